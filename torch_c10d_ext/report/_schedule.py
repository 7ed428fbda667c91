"""Runs a graph by the clock of the cost model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_c10d_ext._groups import process_group
from torch_c10d_ext.report._costs import Compute, Link
from torch_c10d_ext.report._graph import (
    FREE,
    Call,
    NoValue,
    Sizes,
    bytes_moved,
    flat_nodes,
    is_in_place,
    is_view,
    op_name,
    operations_of,
    tensors_in,
    value_of,
    wire_of,
)
from torch_c10d_ext.report._timeline import CollectiveCall, CommunicationReport, Step
from torch_c10d_ext.report._topology import Topology

# What torch calls a group that nobody has described.
UNSAID = ("", "undefined", "default_pg")


@dataclass
class _Flight:
    """A collective between its call and its wait."""

    number: int  # among the report's calls
    static: dict[str, Any]  # what does not change: the fields of CollectiveCall
    reads: list[Node]  # the memory that it holds until its wait
    start: float
    end: float
    compute_ops: int = 0
    hidden: float = 0.0
    waited: bool = False


class _MemoryUse:
    """From when to when the memory that nodes make is live."""

    def __init__(self) -> None:
        self._made: dict[Node, tuple[float, float]] = {}  # bytes, since when
        self._last: dict[Node, float] = {}
        self._kept: set[Node] = set()

    def make(self, node: Node, amount: float, now: float) -> None:
        self._made[node] = (amount, now)

    def use(self, node: Node, now: float) -> None:
        self._last[node] = now

    def keep(self, node: Node) -> None:
        self._kept.add(node)

    def over_time(self) -> list[tuple[float, float]]:
        # What is made at a time is there before what is last used then goes.
        changes: dict[float, list[float]] = {}
        if any(math.isnan(amount) for amount, _ in self._made.values()):
            return []
        for node, (amount, since) in self._made.items():
            if amount:
                changes.setdefault(since, []).append(amount)
                if node not in self._kept:
                    until = max(since, self._last.get(node, since))
                    changes.setdefault(until, []).append(-amount)
        live, found = 0.0, []
        for at in sorted(changes):
            for amounts in (
                [a for a in changes[at] if a > 0],
                [a for a in changes[at] if a < 0],
            ):
                if amounts:
                    live += sum(amounts)
                    found.append((at, live))
        return found


class Schedule:
    """Runs a graph's nodes by the clock of the cost model."""

    def __init__(
        self,
        link: Link | Topology,
        links: dict[str, Link | Topology],
        compute: Compute | Callable[[Node], float],
        sizes: Sizes,
    ) -> None:
        self._link, self._links, self._compute, self._sizes = link, links, compute, sizes
        self._now = 0.0
        self._free: dict[str, float] = {}  # when a link has done its collectives
        self._flights: list[_Flight] = []
        self._open: list[_Flight] = []
        self._writer: dict[Node, _Flight] = {}  # of memory, named by the node that made it
        self._writes: set[Node] = set()  # calls whose results are memory that was there
        self._base: dict[Node, Node] = {}  # a view's memory
        self._busy: list[tuple[float, float]] = []
        self._steps: list[Step] = []
        self._waits: list[int] = []  # since the last computation
        self._memory_use = _MemoryUse()

    def run(self, graph: Graph) -> CommunicationReport:
        for node in flat_nodes(graph, self._base):
            called = self._now
            if node.op.startswith("call_"):
                self._step(node)
            self._record(node, called)
        for flight in self._open:
            self._now = max(self._now, flight.end)
        calls = tuple(
            CollectiveCall(
                **flight.static,
                start=flight.start,
                seconds=flight.end - flight.start,
                compute_ops=flight.compute_ops,
                hidden=flight.hidden,
                waited=flight.waited,
            )
            for flight in self._flights
        )
        memory = self._memory_use.over_time()
        return CommunicationReport(
            calls, tuple(self._busy), self._now, tuple(self._steps), tuple(memory)
        )

    def _record(self, node: Node, called: float) -> None:
        """What memory a node makes and uses."""
        use = self._memory_use
        if node.op == "output":
            for result in node.all_input_nodes:
                use.keep(self._memory(result))
            return
        if node.op in ("placeholder", "get_attr"):
            if node not in self._base:
                use.make(node, self._sizes.amount(value_of(node)), 0.0)
                use.keep(node)
            return
        for given in node.all_input_nodes:
            use.use(self._memory(given), self._now)
        if self._memory(node) is node and node not in self._writes:
            use.make(node, self._sizes.amount(value_of(node)), called)
            use.use(node, self._now)  # while it runs at least

    def _step(self, node: Node) -> None:
        call = Call.of(node)
        if call is not None and call.group is not None:
            self._start(node, call, call.group)
        elif node in self._base:
            pass  # out of a nested graph
        elif call is not None or is_view(node):
            source = node.all_input_nodes[0] if call is None else call.inputs[0]
            self._base[node] = self._memory(source)
            if call is not None and call.info.is_wait:
                self._wait(self._writer.get(self._base[node]))
        elif tensors_in(value_of(node)) and op_name(node.target) not in FREE:
            self._run(node)
            if is_in_place(node):
                self._base[node] = self._memory(node.all_input_nodes[0])

    def _memory(self, node: Node) -> Node:
        return self._base.get(node, node)

    def _start(self, node: Node, call: Call, group: str) -> None:
        for known in (*call.inputs, node):
            if not tensors_in(value_of(known)):
                raise ValueError(
                    "communication_report: the inputs and the result of a collective must carry "
                    f'meta["val"] or meta["example_value"], got {known.name} without, of '
                    f"{node.name}"
                )
        tensors = tensors_in([value_of(n) for n in call.inputs])
        pg = process_group(group)
        wire = wire_of(call, self._sizes, value_of(node), group)
        wire_bytes = self._sizes.number(wire)
        link = self._links.get(group, self._link)
        self._now += link.busy_seconds(wire_bytes)
        wire_name = f"link {link.shared}" if link.shared else f"group {group}"
        start = max(self._now, self._free.get(wire_name, 0.0))
        flight = _Flight(
            len(self._flights),
            dict(
                node=node.name,
                op=call.op,
                group=group,
                label=group if pg.group_desc in UNSAID else f"{group} {pg.group_desc}",
                ranks=pg.size(),
                shape=" + ".join(self._shape(t) for t in tensors),
                dtype=", ".join(dict.fromkeys(str(t.dtype)[len("torch.") :] for t in tensors)),
                wire=str(wire),
                wire_bytes=wire_bytes,
            ),
            [self._memory(n) for n in call.inputs],
            start,
            start + link.seconds(call.info.kind, pg.size(), wire_bytes),
        )
        self._free[wire_name] = flight.end
        self._flights.append(flight)
        self._open.append(flight)
        for written in [node, *(self._memory(n) for n in call.written)]:
            self._writer[written] = flight
        if call.written:
            self._writes.add(node)  # its result is memory that was there
        self._steps.append(
            Step(
                node.name,
                flight.start,
                flight.end - flight.start,
                flight.number,
                tuple(self._waits),
                bytes=sum(self._sizes.amount(value_of(n)) for n in call.inputs),
            )
        )
        self._waits = []

    def _shape(self, tensor: torch.Tensor) -> str:
        return str(tuple(self._sizes.expression(size) for size in tensor.shape))

    def _wait(self, flight: _Flight | None) -> None:
        if flight is not None and not flight.waited:
            self._now = max(self._now, flight.end)
            flight.waited = True
            self._open.remove(flight)
            self._waits.append(flight.number)
            for held in flight.reads:
                self._memory_use.use(held, self._now)

    def _run(self, node: Node) -> None:
        compute = self._compute
        moved = operations = math.nan
        if isinstance(compute, Compute):
            moved, operations = bytes_moved(self._sizes, node), operations_of(self._sizes, node)
            seconds = max(moved / compute.memory_bandwidth, operations / compute.flops)
        else:
            with contextlib.suppress(NoValue):
                moved, operations = bytes_moved(self._sizes, node), operations_of(self._sizes, node)
            seconds = compute(node)
        self._steps.append(
            Step(
                node.name,
                self._now,
                seconds,
                waits=tuple(self._waits),
                flops=operations,
                bytes=moved,
            )
        )
        self._waits = []
        start, end = self._now, self._now + seconds
        for flight in self._open:
            flight.compute_ops += 1
            flight.hidden += max(0.0, min(end, flight.end) - max(start, flight.start))
        if self._busy and self._busy[-1][1] == start:
            self._busy[-1] = (self._busy[-1][0], end)
        else:
            self._busy.append((start, end))
        self._now = end
