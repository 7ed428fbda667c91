"""copy_to_group: the identity, whose gradient is summed over the group."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_c10d_ext import _vmap
from torch_c10d_ext._groups import Group, group_name

_op = torch.ops.c10d_ext.copy_to_group.default


def copy_to_group(self: Tensor, group: Group = None, tag: str = "") -> Tensor:
    """The entry of a tensor-parallel region: identity forward, all_reduce(sum) backward.

    Every rank holds the same ``self`` and uses it with its own shard of the weights, so its
    gradient is the sum of what the ranks found: Megatron-LM's f (Shoeybi et al. 2019, section 3).

    Args:
        self: the same values on every rank.
        group, tag: the ranks that share the region, as for :func:`all_reduce`.

    Returns:
        ``self``.

    Raises:
        ValueError: unknown group.

    Gradient:
        The sum of all ranks' gradients.

    Example::

        hidden = copy_to_group(x, tp) @ weight_columns  # this rank's columns

    Source: csrc/ops/copy_to_group.cpp
    """
    return _op(self, group if type(group) is str else group_name(group, tag))


_vmap.register("copy_to_group", _vmap.any_dim(_op, local=True))
