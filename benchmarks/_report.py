"""Tables of what was measured, next to what was aimed at, for a terminal and for Markdown."""

from __future__ import annotations

import os
import platform
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks._measure import Median, Timings, difference, ratio

WIDTH = 100
# How the titles of tables begin that hold results against what is aimed at.
TARGETS = "Targets"


@dataclass
class Table:
    """Aligned columns; the first ``left`` ones to the left, the others to the right."""

    title: str
    note: str
    head: list[str]
    left: int
    rows: list[list[str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The table for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]

        def line(cells: list[str]) -> str:
            pairs = list(zip(cells, widths, strict=True))
            start = [cell.ljust(width) for cell, width in pairs[: self.left]]
            return "  ".join(start + [c.rjust(w) for c, w in pairs[self.left :]]).rstrip()

        lines = [f"== {self.title}", *textwrap.wrap(self.note, WIDTH), ""]
        lines += [line(self.head), "  ".join("-" * width for width in widths)]
        lines += [line(row) for row in self.rows]
        return "\n".join(lines + [f"  {remark}" for remark in self.remarks])

    def markdown(self) -> str:
        """The table for a document."""
        rule = ["---"] * self.left + ["--:"] * (len(self.head) - self.left)
        rows = ["| " + " | ".join(cells) + " |" for cells in (self.head, rule, *self.rows)]
        remarks = ["", *(f"* {remark}" for remark in self.remarks)] if self.remarks else []
        return "\n".join([f"### {self.title}", "", self.note, "", *rows, *remarks])


class Aim:
    """A bound on medians; every row of a table is held against it, noise included."""

    def __init__(self, text: str, bound: float) -> None:
        self.text, self.bound = text, bound
        self.outcomes: dict[str, list[str]] = {"met": [], "even": [], "missed": []}

    def judge(self, label: str, median: Median, short: str) -> str:
        """met, even (the bound lies within the noise), or missed and by how much it fell short."""
        if median.high <= self.bound:
            outcome = "met"
        elif median.low > self.bound:
            outcome = "missed"
        else:
            outcome = "even"
        missed = outcome == "missed"
        self.outcomes[outcome].append(f"{label} ({short})" if missed else label)
        return f"missed {short}" if missed else outcome

    def row(self) -> list[str]:
        """How many rows met the aim; empty where none was held against it."""
        met, even, missed = (len(self.outcomes[key]) for key in ("met", "even", "missed"))
        total = met + even + missed
        if not total:
            return []
        counts = f"{met} of {total} met, {even} even within noise"
        return [self.text, "every row", counts, f"{missed} missed" if missed else "met"]


class Aims:
    """What the project promises about speed."""

    def __init__(self) -> None:
        self.never_slower = Aim("never slower than torch", 1.0)
        self.three_times = Aim("world size 1: 3 times as fast as torch", 1 / 3)
        self.quarter = Aim("64 calls in a block: a quarter of their time alone", 1 / 4)
        self.five_microseconds = Aim("our layer adds 5 us at most", 5e-6)

    def table(self) -> Table:
        """All aims, one after the other, and what missed them."""
        aims = (self.never_slower, self.three_times, self.quarter, self.five_microseconds)
        table = Table(f"{TARGETS}: ops", "", ["", "target", "measured", "outcome"], left=4)
        table.rows = [row for aim in aims if (row := aim.row())]
        table.remarks = [
            f"{aim.text}: missed by {label}" for aim in aims for label in aim.outcomes["missed"]
        ]
        return table


def against_torch(
    title: str,
    note: str,
    timings: Sequence[Timings],
    aim: Aim,
    peers: tuple[str, str] = ("torch", "ours"),
) -> Table:
    """Torch's time, ours and the ratio."""
    base, mine = peers
    issue = any(timing.issuing for timing in timings)
    head = ["", "per rank", f"{base} us", f"{mine} us", f"{mine}/{base}", "99 %", "aim"]
    if issue:
        head[4:4] = [f"{base} issue us", f"{mine} issue us"]
    table = Table(_with_rounds(title, timings), note, head, left=2)
    for timing in timings:
        table.remarks += _failures(timing)
        if base not in timing.seconds or mine not in timing.seconds:
            continue
        slowdown = ratio(timing.seconds[mine], timing.seconds[base])
        if timing.name.startswith("("):
            verdict = "noise"
        elif aim.bound < 1:
            verdict = aim.judge(_label(title, timing), slowdown, f"at {1 / slowdown.value:.1f}x")
        else:
            verdict = aim.judge(_label(title, timing), slowdown, f"by {slowdown.value - 1:.0%}")
        row = [timing.name, timing.size]
        row += [_us(timing.seconds[peer]) for peer in peers]
        if issue:
            row += [_us(timing.issuing[peer]) for peer in peers]
        row += [_factor(slowdown.value), f"{_factor(slowdown.low)} - {_factor(slowdown.high)}"]
        table.rows.append([*row, verdict])
    return table


def added_time(title: str, note: str, timings: Sequence[Timings], aim: Aim) -> Table:
    """The backend's time, and what dist.* and our op take beyond it."""
    head = ["", "per rank", "backend us", "dist us", "ours us"]
    head += ["dist adds us", "we add us", "99 %", "aim"]
    table = Table(_with_rounds(title, timings), note, head, left=2)
    for timing in timings:
        table.remarks += _failures(timing)
        if len(timing.seconds) < 3:
            continue
        base = timing.seconds["backend"]
        theirs = difference(timing.seconds["dist"], base)
        added = difference(timing.seconds["ours"], base)
        verdict = aim.judge(
            _label(title, timing), added, f"by {(added.value - aim.bound) * 1e6:.1f} us"
        )
        table.rows.append(
            [timing.name, timing.size]
            + [_us(timing.seconds[peer]) for peer in ("backend", "dist", "ours")]
            + [_signed(theirs.value), _signed(added.value)]
            + [f"{_signed(added.low)} - {_signed(added.high)}", verdict]
        )
    return table


def several(
    title: str,
    note: str,
    timings: Sequence[Timings],
    ratios: Sequence[tuple[str, str, Aim | None]],
) -> Table:
    """Every peer's time, and the ratios of chosen pairs."""
    peers = list(dict.fromkeys(peer for timing in timings for peer in timing.names))
    head = ["", "size", *(f"{peer} us" for peer in peers)]
    head += [f"{mine} / {base}" for mine, base, _ in ratios] + ["aim"]
    table = Table(_with_rounds(title, timings), note, head, left=2)
    for timing in timings:
        table.remarks += _failures(timing)
        row = [timing.name, timing.size]
        row += [_us(timing.seconds[peer]) if peer in timing.seconds else "-" for peer in peers]
        verdicts = []
        for mine, base, aim in ratios:
            if mine not in timing.seconds or base not in timing.seconds:
                row.append("-")
                continue
            slowdown = ratio(timing.seconds[mine], timing.seconds[base])
            row.append(
                f"{_factor(slowdown.value)} ({_factor(slowdown.low)} - {_factor(slowdown.high)})"
            )
            if aim is not None:
                label = f"{_label(title, timing)}, {mine} / {base}"
                verdicts.append(aim.judge(label, slowdown, f"by {slowdown.value - 1:.0%}"))
        table.rows.append([*row, ", ".join(verdicts)])
    return table


def machine(device: str) -> str:
    """What was measured on: no names, only kinds."""
    parts = [_cpu_model(), f"{len(os.sched_getaffinity(0))} cores"]
    if device == "cuda":
        parts.append(torch.cuda.get_device_name(0))
    parts += [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    parts.append(f"load average {os.getloadavg()[0]:.1f} before")
    return ", ".join(parts)


def today() -> str:
    """The date as the documents write it."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return " ".join(line.split(":", 1)[1].split())
    except OSError:
        pass
    return platform.machine()


def _with_rounds(title: str, timings: Sequence[Timings]) -> str:
    rounds = max((len(times) for timing in timings for times in timing.seconds.values()), default=0)
    return f"{title} (medians of {rounds} rounds)"


def _failures(timing: Timings) -> list[str]:
    return [
        f"{timing.name} {timing.size}: {peer} fails: {textwrap.shorten(error, 160)}"
        for peer, error in timing.errors.items()
    ]


def _label(title: str, timing: Timings) -> str:
    return f"{title}: {timing.name} {timing.size}"


def _us(times: Sequence[float]) -> str:
    value = Median.of(times).value * 1e6
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _signed(seconds: float) -> str:
    return f"{seconds * 1e6:+.1f}"


def _factor(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"
