"""python -m torch_c10d_ext.run and python -m torch_c10d_ext.doctor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_c10d_ext.functional as F
from tests.harness import run
from tools import develop
from torch_c10d_ext import _C, _tally, backend_of, doctor
from torch_c10d_ext import run as launcher
from torch_c10d_ext.doctor import Finding, Machine, findings

ROOT = Path(__file__).resolve().parent.parent
SWITCH = "TORCH_C10D_EXT_SHM_FOR_GLOO"

# An unmodified program.
PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group()
for _ in range(7):
    dist.all_reduce(torch.ones(1000))
dist.broadcast(torch.ones(500), 1)
served = dist.group.WORLD._get_backend(torch.device("cpu")).name()
print(f"rank {dist.get_rank()} on {served}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which the package is installed, and nothing is left behind elsewhere."""
    site = tmp_path / "site"
    site.mkdir()
    develop.install(site)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_")}
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }


def python(
    arguments: Sequence[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=environment["TMPDIR"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- the launcher ---------------------------------------------------------------------------------


def test_runs_a_program_on_shm_and_sums_up(installed: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launch = ["-m", "torch_c10d_ext.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = python(launch, installed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")) == ["", "rank 0 on shm", "rank 1 on shm"]
    last = done.stderr.splitlines()[-1]
    # 7 all_reduces of 4,000 B, and of one of the two ranks a broadcast of 2,000 B.
    found = re.fullmatch(
        r"torch_c10d_ext: shm 8 collectives, 29 kB, waited (\S+) of (\S+) s in flight "
        r"\(mean of 2 processes\)",
        last,
    )
    assert found, done.stderr
    assert float(found[1]) > 0
    assert float(found[2]) > 0
    assert not list(tmp_path.glob("torch_c10d_ext-*"))


@pytest.mark.parametrize(
    ("name", "value"), ((SWITCH, "0"), (SWITCH, "yes"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0"))
)
def test_refuses_what_contradicts_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"{name}: must be 1 or not set, got '{value}'"):
        launcher.main(["program.py"])


def test_refuses_without_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "is_entry_point_installed", lambda: False)
    monkeypatch.delenv(SWITCH, raising=False)
    with pytest.raises(SystemExit, match="must be installed with its entry point, got none"):
        launcher.main(["program.py"])


def test_a_summary_is_one_line(tmp_path: Path) -> None:
    assert _tally.summary(*_tally.read(tmp_path)).startswith("no process has ended by itself")
    (tmp_path / "1.json").write_text('{"shm": [10, 4000000, 0.5, 0.25]}')
    (tmp_path / "2.tmp").write_text("{")
    assert _tally.summary(*_tally.read(tmp_path)) == (
        "shm 10 collectives, 4 MB, waited 0.25 of 0.5 s in flight (1 process)"
    )
    (tmp_path / "2.json").write_text('{"shm": [20, 2000000, 1.5, 0.5], "nccl": [2, 7, 0.25, null]}')
    assert _tally.summary(*_tally.read(tmp_path)) == (
        "nccl 1 collectives, 3.5 B, 0.125 s in flight; "
        "shm 15 collectives, 3 MB, waited 0.375 of 1 s in flight (mean of 2 processes)"
    )


def _counts_by_backend() -> Any:
    group = dist.new_group(backend="shm")
    _C.start_tally(dist.Backend.backend_list)
    _C.start_tally(dist.Backend.backend_list)  # once is enough
    before = _C.tally()
    x = torch.ones(25)
    for _ in range(3):
        dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.all_reduce(x)
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    dist.barrier(group)
    rank = dist.get_rank()
    dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)
    dist.destroy_process_group(group)
    dist.barrier()
    after = _C.tally()
    zero = (0, 0, 0.0, 0.0)
    return {
        name: [
            None if b is None else b - a for a, b in zip(before.get(name, zero), row, strict=True)
        ]
        for name, row in after.items()
    }


def test_counts_by_backend() -> None:
    for rows in run(2, _counts_by_backend):
        assert set(rows) == {"gloo", "shm"}
        calls, amount, busy, waited = rows["shm"]
        # Four all_reduces, a barrier and a message; what is received is no input.
        assert calls == 6
        assert amount in (400, 500)
        assert busy > 0
        assert waited >= 0
        calls, amount, busy, _ = rows["gloo"]
        assert calls >= 3
        assert amount >= 300
        assert busy > 0


GLOO_ALONE = """
import torch, torch.distributed as dist
import torch_c10d_ext
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(5))
dist.destroy_process_group()
"""


def test_nobody_knows_what_gloo_itself_waits(installed: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "tally"
    folder.mkdir()
    done = python(["-c", GLOO_ALONE], {**installed, _tally.VARIABLE: str(folder)})
    assert done.returncode == 0, done.stderr
    processes, rows = _tally.read(folder)
    assert processes == 1
    assert rows["gloo"].calls == 1
    assert rows["gloo"].bytes == 20
    assert rows["gloo"].waited is None
    assert "waited" not in _tally.summary(processes, rows)


def _waits_for_another(disable: bool) -> tuple[str, list[float]]:
    if disable:
        os.environ["TORCH_C10D_EXT_SHM_DISABLE"] = "1"
    _C.start_tally(dist.Backend.backend_list)
    group = dist.new_group(backend="shm")
    os.environ.pop("TORCH_C10D_EXT_SHM_DISABLE", None)
    name = backend_of(group)
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(4)
    waited: list[float] = []
    for wait in (
        lambda: dist.all_reduce(x, group=group),
        lambda: F.all_reduce(x, "sum", group) + 1,
        lambda: dist.send(x, 1, group) if dist.get_rank() == 0 else dist.recv(x, 0, group),
    ):
        dist.barrier(group)
        before = _C.tally()[name][3]
        if dist.get_rank() == 0:
            store.set(f"called {len(waited)}", "")
        else:
            store.wait([f"called {len(waited)}"])
            time.sleep(0.5)
        wait()
        dist.barrier(group)
        waited.append(_C.tally()[name][3] - before)
    return name, waited


@pytest.mark.parametrize("disable", (False, True), ids=("shm", "fall-back"))
def test_counts_the_time_waited(disable: bool) -> None:
    (name, first), (_, second) = run(2, _waits_for_another, disable)
    assert name == ("gloo" if disable else "shm")
    # In place, with a result that is used, and for a message: for most of the other's half second.
    assert all(seconds > 0.1 for seconds in first), first
    assert all(0 <= seconds < 60 for seconds in second)


# --- the doctor -----------------------------------------------------------------------------------

GOOD = Machine(
    cores=8, threads=1, environment={SWITCH: "1", "OMP_NUM_THREADS": "1"}, descriptors=65536
)

CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "torch": ({"torch": "2.12.0"}, "slow", "torch 2.12.0, built with", "pip install --no-build"),
    "sandbox": (
        {"cannot_share": "memfd_create: Operation not permitted", "seccomp": True},
        *("broken", "cannot share memory: memfd_create: Operation not permitted; groups use gloo"),
        "docker run --security-opt seccomp=unconfined",
    ),
    "old system": (
        {"cannot_share": "memfd_create: Function not implemented"},
        *("broken", "cannot share memory", "Linux 3.17"),
    ),
    "entry point": ({"entry_point": False}, "broken", "entry point is not installed", "make build"),
    "autoload": (
        {"environment": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}},
        *("broken", "AUTOLOAD=0", "unset TORCH_DEVICE_BACKEND_AUTOLOAD"),
    ),
    "switch off": ({"environment": {}}, "slow", "stay on gloo", f"export {SWITCH}=1"),
    "switch": ({"environment": {SWITCH: "on"}}, "broken", "must be 0 or 1, got 'on'", "export"),
    "disabled": (
        {"environment": {"TORCH_C10D_EXT_SHM_DISABLE": "1"}},
        *("broken", "all groups use gloo", "unset TORCH_C10D_EXT_SHM_DISABLE"),
    ),
    "setting": (
        {"environment": {"TORCH_C10D_EXT_SHM_ARENA": "1"}},
        *("broken", "must be a whole number", "unset TORCH_C10D_EXT_SHM_ARENA"),
    ),
    "memory": ({"memory": 64 << 20}, "slow", "groups of 8 ranks take", "SHM_ARENA=262144"),
    "quota": ({"cpu_quota": 1.5}, "slow", "allows the time of 1.5", "docker update --cpus 8"),
    "one core": ({"cores": 1}, "slow", "share one core", "taskset"),
    "threads": (
        {"threads": 8, "environment": {SWITCH: "1"}},
        *("slow", "with 8 threads", "export OMP_NUM_THREADS=1"),
    ),
    "descriptors": ({"descriptors": 1024}, "slow", "1024 file descriptors", "ulimit -n 65536"),
    "kernel": ({"kernel": (5, 10)}, "slow", "Linux 5.10", "upgrade"),
    "pages": ({"huge_pages": "never"}, "slow", "huge pages: never", "echo madvise"),
}


def test_finds_nothing_wrong_with_a_good_machine() -> None:
    found = list(findings(GOOD))
    assert len(found) > 6
    assert [f for f in found if f.verdict != "ok" or f.fix] == []


@pytest.mark.parametrize("case", CASES)
def test_says_how_to_mend(case: str) -> None:
    changed, verdict, what, fix = CASES[case]
    wrong = [f for f in findings(Machine(**{**vars(GOOD), **changed})) if f.verdict != "ok"]
    matching = [f for f in wrong if what in f.what]
    assert [f.verdict for f in matching] == [verdict], wrong
    assert fix in matching[0].fix
    assert all(isinstance(f, Finding) and f.fix for f in wrong)


def test_examines_this_machine() -> None:
    machine = Machine.here()
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.memory > 0
    assert machine.kernel > (3, 17)
    assert machine.cannot_share == ""


def test_prints_a_report_and_what_it_measures(installed: dict[str, str]) -> None:
    done = python(["-m", "torch_c10d_ext.doctor"], {**installed, SWITCH: "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("torch ") and torch.__version__ in line for line in lines)
    assert f"{SWITCH} 1" in done.stdout
    assert re.search(r"^ok +processes share memory", done.stdout, re.MULTILINE)
    for name, line in zip(("shm", "gloo"), lines[-2:], strict=True):
        assert re.fullmatch(
            rf"{name} +[\d.]+ us for an all_reduce of 8 B between 2 processes", line
        )


def test_fails_where_shm_does_not_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_C10D_EXT_SHM_DISABLE", "1")
    assert doctor.main(["--no-measure"]) == 1
    out = capsys.readouterr().out
    assert "-> unset TORCH_C10D_EXT_SHM_DISABLE" in out
    assert "us for an all_reduce" not in out
