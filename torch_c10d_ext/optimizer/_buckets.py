"""Which collectives may share a launch, and how a launch of several is written into a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable

import torch
from torch.fx import Graph, Node

from torch_c10d_ext.optimizer._collectives import Collective, value_of

# What a reduction gives may depend on where in a message an element stands, but for these: they
# are the same in any order.
_EXACT = frozenset({"min", "max", "band", "bor", "bxor"})

_MOVES = frozenset({"all_gather_into_tensor", "broadcast"})


_NOTES = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag", "seq_nr")


def bucket_key(
    c: Collective, same_bits: Callable[[Collective], bool]
) -> tuple[Hashable | None, str]:
    """What the collectives of one bucket have in common; or None, and why there is none.

    Args:
        c: the collective.
        same_bits: whether a reduction gives the same bits wherever in a message an element is.
    """
    if c.form.written or c.form.coalesced:
        return None, "it is in place or coalesced already"
    if len(c.inputs) != 1 or c.ranks == 1:
        return None, "its group has one rank" if c.ranks == 1 else "it reads several tensors"
    value = value_of(c.inputs[0])
    if not isinstance(value, torch.Tensor) or isinstance(value_of(c.node), list | tuple):
        return None, "its input is no tensor"
    if c.kind not in _MOVES and c.kind not in ("all_reduce", "reduce_scatter_tensor"):
        return None, f"{c.kind} has no form for several tensors"
    if c.kind not in _MOVES and not same_bits(c):
        return None, "the backend's sums depend on an element's place in a message"
    return (c.form.namespace, c.kind, c.group, c.arguments, value.dtype, value.device), ""


def is_exact(c: Collective) -> bool:
    """Whether a reduction has the same bits in whatever order it is made."""
    value = value_of(c.inputs[0])
    operation = str(c.argument("reduce_op")).lower()
    if operation in _EXACT or c.ranks <= 2:
        return True
    return operation == "sum" and not (value.dtype.is_floating_point or value.dtype.is_complex)


def write_bucket(graph: Graph, members: list[Collective]) -> list[Node]:
    """Adds one launch for all members where the graph inserts; each one's result comes back.

    The members' own nodes stay, for the caller to replace.
    """
    first = members[0]
    op = getattr(getattr(torch.ops, first.form.namespace), f"{first.kind}_coalesced").default
    args = [a for a in first.node.args if not isinstance(a, Node)]
    inputs = [c.inputs[0] for c in members]
    launch = graph.call_function(op, (inputs, *args), dict(first.node.kwargs))
    launch.meta["val"] = [value_of(c.node) for c in members]
    _copy_notes(launch, first.node)
    results = []
    for k, c in enumerate(members):
        result = graph.call_function(operator.getitem, (launch, k))
        _copy_notes(result, c.node)
        result.meta["val"] = value_of(c.node)
        results.append(result)
    return results


def _copy_notes(node: Node, source: Node) -> None:
    for name in _NOTES:
        if name in source.meta:
            node.meta[name] = source.meta[name]
