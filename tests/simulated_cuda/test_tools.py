"""torch's own tools over our ops: its sanitizer for streams, its allocator's settings.

And `tools/gpu_check.sh`, with the simulated devices as the GPUs of the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext
import torch_c10d_ext.functional as F
from tests.simulated_cuda.on_cuda import ALONE, device, run_on_devices
from tests.simulated_cuda.test_streams import (
    COUNT,
    _dropped,
    _none_fails,
    _other_stream,
    _read_in_order,
)

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("own_processes")]


def _pair(error: Any) -> str:
    """The two accesses that a report says are not in order."""
    accesses = (error.previous_access, error.current_access)
    return " | ".join(f"{a.operator} {a.type} on stream {a.stream:#x}" for a in accesses)


def _sanitized() -> list[str]:
    """What is reported of programs that are in order, and that a race is reported."""
    from torch.cuda import _sanitizer

    mine = device()
    x, n = torch.ones(COUNT, device=mine), dist.get_world_size()
    F.wait_tensor(F.all_reduce(x, "sum", None))
    torch.cuda.synchronize()
    _sanitizer.enable_cuda_sanitizer()
    begins, ends = torch.cuda.Stream(mine), torch.cuda.Stream(mine)
    calls = {
        "all_reduce": lambda x: F.all_reduce(x, "sum", None),
        "all_gather": lambda x: F.all_gather_single(x, 0, None),
        "reduce_scatter": lambda x: F.reduce_scatter_single(x, "sum", 0, None),
        "all_to_all": lambda x: F.all_to_all_single(x, None, None, None),
        "broadcast": lambda x: F.broadcast(x, 0, None),
        "coalesced": lambda x: F.all_reduce_coalesced([x, x + 1], "sum", None)[0],
        "gather": lambda x: F.gather(x, 0, None),
        "scatter": lambda x: F.scatter(x, 0, None),
    }
    reports = []
    for name, start in calls.items():
        for turn in range(3):
            try:
                with torch.cuda.stream(begins):
                    y = start(x.clone())
                # It sees the events of nccl's stream, and takes the collective for one on the
                # stream of its call, which they do not cover: so it is with torch's own, too.
                ends.wait_stream(begins)
                with torch.cuda.stream(ends):
                    z = F.wait_tensor(y) + 0
                with torch.cuda.stream(begins):
                    F.wait_tensor(start(x.clone())).add_(1)
                ends.synchronize()
                if name == "all_reduce":
                    assert bool((z == n).all())
            except _sanitizer.CUDASanitizerErrors as error:
                reports += [f"{name}, turn {turn}: {_pair(e)}" for e in error.errors]
    try:
        with torch.cuda.stream(begins):
            z = x + 1
        with torch.cuda.stream(ends):
            z.add_(1)
        reports.append("no report of a race")
    except _sanitizer.CUDASanitizerErrors:
        pass
    _sanitizer.cuda_sanitizer.disable()
    torch.cuda.synchronize()
    return reports


def test_the_sanitizer_has_nothing_to_report() -> None:
    _none_fails(run_on_devices(2, _sanitized, backend=ALONE))


def _segments() -> list[str]:
    """The stream rules where blocks of the allocator grow, and their pages go."""
    mine = device()
    failures = _read_in_order() + _other_stream() + _dropped()
    assert any(s["is_expandable"] for s in torch.cuda.memory._snapshot()["segments"])
    n = dist.get_world_size()

    def step(rows: int) -> Tensor:
        x = torch.ones(rows, 1 << 20, device=mine)  # 4 MiB a row
        return F.wait_tensor(F.all_reduce(x, "sum", None))

    for rows in (1, 3, 7, 2):
        y = step(rows)
        if not bool((y == n).all()):
            failures.append(f"{rows} rows: wrong values")
        del y
        torch.cuda.empty_cache()
    return failures


def test_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    _none_fails(run_on_devices(2, _segments, backend=ALONE, deadline=200))


def _gpu_check(place: Path, test: str) -> subprocess.CompletedProcess[str]:
    """The command in a tree whose package is the one under test."""
    for name in ("pyproject.toml", "tests", "tools"):
        (place / name).symlink_to(ROOT / name)
    (place / "torch_c10d_ext").symlink_to(Path(torch_c10d_ext.__file__).parent)
    return subprocess.run(
        ["tools/gpu_check.sh", "-p", "no:cacheprovider", f"tests/test_cuda.py::{test}"],
        cwd=place,
        env={**os.environ, "PYTHON": sys.executable, "CHECKS": "test", "LIMIT": "260"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_command_for_a_machine_with_a_gpu(tmp_path: Path) -> None:
    done = _gpu_check(tmp_path, "test_wait_leaves_the_host_free")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"torch {torch.__version__} CUDA {torch.version.cuda} sees 4 GPU" in done.stdout
    assert "1 passed" in done.stdout and "0 failed, " in done.stdout


def test_the_command_for_a_machine_with_a_gpu_fails_with_its_tests(tmp_path: Path) -> None:
    done = _gpu_check(tmp_path, "test_that_is_not_there")
    assert done.returncode == 1
    assert "FAILED" in done.stdout and "1 failed, " in done.stdout
