"""What torch itself brings, in programs that know nothing of this package.

On gloo, on shm by name and, unmodified, on gloo under the switch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.launch import WAYS, launch
from tests.clients.test_libraries import same

PROGRAM = "with_torch.py"


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("what", ("ddp", "fsdp2", "tensor_parallel"))
def test_parallel_training(what: str, ranks: int) -> None:
    results = same(PROGRAM, what, "-", ranks=ranks)
    assert all(result["parameters"] == results[0]["parameters"] for result in results)
    assert results[0]["losses"][-1] < results[0]["losses"][0]


@pytest.mark.parametrize("schedule", ("gpipe", "1f1b"))
def test_pipeline(schedule: str) -> None:
    first, last = same(PROGRAM, "pipeline", schedule)
    assert len(last["losses"]) == 4
    assert all(any(values) for values in first["gradients"])


@pytest.mark.parametrize("method", ("fork", "spawn", "forkserver"))
def test_data_loaders(method: str) -> None:
    results = same(PROGRAM, "loaders", method)
    assert results[0]["parameters"] == results[1]["parameters"]
    assert len(results[0]["losses"]) == 8


def test_rpc_and_distributed_autograd_beside_a_group(tmp_path: Path) -> None:
    said = {}
    for way, (backend, environment) in WAYS.items():
        # A file each: what RPC has met at cannot be met at again.
        arguments = [backend, "rpc", "-", str(tmp_path / way)]
        said[way] = launch(PROGRAM, arguments, 2, environment)
    for results in said.values():
        assert results[0]["gathered"] == [
            [[2.0, 2.0, 2.0], [0.0, 1.0, 2.0]],
            [[3.0, 3.0, 3.0], [0.0, 1.0, 2.0]],
        ]
        assert [result["summed"] for result in results] == [[1.0] * 4] * 2
    assert [said[way][0]["served"] for way in WAYS] == ["gloo", "shm", "shm"]


def test_profiler_traces_hold_the_collectives() -> None:
    results = same(PROGRAM, "profiler", "-")
    assert "<backend>:all_reduce" in results[0]["events"]
    assert "<backend>:barrier" in results[0]["events"]


@pytest.mark.parametrize(("saved_by", "loaded_by"), ((3, 2), (2, 4)))
def test_checkpoints_of_another_world_size(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    said: dict[str, Any] = {}
    for way, (backend, environment) in WAYS.items():
        folder = str(tmp_path / way)
        saved = launch(PROGRAM, [backend, "save", "-", folder], saved_by, environment)
        loaded = launch(PROGRAM, [backend, "load", "-", folder], loaded_by, environment)
        for result in loaded:
            assert result["parameters"] == saved[0]["parameters"]
        said[way] = saved[0]["parameters"]
        assert saved[0]["served"] == loaded[0]["served"] == ("gloo" if way == "gloo" else "shm")
    # What one way has saved another can load.
    for way in WAYS:
        torch.testing.assert_close(said[way], said["gloo"], rtol=1e-5, atol=2e-6)
    other = launch(PROGRAM, ["shm", "load", "-", str(tmp_path / "gloo")], loaded_by)
    torch.testing.assert_close(other[0]["parameters"], said["gloo"], rtol=0, atol=0)


def test_checks_can_fail() -> None:
    with pytest.raises(AssertionError, match=re.compile("exit codes .*KeyError", re.DOTALL)):
        launch(PROGRAM, ["gloo", "no such part", "-"], 1)
