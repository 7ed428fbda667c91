"""What a traced graph communicates, and what of it computation hides: a table and a timeline."""

from __future__ import annotations

import contextlib
import html
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_c10d_ext import _chakra
from torch_c10d_ext._flops import flops
from torch_c10d_ext._groups import group_name, process_group
from torch_c10d_ext._op_info import NAMESPACES, WIRE, OpInfo, kind_of, op_info

__all__ = [
    "CollectiveCall",
    "CommunicationReport",
    "Compute",
    "Link",
    "Step",
    "communication_report",
]


@dataclass(frozen=True)
class Link:
    """What a collective costs: ``latency + hops * hop + wire bytes / bandwidth``.

    The postal model with a count of messages (Thakur, Rabenseifner and Gropp 2005). Of n ranks an
    all_reduce takes 2 (n - 1) hops as a ring and 2 ceil(log2 n) as a tree; a permutation takes one;
    every other collective half of what an all_reduce takes.

    Args:
        latency: seconds per call, whatever its size.
        bandwidth: bytes per second into, and at the same time out of, one rank.
        hop: seconds per message that must wait for another rank's.
        algorithm: ``"ring"`` or ``"tree"``: what ``hop`` is counted by.
        shared: the name of the wire. Collectives of groups whose links have one name take turns on
            it; without a name every group has a wire of its own.
    """

    latency: float = 10e-6
    bandwidth: float = 50e9
    hop: float = 0.0
    algorithm: str = "ring"
    shared: str = ""

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise ValueError(
                "Link: latency must be 0 or more and bandwidth positive, got latency "
                f"{self.latency} and bandwidth {self.bandwidth}"
            )
        if not self.hop >= 0:
            raise ValueError(f"Link: hop must be 0 or more, got {self.hop}")
        if self.algorithm not in ("ring", "tree"):
            raise ValueError(f"Link: algorithm must be 'ring' or 'tree', got {self.algorithm!r}")

    def hops(self, op: str, ranks: int) -> int:
        """How many messages of a collective must wait for one another."""
        if ranks == 1:
            return 0
        if op in ("permute_tensor", "isend", "irecv", "batch_isend_irecv", "batch_p2p_ops"):
            return 1
        steps = ranks - 1 if self.algorithm == "ring" else math.ceil(math.log2(ranks))
        return 2 * steps if op in ("all_reduce", "reduce_from_group", "barrier") else steps

    def seconds(self, op: str, ranks: int, wire_bytes: float) -> float:
        """How long a collective takes that has the link for itself.

        Args:
            op: ``"all_reduce"``, say.
            ranks: the size of the group.
            wire_bytes: the bytes over the busiest rank's link.
        """
        return self.latency + self.hops(op, ranks) * self.hop + wire_bytes / self.bandwidth


@dataclass(frozen=True)
class Compute:
    """What a computation costs: ``max(bytes moved / memory_bandwidth, operations / flops)``.

    The roofline model (Williams, Waterman and Patterson 2009). Inputs and results are moved once.
    Operations are counted in products of matrices, attention and convolutions, as
    ``torch.utils.flop_counter`` counts them: a product of matrices takes 2 × elements of the result
    × length of the contracted dimension.

    Args:
        memory_bandwidth: bytes per second.
        flops: floating-point operations per second.
    """

    memory_bandwidth: float = 3e12
    flops: float = 400e12

    def __post_init__(self) -> None:
        if not (self.memory_bandwidth > 0 and self.flops > 0):
            raise ValueError(
                "Compute: memory_bandwidth and flops must be positive, got memory_bandwidth "
                f"{self.memory_bandwidth} and flops {self.flops}"
            )


@dataclass(frozen=True)
class CollectiveCall:
    """One collective of a graph. Times are in seconds, the first node starting at 0.

    Attributes:
        node: the name of the graph's node.
        op: the op without its namespace, ``"all_reduce"`` say.
        group: the group's registered name.
        label: that name, and what the group's creator calls it: ``"9 mesh_tp"``.
        ranks: the size of the group.
        shape: the input's, or those of a list of inputs; sizes may be expressions.
        dtype: the input's.
        wire: the bytes that cross the busiest rank's link, as an expression of symbolic sizes.
        wire_bytes: their number.
        start: when the transfer begins: when it is called, or when the group is free.
        seconds: how long the transfer lasts.
        compute_ops: how many computations stand between the call and its first wait.
        hidden: for how much of the transfer one of them runs.
        waited: whether the graph waits for it. Else a wait is assumed at the end.
    """

    node: str
    op: str
    group: str
    label: str
    ranks: int
    shape: str
    dtype: str
    wire: str
    wire_bytes: float
    start: float
    seconds: float
    compute_ops: int
    hidden: float
    waited: bool

    @property
    def overlapped(self) -> bool:
        """Whether there is anything to compute before the wait."""
        return self.compute_ops > 0


@dataclass(frozen=True)
class Step:
    """A computation or a collective of a graph.

    Attributes:
        node: the name of the graph's node.
        start: in seconds.
        seconds: how long it lasts.
        call: which of the report's ``calls`` it is; None for a computation.
        waits: the ``calls`` that the graph waited for since the step before.
        flops: floating-point operations of a computation.
        bytes: what a computation reads and writes, or the input of a collective. NaN, as ``flops``,
            where a size that depends on data has no value.
    """

    node: str
    start: float
    seconds: float
    call: int | None = None
    waits: tuple[int, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class CommunicationReport:
    """The collectives of a graph, in order; ``str`` makes a table of them.

    Attributes:
        calls: one entry per collective.
        busy: when the rank computes, as (start, end) in seconds.
        seconds: when the graph is done.
        steps: every computation and collective in the order of the graph.
        memory: (seconds, bytes) whenever the bytes that are live change. Inputs, parameters and
            results are live throughout, a collective's input until its wait, everything else from
            the node that makes it until the last that uses it or a view of it. Empty where a size
            that depends on data has no value.
    """

    calls: tuple[CollectiveCall, ...]
    busy: tuple[tuple[float, float], ...]
    seconds: float
    steps: tuple[Step, ...] = ()
    memory: tuple[tuple[float, float], ...] = ()

    @property
    def peak_bytes(self) -> float:
        """The most bytes that are live at once."""
        return max((amount for _, amount in self.memory), default=0.0)

    def __str__(self) -> str:
        rows = [
            [
                call.op,
                call.label,
                f"{call.ranks}",
                f"{call.dtype} {call.shape}",
                _count(call.wire, call.wire_bytes),
                _us(call.seconds),
                _us(call.hidden),
                _overlap(call),
            ]
            for call in self.calls
        ]
        together: dict[tuple[str, str], list[CollectiveCall]] = {}
        for call in self.calls:
            together.setdefault((call.op, call.label), []).append(call)
        totals = [
            [
                *key,
                f"{len(calls)}",
                f"{sum(call.wire_bytes for call in calls):,.0f}",
                _us(sum(call.seconds for call in calls)),
                _us(sum(call.hidden for call in calls)),
            ]
            for key, calls in together.items()
        ]
        computing = sum(end - start for start, end in self.busy)
        communicating = sum(call.seconds for call in self.calls)
        hidden = sum(call.hidden for call in self.calls)
        waiting = self.seconds - computing
        return "\n".join(
            [
                *_aligned(_HEAD, rows, "llrlrrrl"),
                "",
                *_aligned(_TOTALS, totals, "llrrrr"),
                "",
                f"step {_us(self.seconds)} us: {_us(computing)} computing, {_us(waiting)} waiting",
                f"communication {_us(communicating)} us: {_us(hidden)} hidden by computation",
                *([f"memory {self.peak_bytes:,.0f} bytes at most"] if self.memory else []),
            ]
        )

    def svg(self) -> str:
        """The timeline as the text of an SVG file: computation above, then a lane per group."""
        lanes = list(dict.fromkeys(call.label for call in self.calls))
        ops = list(dict.fromkeys(call.op for call in self.calls))
        left = max(140, 20 + 7 * max(map(len, lanes), default=0))
        width, lane, top = 1000, 34, 40
        scale = width / (self.seconds or 1)
        below = top + lane * (1 + len(lanes))
        legend = -(-len(ops) // 4)
        right, height = left + width + 40, below + 44 + 20 * legend
        font = 'font-family="sans-serif" font-size="12"'

        def bar(kind: str, row: int, start: float, seconds: float, color: str, text: str) -> str:
            # At least a pixel, so that every collective is seen.
            return (
                f'<rect class="{kind}" x="{left + start * scale:.2f}" y="{top + lane * row + 4}" '
                f'width="{max(seconds * scale, 1):.2f}" height="{lane - 8}" fill="{color}">'
                f"<title>{html.escape(text)}</title></rect>"
            )

        def label(x: float, y: float, text: str, anchor: str = "start") -> str:
            return f'<text x="{x:.2f}" y="{y}" text-anchor="{anchor}">{html.escape(text)}</text>'

        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{height}" {font}>',
            '<rect width="100%" height="100%" fill="white"/>',
            label(left, 20, f"collectives: {len(self.calls)}, step: {_us(self.seconds)} us"),
        ]
        for row, name in enumerate(["compute", *lanes]):
            parts.append(label(left - 10, top + lane * row + 21, name, "end"))
        tick = _tick(self.seconds)
        for i in range(math.floor(self.seconds / tick) + 1):
            x = left + i * tick * scale
            parts.append(f'<path d="M{x:.2f} {top}V{below}" stroke="#ddd"/>')
            parts.append(label(x, below + 16, f"{_us(i * tick)} us", "middle"))
        ends = [0.0, *(end for _, end in self.busy)]
        starts = [*(start for start, _ in self.busy), self.seconds]
        for end, start in zip(ends, starts, strict=True):
            if start - end > 1e-12:
                text = f"waits {_us(start - end)} us"
                parts.append(bar("wait", 0, end, start - end, "#f4c7c3", text))
        for start, end in self.busy:
            text = f"computes {_us(end - start)} us"
            parts.append(bar("compute", 0, start, end - start, "#9aa0a6", text))
        for call in self.calls:
            text = (
                f"{call.node}: {call.op} {call.shape} {call.dtype}, group {call.label} of "
                f"{call.ranks} ranks, {_count(call.wire, call.wire_bytes)} bytes, "
                f"{_us(call.seconds)} us, {_us(call.hidden)} us hidden"
            )
            color = _COLORS[ops.index(call.op) % len(_COLORS)]
            row = 1 + lanes.index(call.label)
            parts.append(bar("collective", row, call.start, call.seconds, color, text))
        for i, op in enumerate(ops):
            x, y = left + 250 * (i % 4), below + 40 + 20 * (i // 4)
            color = _COLORS[i % len(_COLORS)]
            parts.append(f'<circle cx="{x + 5}" cy="{y - 4}" r="5" fill="{color}"/>')
            parts.append(label(x + 16, y, op))
        return "\n".join([*parts, "</svg>", ""])

    def trace(self) -> str:
        """The timeline as JSON that Perfetto and chrome://tracing read, times in microseconds."""
        lanes = list(dict.fromkeys(call.label for call in self.calls))
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
            for tid, name in enumerate(["compute", *lanes])
        ]
        for start, end in self.busy:
            span = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append({"ph": "X", "pid": 0, "tid": 0, "name": "computes", **span})
        for call in self.calls:
            about = {
                "node": call.node,
                "input": f"{call.dtype} {call.shape}",
                "group": call.label,
                "ranks": call.ranks,
                "wire bytes": call.wire_bytes,
                "hidden us": call.hidden * 1e6,
            }
            span = {"ts": call.start * 1e6, "dur": call.seconds * 1e6}
            tid = 1 + lanes.index(call.label)
            events.append({"ph": "X", "pid": 0, "tid": tid, "name": call.op, **span, "args": about})
        events.extend(
            {"ph": "C", "pid": 0, "name": "memory", "ts": at * 1e6, "args": {"bytes": amount}}
            for at, amount in self.memory
        )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, indent=1) + "\n"

    def chakra(self) -> bytes:
        """The rank's execution trace as MLCommons Chakra's protocol buffers, for ASTRA-sim say.

        A node per computation and collective; each depends on the computation before it and on the
        collectives that were waited for in between. A simulator with a network model of its own
        takes ``comm_type``, ``comm_size`` (bytes of the input) and ``pg_name`` of a collective,
        ``num_ops`` and ``tensor_size`` of a computation; durations are those of this report.

        Raises:
            ValueError: a size that depends on data has no value.
        """
        unknown = [step.node for step in self.steps if math.isnan(step.bytes)]
        if unknown:
            raise ValueError(
                "chakra: the bytes of every step must be known, got sizes that depend on data at "
                f"{', '.join(unknown)}; pass communication_report(sizes=...)"
            )
        nodes = []
        ids: dict[int, int] = {}  # of calls
        last: list[int] = []
        for i, step in enumerate(self.steps):
            after = sorted({*last, *(ids[k] for k in step.waits)})
            about: dict[str, int | str | bool] = {"is_cpu_op": False}
            if step.call is None:
                about |= {"num_ops": round(step.flops), "tensor_size": round(step.bytes)}
                kind = _chakra.COMPUTATION
            else:
                call = self.calls[step.call]
                op = kind_of(call.op)
                kind = {"isend": _chakra.SEND, "irecv": _chakra.RECEIVE}.get(op, _chakra.COLLECTIVE)
                if kind == _chakra.COLLECTIVE:
                    about["comm_type"] = _chakra.KINDS[op]
                about |= {"comm_size": round(step.bytes), "pg_name": call.group}
            nodes.append(
                _chakra.ChakraNode(i, step.node, kind, step.start, step.seconds, after, about)
            )
            if step.call is None:
                last = [i]
            else:
                ids[step.call] = i
                # What it waited for holds for what follows as well.
                last = after
        return _chakra.encode(nodes)

    def save(self, path: str | Path) -> None:
        """Writes the timeline (``*.svg``), the table (``*.txt``) or a trace.

        ``*.json`` is for Perfetto and chrome://tracing, ``*.et`` is Chakra's.
        """
        path = Path(path)
        if path.suffix == ".et":
            path.write_bytes(self.chakra())
            return
        texts: dict[str, Callable[[], str]] = {
            ".svg": self.svg,
            ".txt": lambda: f"{self}\n",
            ".json": self.trace,
        }
        if path.suffix not in texts:
            raise ValueError(f"save: path must end in .svg, .txt, .json or .et, got {path.name}")
        path.write_text(texts[path.suffix](), encoding="utf-8")


def communication_report(
    graph: Any,
    *,
    link: Link = Link(),
    links: Mapping[Any, Link] | None = None,
    compute: Compute | Callable[[Node], float] = Compute(),
    sizes: Mapping[str, int] | None = None,
) -> CommunicationReport:
    """Lists the collectives of a traced graph: what each moves, what it costs, what hides it.

    Collectives are the ops of this package and of ``torch.distributed._functional_collectives``.
    Nothing runs where fake or meta tensors were traced, so a world of 1,000 ranks needs one
    process, with torch's fake process group, and no memory.

    Wire bytes are those that cross one rank's link in one direction, at the busiest rank; B are an
    input's bytes on a group of n ranks (Thakur, Rabenseifner and Gropp 2005; rings):

    ====================================  ======================================================
    ``all_reduce``                        2 (n - 1) / n B
    ``all_gather_into_tensor``            (n - 1) B
    ``all_gather``                        the result without this rank's rows
    ``reduce_scatter_tensor``             (n - 1) / n B
    ``reduce_scatter``                    B without this rank's result
    ``all_to_all_single``                 what goes to, or comes from, other ranks: the larger
    ``broadcast``, ``reduce``             B
    ``gather``                            (n - 1) B
    ``scatter``                           n - 1 times the result
    ``permute_tensor``                    B, or 0 where every rank keeps its own
    ``barrier``                           0: its latency alone
    ``isend``, ``irecv``                  B
    a batch of them                       what is sent, or received: the larger
    in place, ``out``, lists              as the op, summed over the list
    ====================================  ======================================================

    Times come from a model: nodes run in the graph's order on one stream; a collective starts when
    it is called and the link's earlier ones are done (each group has a link of its own, but where
    :attr:`Link.shared` says otherwise); a wait lasts until its collective is done. Views and
    allocations are free.

    Args:
        graph: a ``torch.fx.GraphModule``, a ``torch.fx.Graph`` or an ``ExportedProgram``, as
            make_fx, torch.export, Dynamo and AOTAutograd make them. The groups it names must
            exist. A nested graph (a loop's body, each branch, a checkpointed region) counts once
            per call.
        link: the cost of a collective.
        links: the same for some groups, see :data:`torch_c10d_ext.functional.Group`.
        compute: the cost of everything else: rates, or a function of the node in seconds.
        sizes: values for symbolic sizes by name (``{"s77": 4096}``), where they shall not be those
            that were traced; sizes that depend on data (``u0``) have no others.

    Returns:
        A :class:`CommunicationReport`: one :class:`CollectiveCall` for each collective.

    Raises:
        ValueError: the graph's nodes do not say which tensors they stand for, as under plain
            ``torch.fx.symbolic_trace``; a size has no value, or ``sizes`` one that is not in the
            graph; unknown group or collective.
        TypeError: ``graph`` is none of the types above.

    Example, rank 0 of 1,000::

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1000)
        step = lambda x: fc.all_reduce(x, "sum") + 1
        graph = make_fx(step)(torch.empty(500, device="meta"))
        report = communication_report(graph, link=Link(latency=5e-6, bandwidth=1e9))
        report.calls[0].wire_bytes  # 2 * 999 / 1000 * 2000 bytes = 3996
        report.calls[0].seconds  # 5e-6 + 3996 / 1e9 = 8.996e-6
        report.save("step.svg")

    ``FakeStore`` is in ``torch.testing._internal.distributed.fake_pg``.
    """
    inner = getattr(graph, "graph", graph)
    if not isinstance(inner, Graph):
        raise TypeError(
            "communication_report: graph must be a torch.fx.GraphModule, torch.fx.Graph or "
            f"ExportedProgram, got {type(graph).__name__}"
        )
    if not any("val" in node.meta or "example_value" in node.meta for node in inner.nodes):
        raise ValueError(
            'communication_report: nodes must carry tensors in meta["val"] or '
            f'meta["example_value"], got {len(inner.nodes)} nodes without; trace with make_fx, '
            "torch.export or torch.compile"
        )
    by_name = {group_name(group): cost for group, cost in (links or {}).items()}
    for name in by_name:
        process_group(name)  # a misspelt name would leave its link unused
    known = _Sizes(sizes or {})
    report = _Schedule(link, by_name, compute, known).run(inner)
    unknown = sorted(set(known.given) - known.seen)
    if unknown:
        raise ValueError(
            "communication_report: sizes must name symbolic sizes that its times depend on, got "
            f"{', '.join(unknown)}; there is {', '.join(sorted(known.seen)) or 'none'}"
        )
    return report


# --- the graph -----------------------------------------------------------------------------------


def _flat(graph: Graph, base: dict[Node, Node]) -> Iterator[Node]:
    """The graph's nodes in order, with the nodes of a nested graph in place of its call.

    What goes into one nested graph, and comes out of it, is put into ``base``.
    """
    for node in graph.nodes:
        inside = [] if node.op in ("get_attr", "output") else _graphs_called(node)
        if not inside:
            yield node
        if len(inside) == 1:
            placeholders = inside[0].find_nodes(op="placeholder")
            inputs = [n for n in node.args if isinstance(n, Node) and n.op != "get_attr"]
            base.update((p, base.get(n, n)) for p, n in zip(placeholders, inputs, strict=False))
        for nested in inside:
            yield from _flat(nested, base)
        if len(inside) == 1:
            results = _as_list(inside[0].output_node().args[0])
            for user in node.users:
                if user.target is operator.getitem:
                    result = results[user.args[1]]
                    base[user] = base.get(result, result)


def _graphs_called(node: Node) -> list[Graph]:
    root = node.graph.owning_module
    names = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    names += [node.target] if node.op == "call_module" else []
    found = [_attribute(root, str(name)) for name in names]
    return [module.graph for module in found if isinstance(module, GraphModule)]


def _attribute(root: Any, path: str) -> Any:
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), root)


def _value(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _op_name(target: Any) -> str:
    """``mm`` for aten.mm.default, torch.mm and the method mm."""
    return target if isinstance(target, str) else getattr(target, "__name__", "").split(".")[0]


def _schema(target: Any) -> Any:
    """The schema of an op, which Dynamo may call without naming the overload."""
    return getattr(getattr(target, "default", target), "_schema", None)


@dataclass
class _Call:
    """A call of an op of this package or of torch's functional collectives."""

    info: OpInfo
    arguments: dict[str, Any]
    inputs: list[Node]
    written: list[Node]  # the arguments that it writes

    @property
    def op(self) -> str:
        return self.info.name

    @staticmethod
    def of(node: Node) -> _Call | None:
        target, args = node.target, node.args
        if _op_name(target) == "with_effects":  # token, op, its arguments
            _, target, *args = args
        if not str(target).startswith(tuple(f"{name}." for name in NAMESPACES)):
            return None
        info = op_info(getattr(target, "default", target))  # Dynamo may name no overload
        assert info is not None
        named = info.named(tuple(args), node.kwargs)
        return _Call(
            info,
            named,
            _as_list(named[info.tensors[0]]),
            [node for name in info.written for node in _as_list(named[name])],
        )

    @property
    def group(self) -> str | None:
        """The group's name; None where the op does not communicate."""
        name = self.arguments.get(self.info.group) if self.info.group else None
        if name is None:
            return None
        name = _value(name) if isinstance(name, Node) else name
        return name if isinstance(name, str) else group_name(name)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# Not computations, though they have results and their schemas name no alias.
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")


def _is_view(node: Node) -> bool:
    """Whether the node's result is another view of its first input's memory."""
    inputs = node.all_input_nodes
    if not inputs:
        return False
    if node.target is operator.getitem and isinstance(_value(inputs[0]), list | tuple):
        return True
    schema = _schema(node.target)
    if schema is not None:
        first = schema.arguments[0].alias_info if schema.arguments else None
        return first is not None and not first.is_write
    # Dynamo's functions and methods have no schema, but views share their fake storage. So do
    # add_ and operator.iadd.
    if _op_name(node.target).endswith("_") or _op_name(node.target).startswith("i"):
        return False
    return _shares_storage(node, inputs[0])


def _is_in_place(node: Node) -> bool:
    """Whether the node's result is its first input, written."""
    schema = _schema(node.target)
    if schema is not None:
        first = schema.arguments[0].alias_info if schema.arguments else None
        return first is not None and first.is_write
    inputs = node.all_input_nodes
    return bool(inputs) and _shares_storage(node, inputs[0])


def _shares_storage(a: Node, b: Node) -> bool:
    first, second = ({t.untyped_storage()._cdata for t in _tensors(_value(n))} for n in (a, b))
    return bool(first & second)


# --- bytes ---------------------------------------------------------------------------------------


class _NoValue(ValueError):
    """A size that depends on data, and is not given."""


@dataclass
class _Sizes:
    """Numbers for symbolic sizes: those given by name, else those that were traced."""

    given: Mapping[str, int]
    seen: set[str] = field(default_factory=set)
    traced: dict[Any, Any] = field(default_factory=dict)

    def expression(self, size: Any) -> Any:
        import sympy  # type: ignore[import-untyped]  # slow, and by now imported by the tracer

        if isinstance(size, Node):
            size = _value(size)
        if not isinstance(size, torch.SymInt):
            return sympy.Integer(size)
        env = size.node.shape_env
        # Named differently by the versions of torch.
        backed = getattr(env, "backed_var_to_val", None)
        self.traced = env.var_to_val if backed is None else backed
        return size.node.expr

    def number(self, expression: Any) -> float:
        if expression.is_number:
            return float(expression)
        self.seen.update(symbol.name for symbol in expression.free_symbols)
        values = {
            symbol: self.given.get(symbol.name, self.traced.get(symbol))
            for symbol in expression.free_symbols
        }
        missing = sorted(symbol.name for symbol, value in values.items() if value is None)
        if missing:
            raise _NoValue(
                "communication_report: sizes must hold a value for every size that depends on "
                f"data, got none for {', '.join(missing)}; pass sizes={{{missing[0]!r}: ...}}"
            )
        return float(expression.subs(values))

    def bytes_of(self, value: Any) -> Any:
        tensors = _tensors(value)
        return sum(self.expression(t.numel()) * t.dtype.itemsize for t in tensors)

    def count(self, size: Any) -> float:
        return float(size) if isinstance(size, int) else self.number(self.expression(size))

    def amount(self, value: Any) -> float:
        """The bytes of a value's tensors; NaN where a size that depends on data has no value."""
        with contextlib.suppress(_NoValue):
            return sum(self.count(t.numel()) * t.dtype.itemsize for t in _tensors(value))
        return math.nan


def _wire(call: _Call, sizes: _Sizes, result: Any, group: str) -> Any:
    """The bytes over the busiest rank's link, as an expression; the table of the docstring."""
    import sympy

    pg = process_group(group)
    n = pg.size()
    if n == 1:
        return sympy.Integer(0)
    values = [_value(node) for node in call.inputs]
    b, out = (sympy.sympify(sizes.bytes_of(value)) for value in (values, result))
    op = call.info.kind
    if op == "all_to_all_single":
        rank = pg.rank()
        sent, received = (
            [sizes.expression(size) for size in call.arguments[name]]
            for name in ("input_split_sizes", "output_split_sizes")
        )
        row = values[0].dtype.itemsize
        for size in values[0].shape[1:]:
            row = row * sizes.expression(size)
        own = sent[rank]
        return row * sympy.Max(sum(sent) - own, sum(received) - own)
    if op in ("batch_isend_irecv", "batch_p2p_ops"):
        sends = call.arguments.get("sends") or [o == "isend" for o in call.arguments["op_list"]]
        outgoing = sum(
            (sizes.bytes_of(value) for value, sent in zip(values, sends, strict=True) if sent),
            sympy.Integer(0),
        )
        return sympy.Max(outgoing, b - outgoing)
    if op == "permute_tensor" and list(call.arguments["src_dst"]) == list(range(n)):
        return sympy.Integer(0)
    if op in WIRE:
        return WIRE[op](n, b, out)
    raise ValueError(
        f"communication_report: collectives must be of the kinds it knows, got {call.op}"
    )


# The operand whose last dimension is contracted.
_PRODUCTS = dict(mm=0, bmm=0, matmul=0, linear=0, dot=0, mv=0, addmm=1, baddbmm=1)


def _moved(sizes: _Sizes, node: Node) -> float:
    """The bytes that a computation reads and writes."""
    values = [node, *node.all_input_nodes]
    tensors = [tensor for n in values for tensor in _tensors(_value(n))]
    return sum(sizes.count(t.numel()) * t.dtype.itemsize for t in tensors)


def _operations(sizes: _Sizes, node: Node) -> float:
    """The floating-point operations of a computation."""
    counted = flops(node, node.target, _value, sizes.count)
    if counted:
        return counted
    # Dynamo's functions and methods, which are no ops.
    operand = _PRODUCTS.get(_op_name(node.target))
    if operand is not None and operand < len(node.args) and isinstance(node.args[operand], Node):
        contracted = _value(node.args[operand]).shape[-1]
        result = sum(sizes.count(t.numel()) for t in _tensors(_value(node)))
        return 2 * result * sizes.count(contracted)
    return 0.0


# What torch calls a group that nobody has described.
_UNSAID = ("", "undefined", "default_pg")


# --- time ----------------------------------------------------------------------------------------


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


class _Schedule:
    """Runs a graph's nodes by the clock of the cost model."""

    def __init__(
        self,
        link: Link,
        links: dict[str, Link],
        compute: Compute | Callable[[Node], float],
        sizes: _Sizes,
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
        for node in _flat(graph, self._base):
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
                use.make(node, self._sizes.amount(_value(node)), 0.0)
                use.keep(node)
            return
        for given in node.all_input_nodes:
            use.use(self._memory(given), self._now)
        if self._memory(node) is node and node not in self._writes:
            use.make(node, self._sizes.amount(_value(node)), called)
            use.use(node, self._now)  # while it runs at least

    def _step(self, node: Node) -> None:
        call = _Call.of(node)
        if call is not None and call.group is not None:
            self._start(node, call, call.group)
        elif node in self._base:
            pass  # out of a nested graph
        elif call is not None or _is_view(node):
            source = node.all_input_nodes[0] if call is None else call.inputs[0]
            self._base[node] = self._memory(source)
            if call is not None and call.info.is_wait:
                self._wait(self._writer.get(self._base[node]))
        elif _tensors(_value(node)) and _op_name(node.target) not in _FREE:
            self._run(node)
            if _is_in_place(node):
                self._base[node] = self._memory(node.all_input_nodes[0])

    def _memory(self, node: Node) -> Node:
        return self._base.get(node, node)

    def _start(self, node: Node, call: _Call, group: str) -> None:
        for known in (*call.inputs, node):
            if not _tensors(_value(known)):
                raise ValueError(
                    "communication_report: the inputs and the result of a collective must carry "
                    f'meta["val"] or meta["example_value"], got {known.name} without, of '
                    f"{node.name}"
                )
        tensors = _tensors([_value(n) for n in call.inputs])
        pg = process_group(group)
        wire = _wire(call, self._sizes, _value(node), group)
        wire_bytes = self._sizes.number(wire)
        link = self._links.get(group, self._link)
        wire_name = f"link {link.shared}" if link.shared else f"group {group}"
        start = max(self._now, self._free.get(wire_name, 0.0))
        flight = _Flight(
            len(self._flights),
            dict(
                node=node.name,
                op=call.op,
                group=group,
                label=group if pg.group_desc in _UNSAID else f"{group} {pg.group_desc}",
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
                bytes=sum(self._sizes.amount(_value(n)) for n in call.inputs),
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
            moved, operations = _moved(self._sizes, node), _operations(self._sizes, node)
            seconds = max(moved / compute.memory_bandwidth, operations / compute.flops)
        else:
            with contextlib.suppress(_NoValue):
                moved, operations = _moved(self._sizes, node), _operations(self._sizes, node)
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


# --- the text and the picture --------------------------------------------------------------------

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000")

_HEAD = ["op", "group", "ranks", "input", "wire bytes", "comm us", "hidden us", "overlapped"]
_TOTALS = ["total op", "group", "calls", "wire bytes", "comm us", "hidden us"]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _count(expression: str, number: float) -> str:
    symbolic = any(letter.isalpha() for letter in expression)
    return f"{expression} = {number:,.0f}" if symbolic else f"{number:,.0f}"


def _overlap(call: CollectiveCall) -> str:
    ops = f"{call.compute_ops} op{'s' * (call.compute_ops != 1)}" if call.overlapped else "no"
    return ops if call.waited else f"{ops}, never waited"


def _aligned(head: list[str], rows: list[list[str]], sides: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in [head, *rows]
    ]


def _tick(seconds: float) -> float:
    """A distance of 1, 2 or 5 times a power of ten that divides the axis into at most ten."""
    if seconds == 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(seconds / 10))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * 10 >= seconds)
