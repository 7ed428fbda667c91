"""Floating-point operations of products, attention and convolutions, by torch's own formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node


def flops(node: Node, op: Any, value: Callable[[Node], Any], size: Callable[[Any], float]) -> float:
    """What ``torch.utils.flop_counter`` counts for a node of a traced graph; 0 for other ops.

    Args:
        node: a call.
        op: the overload that it calls.
        value: the tensors that a node stands for.
        size: the number of a size, which may be symbolic.
    """
    formula = _formula(op)
    if formula is None:
        return 0.0

    def shape(argument: Any) -> Any:
        argument = value(argument) if isinstance(argument, Node) else argument
        if isinstance(argument, torch.Tensor):
            return torch.Size([int(size(s)) for s in argument.shape])
        if isinstance(argument, torch.SymInt):
            return int(size(argument))
        if isinstance(argument, list | tuple):
            return type(argument)(shape(a) for a in argument)
        return argument

    given = [shape(a) for a in node.args]
    named = {k: shape(v) for k, v in node.kwargs.items()}
    try:
        return float(formula(*given, **named, out_val=None, out_shape=shape(value(node))))
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0.0  # a formula for another form of the op


# What attention becomes on a CPU, which torch has no formulas for.
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
}


@functools.cache
def _formula(op: Any) -> Any:
    from torch.utils.flop_counter import flop_registry

    packet = getattr(op, "overloadpacket", None)
    stands_for = _ATTENTION.get(getattr(packet, "__name__", ""))
    if stands_for is not None:
        packet = getattr(torch.ops.aten, stands_for)
    found = flop_registry.get(packet)
    return getattr(found, "__wrapped__", found)
