"""The ``torch.backends`` entry point of torch_c10d_ext, which ``import torch`` calls.

It makes the backend ``shm`` known by name. The package, with its extension, is loaded with the
first process group that needs it: one of ``shm``, or one of gloo under
``TORCH_C10D_EXT_SHM_FOR_GLOO``. A module beside the package, because importing a module of the
package would load all of that. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns such entry points off.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

# The backends' names.
SHM = "shm"
MPI = "mpi"
SWITCH = "TORCH_C10D_EXT_SHM_FOR_GLOO"


def register() -> None:
    """Makes the backend known to ``torch.distributed``; the defaults stay as they are."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    import torch.distributed.distributed_c10d as c10d

    # What register_backend() does but for the plug-in itself: as soon as torch knows any plug-in,
    # it makes groups of "cpu:gloo" without a default backend.
    backend: Any = c10d.Backend
    if SHM not in backend.backend_list:
        backend.SHM = SHM
        backend.backend_list.append(SHM)
        backend.backend_capability[SHM] = ["cpu"]
        backend.backend_type_map[SHM] = c10d.ProcessGroup.BackendType.CUSTOM
    hook(c10d)
    _Accelerate.register()


def hook(c10d: Any) -> None:
    """Has groups of ``torch.distributed`` made by this package where they are its business."""
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None or hasattr(make, "_c10d_ext_original"):
        return  # a torch that makes them elsewhere goes on without

    @functools.wraps(make)
    def make_group(
        group_size: Any,
        group_rank: Any,
        global_ranks_in_group: Any,
        backend: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not (_is_loaded() or os.environ.get(SWITCH) or _names_ours(backend)):
            return make(group_size, group_rank, global_ranks_in_group, backend, *args, **kwargs)
        from torch_c10d_ext import _for_gloo

        return _for_gloo.make_group(
            make, group_size, group_rank, global_ranks_in_group, backend, *args, **kwargs
        )

    make_group._c10d_ext_original = make  # type: ignore[attr-defined]
    c10d._new_process_group_helper = make_group
    _hook_init(c10d)


def _hook_init(c10d: Any) -> None:
    """Has a launcher of MPI number the ranks of "cpu:mpi", too, as torch has those of "mpi"."""
    import torch.distributed as dist

    init = c10d.init_process_group

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if MPI in _names(backend) and str(backend).lower() != MPI and not dist.is_mpi_available():
            from torch_c10d_ext import _mpi

            _mpi.init_process_group(init, backend, *args, **kwargs)
        else:
            init(backend, *args, **kwargs)

    c10d.init_process_group = dist.init_process_group = init_process_group


def _is_loaded() -> bool:
    return "torch_c10d_ext._for_gloo" in sys.modules


def _names_shm(backend: object) -> bool:
    """Whether "shm", "cpu:shm" or "cpu:shm,cuda:nccl" is given."""
    return SHM in _names(backend)


def _names_ours(backend: object) -> bool:
    """The same of all that this package makes: "mpi", too, where torch was built without MPI."""
    import torch.distributed as dist

    names = _names(backend)
    return SHM in names or (MPI in names and not dist.is_mpi_available())


def _names(backend: object) -> set[str]:
    return {part.rpartition(":")[2] for part in str(backend).lower().split(",")}


class _Accelerate:
    """Lets Hugging Face accelerate, and with it transformers, take the name "shm".

    For processes on CPUs its ``PartialState._prepare_backend`` answers "gloo" whatever it is asked
    for, and then refuses any other name. This finder changes that when ``accelerate.state`` is
    imported, and imports nothing itself.
    """

    NAME = "accelerate.state"

    def __init__(self) -> None:
        self._is_asking = False

    @classmethod
    def register(cls) -> None:
        """From the next import on, or at once where the module is there already."""
        module = sys.modules.get(cls.NAME)
        if module is not None:
            cls.change(module)
        elif not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.NAME or self._is_asking:
            return None
        from importlib.util import find_spec

        self._is_asking = True
        try:
            spec = find_spec(name)  # of the other finders
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)  # type: ignore[arg-type]
                self.change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    @staticmethod
    def change(module: ModuleType) -> None:
        state = getattr(module, "PartialState", None)
        prepare = getattr(state, "_prepare_backend", None)
        if prepare is None or hasattr(prepare, "_c10d_ext_original"):
            return

        @functools.wraps(prepare)
        def _prepare_backend(
            self: Any, cpu: bool = False, sagemaker_dp: Any = False, backend: Any = None
        ) -> Any:
            ours = backend is not None and _names_shm(backend)
            prepared, kind = prepare(self, cpu, sagemaker_dp, None if ours else backend)
            return (backend if ours and prepared in (None, "gloo", "mpi") else prepared), kind

        _prepare_backend._c10d_ext_original = prepare  # type: ignore[attr-defined]
        state._prepare_backend = _prepare_backend  # type: ignore[union-attr]
