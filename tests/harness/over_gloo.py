"""What process groups written in Python over gloo have in common."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class GroupOverGloo(dist.ProcessGroup):
    """gloo, and the names that torch asks for; subclasses say what the collectives do."""

    BACKEND: str

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    @classmethod
    def register(cls) -> None:
        """Make the backend known by the name `BACKEND`."""
        if not hasattr(dist.Backend, cls.BACKEND.upper()):
            dist.Backend.register_backend(
                cls.BACKEND,
                lambda store, rank, size, timeout: cls(store, rank, size, timeout),
                devices=["cpu"],
            )

    def getBackendName(self) -> str:  # noqa: N802
        return self.BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        pass

    @property
    def group_name(self) -> str:
        return self._name
