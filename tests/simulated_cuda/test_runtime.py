"""The simulation itself: it gets wrong what a device would, and names what it lacks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import WorkersFailed, run
from tests.simulated_cuda.on_cuda import ALONE, device, run_on_devices

pytestmark = pytest.mark.cuda

NCCL = "cpu:gloo,cuda:nccl"


def _alone(code: str, delays: str = "none", **settings: str) -> str:
    """What a program of its own prints; its error text where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("import torch\n") + textwrap.dedent(code)],
        env={**os.environ, "SIMULATED_CUDA_DELAYS": delays, **settings},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()


RACE = """
side = torch.cuda.Stream()
wrong = turns = 0
while turns < {turns} and not wrong:
    turns += 1
    x = torch.zeros(1 << 16, device="cuda")
    torch.cuda.synchronize()
    x.fill_(1)
    with torch.cuda.stream(side):
        {wait}
        y = x + 1
    side.synchronize()
    wrong += bool((y != 2).any())
print(wrong)
"""


@pytest.mark.parametrize("delays", ["late:1", "random:1"])
def test_a_missing_wait_shows(delays: str) -> None:
    """At random it is a matter of luck in each turn, and so of many turns on a busy machine."""
    assert int(_alone(RACE.format(wait="pass", turns=10_000), delays)) == 1
    wait = "side.wait_stream(torch.cuda.default_stream())"
    assert int(_alone(RACE.format(wait=wait, turns=20), delays)) == 0


REUSE = """
side = torch.cuda.Stream()
wrong = 0
for turn in range(20):
    x = torch.ones(1 << 20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        {record}
    del x
    junk = torch.full((1 << 20,), 7.0, device="cuda")
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    wrong += bool((y != 2).any())
print(wrong)
"""


def test_a_missing_record_stream_shows() -> None:
    assert int(_alone(REUSE.format(record="pass"), "late:1")) > 0
    assert int(_alone(REUSE.format(record="x.record_stream(side)"), "late:1")) == 0


def test_streams_events_and_timing() -> None:
    side = torch.cuda.Stream()
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(side):
        begun.record()
        torch.cuda._sleep(30_000_000)
        done.record()
    assert not done.query()
    done.synchronize()
    assert done.query()
    assert begun.elapsed_time(done) >= 29


def test_a_graph_replays_its_branches_in_order() -> None:
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = torch.zeros(1 << 12, device="cuda")
    with torch.cuda.graph(graph):
        y = x + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            left = y * 10
        right = y * 100
        torch.cuda.current_stream().wait_stream(side)
        z = left + right
    for value in range(5):
        x.fill_(value)
        graph.replay()
        assert torch.equal(z, torch.full_like(z, 110.0 * (value + 1)))


def _capture(body: Callable[[], object]) -> None:
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            body()
    finally:
        torch.cuda.set_stream(before)  # which torch does not where a capture fails


def test_what_a_capture_cannot_hold_is_refused() -> None:
    x, side, outside = torch.zeros(8, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
    outside.record()
    bad: dict[str, Callable[[], object]] = {
        "capturing": lambda: (x + 1).sum().item(),
        "when stream is capturing": torch.cuda.synchronize,
        "uncaptured": lambda: torch.cuda.current_stream().wait_event(outside),
    }
    for text, body in bad.items():
        with pytest.raises(RuntimeError, match="previous error during capture") as error:
            _capture(body)
        assert text in str(error.value.__context__)

    def unjoined() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="unjoined"):
        _capture(unjoined)
    assert torch.equal(x + 1, torch.ones(8, device="cuda"))


def test_what_is_not_simulated_is_named() -> None:
    assert "libcudnn.so.9 has no cudnnGetVersion: it is not simulated" in _alone(
        "torch.backends.cudnn.version()"
    )
    assert "cudaStreamPerThread is not simulated" in _alone(
        "torch.cuda.ExternalStream(2).synchronize()"
    )
    assert "must be none, random:SEED or late:SEED, got often" in _alone(
        "torch.ones(1, device='cuda')", "often"
    )


def test_devices_are_visible_as_asked() -> None:
    show = "print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).pci_bus_id)"
    assert _alone(show) == "4 1"
    assert _alone(show, CUDA_VISIBLE_DEVICES="2,3") == "2 3"
    assert _alone("print(torch.cuda.is_available())", SIMULATED_CUDA_DEVICES="0") == "False"


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(9 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[1] == 8 << 30


def test_random_numbers_and_losses_of_values() -> None:
    x = torch.randn(1000, device="cuda")
    assert 0.8 < float(x.std()) < 1.2
    assert torch.equal(x[x > 0].cpu(), x.cpu()[x.cpu() > 0])
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(1000)


SHARED = """
import sys
import torch
import torch.multiprocessing as mp

def other(queue, back):
    side = torch.cuda.Stream()
    for turn in range(5):
        x = queue.get(timeout=60)
        back.put(x.cpu().tolist()[:3])
        x.add_(1)
        torch.cuda.synchronize()
        del x
        back.put("done")

if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue, back = mp.Queue(), mp.Queue()
    process = mp.Process(target=other, args=(queue, back), daemon=True)
    process.start()
    for turn in range(5):
        x = torch.zeros(1 << 16, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        x.fill_(turn)  # late: the other process waits for the event
        queue.put(x)
        assert back.get(timeout=60) == [float(turn)] * 3, turn
        assert back.get(timeout=60) == "done"
        assert bool((x == turn + 1).all()), turn
    process.join(60)
    print("shared", process.exitcode)
"""


@pytest.mark.parametrize("delays", ["none", "late:1"])
def test_memory_is_shared_between_processes(delays: str, tmp_path: Path) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "SIMULATED_CUDA_DELAYS": delays},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "shared 0", done.stderr


EXPANDABLE = """
import torch
x = torch.zeros(1 << 20, device="cuda")
before = torch.cuda.memory._snapshot()["segments"]
y = torch.ones(8 << 20, device="cuda")
del x
y = y * 2
assert bool((y == 2).all())
assert all(s["is_expandable"] for s in before), before
reserved = torch.cuda.memory_reserved()
del y
torch.cuda.synchronize()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() < reserved
try:
    torch.empty(9 << 30, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("refused")
"""


def test_segments_that_grow() -> None:
    said = _alone(EXPANDABLE, "late:1", PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert said == "refused"


def _reductions() -> list[str]:
    """nccl's arithmetic against float64's, for all it can reduce."""
    mine, n, rank, wrong = device(), dist.get_world_size(), dist.get_rank(), []
    ops = {
        "SUM": lambda v: v.sum(0),
        "PRODUCT": lambda v: v.prod(0),
        "MIN": lambda v: v.amin(0),
        "MAX": lambda v: v.amax(0),
    }
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8,
              torch.int32, torch.int64)  # fmt: skip
    for dtype in dtypes:
        world = torch.stack([torch.arange(-3, 4) * (r + 1) for r in range(n)]).to(dtype)
        for name, reference in ops.items():
            x = world[rank].to(mine)
            dist.all_reduce(x, getattr(dist.ReduceOp, name))
            want = reference(world.double() if dtype.is_floating_point else world.long()).to(dtype)
            if not torch.equal(x.cpu(), want):
                wrong.append(f"{dtype} {name}: {x.tolist()} instead of {want.tolist()}")
    return wrong


def test_reductions() -> None:
    for wrong in run_on_devices(2, _reductions, backend=NCCL):
        assert not wrong, "\n".join(wrong)


def _same_device() -> str:
    torch.cuda.set_device(0)
    with pytest.raises(dist.DistBackendError, match="Duplicate GPU detected") as error:
        dist.all_reduce(torch.ones(1, device="cuda:0"))
    return str(error.value)


@pytest.mark.usefixtures("own_processes")  # rank 0 may have a communicator on the device already
def test_two_ranks_on_a_device_are_refused() -> None:
    for text in run(2, _same_device, backend=ALONE):
        assert "rank 0 and rank 1 both on CUDA device 0" in text


def _die_of_different_calls() -> None:
    x = torch.ones(4 + dist.get_rank(), device=device())
    dist.all_reduce(x)
    torch.cuda.synchronize()


@pytest.mark.usefixtures("own_processes")
def test_different_calls_are_an_error() -> None:
    with pytest.raises(WorkersFailed):
        run_on_devices(2, _die_of_different_calls, backend=ALONE, deadline=15)
