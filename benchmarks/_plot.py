"""Latency and bandwidth against size, every peer, in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

STYLES: dict[str, dict[str, Any]] = {
    "shm, ours": {"color": "#d62728", "linewidth": 2.2, "marker": "o"},
    "shm, op": {"color": "#8c564b", "marker": "o"},
    "shm, dist": {"color": "#ff7f0e", "marker": "o"},
    "shm, functional": {"color": "#e377c2", "marker": "o"},
    "gloo": {"color": "#1f77b4", "marker": "s"},
    "MPICH": {"color": "#2ca02c", "marker": "^"},
    "Open MPI": {"color": "#17becf", "marker": "v"},
    "Intel MPI": {"color": "#9467bd", "marker": "d"},
    "memory limit": {"color": "black", "linestyle": "--"},
}


@dataclass(frozen=True)
class Point:
    """Seconds per call of a peer at a size."""

    collective: str
    dtype: str
    ranks: int
    size: int
    peer: str
    seconds: float


def draw(points: Sequence[Point], file: Path) -> None:
    """A column per collective; rows of latency and bandwidth, by ranks and dtype."""
    collectives = list(dict.fromkeys(p.collective for p in points))
    groups = list(dict.fromkeys((p.ranks, p.dtype) for p in points))
    figure, axes = plt.subplots(
        2 * len(groups),
        len(collectives),
        figsize=(4.2 * len(collectives), 5.6 * len(groups)),
        squeeze=False,
        layout="constrained",
    )
    for row, (ranks, dtype) in enumerate(groups):
        for column, collective in enumerate(collectives):
            latency, bandwidth = axes[2 * row][column], axes[2 * row + 1][column]
            mine = [
                p for p in points if (p.ranks, p.dtype, p.collective) == (ranks, dtype, collective)
            ]
            for peer in dict.fromkeys(p.peer for p in mine):
                line = sorted((p.size, p.seconds) for p in mine if p.peer == peer)
                sizes = [size for size, _ in line]
                style = {"markersize": 3.5, "linewidth": 1.2, **STYLES.get(peer, {})}
                latency.plot(sizes, [t * 1e6 for _, t in line], label=peer, **style)
                bandwidth.plot(sizes, [n / t / 1e9 for n, t in line], label=peer, **style)
            latency.set_title(f"{collective}, {ranks} ranks, {dtype}", fontsize=10)
            latency.set_ylabel("us per call")
            bandwidth.set_ylabel("GB/s (bytes per rank / time)")
            for axis in (latency, bandwidth):
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.xaxis.set_major_formatter(FuncFormatter(_bytes))
                axis.grid(True, which="major", alpha=0.3)
            bandwidth.set_xlabel("bytes per rank")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)
    plt.close(figure)


def _bytes(size: float, position: int) -> str:
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.0f}{unit}"
    return f"{size:.0f}"
