"""The harness itself: results by rank, failures with every rank's traceback, clean recovery."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import WorkersFailed, run
from tests.native import build

ROOT = Path(__file__).resolve().parent.parent


def _identify(offset: int) -> tuple[int, int, int]:
    return offset + dist.get_rank(), dist.get_world_size(), torch.get_num_threads()


def _pid() -> int:
    return os.getpid()


def _all_reduce() -> float:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    dist.all_reduce(torch.ones(1))


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()
    dist.all_reduce(torch.ones(1))


def test_returns_results_by_rank() -> None:
    assert run(3, _identify, 10) == [(10, 3, 1), (11, 3, 1), (12, 3, 1)]


def test_reuses_workers() -> None:
    assert run(2, _pid) == run(2, _pid)


def test_reports_the_traceback_of_the_failing_rank_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.harness.pool.GRACE", 0.5)  # rank 0 never ends by itself
    with pytest.raises(WorkersFailed, match="rank 1 raised(.|\n)*rank 1 says no"):
        run(2, _fail_on, 1)
    assert run(2, _all_reduce) == [3.0, 3.0]


def test_reports_the_stack_of_a_stuck_rank_and_recovers() -> None:
    with pytest.raises(WorkersFailed, match="rank 0 gave no answer(.|\n)*_hang_on"):
        run(2, _hang_on, 0, deadline=1.0)
    assert run(2, _all_reduce) == [3.0, 3.0]


def test_reports_a_dead_rank_and_recovers() -> None:
    with pytest.raises(WorkersFailed, match="rank 1 killed by SIGABRT(.|\n)*_die_on"):
        run(2, _die_on, 1)
    assert run(2, _all_reduce) == [3.0, 3.0]


def test_connections_take_turns_on_an_emulated_cable() -> None:
    output = build.run(build.build("fair_queue_test", []))
    print(output)
    assert output.endswith("tests passed\n")


TEST = """
import pathlib, time, pytest

@pytest.fixture
def thing():
    pathlib.Path("begun").touch()
    yield
    pathlib.Path("put away").touch()

def test_it(thing):
    time.sleep(60)
"""


def test_what_tests_have_made_is_put_away_when_they_are_terminated(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "test_it.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert b"KeyboardInterrupt: ended by SIGTERM" in output
    assert (tmp_path / "put away").exists()
