"""The tables of docs/results-hosts.md, from the newest whole runs of ``benchmarks/hosts.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from benchmarks import _history
from benchmarks._history import Run
from benchmarks._report import Table

BEGIN, END = "<!-- hosts: python benchmarks/summary.py -->", "<!-- end of hosts -->"
LAYOUTS = {"2x2": "2 hosts x 2 ranks", "4x2": "4 hosts x 2 ranks"}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
MESSAGES = {
    "send_recv": "rank 0 and the last",
    "send_recv_others": "rank 1 and the last",
    "send_recv_far": "two far from rank 0",
}
ROUNDS = 5
PEERS = ("gloo", "flat", "mpi", "shm+gloo", "shm+mpi", "MPICH", "Open MPI", "Open MPI, UCX")
SIZES = {
    8: "8 B",
    4 << 10: "4 KiB",
    64 << 10: "64 KiB",
    1 << 20: "1 MiB",
    4 << 20: "4 MiB",
    16 << 20: "16 MiB",
}


def tables(history: Sequence[Run]) -> str:
    """Collectives, then messages, as Markdown, with where each layout was measured."""
    found = {layout: _newest(layout, history) for layout in LAYOUTS}
    peers = [peer.removeprefix("Open MPI, ") for peer in PEERS]
    lines = [
        _line("ms", "size", *peers, "bound", "ours/bound", "model"),
        "|---|---|" + "--:|" * (len(PEERS) + 3),
    ]
    for layout, (_, table) in found.items():
        lines.append(_line(f"**{LAYOUTS[layout]}**", *[""] * (len(PEERS) + 4)))
        lines += _collectives(table)
    lines += ["", "Messages, there and back:", ""]
    lines += [_line("ms", "", *SIZES.values()), "|---|---|" + "--:|" * len(SIZES)]
    for layout, (_, table) in found.items():
        for kind in _messages_of(layout):
            between = f"**{LAYOUTS[layout]}**, {MESSAGES[kind]}"
            lines.append(_line(between, *[""] * (len(SIZES) + 1)))
            lines += _messages(table, kind, peers)
    sources = [
        f"{layout}: {run.date}, {run.machine}, `{run.command}`."
        for layout, (run, _) in found.items()
    ]
    return "\n".join([*lines, "", *sources])


def _messages_of(layout: str) -> list[str]:
    """Of two hosts one is rank 0's."""
    return [kind for kind in MESSAGES if layout != "2x2" or kind != "send_recv_far"]


def _newest(layout: str, history: Sequence[Run]) -> tuple[Run, Table]:
    """Some runs are of a few collectives or sizes alone, or of fewer rounds than the page says."""
    kinds = (*COLLECTIVES, *_messages_of(layout))
    wanted = {(kind, f"{size:,}") for kind in kinds for size in SIZES}
    for run, table in _history.newest(f"hosts {layout}:", history):
        has_peers = set(PEERS) <= set(table.head)
        has_rows = wanted == {(row[0], row[1]) for row in table.rows}
        if has_peers and has_rows and f"of {ROUNDS} rounds" in table.note:
            return run, table
    raise ValueError(f"benchmarks/history: must have a whole run of hosts {layout}, got none")


def _rows(table: Table, collective: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The size and the cells of each row."""
    for row in table.rows:
        if row[0] == collective:
            size = int(row[1].replace(",", ""))
            yield SIZES[size], dict(zip(table.head, row, strict=True))


def _collectives(table: Table) -> Iterator[str]:
    for collective in COLLECTIVES:
        for index, (size, row) in enumerate(_rows(table, collective)):
            modelled = re.search(r"\(([\d.]+)\)", row["model"])
            yield _line(
                "" if index else collective,
                size,
                *(_milliseconds(row[name], 2) for name in (*PEERS, "bound")),
                row["ours/bound"],
                modelled[1] if modelled else "",
            )


def _messages(table: Table, kind: str, peers: Sequence[str]) -> Iterator[str]:
    sizes = dict(_rows(table, kind))
    for name, label in zip(PEERS, peers, strict=True):
        yield _line("", label, *(_milliseconds(sizes[size][name], 3) for size in SIZES.values()))


def _milliseconds(text: str, digits: int) -> str:
    number, unit = text.split()
    value = float(number) / (1 if unit == "ms" else 1000)
    is_long = float(f"{value:.{digits}g}") >= 10 ** (digits - 1)
    return f"{value:.0f}" if is_long else f"{value:#.{digits}g}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
