"""CUDA graphs: every collective captured and replayed, and waits that a capture cannot hold."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext
import torch_c10d_ext.functional as F
from tests.contract import group, wait
from tests.harness.flight import single_rank_shortcut
from tests.simulated_cuda.on_cuda import device, run_on_devices
from tests.simulated_cuda.test_streams import COUNT, _differ, _each, _none_fails, _world

pytestmark = pytest.mark.cuda

NCCL = "cpu:shm,cuda:nccl"


def _all_captured() -> list[str]:
    """Every collective in a graph of its own, replayed with other inputs."""

    def check(name: str, start: Callable[[Tensor], Tensor], x: Tensor, want: Tensor | None) -> str:
        given = x.clone()
        F.wait_tensor(start(given))  # the communicator
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = F.wait_tensor(start(given)) + 0
        texts = []
        for turn in range(3):
            given.fill_(-3.0) if turn == 1 else given.copy_(x)
            graph.replay()
            if turn != 1:
                texts.append(_differ(y, want))
        return next((text for text in texts if text), "")

    return _each(check)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_collective_in_a_graph(size: int) -> None:
    _none_fails(run_on_devices(size, _all_captured, backend=NCCL, deadline=200))


def _side_stream_captured() -> list[str]:
    """In a capture, started on one stream and waited for on another that joins."""
    side = torch.cuda.Stream(device())

    def check(name: str, start: Callable[[Tensor], Tensor], x: Tensor, want: Tensor | None) -> str:
        F.wait_tensor(start(x))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            y = start(x * 1)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                z = F.wait_tensor(y) + 0
            main.wait_stream(side)
        graph.replay()
        graph.replay()
        return _differ(z, want)

    return _each(check)


def test_waits_on_another_stream_of_the_capture() -> None:
    _none_fails(run_on_devices(2, _side_stream_captured, backend=NCCL, deadline=200))


def _works() -> bool:
    n = dist.get_world_size()
    y = wait(torch.ops.c10d_ext.all_reduce(torch.ones(3, device=device()), "sum", group()))
    torch.cuda.synchronize()
    return bool((y == n).all())


def _capture(graph: torch.cuda.CUDAGraph, body: Callable[[], object]) -> None:
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            body()
    finally:
        torch.cuda.set_stream(before)  # which torch does not where a capture fails


def _started_before() -> str:
    x = torch.ones(COUNT, device=device())
    y = torch.ops.c10d_ext.all_reduce(x, "sum", group())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="wait for it before the capture") as error:
        _capture(graph, lambda: (x + 1, wait(y)))
    assert bool((wait(y) == dist.get_world_size()).all())
    assert _works()
    assert torch_c10d_ext.pending_count() == 0
    return str(error.value)


def test_a_wait_for_what_was_started_before_the_capture_is_refused() -> None:
    for rank, text in enumerate(run_on_devices(2, _started_before, backend=NCCL)):
        assert text.startswith("all_reduce: the collective must complete, got a wait in a CUDA")
        assert f"(rank {rank}/2, group '" in text


def _waited_after(elsewhere: str) -> str:
    x = torch.ones(COUNT, device=device())
    assert _works()
    graph, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    # nccl's stream is left unjoined, which the capture says itself.
    kept: list[Tensor] = []
    with pytest.raises(RuntimeError, match="unjoined"):
        _capture(graph, lambda: kept.append(torch.ops.c10d_ext.all_reduce(x, "sum", group())))

    def late() -> None:
        if elsewhere == "capture":
            _capture(second, lambda: (x + 1, wait(kept[0])))
        else:
            wait(kept[0])

    with pytest.raises(RuntimeError, match="wait for it there") as error:
        late()
    kept.clear()
    assert _works()
    assert torch_c10d_ext.pending_count() == 0
    return str(error.value)


@pytest.mark.parametrize("elsewhere", ["eager", "capture"])
def test_a_wait_outside_its_capture_is_refused(elsewhere: str) -> None:
    for rank, text in enumerate(run_on_devices(2, _waited_after, elsewhere, backend=NCCL)):
        assert text.startswith("all_reduce: the collective must complete, got a wait outside")
        assert f"(rank {rank}/2, group '" in text


def _never_waited() -> bool:
    """What a capture leaves behind does not spoil the collectives after it."""
    x = torch.ones(COUNT, device=device())
    assert _works()
    lost: list[Tensor] = []
    with pytest.raises(RuntimeError, match="unjoined"):
        _capture(
            torch.cuda.CUDAGraph(),
            lambda: lost.append(torch.ops.c10d_ext.all_reduce(x, "sum", group())),
        )
    good = all(_works() for _ in range(5)) and all(
        bool((wait(y) == dist.get_world_size()).all())
        for y in [torch.ops.c10d_ext.all_reduce(x, "sum", group()) for _ in range(140)]
    )
    # Nor does it hide what was started after it, and is over, from the next wait.
    for _ in range(100):
        torch.ops.c10d_ext.all_reduce(x, "sum", group())
    torch.cuda.synchronize()
    assert _works()
    assert torch_c10d_ext.pending_count() == 1
    with pytest.raises(RuntimeError, match="wait for it there"):
        wait(lost[0])
    return good


def test_what_a_failed_capture_leaves_behind() -> None:
    assert all(run_on_devices(2, _never_waited, backend=NCCL))


def _captured_barrier() -> bool:
    """A graph with dist.barrier's counterpart between two collectives."""
    x = torch.ones(COUNT, device=device())
    n = dist.get_world_size()
    with single_rank_shortcut(False):
        assert _works()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = F.wait_tensor(F.all_reduce(x, "sum", None))
            z = F.barrier(y, None)
            junk = [torch.full((1,), 9.0, device=x.device) for _ in range(4)]
            y = F.wait_tensor(z)
            y = F.wait_tensor(F.all_reduce(y, "sum", None)) + 1
    good = True
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        good = good and bool((y == n * n + 1).all()) and all(float(j) == 9.0 for j in junk)
    return good


@pytest.mark.parametrize("size", [1, 2])
def test_a_barrier_in_a_graph(size: int) -> None:
    assert all(run_on_devices(size, _captured_barrier, backend=NCCL))


def _many_captured() -> bool:
    """More collectives in one graph than may be in flight before a call looks for their ends."""
    x = torch.ones(64, device=device())
    n = dist.get_world_size()
    assert _works()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        started = [torch.ops.c10d_ext.all_reduce(x * i, "sum", group()) for i in range(100)]
        ys = [wait(y) + 0 for y in started]
    graph.replay()
    torch.cuda.synchronize()
    return all(bool((y == n * i).all()) for i, y in enumerate(ys)) and _works()


def test_many_collectives_in_a_graph() -> None:
    assert all(run_on_devices(2, _many_captured, backend=NCCL))


def _after_a_graph_break() -> list[str]:
    """Compiled code that breaks between start and wait, captured by the caller."""
    mine, world = device(), _world(dist.get_world_size())
    x = world[dist.get_rank()].to(mine)

    def f(x: Tensor) -> Tensor:
        y = F.all_reduce(x * 2, "sum", None)
        torch._dynamo.graph_break()
        return y + 1

    compiled = torch.compile(f, backend="aot_eager")
    compiled(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x) + 0
    graph.replay()
    want = 2 * torch.stack(world).sum(0) + 1
    text = _differ(y, want)
    return [text] if text else []


def test_a_graph_break_between_start_and_wait() -> None:
    _none_fails(run_on_devices(2, _after_a_graph_break, backend=NCCL, deadline=200))


def _swept_in_another_thread() -> str:
    """Results nobody waits for are looked for while another thread captures, with every care."""
    mine = device()
    x = torch.ones(COUNT, device=mine)
    assert _works()
    side = torch.cuda.Stream(mine)
    # The other thread's memory: one that asks the device for more ends the capture, too.
    with torch.cuda.stream(side):
        held = [wait(torch.ops.c10d_ext.all_reduce(x, "sum", group())) for _ in range(140)]
    torch.cuda.synchronize()
    started, over, failures = threading.Event(), threading.Event(), []
    late: list[Tensor] = []

    def others() -> None:
        try:
            torch.cuda.set_device(mine)
            started.wait(30)
            held.clear()
            with torch.cuda.stream(side):
                for _ in range(140):
                    late.append(torch.ops.c10d_ext.all_reduce(x, "sum", group()))
                wait(late[-1])
        except Exception as error:
            failures.append(f"the other thread: {error}")
        finally:
            over.set()

    thread = threading.Thread(target=others)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(mine), capture_error_mode="global"):
        y = x * 2
        started.set()
        assert over.wait(30)
        z = y + 1
    thread.join(30)
    graph.replay()
    torch.cuda.synchronize()
    if not bool((z == 3).all()):
        failures.append("the graph is wrong")
    for y in late:  # a thread that has ended looks for nothing
        wait(y)
    assert _works()
    return "\n".join(failures)


def test_a_search_for_results_spares_another_threads_capture() -> None:
    assert run_on_devices(2, _swept_in_another_thread, backend=NCCL) == ["", ""]


def test_a_search_for_results_of_one_rank_spares_another_threads_capture() -> None:
    assert run_on_devices(1, _swept_in_another_thread, backend=NCCL) == [""]
