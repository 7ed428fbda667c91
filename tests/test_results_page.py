"""docs/results.md is what the recorded runs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import _history, summary
from benchmarks._report import TARGETS, Table

ROOT = Path(__file__).resolve().parent.parent


def a_table(measured: str) -> Table:
    return Table(
        f"{TARGETS}: x",
        "",
        ["", "target", "measured", "outcome"],
        4,
        [["a", "<= 1", measured, "met"]],
    )


def test_table_is_that_of_the_newest_runs() -> None:
    assert summary.main(["--check"]) == 0, "run benchmarks/summary.py"


def test_page_stays_short() -> None:
    assert len((ROOT / "docs" / "results.md").read_text().splitlines()) <= 190


def test_a_recorded_run_is_read_back_and_the_newest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_history, "HISTORY", tmp_path)
    first = _history.record("a", "some machine", "some command", [a_table("0.5")])
    second = _history.record("a", "some machine", "some command", [a_table("0.25")])
    assert (first.name[10:], second.name[10:]) == ("-a.json", "-a-2.json")
    newest, oldest = _history.runs()
    assert [newest.tables, oldest.tables] == [[a_table("0.25")], [a_table("0.5")]]
    table = summary.targets([newest, oldest])
    assert "| x: a | <= 1 | 0.25 | met |" in table
    assert "0.5" not in table
    assert "some machine, `some command`" in table


def test_all_recorded_runs_are_whole() -> None:
    runs = _history.runs()
    assert runs
    for run in runs:
        for table in run.tables:
            assert {len(row) for row in table.rows} <= {len(table.head)}, (run.date, table.title)
