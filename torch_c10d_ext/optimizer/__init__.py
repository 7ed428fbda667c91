"""The communication optimizer: see :func:`torch_c10d_ext.optimize`."""

from torch_c10d_ext.optimizer._agreement import find_deadlock
from torch_c10d_ext.optimizer._checker import CheckFailed, check_rewrite
from torch_c10d_ext.optimizer._optimize import optimize, optimize_and_report
from torch_c10d_ext.optimizer._options import communication_backend, communication_options
from torch_c10d_ext.optimizer._settings import Optimization, Settings

__all__ = [
    "CheckFailed",
    "Optimization",
    "Settings",
    "check_rewrite",
    "communication_backend",
    "communication_options",
    "find_deadlock",
    "optimize",
    "optimize_and_report",
]
