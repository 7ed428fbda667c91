"""Runs as they were measured: one JSON file each, in ``benchmarks/history/``.

A file holds a run's heading, the command, what to know about it, and its tables cell by cell. Runs
are never edited: docs/results.md, docs/results-hosts.md and the plots are drawn from them by
``benchmarks/summary.py``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._report import Table, today

HISTORY = Path(__file__).resolve().parent / "history"


@dataclass
class Run:
    """One run of one program, whose peers took turns."""

    date: str
    machine: str
    command: str
    notes: str = ""
    tables: list[Table] = field(default_factory=list)

    def table(self, title: str) -> Table | None:
        """The first table whose title starts with ``title``."""
        return next((table for table in self.tables if table.title.startswith(title)), None)


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--record NAME``, which every program of this folder takes."""
    parser.add_argument(
        "--record",
        metavar="NAME",
        type=_name,
        help="keep the run as benchmarks/history/<date>-NAME.json",
    )


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", text):
        raise argparse.ArgumentTypeError(
            f"must be lower-case letters, digits and hyphens, got {text!r}"
        )
    return text


def record(name: str, machine: str, command: str, tables: Sequence[Table]) -> Path:
    """Writes a run; an earlier one of the day and name stays, the new one gets a number."""
    run = Run(today(), machine, command, tables=list(tables))
    stem = f"{run.date}-{name}"
    taken = {path.stem for path in HISTORY.glob(f"{stem}*.json")}
    number = next(n for n in range(1, len(taken) + 2) if _numbered(stem, n) not in taken)
    path = HISTORY / f"{_numbered(stem, number)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(encode(run))
    return path


def _numbered(stem: str, number: int) -> str:
    return stem if number == 1 else f"{stem}-{number}"


def runs() -> list[Run]:
    """All runs, newest first; of one day, the higher number and then the later name first."""
    paths = sorted(HISTORY.glob("*.json"), key=lambda path: path.stem, reverse=True)
    return [_decoded(json.loads(path.read_text())) for path in paths]


def newest(title: str, where: Sequence[Run]) -> Iterator[tuple[Run, Table]]:
    """The tables whose titles start with ``title``, the newest run's first."""
    for run in where:
        table = run.table(title)
        if table is not None:
            yield run, table


def encode(run: Run) -> str:
    """A row of a table is a line, so that runs can be compared with ``diff``."""
    document: dict[str, Any] = asdict(run)
    rows: list[str] = []
    for table in document["tables"]:
        for index, row in enumerate(table["rows"]):
            rows.append(json.dumps(row, ensure_ascii=False))
            table["rows"][index] = f"@{len(rows) - 1}@"
    text = json.dumps(document, indent=1, ensure_ascii=False)
    return re.sub(r'"@(\d+)@"', lambda found: rows[int(found[1])], text) + "\n"


def _decoded(document: dict[str, Any]) -> Run:
    tables = [Table(**table) for table in document.pop("tables")]
    return Run(**document, tables=tables)
