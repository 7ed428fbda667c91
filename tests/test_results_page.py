"""docs/results.md and docs/results-hosts.md are what the recorded runs say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import _history, _hosts_page, summary
from benchmarks._history import Run
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


def test_tables_are_those_of_the_newest_runs() -> None:
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


def a_run_of_hosts(
    layout: str, date: str, kinds: tuple[str, ...], times: list[str], rounds: int = 5
) -> Run:
    table = Table(
        f"hosts {layout}: 1000 Mbit/s",
        f"Median of {rounds} rounds in turns.",
        ["collective", "size", *_hosts_page.PEERS, "bound", "ours/bound", "model"],
        1,
        [
            [
                kind,
                f"{size:,}",
                *times,
                "143.0 ms",
                "1.05",
                "-" if "send" in kind else "9 ms (0.98)",
            ]
            for kind in kinds
            for size in _hosts_page.SIZES
        ],
    )
    return Run(date, "some machine", "some command", tables=[table])


def test_targets_of_other_links_are_with_the_hosts() -> None:
    usual, slow = a_table("0.5"), a_table("0.25")
    slow.title = f"{TARGETS}: hosts 4x2 at 250 Mbit/s"
    runs = [Run("today", "some machine", "some command", tables=[usual, slow])]
    there, here = summary.targets(runs, other_links=True), summary.targets(runs)
    assert "| hosts 4x2 at 250 Mbit/s: a | <= 1 | 0.25 | met |" in there
    assert "0.5" not in there and "x: a" not in there
    assert "| x: a | <= 1 | 0.5 | met |" in here
    assert "0.25" not in here and "Mbit" not in here


def test_hosts_are_those_of_the_newest_whole_runs() -> None:
    messages = ("send_recv", "send_recv_others")
    every = (*_hosts_page.COLLECTIVES, *messages)
    times = ["1613 µs", "9950 µs", "0 µs", "23 µs", "5.5 ms", "99.4 ms", "99.6 ms", "1234.5 ms"]
    of_few_sizes = a_run_of_hosts("2x2", "of few sizes", every, times)
    del of_few_sizes.tables[0].rows[1::6]
    page = _hosts_page.tables(
        [
            a_run_of_hosts("2x2", "of messages alone", messages, times),
            a_run_of_hosts("2x2", "of few rounds", every, times, rounds=3),
            of_few_sizes,
            a_run_of_hosts("4x2", "without those far from rank 0", every, times),
            a_run_of_hosts("2x2", "newest", every, times),
            a_run_of_hosts("2x2", "older", every, times[::-1]),
            a_run_of_hosts("4x2", "newest", (*every, "send_recv_far"), times),
        ]
    ).splitlines()
    row = "| {} | {} | 1.6 | 9.9 | 0.0 | 0.023 | 5.5 | 99 | 100 | 1234 | 143 | 1.05 | 0.98 |"
    for collective in _hosts_page.COLLECTIVES:
        assert page.count(row.format(collective, "8 B")) == 2
    assert page.count(row.format("", "16 MiB")) == 2 * len(_hosts_page.COLLECTIVES)
    assert (
        page.count(f"|  | gloo |{' 1.61 |' * 6}") == page.count(f"|  | UCX |{' 1234 |' * 6}") == 5
    )
    assert page[-2:] == [
        f"{layout}: newest, some machine, `some command`." for layout in ("2x2", "4x2")
    ]
    with pytest.raises(ValueError, match="a whole run of hosts 2x2, got none"):
        _hosts_page.tables([a_run_of_hosts("2x2", "of messages alone", messages, times)])


def test_all_recorded_runs_are_whole() -> None:
    runs = _history.runs()
    assert runs
    for run in runs:
        for table in run.tables:
            assert {len(row) for row in table.rows} <= {len(table.head)}, (run.date, table.title)
