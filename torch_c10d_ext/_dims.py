"""Collectives split and concatenate along dim 0; these bring other dimensions there and back."""

from __future__ import annotations

from torch import Tensor

from torch_c10d_ext._groups import where
from torch_c10d_ext.errors import InvalidArgument


def check_dim(op: str, argument: str, dim: int, input: Tensor, name: str) -> int:
    """``dim`` counted from the front, or a ValueError where ``input`` has no such dimension."""
    ndim = max(input.dim(), 1)
    if not -ndim <= dim < ndim:
        raise InvalidArgument(
            f"{op}: {argument} must be a dimension of the input, {-ndim} to {ndim - 1}, got {dim} "
            f"{where(name)}"
        )
    return dim % ndim


def check_list(op: str, inputs: list[Tensor], name: str) -> None:
    """A ValueError for an empty list, which the dispatcher could send to no kernel."""
    if len(inputs) == 0:
        raise InvalidArgument(
            f"{op}: inputs must hold at least one tensor, got an empty list {where(name)}"
        )


# By reshape: the older vmap of torch.autograd knows neither flatten nor unflatten.


def rows_to_dim(gathered: Tensor, parts: int, dim: int) -> Tensor:
    """``parts`` tensors concatenated along dim 0, as their concatenation along ``dim``."""
    if dim == 0:
        return gathered
    shape = [gathered.size(0) // parts, *gathered.shape[1:]]
    split = gathered.reshape(parts, *shape).movedim(0, dim)
    shape[dim] *= parts
    return split.reshape(shape).contiguous()


def dim_to_rows(input: Tensor, parts: int, dim: int) -> Tensor:
    """The ``parts`` equal slices of ``input`` along ``dim``, concatenated along dim 0."""
    if dim == 0:
        return input
    before, after = input.shape[:dim], input.shape[dim + 1 :]
    slices = input.reshape(*before, parts, input.size(dim) // parts, *after).movedim(dim, 0)
    return slices.reshape(parts * slices.size(1), *slices.shape[2:])
