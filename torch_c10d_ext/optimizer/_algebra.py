"""Rules by which collectives are replaced by cheaper ones.

===================  ==========  ==================================================================
rule                 tag         what becomes of it
===================  ==========  ==================================================================
duplicate            bitwise     the same collective of the same value: one of them
repeated             bitwise     ``min``/``max``/``band``/``bor`` of what they have given: that
elementwise          bitwise     a cast to fewer bytes, and behind a gather any exact op of one
                                 tensor: before the gather or broadcast, where there is less of it
own part             bitwise     of a gather, the rows that this rank gave: what it gave; needs
                                 ``spmd``
part of a sum        bitwise(*)  an all_reduce of which each rank takes its own rows alone: a
                                 reduce_scatter; needs ``spmd``
constant             bitwise     an all_reduce of a constant, whose sum is exact: the sum; needs
                                 ``spmd``
gather of scatter    bitwise(*)  an all_gather of a reduce_scatter: an all_reduce
sum of sums          rounding    ``all_reduce(a) + all_reduce(b)``: ``all_reduce(a + b)``
===================  ==========  ==================================================================

(*) Where the backend adds in one order wherever an element stands; rounding elsewhere.

Each is a decision of the graph's structure alone, which all ranks of one program take alike. A
collective whose result nobody needs stays: that it is dead on this rank says nothing of others.
What a graph says of its own rank says nothing of others either: rows 0 to 2 of a sum may be rank
0's part, or what all ranks take, and ranks must come to one order. Rules that take them for the
former need the promise ``spmd``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_c10d_ext._op_info import traffic_of
from torch_c10d_ext.optimizer._collectives import Collective, tensors_in, value_of
from torch_c10d_ext.optimizer._problem import Problem

_IDEMPOTENT = frozenset({"min", "max", "band", "bor"})
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
# Of one tensor and numbers; an element's result depends on that element alone, to the last bit.
_EXACT = frozenset(
    {torch.ops.aten.neg.default, torch.ops.aten.abs.default, torch.ops.aten.relu.default}
    | {torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor}
    | {torch.ops.aten.div.Tensor, torch.ops.aten.sign.default}
)


@dataclass
class Simplified:
    """What the rules did.

    Attributes:
        done: in words.
        missed: what they did not do, and why.
        folded: by group, collectives that were replaced by constants, as the ranks compare them.
    """

    done: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    folded: dict[str, list[str]] = field(default_factory=dict)


def simplify(
    graph: Graph,
    p: Problem,
    numerics: str,
    same_bits: Callable[[Collective], bool],
    rank_in: Callable[[str], int],
    spmd: bool,
) -> Simplified:
    """Applies the rules to a graph, in order; says what was done.

    Args:
        graph: changed in place.
        p: the problem that it is, whose nodes are the graph's.
        numerics: ``"rounding"`` for the rules that round.
        same_bits: whether a collective's sums do not depend on where an element stands.
        rank_in: this rank's number in a group.
        spmd: whether constants, and the rank's own place, are such on all ranks.
    """
    return _Rules(graph, p, numerics, same_bits, rank_in, spmd).run()


class _Program:
    """A graph that rules change, and what they look at.

    Attributes:
        by_node: the collectives that rules may take.
        written: the storages that any node may write.
        returned: the storages of what the graph returns.
        place: of nodes in the graph's order.
    """

    def __init__(self, graph: Graph, p: Problem) -> None:
        self.graph = graph
        self.returned = {
            s for n in next(iter(reversed(graph.nodes))).all_input_nodes for s in _storages(n)
        }
        # Where ranks move different sizes, what is a duplicate on one of them is none on another.
        self.by_node = {
            c.node: c for c in p.collectives.values() if c.symmetric and not c.form.written
        }
        self.written = _written_storages(graph)
        self.place = {node: k for k, node in enumerate(graph.nodes)}

    def is_still(self, *nodes: Node) -> bool:
        """Whether nothing writes the memory of nodes, and nothing returns it."""
        return all(
            not (_storages(node) & self.written) and all(u.op != "output" for u in node.users)
            for node in nodes
        )

    def awaited(self, node: Node) -> Collective | None:
        """The collective that a node waits for."""
        source = node.args[0] if _is_wait(node) and node.args else None
        return self.by_node.get(source) if isinstance(source, Node) else None

    def erase(self, *nodes: Node) -> None:
        for node in nodes:
            self.by_node.pop(node, None)
            self.graph.erase_node(node)


class _Rules:
    def __init__(
        self,
        graph: Graph,
        p: Problem,
        numerics: str,
        same_bits: Callable[[Collective], bool],
        rank_in: Callable[[str], int],
        spmd: bool,
    ) -> None:
        self.graph, self.numerics, self.same_bits = graph, numerics, same_bits
        self.program = _Program(graph, p)
        self.rank_in, self.spmd = rank_in, spmd
        self.result = Simplified()
        self.promise: dict[str, int] = {}
        self.groups: dict[str, int] = {}  # how many collectives each has
        for c in p.collectives.values():
            self.groups[c.group] = self.groups.get(c.group, 0) + 1
        self.counts: dict[str, int] = {}

    def run(self) -> Simplified:
        rules = (
            self._constant,
            self._repeated,
            self._gather_of_scatter,
            self._elementwise,
            self._own_part,
            self._sum_of_sums,
            self._part_of_sum,
        )
        for rule in rules:
            by_node = self.program.by_node
            for node in list(by_node):
                if node in by_node and not by_node[node].form.coalesced:
                    rule(node, by_node[node])
        self._duplicates()
        self.result.done = [f"{count} x {what}" for what, count in self.counts.items()]
        self.result.missed = [
            f"{count} {what}: spmd does not promise that other ranks do alike"
            for what, count in self.promise.items()
        ]
        return self.result

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _miss(self, what: str) -> None:
        self.promise[what] = self.promise.get(what, 0) + 1

    # --- the rules -----------------------------------------------------------------------------

    def _duplicates(self) -> None:
        first: dict[Any, Node] = {}
        for node, c in list(self.program.by_node.items()):
            wait = _single(node)
            if c.form.coalesced or wait is None or not self.program.is_still(node, wait, *c.inputs):
                continue
            key = (c.form.namespace, c.kind, c.group, c.arguments, c.inputs)
            known = first.setdefault(key, node)
            if known is node:
                continue
            earlier = _single(known)
            if earlier is None or self.program.place[earlier] > self.program.place[wait]:
                continue
            wait.replace_all_uses_with(earlier)
            self.program.erase(wait, node)
            self._count(f"duplicate {c.kind} taken once")

    def _repeated(self, node: Node, c: Collective) -> None:
        operation = str(c.argument("reduce_op")).lower()
        if c.kind != "all_reduce" or operation not in _IDEMPOTENT:
            return
        inner = self.program.awaited(c.inputs[0])
        wait = _single(node)
        if (
            inner is None
            or wait is None
            or (inner.kind, inner.group, inner.arguments) != (c.kind, c.group, c.arguments)
            or not self.program.is_still(node, wait, *c.inputs)
        ):
            return
        wait.replace_all_uses_with(c.inputs[0])
        self.program.erase(wait, node)
        self._count(f"repeated {operation} dropped")

    def _constant(self, node: Node, c: Collective) -> None:
        wait = _single(node)
        if c.kind != "all_reduce" or wait is None or c.argument("factor") is not None:
            return
        source = c.inputs[0]
        filled = _constant_of(source)
        if filled is None or not self.program.is_still(node, wait, source):
            return
        total = _reduced_constant(
            filled, value_of(source).dtype, str(c.argument("reduce_op")).lower(), c.ranks
        )
        # The ranks compare what was folded when they compare what is left.
        if total is None or self.groups[c.group] < 2:
            return
        if not self.spmd:
            self._miss("all_reduce of a constant")
            return
        made = value_of(node)
        with self.graph.inserting_before(wait):
            new = self.graph.call_function(
                torch.ops.aten.full.default,
                (list(made.shape), total),
                {"dtype": made.dtype, "device": made.device, "pin_memory": False},
            )
        new.meta["val"] = made
        wait.replace_all_uses_with(new)
        self.program.erase(wait, node)
        self.groups[c.group] -= 1
        self.result.folded.setdefault(c.group, []).append(f"{c.describe()} of {filled!r}")
        self._count("all_reduce of a constant as a constant")

    def _own_part(self, node: Node, c: Collective) -> None:
        wait = _single(node)
        if c.kind != "all_gather_into_tensor" or wait is None:
            return
        source = c.inputs[0]
        if not self.program.is_still(wait, node):
            return
        if _storages(wait) & self.program.returned or not self.program.is_still(source):
            return
        if not value_of(source).is_contiguous():
            return
        for part in list(wait.users):
            # A view of the part would be one of other memory.
            seen = any(_storages(user) & _storages(part) for user in part.users)
            if seen or not self._is_own_rows(part, wait, c):
                continue
            if not self.spmd:
                self._miss("own part of a gather")
            else:
                part.replace_all_uses_with(source)
                self.program.erase(part)
                self._count("own part of a gather as what this rank gave")

    def _is_own_rows(self, part: Node, whole: Node, c: Collective) -> bool:
        """Whether a node takes the rows of a tensor that are at this rank's place."""
        rows = value_of(whole).shape[0] if value_of(whole).dim() else None
        if part.target is not torch.ops.aten.slice.Tensor or part.args[0] is not whole:
            return False
        if type(rows) is not int or rows % c.ranks or not rows or part.kwargs:
            return False
        each, rank = rows // c.ranks, self.rank_in(c.group)
        end = part.args[3] if len(part.args) > 3 else None
        is_end = end == (rank + 1) * each or (
            rank == c.ranks - 1 and isinstance(end, int) and end >= rows
        )
        return part.args[1:3] == (0, rank * each) and is_end and len(part.args) == 4

    def _part_of_sum(self, node: Node, c: Collective) -> None:
        wait = _single(node)
        if c.kind != "all_reduce" or wait is None or not wait.users or c.ranks < 2:
            return
        if not all(self._is_own_rows(user, wait, c) for user in wait.users):
            return
        source = c.inputs[0]
        if not self.program.is_still(node, wait, source) or _storages(wait) & self.program.returned:
            return
        if not self.same_bits(c) or not value_of(source).is_contiguous():
            return
        if not self.spmd:
            self._miss("all_reduce of which this rank takes its own rows alone")
            return
        parts = list(wait.users)
        factor = c.argument("factor")
        op = getattr(torch.ops, c.form.namespace).reduce_scatter_tensor.default
        with self.graph.inserting_before(node):
            new = self.graph.call_function(
                op,
                (source, c.argument("reduce_op"), c.ranks, c.group),
                {} if factor is None else {"factor": factor},
            )
        with self.graph.inserting_before(wait):
            waited = self.graph.call_function(wait.target, (new,))
        new.meta["val"] = _like(value_of(parts[0]), value_of(source).dtype)
        waited.meta["val"] = new.meta["val"]
        for part in parts:
            part.replace_all_uses_with(waited)
        self.program.erase(*parts, wait, node)
        self._count("all_reduce whose users take a part as a reduce_scatter")

    def _elementwise(self, node: Node, c: Collective) -> None:
        wait = _single(node)
        if not traffic_of(c.kind).moves or wait is None or len(wait.users) != 1:
            return
        cast = next(iter(wait.users))
        inner = self.program.awaited(c.inputs[0])
        if inner is not None and inner.kind == "reduce_scatter_tensor":
            return  # together they are an all_reduce
        given, made = value_of(c.inputs[0]), value_of(cast)
        if not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
            return
        if cast.target in _CASTS:
            if set(cast.kwargs) - {"dtype"} or made.dtype.itemsize >= given.dtype.itemsize:
                return
        elif cast.target in _EXACT and c.kind == "all_gather_into_tensor" and c.ranks > 1:
            if cast.kwargs or made.dtype != given.dtype or cast.all_input_nodes != [wait]:
                return
            if any(arg is wait for arg in cast.args[1:]):
                return  # x + x
        else:
            return
        if not given.is_contiguous() or not self.program.is_still(node, wait, c.inputs[0]):
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
        self.program.erase(cast, wait, node)
        place = self.program.place
        place[moved], place[waited] = place[node], place[wait]
        self.program.by_node[moved] = replace(c, node=moved, inputs=(early,))
        what = "cast" if made.dtype != given.dtype else "elementwise op"
        self._count(f"{what} before {c.kind}")
        self._elementwise(moved, self.program.by_node[moved])

    def _gather_of_scatter(self, node: Node, c: Collective) -> None:
        if c.kind != "all_gather_into_tensor":
            return
        inner = self.program.awaited(c.inputs[0])
        if inner is None or inner.kind != "reduce_scatter_tensor" or inner.group != c.group:
            return
        between, wait = _single(inner.node), _single(node)
        if wait is None or between is None or between is not c.inputs[0]:
            return
        if len(between.users) != 1:
            return
        source = inner.inputs[0]
        if not self.same_bits(inner) or not self.program.is_still(between, source):
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
        self.program.erase(node, between, inner.node)
        self._count("all_gather of a reduce_scatter as an all_reduce")

    def _sum_of_sums(self, node: Node, c: Collective) -> None:
        if self.numerics != "rounding" or c.kind != "all_reduce" or c.argument("factor"):
            return
        wait = _single(node)
        if str(c.argument("reduce_op")).lower() != "sum" or wait is None or len(wait.users) != 1:
            return
        add = next(iter(wait.users))
        if add.target is not torch.ops.aten.add.Tensor or add.args[0] is not wait or add.kwargs:
            return
        other = add.args[1]
        second = self.program.awaited(other) if isinstance(other, Node) else None
        if second is None or second.node is node or not isinstance(other, Node):
            return
        if (second.kind, second.group, second.arguments) != (c.kind, c.group, c.arguments):
            return
        pair = [value_of(n) for n in (c.inputs[0], second.inputs[0])]
        if pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype:
            return
        if len(other.users) != 1 or _single(second.node) is not other:
            return
        if not self.program.is_still(node, wait, second.node, other, c.inputs[0], second.inputs[0]):
            return
        last = max(node, second.node, key=lambda n: self.program.place[n])
        with self.graph.inserting_before(last):
            added = self.graph.call_function(add.target, (c.inputs[0], second.inputs[0]))
            added.meta["val"] = _like(pair[0], pair[0].dtype)
            new = self.graph.call_function(node.target, (added, *node.args[1:]), node.kwargs)
        new.meta.update(node.meta)
        with self.graph.inserting_before(add):
            waited = self.graph.call_function(wait.target, (new,))
        waited.meta.update(wait.meta)
        add.replace_all_uses_with(waited)
        self.program.erase(add, wait, other, node, second.node)
        self._count("sum of all_reduces as one all_reduce of the sum")


def _single(node: Node) -> Node | None:
    """The one wait for a collective, where nothing else uses it."""
    users = list(node.users)
    return users[0] if len(users) == 1 and _is_wait(users[0]) else None


def _constant_of(node: Node) -> int | float | None:
    """The number that every element of a tensor is, where the graph says so."""
    aten = torch.ops.aten
    known = {
        aten.zeros.default: 0,
        aten.zeros_like.default: 0,
        aten.ones.default: 1,
        aten.ones_like.default: 1,
    }
    if node.target in known:
        return known[node.target]
    if node.target in (aten.full.default, aten.full_like.default) and len(node.args) == 2:
        number = node.args[1]
        return number if type(number) in (int, float) else None  # type: ignore[return-value]
    return None


def _reduced_constant(
    number: float, dtype: torch.dtype, operation: str, ranks: int
) -> int | float | None:
    """What ranks get that all give one number, if it is the same in whatever order."""
    if dtype.is_complex or dtype == torch.bool or not math.isfinite(number):
        return None
    kept = torch.tensor(number, dtype=dtype).item()
    if not math.isfinite(kept):
        return None
    if operation in ("min", "max"):
        return kept
    if operation != "sum":
        return None
    for count in range(1, ranks + 1):
        exact = Fraction(kept) * count
        if dtype.is_floating_point:
            if abs(exact) > torch.finfo(dtype).max:
                return None
        elif not torch.iinfo(dtype).min <= exact <= torch.iinfo(dtype).max:
            return None
        if Fraction(torch.tensor(kept * count, dtype=dtype).item()) != exact:
            return None
    return kept * ranks


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
