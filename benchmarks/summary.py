"""Draws what docs/ has of ``benchmarks/history/``.

docs/results.md has a table of targets and three plots, docs/results-hosts.md the tables of several
hosts.

    python benchmarks/summary.py            # the tables and the plots, written into docs/
    python benchmarks/summary.py --check    # whether the tables in docs/ are those of the history

The text around the tables is written by hand. Every program of this folder that has targets records
a table whose title starts with ``Targets``; the newest of each title is shown.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import _history, _hosts_page  # noqa: E402
from benchmarks._history import Run  # noqa: E402
from benchmarks._report import TARGETS, Table  # noqa: E402

PAGE, HOSTS_PAGE = ROOT / "docs" / "results.md", ROOT / "docs" / "results-hosts.md"
BEGIN, END = "<!-- targets: python benchmarks/summary.py -->", "<!-- end of targets -->"


def targets(history: Sequence[Run], other_links: bool = False) -> str:
    """What is aimed at and what came of it, as Markdown, with where each part was measured.

    Of hosts with other links than the aims are for, or of everything else.
    """
    lines = ["| | target | measured | outcome |", "| --- | --- | --- | --- |"]
    sources = []
    seen: set[str] = set()
    for run in history:
        for table in run.tables:
            if not table.title.startswith(TARGETS) or table.title in seen:
                continue
            seen.add(table.title)
            subject = table.title.removeprefix(TARGETS).strip(": ")
            if (" at " in subject) != other_links:
                continue
            lines += [f"| {subject}: {' | '.join(row)} |" for row in table.rows]
            sources.append(f"{subject}: {run.date}, {run.machine}, `{run.command}`.")
    return "\n".join([*lines, "", *sources])


def redrawn(text: str, begin: str, end: str, drawn: str) -> str:
    """A page's text with what is between the two replaced."""
    pattern = re.escape(begin) + r"\n.*?" + re.escape(end)
    whole = f"{begin}\n{drawn}\n{end}"
    replaced, count = re.subn(pattern, lambda _: whole, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"a page must have one pair of {begin} and {end}, got {count}")
    return replaced


def _column(table: Table, name: str) -> int | None:
    return table.head.index(name) if name in table.head else None


def cell(table: Table, row: Sequence[str], name: str) -> float | None:
    """A number of a table; None where it was not measured."""
    column = _column(table, name)
    if column is None or row[column] in ("-", ""):
        return None
    return float(row[column])


def size_of(label: str) -> int:
    """Bytes of a label such as ``64 KiB``."""
    number, unit = label.split()
    return int(number) * {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes, or compares."""
    parser = argparse.ArgumentParser(description="docs/results*.md from benchmarks/history/")
    parser.add_argument("--check", action="store_true", help="compare the tables, write nothing")
    options = parser.parse_args(arguments)
    history = _history.runs()
    hosts = HOSTS_PAGE.read_text()
    hosts = redrawn(hosts, _hosts_page.BEGIN, _hosts_page.END, _hosts_page.tables(history))
    wanted = {
        PAGE: redrawn(PAGE.read_text(), BEGIN, END, targets(history)),
        HOSTS_PAGE: redrawn(hosts, BEGIN, END, targets(history, other_links=True)),
    }
    if options.check:
        stale = [page for page, text in wanted.items() if text != page.read_text()]
        for page in stale:
            print(f"docs/{page.name}: not what benchmarks/summary.py makes of the history")
        return int(bool(stale))
    for page, text in wanted.items():
        page.write_text(text)
    try:
        from benchmarks import _plot
    except ImportError:
        print("no plots: matplotlib is not installed (pip install matplotlib)")
        return 0
    for path in _plot.draw_all(history, PAGE.parent):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
