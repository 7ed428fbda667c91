"""A graph as a scheduling problem: numbered nodes, what each must follow, takes and holds."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_c10d_ext._op_info import NAMESPACES, SILENT, op_info, traffic_of
from torch_c10d_ext.optimizer._collectives import (
    Collective,
    OpOverload,
    op_of,
    read_collective,
    tensors_in,
    value_of,
    wire_bytes,
)
from torch_c10d_ext.optimizer._costs import Costs
from torch_c10d_ext.report import Link


class Unsupported(Exception):
    """Why a graph is left as it is."""


@dataclass
class Problem:
    """A graph by numbers. Node i is ``nodes[i]``; the last one is the graph's output.

    Attributes:
        follows: what each node must come after, of data and of memory that is written.
        seconds: how long each computes; of a start, what its bytes take of the rank.
        idle: whether a node takes no time and makes no memory: a view, a wait.
        collectives: by the number of the node that starts them.
        started_by: the start that a wait ends.
        sent: seconds on the link, by start.
        overhead: seconds that a launch takes of the rank, by start; that of the largest counts.
        lane: the link's number, by start.
        size: bytes, by storage.
        maker: the node that makes a storage; -1 for what the caller holds, whose size is 0 here.
        users: the nodes that need a storage, in order, the maker included.
        made: the storages that a node makes.
        used: the storages that a node needs or makes.
        fixed_order: whether collectives must start in the order of the graph.
        copying: by start, seconds that a copy into or out of a launch of several takes, where
            these share one message.
    """

    nodes: list[Node] = field(default_factory=list)
    follows: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    idle: list[bool] = field(default_factory=list)
    collectives: dict[int, Collective] = field(default_factory=dict)
    started_by: dict[int, int] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)
    overhead: dict[int, float] = field(default_factory=dict)
    lane: dict[int, int] = field(default_factory=dict)
    size: list[int] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)
    users: list[list[int]] = field(default_factory=list)
    made: list[list[int]] = field(default_factory=list)
    used: list[list[int]] = field(default_factory=list)
    fixed_order: bool = False
    lanes: dict[str, int] = field(default_factory=dict)
    latency: dict[int, float] = field(default_factory=dict)
    copying: dict[int, float] = field(default_factory=dict)

    def charge(self, start: int, link: Link, kind: str, ranks: int, wire: float, lane: str) -> None:
        """Says what a collective costs, with so many bytes on the wire of a link."""
        self.sent[start] = link.seconds(kind, ranks, wire)
        self.latency[start] = link.seconds(kind, ranks, 0.0)
        self.overhead[start] = link.busy_seconds(0.0)
        self.seconds[start] = link.busy_seconds(wire) - self.overhead[start]
        self.lane[start] = self.lanes.setdefault(lane, len(self.lanes))

    def busy(self, members: Sequence[int]) -> float:
        """Seconds that a launch takes of the rank."""
        total = max(self.overhead[i] for i in members)
        total += sum(self.seconds[i] for i in members)
        if len(members) > 1 and members[0] in self.copying:
            total += sum(self.copying[i] for i in members)
        return total

    def on_link(self, members: Sequence[int]) -> float:
        """Seconds that a launch takes of its link."""
        total = max(self.latency[i] for i in members)
        return total + sum(self.sent[i] - self.latency[i] for i in members)

    def waits(self) -> dict[int, list[int]]:
        """The waits of each start."""
        found: dict[int, list[int]] = {start: [] for start in self.collectives}
        for wait, start in self.started_by.items():
            found[start].append(wait)
        return found


@dataclass(frozen=True)
class _Traits:
    """What a schema says of an op."""

    written: tuple[str, ...]  # names of the arguments that it writes
    viewed: tuple[str, ...]  # names of the arguments that its result may be a view of
    names: tuple[str, ...]
    ordered: bool  # draws random numbers, or works by effects
    free: bool  # an allocation alone


_FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@functools.cache
def _traits(op: Any) -> _Traits:
    schema = op._schema
    infos = [(a.name, a.alias_info) for a in schema.arguments]
    written = tuple(name for name, info in infos if info is not None and info.is_write)
    viewed = tuple(name for name, info in infos if info is not None and not info.is_write)
    if not any(r.alias_info is not None for r in schema.returns):
        viewed = ()
    random = torch.Tag.nondeterministic_seeded in op.tags
    return _Traits(
        written,
        viewed,
        tuple(name for name, _ in infos),
        random or (not schema.returns and not written),
        op._schema.name.split("::")[1] in _FREE,
    )


def read_problem(graph: Graph, costs: Costs, size_of: Any) -> Problem:
    """The problem of a graph.

    Args:
        graph: of ATen ops, whose nodes carry fake tensors.
        costs: the cost model.
        size_of: gives the size of a group by its name.

    Raises:
        Unsupported: the graph cannot be understood in full.
    """
    return _Reader(graph, costs, size_of).read()


class _Memory:
    """The storages of a graph's results, and who may not pass whom for what they hold."""

    def __init__(self, p: Problem, costs: Costs) -> None:
        self.p, self.costs = p, costs
        self.storage: dict[int, int] = {}  # the address of a fake storage -> its number
        self.writer: dict[int, int] = {}  # storage -> who wrote it last
        self.readers: dict[int, list[int]] = {}  # storage -> who read it since
        self.flying: dict[int, int] = {}  # storage -> the collective that writes it
        self.lent: dict[int, int] = {}  # storage -> the collective in flight that reads it

    def storages(
        self, i: int, value: Any, viewed: tuple[int, ...], held: bool = False
    ) -> tuple[int, ...]:
        """The storages of a result: known ones, those of a viewed argument, or new ones."""
        p = self.p
        found: dict[int, None] = {}
        for tensor in tensors_in(value):
            address = tensor.untyped_storage()._cdata
            s = self.storage.get(address)
            if s is None:
                if viewed:
                    found.update(dict.fromkeys(viewed))
                    continue
                s = self.storage[address] = len(p.size)
                p.size.append(0 if held else self.costs.storage_bytes(tensor))
                p.maker.append(-1 if held else i)
                p.users.append([])
                if not held:
                    p.made[i].append(s)
            found[s] = None
        return tuple(found)

    def element(self, i: int, value: Any, owner: tuple[int, ...]) -> tuple[int, ...]:
        if len(owner) <= 1:
            return self.storages(i, value, owner)
        known = tuple(
            s
            for t in tensors_in(value)
            if (s := self.storage.get(t.untyped_storage()._cdata)) is not None
        )
        return known or owner

    def use(self, i: int, storages: tuple[int, ...]) -> None:
        p = self.p
        for s in storages:
            if p.maker[s] >= 0 and (not p.users[s] or p.users[s][-1] != i):
                p.users[s].append(i)
                p.used[i].append(s)

    def read(self, i: int, s: int, follows: set[int]) -> None:
        if s in self.writer:
            follows.add(self.writer[s])
        self.readers.setdefault(s, []).append(i)

    def write(self, i: int, s: int, follows: set[int]) -> None:
        if s in self.lent:
            raise Unsupported(
                f"what is in flight must be left alone until its wait, got {self.p.nodes[i].name}, "
                f"which writes what {self.p.nodes[self.lent[s]].name} reads"
            )
        if s in self.writer:
            follows.add(self.writer[s])
        follows.update(self.readers.pop(s, ()))
        self.writer[s] = i


class _Reader:
    def __init__(self, graph: Graph, costs: Costs, size_of: Any) -> None:
        self.graph, self.costs, self.size_of = graph, costs, size_of
        self.p = Problem()
        self.memory = _Memory(self.p, costs)
        self.number: dict[Node, int] = {}
        self.roles: dict[str, int] = {}
        self.storages_of: list[tuple[int, ...]] = []  # of a node's result
        self.chain: int | None = None  # the last node whose order among its kind counts
        self.fence: int | None = None  # the last call that no collective passes
        self.since: list[int] = []  # starts and waits since then

    def read(self) -> Problem:
        p = self.p
        for node in self.graph.nodes:
            self._add(node)
        if p.fixed_order:
            starts = sorted(p.collectives)
            for before, after in itertools.pairwise(starts):
                p.follows[after].append(before)
        return p

    def _add(self, node: Node) -> None:
        p = self.p
        i = len(p.nodes)
        self.number[node] = i
        p.nodes.append(node)
        given = [self.number[n] for n in node.all_input_nodes]
        follows = set(given)
        p.follows.append([])
        p.seconds.append(0.0)
        p.idle.append(True)
        p.made.append([])
        p.used.append([])
        op = op_of(node)
        form = op_info(op) if op is not None else None
        value = value_of(node)
        if node.op in ("placeholder", "get_attr"):
            self.storages_of.append(self.memory.storages(i, value, (), held=True))
            return
        if node.op == "output":
            self.storages_of.append(())
            for start in p.collectives:  # what is in flight ends with the graph
                follows.add(start)
            for n in given:
                self.memory.use(i, self.storages_of[n])
            p.follows[i] = sorted(follows)
            return
        if node.op != "call_function":
            raise Unsupported(
                f"the graph must hold ATen ops alone, got {node.op} {node.target} ({node.name})"
            )
        if form is not None and form.kind == "wait_tensor":
            self._wait(i, node, given, follows, value)
        elif form is not None and form.kind in SILENT:
            viewed = tuple(s for n in given for s in self.storages_of[n])
            self.storages_of.append(self.memory.storages(i, value, viewed))
        elif form is not None:
            self._communicate(i, node, op, form, given, follows, value)
        else:
            self._compute(i, node, op, given, follows, value)
        self.memory.use(i, self.storages_of[i])
        for n in given:
            self.memory.use(i, self.storages_of[n])
        follows.discard(i)
        p.follows[i] = sorted(follows)

    # --- kinds of nodes ------------------------------------------------------------------------

    def _wait(self, i: int, node: Node, given: list[int], follows: set[int], value: Any) -> None:
        p = self.p
        viewed = self.storages_of[given[0]] if given else ()
        self.storages_of.append(self.memory.storages(i, value, viewed))
        starts = {self.memory.flying[s] for s in viewed if s in self.memory.flying}
        if len(starts) > 1:
            raise Unsupported(f"a wait must end one collective, got {node.name} of {len(starts)}")
        for start in starts:
            p.started_by[i] = start
            follows.add(start)
            for n in p.collectives[start].inputs:
                sources = self.storages_of[self.number[n]]
                self.memory.use(i, sources)
                for s in sources:
                    self.memory.lent.pop(s, None)
                    if s not in viewed:
                        self.memory.read(i, s, follows)
            for s in viewed:
                self.memory.flying.pop(s, None)
        for s in viewed:
            self.memory.write(i, s, follows)
        self._keep_behind_fence(i, follows)

    def _communicate(
        self,
        i: int,
        node: Node,
        op: Any,
        form: Any,
        given: list[int],
        follows: set[int],
        value: Any,
    ) -> None:
        p = self.p
        p.idle[i] = False
        self._check_landed(node, given)
        movable = traffic_of(form.kind).movable
        if not movable or form.namespace not in ("c10d_ext", "_c10d_functional"):
            self.storages_of.append(self.memory.storages(i, value, ()))
            self._touch_all(i, given, follows)
            self._as_fence(i, follows)
            self._as_link(i, follows)
            return
        try:
            collective = read_collective(node, form, self.roles, self.size_of)
        except ValueError as error:
            raise Unsupported(str(error)) from error
        if not collective.symmetric:
            p.fixed_order = True
        p.collectives[i] = collective
        sources = [s for n in collective.inputs for s in self.storages_of[self.number[n]]]
        if form.written:
            written = collective.inputs if form.coalesced else collective.inputs[:1]
            if "out" in node.kwargs:
                written = (node.kwargs["out"],)
            targets = tuple(s for n in written for s in self.storages_of[self.number[n]])
            self.storages_of.append(self.memory.storages(i, value, targets))
        else:
            self.storages_of.append(self.memory.storages(i, value, ()))
            targets = self.storages_of[i]
        for s in sources:
            self.memory.read(i, s, follows)
        for s in targets:
            self.memory.write(i, s, follows)
            self.memory.flying[s] = i
        self.memory.lent.update(dict.fromkeys(sources, i))
        self._keep_behind_fence(i, follows)
        costs = self.costs
        # Where a result is written to sends nothing, but for what is both.
        out = node.kwargs.get("out")
        sent = costs.bytes_of([value_of(n) for n in collective.inputs if n is not out])
        wire = wire_bytes(form.kind, collective.ranks, sent, costs.bytes_of(value))
        link, lane = costs.link_of(collective.group), costs.lane_of(collective.group)
        p.charge(i, link, form.kind, collective.ranks, wire, lane)

    def _compute(
        self, i: int, node: Node, op: Any, given: list[int], follows: set[int], value: Any
    ) -> None:
        p = self.p
        if op is None:
            if node.target is operator.getitem and tensors_in(value):
                self.storages_of.append(
                    self.memory.element(i, value, self.storages_of[given[0]] if given else ())
                )
            elif not tensors_in(value) and _is_plain(node.target):
                self.storages_of.append(())
            else:
                self._higher_order(i, node, given, follows, value)
            return
        if value is None and op._schema.returns:
            raise Unsupported(f"nodes must carry fake tensors, got {node.name} without")
        traits = _traits(op)
        arguments = dict(zip(traits.names, node.args, strict=False))
        arguments.update(node.kwargs)
        viewed = self._storages_in(traits.viewed, arguments)
        written = self._storages_in(traits.written, arguments)
        before = len(p.size)
        self.storages_of.append(self.memory.storages(i, value, (*viewed, *written)))
        if traits.ordered:
            self._as_link(i, follows)
        made = len(p.size) > before
        if viewed and not written and not made:
            return
        if op.__name__.startswith("sym_"):
            return
        p.idle[i] = False
        self._check_landed(node, given)
        if not traits.free:
            p.seconds[i] = self.costs.seconds(node, op)
        for n in given:
            for s in self.storages_of[n]:
                self.memory.read(i, s, follows)
        for s in written:
            self.memory.write(i, s, follows)

    def _higher_order(
        self, i: int, node: Node, given: list[int], follows: set[int], value: Any
    ) -> None:
        """Ops that may do anything with what they are given: loops, branches, effects."""
        p = self.p
        p.idle[i] = False
        self._check_landed(node, given)
        shared = tuple(s for n in given for s in self.storages_of[n])
        self.storages_of.append(self.memory.storages(i, value, ()))
        p.seconds[i] = self.costs.seconds(node, node.target)
        for s in shared:
            self.memory.write(i, s, follows)
        self._as_link(i, follows)
        if _communicates(node):
            self._as_fence(i, follows)

    # --- memory --------------------------------------------------------------------------------

    def _storages_in(self, names: tuple[str, ...], arguments: dict[str, Any]) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for name in names:
            value = arguments.get(name)
            for n in value if isinstance(value, list | tuple) else (value,):
                if isinstance(n, Node):
                    found.update(dict.fromkeys(self.storages_of[self.number[n]]))
        return tuple(found)

    def _touch_all(self, i: int, given: list[int], follows: set[int]) -> None:
        for n in given:
            for s in self.storages_of[n]:
                self.memory.write(i, s, follows)

    def _check_landed(self, node: Node, given: list[int]) -> None:
        """Whether what a node computes with has arrived."""
        for n in given:
            for s in self.storages_of[n]:
                if s in self.memory.flying:
                    raise Unsupported(
                        f"a result must be waited for before it is used, got {node.name}, which "
                        f"uses that of {self.p.nodes[self.memory.flying[s]].name}"
                    )

    # --- order ---------------------------------------------------------------------------------

    def _as_link(self, i: int, follows: set[int]) -> None:
        """Puts a node behind the last one whose order counts."""
        if self.chain is not None:
            follows.add(self.chain)
        self.chain = i

    def _as_fence(self, i: int, follows: set[int]) -> None:
        follows.update(self.since)
        if self.fence is not None:
            follows.add(self.fence)
        self.since = []
        self.fence = i

    def _keep_behind_fence(self, i: int, follows: set[int]) -> None:
        if self.fence is not None:
            follows.add(self.fence)
        self.since.append(i)


def _is_plain(target: Any) -> bool:
    """Arithmetic of sizes, and access to elements."""
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", "")
    return module in ("_operator", "operator", "math", "builtins") or name.startswith("sym_")


def _communicates(node: Node) -> bool:
    """Whether a nested graph that a node calls, or the op it carries, communicates."""
    if any(isinstance(a, OpOverload) and a.namespace in NAMESPACES for a in node.args):
        return True
    root = node.graph.owning_module
    for given in node.all_input_nodes:
        if given.op == "get_attr" and root is not None:
            module: Any = root
            for name in str(given.target).split("."):
                module = getattr(module, name, None)
            if isinstance(module, GraphModule) and graph_communicates(module):
                return True
    return False


def graph_communicates(module: GraphModule) -> bool:
    """Whether a graph, or one that is nested in it, holds a collective."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                op = op_of(node)
                if op is not None and op.namespace in NAMESPACES:
                    return True
                if any(isinstance(a, OpOverload) and a.namespace in NAMESPACES for a in node.args):
                    return True
    return False
