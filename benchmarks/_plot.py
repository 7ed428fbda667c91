"""The plots of docs/results.md, from the newest runs that measured what they show."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from benchmarks import _history
from benchmarks._history import Run
from benchmarks._report import Table
from benchmarks.summary import cell, size_of

# Of the peers of benchmarks/shm.py, in the order of the legend.
PEERS: dict[str, dict[str, Any]] = {
    "shm, ours": {"color": "#c1272d", "label": "shm, in place"},
    "shm, functional": {"color": "#e79aa0", "label": "shm, functional + wait"},
    "gloo": {"color": "#1f77b4", "label": "gloo"},
    "MPICH": {"color": "#2ca02c", "label": "MPICH"},
    "Open MPI": {"color": "#17becf", "label": "Open MPI"},
    "Intel MPI": {"color": "#9467bd", "label": "Intel MPI"},
}
SHM_TABLE = "shm, 2 ranks, float32 (medians"
LAYER_TABLE = "Time added to the backend's, {}"
# A curve through fewer sizes says nothing.
FEWEST_SIZES = 5


def draw_all(history: Sequence[Run], directory: Path) -> list[Path]:
    """All plots that the history has the data of."""
    # The same file for the same data, and text that a reader can search.
    mpl.rcParams.update({"svg.hashsalt": "torch_c10d_ext", "svg.fonttype": "none", "font.size": 9})
    plots: dict[str, Callable[[Sequence[Run]], Any]] = {
        "results-latency.svg": _latency,
        "results-bandwidth.svg": _bandwidth,
        "results-overhead.svg": _overhead,
    }
    drawn = []
    for name, draw in plots.items():
        figure = draw(history)
        if figure is not None:
            svg = io.StringIO()
            figure.savefig(svg, format="svg", metadata={"Date": None})
            plt.close(figure)
            lines = (line.rstrip() for line in svg.getvalue().splitlines())
            (directory / name).write_text("\n".join(lines) + "\n")
            drawn.append(directory / name)
    return drawn


def _rows(table: Table, size: str) -> list[list[str]]:
    return [row for row in table.rows if row[1] == size]


def _latency(history: Sequence[Run]) -> Any:
    """What 8 B take, a group of bars per collective."""
    found = next(
        ((run, t) for run, t in _history.newest(SHM_TABLE, history) if _rows(t, "8 B")), None
    )
    if found is None:
        return None
    run, table = found
    rows = _rows(table, "8 B")
    peers = [name for name in PEERS if any(cell(table, row, name) for row in rows)]
    figure, axis = plt.subplots(figsize=(8.2, 3.2), layout="constrained")
    width = 0.8 / len(peers)
    for index, name in enumerate(peers):
        values = [cell(table, row, name) or float("nan") for row in rows]
        places = [
            position + (index - (len(peers) - 1) / 2) * width for position in range(len(rows))
        ]
        bars = axis.bar(places, values, width, **PEERS[name])
        axis.bar_label(bars, fmt="{:.3g}", fontsize=6, rotation=90, padding=2)
    axis.set_xticks(range(len(rows)), [row[0] for row in rows])
    axis.set_yscale("log")
    axis.set_ylim(top=axis.get_ylim()[1] * 4)
    axis.set_ylabel("µs per call")
    axis.set_title(f"8 B per rank, 2 ranks ({run.date}; lower is better)", fontsize=9)
    axis.legend(ncols=len(peers), fontsize=7, frameon=False, loc="upper center")
    return figure


def _bandwidth(history: Sequence[Run]) -> Any:
    """Bytes per second against bytes, a panel per collective."""

    def sizes(table: Table) -> set[str]:
        return {row[1] for row in table.rows if row[0] == "all_reduce"}

    found = next(
        (
            (run, table)
            for run, table in _history.newest(SHM_TABLE, history)
            if len(sizes(table)) >= FEWEST_SIZES and cell(table, table.rows[0], "MPICH")
        ),
        None,
    )
    if found is None:
        return None
    run, table = found
    collectives = list(dict.fromkeys(row[0] for row in table.rows))
    figure, axes = plt.subplots(
        1, len(collectives), figsize=(2.6 * len(collectives), 3), sharey=True, layout="constrained"
    )
    for axis, collective in zip(axes, collectives, strict=True):
        rows = [row for row in table.rows if row[0] == collective]
        for name, style in PEERS.items():
            points = [(size_of(row[1]), cell(table, row, name)) for row in rows]
            line = [(size, size / us / 1e3) for size, us in points if us]
            if line:
                axis.plot(*zip(*line, strict=True), marker="o", markersize=3, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(FuncFormatter(_bytes))
        axis.grid(True, alpha=0.3)
        axis.set_title(collective, fontsize=9)
        axis.set_xlabel("bytes per rank")
    axes[0].set_ylabel("GB/s (bytes per rank / time)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title=f"2 ranks, float32 ({run.date}; higher is better)",
        ncols=len(labels),
        fontsize=8,
        frameon=False,
        loc="outside upper center",
    )
    return figure


def _overhead(history: Sequence[Run]) -> Any:
    """What dist.* and this package add to the bare backend."""
    places = {
        "fake backend (does nothing": "a backend that does nothing",
        "world size 1, gloo": "gloo, world size 1",
    }
    tables = {
        label: next(_history.newest(LAYER_TABLE.format(prefix), history), None)
        for prefix, label in places.items()
    }
    shown = {label: found for label, found in tables.items() if found is not None}
    if not shown:
        return None
    figure, axes = plt.subplots(
        1,
        len(shown),
        figsize=(3.8 * len(shown), 3),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (label, (run, table)) in zip(axes[0], shown.items(), strict=True):
        names = [row[0].removesuffix("_inplace") for row in table.rows]
        for offset, column, style in (
            (-0.2, "dist adds us", {"color": "#1f77b4", "label": "torch.distributed"}),
            (0.2, "we add us", {"color": "#c1272d", "label": "torch_c10d_ext"}),
        ):
            values = [cell(table, row, column) or 0.0 for row in table.rows]
            axis.barh([i + offset for i in range(len(names))], values, 0.38, **style)
        axis.set_yticks(range(len(names)), names)
        axis.set_xlabel("µs added to the backend's time")
        axis.set_title(f"{label} ({run.date})", fontsize=9)
    axes[0][0].invert_yaxis()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, ncols=len(labels), fontsize=8, frameon=False, loc="outside upper center"
    )
    return figure


def _bytes(size: float, position: int) -> str:
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.0f}{unit}"
    return f"{size:.0f}"
