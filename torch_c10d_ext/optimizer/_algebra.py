"""Rules by which collectives are replaced by cheaper ones.

===================  ==========  ==================================================================
rule                 tag         what becomes of it
===================  ==========  ==================================================================
duplicate            bitwise     the same collective of the same value: one of them
repeated             bitwise     ``min``/``max``/``band``/``bor`` of what they have given: that
elementwise          bitwise     a cast behind a gather or broadcast, to fewer bytes: before it
gather of scatter    bitwise(*)  an all_gather of a reduce_scatter: an all_reduce
sum of sums          rounding    ``all_reduce(a) + all_reduce(b)``: ``all_reduce(a + b)``
===================  ==========  ==================================================================

(*) Where the backend adds in one order wherever an element stands; rounding elsewhere.

Each is a decision of the graph's structure alone, which all ranks of one program take alike. A
collective whose result nobody needs stays: that it is dead on this rank says nothing of others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_c10d_ext.optimizer._collectives import Collective, tensors_in, value_of
from torch_c10d_ext.optimizer._problem import Problem

_IDEMPOTENT = frozenset({"min", "max", "band", "bor"})
_MOVES = frozenset({"all_gather_into_tensor", "broadcast"})
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def simplify(
    graph: Graph, p: Problem, numerics: str, same_bits: Callable[[Collective], bool]
) -> list[str]:
    """Applies the rules to a graph, in order; says what was done.

    Args:
        graph: changed in place.
        p: the problem that it is, whose nodes are the graph's.
        numerics: ``"rounding"`` for the rules that round.
        same_bits: whether a collective's sums do not depend on where an element stands.
    """
    return _Rules(graph, p, numerics, same_bits).run()


class _Rules:
    def __init__(
        self, graph: Graph, p: Problem, numerics: str, same_bits: Callable[[Collective], bool]
    ) -> None:
        self.graph, self.numerics, self.same_bits = graph, numerics, same_bits
        # Where ranks move different sizes, what is a duplicate on one of them is none on another.
        self.by_node = {
            c.node: c for c in p.collectives.values() if c.symmetric and not c.form.written
        }
        self.written = _written_storages(graph)
        self.place = {node: k for k, node in enumerate(graph.nodes)}
        self.counts: dict[str, int] = {}

    def run(self) -> list[str]:
        for rule in (self._repeated, self._elementwise, self._gather_of_scatter, self._sum_of_sums):
            for node in list(self.by_node):
                if node in self.by_node and not self.by_node[node].form.coalesced:
                    rule(node, self.by_node[node])
        self._duplicates()
        return [f"{count} x {what}" for what, count in self.counts.items()]

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # --- what the rules look at ----------------------------------------------------------------

    def _is_still(self, *nodes: Node) -> bool:
        """Whether nothing writes the memory of nodes, and nothing returns it."""
        return all(
            not (_storages(node) & self.written) and all(u.op != "output" for u in node.users)
            for node in nodes
        )

    def _single(self, node: Node) -> Node | None:
        """The one wait for a collective, where nothing else uses it."""
        users = list(node.users)
        return users[0] if len(users) == 1 and _is_wait(users[0]) else None

    def _awaited(self, node: Node) -> Collective | None:
        """The collective that a node waits for."""
        source = node.args[0] if _is_wait(node) and node.args else None
        return self.by_node.get(source) if isinstance(source, Node) else None

    def _erase(self, *nodes: Node) -> None:
        for node in nodes:
            self.by_node.pop(node, None)
            self.graph.erase_node(node)

    # --- the rules -----------------------------------------------------------------------------

    def _duplicates(self) -> None:
        first: dict[Any, Node] = {}
        for node, c in list(self.by_node.items()):
            wait = self._single(node)
            if c.form.coalesced or wait is None or not self._is_still(node, wait, *c.inputs):
                continue
            key = (c.form.namespace, c.kind, c.group, c.arguments, c.inputs)
            known = first.setdefault(key, node)
            if known is node:
                continue
            earlier = self._single(known)
            if earlier is None or self.place[earlier] > self.place[wait]:
                continue
            wait.replace_all_uses_with(earlier)
            self._erase(wait, node)
            self._count(f"duplicate {c.kind} taken once")

    def _repeated(self, node: Node, c: Collective) -> None:
        operation = str(c.argument("reduce_op")).lower()
        if c.kind != "all_reduce" or operation not in _IDEMPOTENT:
            return
        inner = self._awaited(c.inputs[0])
        wait = self._single(node)
        if (
            inner is None
            or wait is None
            or (inner.kind, inner.group, inner.arguments) != (c.kind, c.group, c.arguments)
            or not self._is_still(node, wait, *c.inputs)
        ):
            return
        wait.replace_all_uses_with(c.inputs[0])
        self._erase(wait, node)
        self._count(f"repeated {operation} dropped")

    def _elementwise(self, node: Node, c: Collective) -> None:
        wait = self._single(node)
        if c.kind not in _MOVES or wait is None or len(wait.users) != 1:
            return
        cast = next(iter(wait.users))
        given, made = value_of(c.inputs[0]), value_of(cast)
        if cast.target not in _CASTS or not isinstance(made, torch.Tensor):
            return
        if set(cast.kwargs) - {"dtype"} or made.dtype.itemsize >= given.dtype.itemsize:
            return
        if not given.is_contiguous() or not self._is_still(node, wait, c.inputs[0]):
            return
        with self.graph.inserting_before(node):
            early = self.graph.call_function(
                cast.target, (c.inputs[0], *cast.args[1:]), dict(cast.kwargs)
            )
            early.meta["val"] = _like(given, made.dtype)
            moved = self.graph.call_function(node.target, (early, *node.args[1:]), node.kwargs)
        with self.graph.inserting_before(wait):
            waited = self.graph.call_function(wait.target, (moved,))
        moved.meta["val"] = _like(value_of(node), made.dtype)
        waited.meta["val"] = moved.meta["val"]
        cast.replace_all_uses_with(waited)
        self._erase(cast, wait, node)
        self._count(f"cast before {c.kind}")

    def _gather_of_scatter(self, node: Node, c: Collective) -> None:
        if c.kind != "all_gather_into_tensor":
            return
        inner = self._awaited(c.inputs[0])
        if inner is None or inner.kind != "reduce_scatter_tensor" or inner.group != c.group:
            return
        between, wait = self._single(inner.node), self._single(node)
        if wait is None or between is None or between is not c.inputs[0]:
            return
        if len(between.users) != 1:
            return
        source = inner.inputs[0]
        if not self.same_bits(inner) or not self._is_still(between, source):
            return
        if (
            value_of(source).shape != value_of(node).shape
            or inner.form.namespace != c.form.namespace
        ):
            return
        op = getattr(torch.ops, c.form.namespace).all_reduce.default
        args = (source, inner.argument("reduce_op"), c.group)
        factor = inner.argument("factor")
        with self.graph.inserting_before(inner.node):
            new = self.graph.call_function(op, args, {} if factor is None else {"factor": factor})
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        self._erase(node, between, inner.node)
        self._count("all_gather of a reduce_scatter as an all_reduce")

    def _sum_of_sums(self, node: Node, c: Collective) -> None:
        if self.numerics != "rounding" or c.kind != "all_reduce" or c.argument("factor"):
            return
        wait = self._single(node)
        if str(c.argument("reduce_op")).lower() != "sum" or wait is None or len(wait.users) != 1:
            return
        add = next(iter(wait.users))
        if add.target is not torch.ops.aten.add.Tensor or add.args[0] is not wait or add.kwargs:
            return
        other = add.args[1]
        second = self._awaited(other) if isinstance(other, Node) else None
        if second is None or second.node is node or not isinstance(other, Node):
            return
        if (second.kind, second.group, second.arguments) != (c.kind, c.group, c.arguments):
            return
        pair = [value_of(n) for n in (c.inputs[0], second.inputs[0])]
        if pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype:
            return
        if len(other.users) != 1 or self._single(second.node) is not other:
            return
        if not self._is_still(node, wait, second.node, other, c.inputs[0], second.inputs[0]):
            return
        last = max(node, second.node, key=lambda n: self.place[n])
        with self.graph.inserting_before(last):
            added = self.graph.call_function(add.target, (c.inputs[0], second.inputs[0]))
            added.meta["val"] = _like(pair[0], pair[0].dtype)
            new = self.graph.call_function(node.target, (added, *node.args[1:]), node.kwargs)
        new.meta.update(node.meta)
        with self.graph.inserting_before(add):
            waited = self.graph.call_function(wait.target, (new,))
        waited.meta.update(wait.meta)
        add.replace_all_uses_with(waited)
        self._erase(add, wait, other, node, second.node)
        self._count("sum of all_reduces as one all_reduce of the sum")


def _is_wait(node: Node) -> bool:
    return node.op == "call_function" and node.target in (
        torch.ops.c10d_ext.wait_tensor.default,
        torch.ops._c10d_functional.wait_tensor.default,
    )


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor of a shape, with memory of its own."""
    with getattr(tensor, "fake_mode", None) or contextlib.nullcontext():
        return torch.empty_like(tensor, dtype=dtype)


def _storages(node: Node) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors_in(value_of(node))}


def _written_storages(graph: Graph) -> set[int]:
    """The memory that any node may write: what an op mutates, and what a nested graph is given."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            if not hasattr(node.target, "__module__") or node.target.__module__ != "_operator":
                for given in node.all_input_nodes:
                    found |= _storages(given)
            continue
        if not schema.is_mutable:
            continue
        for k, argument in enumerate(schema.arguments):
            info = argument.alias_info
            if info is None or not info.is_write:
                continue
            value = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, Node):
                    found |= _storages(each)
    return found
