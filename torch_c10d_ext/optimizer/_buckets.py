"""Which collectives may share a launch, and how a launch of several is written into a graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Container, Hashable
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_c10d_ext._op_info import COALESCED, forms_of, op_info, traffic_of
from torch_c10d_ext.optimizer._collectives import Collective, op_of, value_of

# What a reduction gives may depend on where in a message an element stands, but for these: they
# are the same in any order.
_EXACT = frozenset({"min", "max", "band", "bor", "bxor"})


_NOTES = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag", "seq_nr")


def bucket_key(
    c: Collective, same_bits: Callable[[Collective], bool], written: Container[int] = ()
) -> tuple[Hashable | None, str]:
    """What the collectives of one bucket have in common; or None, and why there is none.

    Args:
        c: the collective.
        same_bits: whether a reduction gives the same bits wherever in a message an element is.
        written: addresses of storages that are written after they are made. Their bytes are those
            of no one value, which the checker would have to tell apart.
    """
    if c.form.written or c.form.coalesced:
        return None, "it is in place or coalesced already"
    if len(c.inputs) != 1 or c.ranks == 1:
        return None, "its group has one rank" if c.ranks == 1 else "it reads several tensors"
    value = value_of(c.inputs[0])
    if not isinstance(value, torch.Tensor) or isinstance(value_of(c.node), list | tuple):
        return None, "its input is no tensor"
    if c.kind == "all_to_all_single":
        if not c.even or not _is_plain(c, written):
            return None, "its parts are uneven, or its input is not contiguous or written in place"
        return (c.form.namespace, c.kind, c.group, value.device), ""
    if COALESCED not in forms_of(c.kind):
        return None, f"{c.kind} has no form for several tensors"
    moves = traffic_of(c.kind).moves
    if not moves and not same_bits(c):
        return None, "the backend's sums depend on an element's place in a message"
    # What only moves may travel as bytes, whatever it means.
    dtype = None if moves and _is_plain(c, written) else value.dtype
    return (c.form.namespace, c.kind, c.group, c.arguments, dtype, value.device), ""


def is_packed(members: list[Collective]) -> bool:
    """Whether the members of a bucket are copied into one message, and out of it."""
    return members[0].kind == "all_to_all_single"


def _is_plain(c: Collective, written: Container[int]) -> bool:
    """Whether a collective's bytes may be taken for those of another dtype.

    Its memory is contiguous, its sizes are numbers, and nothing looks at its result but waits.
    """
    given, made = value_of(c.inputs[0]), value_of(c.node)
    return (
        given.untyped_storage()._cdata not in written
        and all(type(size) is int for size in (*given.shape, *made.shape))
        and given.is_contiguous()
        and made.is_contiguous()
        and not given.is_conj()
        and not given.is_neg()
        and all(is_wait(user) for user in c.node.users)
    )


def is_exact(c: Collective) -> bool:
    """Whether a reduction has the same bits in whatever order it is made.

    But for what a value has several of: which of two NaNs a sum of two ranks is, and which of two
    zeros a minimum, depends on the order. shm has one order, and is not asked this.
    """
    value = value_of(c.inputs[0])
    operation = str(c.argument("reduce_op")).lower()
    if operation in _EXACT or c.ranks <= 2:
        return True
    return operation == "sum" and not (value.dtype.is_floating_point or value.dtype.is_complex)


class Landing:
    """What a member of a bucket becomes: its part of the launch, and its value after the wait.

    Args:
        graph: where nodes are added.
        c: the member.
        part: of the launch, in flight; the whole launch where members share one message.
        columns: of that message, where the member lies; None for a part of the member's own.
        waits: the first wait for the whole launch, once there is one; shared by the members.
    """

    def __init__(
        self,
        graph: Graph,
        c: Collective,
        part: Node,
        columns: tuple[int, int] | None,
        waits: list[Node],
    ) -> None:
        self.graph, self.c, self.part = graph, c, part
        self.columns, self.waits = columns, waits

    def replace_start(self) -> None:
        """Has what used the member's own start use the part."""
        for user in list(self.c.node.users):
            user.replace_input_with(self.c.node, self.part)

    def replace_wait(self, wait: Node) -> None:
        """Adds behind a wait what makes the member's result of the launch's."""
        made = value_of(wait)
        if self.columns is None and value_of(self.part).dtype == made.dtype:
            return
        users = list(wait.users)
        wait.meta["val"] = value_of(self.part)
        wait.meta.pop("tensor_meta", None)
        aten, node = torch.ops.aten, wait
        if self.columns is not None:
            if self.waits:
                node = self.waits[0]
            else:
                self.waits.append(wait)
            node = self._add(aten.slice.Tensor, node, 1, *self.columns)
            node = self._add(aten.clone.default, node, memory_format=torch.contiguous_format)
        if value_of(node).dtype != made.dtype:
            node = self._add(aten.view.dtype, node, made.dtype)
        if value_of(node).shape != made.shape:
            node = self._add(aten.view.default, node, list(made.shape))
        node.meta["val"] = made
        for user in users:
            user.replace_input_with(wait, node)
        if self.columns is not None and wait is not self.waits[0]:
            self.graph.erase_node(wait)

    def _add(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        return _call(self.graph, op, self.c.node, *args, **kwargs)


def write_bucket(graph: Graph, members: list[Collective]) -> list[Landing]:
    """Adds one launch for all members where the graph inserts.

    The members' own nodes stay, for the caller to replace.
    """
    if is_packed(members):
        return _write_packed(graph, members)
    first = members[0]
    inputs = [c.inputs[0] for c in members]
    mixed = len({value_of(node).dtype for node in inputs}) > 1
    if mixed:
        inputs = [_as_bytes(graph, c, -1) for c in members]
    # torch has no broadcast of several tensors; ours does the same.
    space = "c10d_ext" if first.kind == "broadcast" else first.form.namespace
    op = getattr(getattr(torch.ops, space), f"{first.kind}_coalesced").default
    args = [a for a in first.node.args if not isinstance(a, Node)]
    launch = graph.call_function(op, (inputs, *args), dict(first.node.kwargs))
    launch.meta["val"] = [value_of(c.node) for c in members]
    if mixed:
        sizes = [made.numel() * made.dtype.itemsize for made in launch.meta["val"]]
        sent = [value_of(node) for node in inputs]
        launch.meta["val"] = [_fresh(x, size) for x, size in zip(sent, sizes, strict=True)]
    _copy_notes(launch, first.node)
    parts = []
    for k, c in enumerate(members):
        part = graph.call_function(operator.getitem, (launch, k))
        _copy_notes(part, c.node)
        part.meta["val"] = launch.meta["val"][k]
        parts.append(Landing(graph, c, part, None, []))
    return parts


def _write_packed(graph: Graph, members: list[Collective]) -> list[Landing]:
    """One all_to_all for all members: a row for each rank, which holds a part of each member."""
    first = members[0]
    mixed = len({value_of(c.inputs[0]).dtype for c in members}) > 1
    rows = []
    for c in members:
        if mixed:
            rows.append(_as_bytes(graph, c, c.ranks))
        else:
            width = value_of(c.inputs[0]).numel() // c.ranks
            op = torch.ops.aten.view.default
            rows.append(_call(graph, op, c.node, c.inputs[0], [c.ranks, width]))
    packed = graph.call_function(torch.ops.aten.cat.default, (rows, 1))
    width = sum(value_of(row).shape[1] for row in rows)
    packed.meta["val"] = _fresh(value_of(rows[0]), first.ranks, width)
    _copy_notes(packed, first.node)
    op = getattr(torch.ops, first.form.namespace).all_to_all_single.default
    ones = [1] * first.ranks
    launch = graph.call_function(op, (packed, ones, ones, first.group))
    launch.meta["val"] = _fresh(value_of(packed), first.ranks, width)
    _copy_notes(launch, first.node)
    parts: list[Landing] = []
    waits: list[Node] = []
    end = 0
    for c, row in zip(members, rows, strict=True):
        begin, end = end, end + value_of(row).shape[1]
        parts.append(Landing(graph, c, launch, (begin, end), waits))
    return parts


def _as_bytes(graph: Graph, c: Collective, rows: int) -> Node:
    """A view of a member's input as bytes, in one row or several."""
    given = c.inputs[0]
    size = value_of(given).numel()
    shape = [size] if rows < 0 else [rows, size // rows]
    flat = _call(graph, torch.ops.aten.view.default, c.node, given, shape)
    return _call(graph, torch.ops.aten.view.dtype, c.node, flat, torch.uint8)


def _call(graph: Graph, op: Any, like: Node, *args: Any, **kwargs: Any) -> Node:
    """Adds a call of one tensor, with the fake tensor that it makes."""
    node = graph.call_function(op, args, kwargs)
    given, *rest = torch.fx.node.map_arg(args, value_of)
    with getattr(given, "fake_mode", None) or contextlib.nullcontext():
        node.meta["val"] = op(given, *rest, **kwargs)
    _copy_notes(node, like)
    return node


def _fresh(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """A fake tensor with memory of its own. What nodes carry may be of several fake modes."""
    with getattr(like, "fake_mode", None) or contextlib.nullcontext():
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def is_wait(node: Node) -> bool:
    """Whether a node ends a collective."""
    op = op_of(node)
    info = op_info(op) if op is not None else None
    return info is not None and info.is_wait


def _copy_notes(node: Node, source: Node) -> None:
    for name in _NOTES:
        if name in source.meta:
            node.meta[name] = source.meta[name]
