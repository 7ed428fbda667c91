"""What a collective raises.

Wrong arguments raise :class:`InvalidArgument` or ``TypeError`` before anything is sent. What fails
after it was started raises one of the others; they are ``torch.distributed.DistBackendError``, so
code that catches that keeps working.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DistBackendError

__all__ = [
    "CollectiveError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "GroupClosed",
    "InvalidArgument",
    "RankLost",
]


class InvalidArgument(ValueError, RuntimeError):
    """Arguments that do not fit; nothing was sent, and the group stays usable.

    Both, because ``torch.distributed`` raises the one for what it checks itself and the other for
    what a backend finds.
    """


class CollectiveError(DistBackendError):
    """A collective failed.

    Attributes:
        ranks: the ranks at fault, as numbered in the group; empty where the backend does not tell
            (nccl).
        op: the collective, ``"all_reduce"`` say.
        seq: its number among the collectives of the group, as its backend counts.
        group: the group's name.
    """

    def __init__(
        self,
        text: str = "",
        ranks: Sequence[int] = (),
        op: str = "",
        seq: int = 0,
        group: str = "",
    ) -> None:
        super().__init__(text)
        self.ranks = list(ranks)
        self.op = op
        self.seq = seq
        self.group = group


class RankLost(CollectiveError):
    """A rank that the collective needs has died, exited or left the group."""


class CollectiveTimeout(CollectiveError):
    """Not all ranks took part in time; ``ranks`` are those that did not."""


class CollectiveMismatch(CollectiveError):
    """The ranks called different collectives; raised on all of them, before data is written.

    ``ranks`` are those that disagree with rank 0. The group goes on, unless ranks sent different
    numbers of tensors: those may have coalesced their calls differently, and later calls cannot be
    told apart.
    """


class GroupClosed(CollectiveError):
    """The group was destroyed, aborted, or belongs to the process that this one was forked from."""
