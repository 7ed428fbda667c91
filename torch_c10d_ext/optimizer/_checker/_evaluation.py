"""A graph's symbolic run: what each node is worth, and what is in flight meanwhile."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_c10d_ext.optimizer._checker._algebra import FILLS, Algebra
from torch_c10d_ext.optimizer._checker._bytes import OF_BYTES, Bytes
from torch_c10d_ext.optimizer._checker._nodes import (
    SPACES,
    alias_names,
    carries_collective,
    is_collective_target,
    is_higher_order,
    is_packet,
    nodes_in,
    target_name,
    tensors_in,
    text_of,
    value_of,
)
from torch_c10d_ext.optimizer._checker._parts import Parts
from torch_c10d_ext.optimizer._checker._terms import Terms, plain_value, type_of

_KINDS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_to_all_single",
    "all_gather",
    "reduce_scatter",
    "reduce",
    "gather",
    "scatter",
    "permute_tensor",
)


class CheckFailed(Exception):
    """The graphs differ; the text says where."""


class Cell:
    """A piece of memory: what it holds, and which collective in flight reads or writes it."""

    __slots__ = ("maker", "readers", "version", "writer")

    def __init__(self, maker: int) -> None:
        self.maker = maker
        self.version: int | None = None  # None: as it was made
        self.writer: tuple[Node, int] | None = None  # the launch, and which of its collectives
        self.readers: set[tuple[Node, int]] = set()


class Evaluation:
    """A graph's symbolic run: the state of one pass over its nodes.

    What terms are equal is not decided here, but by the rules of the other modules.
    """

    def __init__(self, graph: Graph, terms: Terms) -> None:
        self.graph, self.terms = graph, terms
        self.term: dict[Node, Any] = {}  # a number, or a tuple of them
        self.cells: dict[Node, tuple[Cell, ...]] = {}
        self.by_storage: dict[int, Cell] = {}
        self.inputs: list[tuple[str, Cell]] = []
        self.outputs: Any = None
        self.final: tuple[Any, ...] = ()
        self.shared: tuple[Any, ...] = ()
        self.effects: list[Any] = []
        self.collectives: dict[int, str] = {}
        self.algebra, self.parts = Algebra(terms), Parts(terms)
        self.bytes = Bytes(terms, self.parts)
        self.buckets: dict[Any, tuple[str, str | None, str, set[torch.dtype], str]] = {}
        # By launch and number: what it reads and writes.
        self.flying: dict[tuple[Node, int], tuple[tuple[Cell, ...], tuple[Cell, ...]]] = {}

    def run(self) -> Evaluation:
        count = 0
        for node in self.graph.nodes:
            for given in node.all_input_nodes:
                if given not in self.term:
                    raise CheckFailed(f"{node.name} comes before {given.name}, which it uses")
            if node.op == "placeholder":
                self._make(node, self.terms.number(("input", count), node.name), held=True)
                count += 1
            elif node.op == "get_attr":
                self._make(node, self.terms.number(("attribute", node.target), node.name), True)
            elif node.op == "output":
                self._output(node)
            else:
                self._call(node)
        return self

    # --- nodes ---------------------------------------------------------------------------------

    def _make(self, node: Node, term: Any, held: bool = False, views: Iterable[Node] = ()) -> None:
        self.term[node] = term
        if type(term) is int:
            self.terms.types.note(term, node)
        shared: dict[Cell, None] = {}
        for tensor in tensors_in(value_of(node)):
            address = tensor.untyped_storage()._cdata
            cell = self.by_storage.get(address)
            if cell is None:
                bases = [c for base in views for c in self.cells[base]]
                if bases:
                    shared.update(dict.fromkeys(bases))
                    continue
                cell = self.by_storage[address] = Cell(term if isinstance(term, int) else -1)
                if held:
                    self.inputs.append((node.name, cell))
            shared[cell] = None
        self.cells[node] = tuple(shared)

    def _output(self, node: Node) -> None:
        self.outputs = self._value(node.args[0], in_flight=True)
        self.term[node] = self.outputs
        self.final = tuple(
            (k, cell.version) for k, (_, cell) in enumerate(self.inputs) if cell.version is not None
        )
        # Which outputs share memory, with each other and with inputs.
        seen: dict[Cell, int] = {cell: k for k, (_, cell) in enumerate(self.inputs)}
        shared = []
        for given in nodes_in(node.args[0]):
            for cell in self.cells[given]:
                shared.append(seen.setdefault(cell, len(seen)))
        self.shared = tuple(shared)

    def _call(self, node: Node) -> None:
        target = node.target
        op = getattr(target, "default", target) if is_packet(target) else target
        if target is operator.getitem:
            source, k = node.args
            whole = self.term[source]  # type: ignore[index]
            if isinstance(whole, tuple) and isinstance(k, int):
                self._make(node, whole[k], views=[source])  # type: ignore[list-item]
            else:
                key = ("item", whole, k if isinstance(k, int) else self._value(k))
                term = self.terms.number(key, node.name)
                self._make(node, term, views=[source])  # type: ignore[list-item]
            return
        if not hasattr(op, "_schema") or not hasattr(op, "namespace"):
            self._opaque(node)
            return
        space, name = op._schema.name.split("::")
        if space == "c10d_ext_optimizer":
            self.term[node], self.cells[node] = -1, ()
        elif space in SPACES and name == "wait_tensor":
            self._wait(node)
        elif space in SPACES and name != "copy_to_group":
            self._collective(node, op, space, name)
        else:
            self._plain(node, op)

    def _plain(self, node: Node, op: Any) -> None:
        written, viewed = self._aliases(node, op)
        has_result = bool(op._schema.returns)
        is_view = bool(viewed) and not written and has_result
        # A view is an address: it reads nothing yet.
        key: Any = (
            text_of(op),
            self._value(node.args, address=is_view),
            self._value(node.kwargs, address=is_view),
        )
        ordered = torch.Tag.nondeterministic_seeded in op.tags or not (has_result or written)
        if not is_view:
            self._touch(node, written)
        if ordered:
            key = (*key, len(self.effects))
        term = None
        name = text_of(op)
        if name in OF_BYTES:
            term = self.bytes.same_bytes(node, op, key)
        if name == "aten.cat.default":
            term = self.parts.joined(node, key)
        elif term is None and name == "aten.slice.Tensor":
            term = self.algebra.rows(node, op, key)
        elif name in FILLS:
            term = self.algebra.filled(node, op, key)
        if term is None:
            term = self.algebra.rewritten(node, op, key)
        if ordered:
            self.effects.append(term)
        for cell in self._cells(written):
            cell.version = self.terms.number(("write", term, cell.version), node.name)
        if written:
            # The result is what was written.
            self._make(node, self.term[written[0]], views=written)
        else:
            self._make(node, term, views=viewed)

    def _opaque(self, node: Node) -> None:
        """A call that may do anything with what it is given."""
        given = node.all_input_nodes
        plain = not tensors_in(value_of(node)) and not any(self.cells[n] for n in given)
        key: Any = (target_name(node), self._value(node.args), self._value(node.kwargs))
        if plain and not is_higher_order(node.target):
            self._make(node, self.terms.number(key, node.name))
            return
        self._touch(node, given)
        term = self.terms.number((*key, len(self.effects)), node.name)
        started = frozenset(self.collectives) if carries_collective(node) else None
        self.effects.append((term, started, self._in_flight() if started is not None else None))
        for cell in self._cells(given):
            cell.version = self.terms.number(("write", term, cell.version), node.name)
        self._make(node, term)

    def _collective(self, node: Node, op: Any, space: str, name: str) -> None:
        in_place = name.endswith("_")
        into = name.endswith("_out")
        name = name.removesuffix("_").removesuffix("_out")
        if name.removesuffix("_coalesced") == "broadcast":
            space = SPACES[0]  # it only moves; torch's has no form for several tensors
        several = name.endswith("_coalesced")
        kind = name.removesuffix("_coalesced")
        arguments = dict(zip([a.name for a in op._schema.arguments], node.args, strict=False))
        arguments.update(node.kwargs)
        tensors = [a.name for a in op._schema.arguments if "Tensor" in str(a.type)]
        given = [n for t in tensors for n in nodes_in(arguments.get(t))]
        rest = tuple((k, self._value(v)) for k, v in sorted(arguments.items()) if k not in tensors)
        group = str(arguments.get("group_name"))
        if kind not in _KINDS:
            self._touch(node, given)
            term = self.terms.number(
                (space, name, rest, self._value(given), len(self.effects)), node.name
            )
            self.effects.append((term, frozenset(self.collectives), self._in_flight()))
            self._make(node, term)
            return
        self._touch(node, [])
        self._check_landed(node, given)
        values = [self._value(n) for n in given]
        # One term for each: a launch of several is worth what launches of one are worth.
        found: list[int] = []
        results_in = tensors_in(value_of(node))
        for k, (n, value) in enumerate(
            zip(given, values, strict=True) if several else [(given[0], values)]
        ):
            key = (
                space,
                kind,
                rest,
                value if several else (value[0] if len(value) == 1 else tuple(value)),
            )
            name = f"{kind} of {n.name}"
            result = results_in[k] if k < len(results_in) else None
            moved = self.bytes.moved_bytes(result, key, name)
            if moved is not None:
                self.collectives.update(dict.fromkeys(moved, node.name))
                type_ = type_of(results_in[k])
                if kind == "all_to_all_single" or type_ is None:
                    found.append(self.terms.number(key, name))
                else:
                    found.append(self.terms.as_root(moved[0], key, name, type_))
                continue
            folded = None if several else self.algebra.folded(key, name)
            if folded is not None:
                found.append(folded)
                continue
            made = self.algebra.reduced_twice(key, f"{kind} of {n.name}")
            term = self.terms.number(key, f"{kind} of {n.name}") if made is None else made
            self.collectives[term] = node.name
            found.append(term)
        if several:
            reduce_op = arguments.get("reduce_op")
            self.buckets[tuple(found)] = (
                node.name,
                str(reduce_op).lower() if reduce_op is not None else None,
                group,
                {t.dtype for n in given for t in tensors_in(value_of(n))},
                space,
            )
        if in_place or into:
            targets = [arguments["out"]] if into else (given if several else given[:1])
            for n, term in zip(targets, found, strict=True):
                self._touch(node, [n])
                for cell in self.cells[n]:
                    cell.version = self.terms.number(("write", term, cell.version), node.name)
            self._make(node, self.term[targets[0]], views=targets)
            if several:
                self.term[node] = tuple(self.term[n] for n in targets)
            results = [self.cells[n] for n in targets]
        else:
            self._make(node, tuple(found) if several else found[0])
            results = [(cell,) for cell in self.cells[node]] if several else [self.cells[node]]
        for k, written in enumerate(results):
            read = self._cells([given[k]] if several else given)
            for cell in written:
                cell.writer = (node, k)
            for cell in read:
                cell.readers.add((node, k))
            self.flying[node, k] = (read, written)

    def _wait(self, node: Node) -> None:
        (source,) = node.all_input_nodes
        for cell in self.cells[source]:
            start = cell.writer
            if start is None:
                continue
            read, written = self.flying.pop(start)
            for other in written:
                other.writer = None
            for other in read:
                other.readers.discard(start)
        self._make(node, self.term[source], views=[source])

    # --- values --------------------------------------------------------------------------------

    def _value(self, argument: Any, address: bool = False, in_flight: bool = False) -> Any:
        """What an argument is worth now; a view of memory that was written, with its version."""
        if isinstance(argument, Node):
            term = self.term[argument]
            if address:
                return term
            versions = tuple(c.version for c in self.cells[argument] if c.version is not None)
            return ("read", term, versions) if versions else term
        if isinstance(argument, list | tuple):
            return tuple(self._value(a, address, in_flight) for a in argument)
        if isinstance(argument, dict):
            items = sorted(argument.items())
            return tuple((k, self._value(v, address, in_flight)) for k, v in items)
        if isinstance(argument, slice):
            return (
                "slice",
                *(self._value(v) for v in (argument.start, argument.stop, argument.step)),
            )
        return plain_value(argument)

    def _cells(self, nodes: Iterable[Node]) -> tuple[Cell, ...]:
        return tuple(dict.fromkeys(c for n in nodes for c in self.cells[n]))

    def _aliases(self, node: Node, op: Any) -> tuple[list[Node], list[Node]]:
        """The arguments that an op writes, and those that its result may be a view of."""
        writes, views = alias_names(op)
        if not writes and not views:
            return [], []
        names = [a.name for a in op._schema.arguments]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        written = [n for name in writes for n in nodes_in(arguments.get(name))]
        viewed = [n for name in views for n in nodes_in(arguments.get(name))]
        return written, viewed

    def _check_landed(self, node: Node, given: Iterable[Node]) -> None:
        for cell in self._cells(given):
            if cell.writer is not None:
                raise CheckFailed(f"{node.name} uses what {cell.writer[0].name} has in flight")

    def _touch(self, node: Node, written: list[Node]) -> None:
        if not is_collective_target(node):
            self._check_landed(node, node.all_input_nodes)
        for cell in self._cells(written):
            if cell.writer is not None:
                raise CheckFailed(f"{node.name} writes what {cell.writer[0].name} has in flight")
            if cell.readers:
                reader = next(iter(cell.readers))
                raise CheckFailed(f"{node.name} writes what {reader[0].name} reads in flight")

    def _in_flight(self) -> frozenset[Any]:
        return frozenset(
            self.term[n][k] if isinstance(self.term[n], tuple) else self.term[n]
            for n, k in self.flying
        )
