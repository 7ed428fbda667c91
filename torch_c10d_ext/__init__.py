"""Every collective of torch.distributed as a dispatcher op, ``torch.ops.c10d_ext.*``.

``torch_c10d_ext.functional`` holds the functions to call; the ops themselves are for graph passes
and for code that manages its own waits.
"""

import atexit

import torch

__version__ = "0.1.0"

try:
    from torch_c10d_ext._built_with import SOURCES as _SOURCES  # noqa: F401
    from torch_c10d_ext._built_with import TORCH_VERSION as _BUILT_WITH
except ImportError as error:
    raise ImportError(
        "torch_c10d_ext: the extension must be built before it is imported from a source tree; run "
        "`make build` or `python setup.py build_ext --inplace`"
    ) from error

# Asked before the extension is loaded: under another torch that ends in the linker.
if _BUILT_WITH.split(".")[:2] != torch.__version__.split(".")[:2]:
    raise ImportError(
        f"torch_c10d_ext: the extension must run on the torch it was built with, got torch "
        f"{torch.__version__} for a build with {_BUILT_WITH}; rebuild it with "
        "`pip install --no-build-isolation --force-reinstall .`"
    )

from torch_c10d_ext import _C as _C
from torch_c10d_ext import (
    _backends,
    _call_site,
    _exit,
    _for_gloo,
    _groups,
    _inductor,
    _mpi,
    _tally,
    errors,
    functional,
)
from torch_c10d_ext._async import AsyncCollectiveTensor, pending_count, work_of
from torch_c10d_ext._calibrate import calibrate
from torch_c10d_ext._capabilities import register_backend_capabilities
from torch_c10d_ext._dynamo import install, installed, uninstall
from torch_c10d_ext._for_gloo import backend_of, use_shm_for_gloo
from torch_c10d_ext.optimizer import communication_backend, communication_options, optimize
from torch_c10d_ext.report import Compute, Link, Topology, communication_report

_C.set_group_names_provider(_groups.known_names)
_inductor.enable()
# Last in, first out: the backends close, what they completed is swept, and gloo's threads rest.
_tally.register()
_exit.register()
atexit.register(_C.sweep)
_mpi.register()
_backends.register()
_for_gloo.install()
_call_site.register()

__all__ = [
    "AsyncCollectiveTensor",
    "Compute",
    "Link",
    "Topology",
    "backend_of",
    "calibrate",
    "communication_backend",
    "communication_options",
    "communication_report",
    "errors",
    "functional",
    "install",
    "installed",
    "optimize",
    "pending_count",
    "register_backend_capabilities",
    "uninstall",
    "use_shm_for_gloo",
    "work_of",
]
