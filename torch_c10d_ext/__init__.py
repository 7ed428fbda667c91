"""Every collective of torch.distributed as a dispatcher op, ``torch.ops.c10d_ext.*``.

``torch_c10d_ext.functional`` holds the functions to call; the ops themselves are for graph passes
and for code that manages its own waits.
"""

import atexit

import torch

from torch_c10d_ext import _C as _C

__version__ = "0.1.0"

_built = ".".join(_C.torch_version.split("+")[0].split(".")[:2])
_running = ".".join(torch.__version__.split("+")[0].split(".")[:2])
if _built != _running:
    raise ImportError(
        f"torch_c10d_ext: the extension must run on the torch it was built with, got torch "
        f"{torch.__version__} for a build with {_C.torch_version}; rebuild it with "
        "`pip install --no-build-isolation --force-reinstall .`"
    )

from torch_c10d_ext import _groups, _inductor, functional  # noqa: E402  (after the version check)
from torch_c10d_ext._async import AsyncCollectiveTensor, pending_count, work_of  # noqa: E402

_C.set_group_names_provider(_groups.known_names)
_inductor.enable()
atexit.register(_C.sweep)

__all__ = ["AsyncCollectiveTensor", "functional", "pending_count", "work_of"]
