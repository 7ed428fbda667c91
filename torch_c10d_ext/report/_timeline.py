"""The report: the collectives of a graph as a table, a picture and traces."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_c10d_ext._op_info import kind_of, traffic_of
from torch_c10d_ext.report import _chakra


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
                    about["comm_type"] = _chakra.KINDS[traffic_of(op).pattern]
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
