"""Lists of tensors where this package's backend serves the group.

It reads and writes the tensors of a list themselves, in the order of the calls. The ops have one
tensor for a list: copies, made at the call and at the wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_c10d_ext._groups import cpu_backend, is_ours, process_group
from torch_c10d_ext.distributed import _delivery

Options = TypeVar("Options")

_REDUCE_OPS = {
    name: getattr(dist.ReduceOp, name.upper())
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
}


def backend(name: str, tensors: Iterable[Tensor]) -> Any:
    """The backend, in eager and where it is this package's; else None, alike on all ranks."""
    if not all(t.is_cpu and _delivery.in_place(t) for t in tensors):
        return None
    pg = process_group(name)
    return cpu_backend(pg) if is_ours(pg) else None


def reduce_op(op: Any) -> Any:
    """The ``ReduceOp`` of a name; None where it is the op's to say what is wrong with it."""
    return _REDUCE_OPS.get(op.lower()) if isinstance(op, str) else op


def options(made: Options, async_op: bool, **values: Any) -> Options:
    """Fills them in."""
    for name, value in {"asyncOp": async_op, **values}.items():
        setattr(made, name, value)
    return made


def written(tensors: list[Tensor], work: dist.Work | None) -> dist.Work | None:
    """What a call returns that has started, or is done; autograd hears of the writes."""
    torch.autograd.graph.increment_version(tensors)
    return _delivery.work_of(tensors, [work]) if work else None
