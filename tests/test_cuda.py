"""On a GPU: the same values, streams in order, nothing read before its wait, graph capture.

World size 1 runs on nccl itself (the single-rank shortcut off), several ranks share the GPU through
gloo's CUDA path.
"""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext
import torch_c10d_ext.distributed as ext
import torch_c10d_ext.functional as F
from tests.contract import Variant, expected, group, load, start, variants, wait
from tests.harness import run, values
from tests.harness.flight import single_rank_shortcut

pytestmark = pytest.mark.cuda

NCCL, GLOO = "cpu:gloo,cuda:nccl", "gloo"
MODULES = [
    f"tests.ops.test_{stem}"
    for stem in (
        "all_reduce",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "permute_tensor",
        "barrier",
        "all_gather",
        "reduce_scatter",
    )
]


def _device() -> torch.device:
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _spin(milliseconds: float = 50) -> None:
    """Keep the current stream busy without blocking the host."""
    torch.cuda._sleep(int(milliseconds * 1e6))


def _values(module: str, shortcut: bool) -> list[str]:
    """Every form on the dtypes that CUDA reduces natively and some that it does not."""
    c, rank, device, failures = load(module), dist.get_rank(), _device(), []
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int16,
        torch.uint8,
        torch.int64,
        torch.bool,
    )
    n = dist.get_world_size()
    with single_rank_shortcut(shortcut):
        for form, v in itertools.product(c.forms, list(variants(c, n, dtypes))):
            try:
                failures += _failure(c, form, v, rank, device)
            except Exception as error:
                failures.append(f"{form} {v}: {type(error).__name__}: {str(error)[:300]}")
    torch.cuda.synchronize()
    return failures


def _failure(c: object, form: str, v: Variant, rank: int, device: torch.device) -> list[str]:
    from tests.contract import Collective, inputs

    assert isinstance(c, Collective)
    world = inputs(c, v)
    want = expected(c, form, v.case, world)[rank]
    x = world[rank].to(device)
    outs = [torch.empty(want.shape, dtype=want.dtype, device=device)] if form == "_out" else []
    y = wait(start(c, form, v.case, [x], outs)[0])
    exact = values.exact(v.dtype, v.reduce_op, dist.get_world_size())
    text = values.mismatch(y.cpu(), want, bitwise=exact, ulps=2)
    return [f"{form} {v}: {text}"] if text else []


@pytest.mark.parametrize("module", MODULES)
def test_values_on_nccl(module: str) -> None:
    (failures,) = run(1, _values, module, False, backend=NCCL)
    assert not failures, "\n".join(failures[:30])


@pytest.mark.parametrize("module", MODULES)
def test_values_without_the_backend(module: str) -> None:
    (failures,) = run(1, _values, module, True, backend=NCCL)
    assert not failures, "\n".join(failures[:30])


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("module", MODULES)
def test_values_of_ranks_that_share_the_gpu(module: str, size: int) -> None:
    for failures in run(size, _values, module, False, backend=GLOO):
        assert not failures, "\n".join(failures[:30])


def _input_is_read_in_stream_order() -> None:
    """The collective reads what earlier kernels of the caller's stream write, however late."""
    device = _device()
    n, rank = dist.get_world_size(), dist.get_rank()
    for f, want in (
        (lambda x: F.all_reduce(x, "sum", None), n * (n + 1) / 2),
        (lambda x: F.broadcast(x, n - 1, None), float(n)),
    ):
        x = torch.zeros(1 << 20, device=device)
        torch.cuda.synchronize()
        _spin()
        x.fill_(rank + 1.0)
        y = f(x)
        # The caller may overwrite the input in stream order at once.
        x.fill_(-1.0)
        assert torch.equal(y + 0, torch.full_like(x, want))


@pytest.mark.parametrize(("size", "backend"), [(1, NCCL), (2, GLOO)])
def test_input_is_read_in_stream_order(size: int, backend: str) -> None:
    run(size, _input_is_read_in_stream_order, backend=backend)


def _side_streams() -> None:
    """Started on one stream, waited for and used on another, memory kept until both are done."""
    device = _device()
    n, rank = dist.get_world_size(), dist.get_rank()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(5):
        with torch.cuda.stream(side):
            x = torch.full((1 << 20,), float(rank + turn), device=device)
            _spin(10)
            x += 1
            y = torch.ops.c10d_ext.all_reduce(x, "sum", group())
            del x
        junk = torch.full((1 << 20,), -5.0, device=device)
        with torch.cuda.stream(other):
            wait(y)
            z = y * 2
        other.synchronize()
        want = 2.0 * sum(r + turn + 1 for r in range(n))
        assert torch.equal(z, torch.full_like(z, want)), f"turn {turn}"
        assert bool((junk == -5.0).all())


@pytest.mark.parametrize(("size", "backend"), [(1, NCCL), (2, GLOO)])
def test_side_streams(size: int, backend: str) -> None:
    run(size, _side_streams, backend=backend)


def _wait_does_not_block_the_host() -> None:
    """On nccl wait_tensor orders streams and leaves the host free."""
    device = _device()
    x = torch.ones(1 << 10, device=device)
    spun = torch.cuda.Event()
    with single_rank_shortcut(False):
        wait(torch.ops.c10d_ext.all_reduce(x, "sum", group()))
        torch.cuda.synchronize()
        _spin(1000)
        spun.record()
        y = wait(torch.ops.c10d_ext.all_reduce(x, "sum", group()))
        assert not spun.query(), "the wait came back only after what was queued before"
    assert torch.equal(y, x)


def test_wait_leaves_the_host_free() -> None:
    run(1, _wait_does_not_block_the_host, backend=NCCL)


def _graph_capture(shortcut: bool) -> None:
    with single_rank_shortcut(shortcut):
        _capture_and_replay()


def _capture_and_replay() -> None:
    device = _device()
    x = torch.arange(8.0, device=device)

    def step(x: Tensor) -> Tensor:
        y = wait(torch.ops.c10d_ext.all_reduce(x * 2, "sum", group()))
        z = wait(torch.ops.c10d_ext.all_gather_into_tensor(y, 1, group()))
        z = wait(torch.ops.c10d_ext.barrier(z, group()))
        return wait(torch.ops.c10d_ext.reduce_scatter_tensor(z, "avg", 1, group())) + 1

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(x)
    for scale in (1.0, 3.0):
        x.copy_(torch.arange(8.0, device=device) * scale)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x * 2 + 1)
    assert torch_c10d_ext.pending_count() == 0


@pytest.mark.parametrize("shortcut", [False, True])
def test_cuda_graph_capture(shortcut: bool) -> None:
    run(1, _graph_capture, shortcut, backend=NCCL)


def _unwaited_results() -> int:
    device = _device()
    x = torch.ones(1 << 20, device=device)
    for _ in range(20):
        F.all_reduce(x, "sum", None)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    if dist.get_rank() != 0:
        time.sleep(1)  # rank 0 has all of them in flight
    for _ in range(300):
        F.all_reduce(x, "sum", None)
    torch.cuda.synchronize()
    F.wait_tensor(F.all_reduce(x, "sum", None))
    return torch.cuda.memory_allocated() - before


@pytest.mark.parametrize(("size", "backend"), [(1, NCCL), (2, GLOO)])
def test_unwaited_results_are_freed(size: int, backend: str) -> None:
    for growth in run(size, _unwaited_results, backend=backend):
        assert growth <= 70 * 2**22, growth


def _gradients_and_compile() -> None:
    device = _device()
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = [torch.arange(6.0, device=device).reshape(2, 3) + r for r in range(n)]

    def f(x: Tensor) -> Tensor:
        return F.reduce_scatter_single(F.all_gather_single(x.sin(), 0, None), "sum", 0, None) * 2

    for g in (f, torch.compile(f, fullgraph=True)):
        x = xs[rank].clone().requires_grad_()
        y = g(x)
        torch.testing.assert_close(y.detach() + 0, 2 * n * xs[rank].sin())
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(grad, 2 * n * xs[rank].cos())


@pytest.mark.parametrize(("size", "backend"), [(1, NCCL), (2, GLOO)])
def test_gradients_and_compile(size: int, backend: str) -> None:
    pytest.importorskip("triton")
    run(size, _gradients_and_compile, backend=backend, deadline=200)


def _messages() -> None:
    """Around the ring, of late values, in pieces of a tensor, whatever the sender writes then."""
    device = _device()
    n, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % n, (rank - 1) % n
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        x = torch.zeros(1000, 2, device=device, dtype=dtype)
        like = torch.zeros(1000, 2, device=device, dtype=dtype)
        torch.cuda.synchronize()
        _spin()
        x[:, 1] = torch.arange(1000, device=device) + rank
        sent, got = F.batch_isend_irecv([x[:, 1], like[:, 0]], [after, before], [True, False])
        x.fill_(-1)
        y, source = F.wait_message(got, like[:, 0])
        F.wait_message(sent, x)
        assert int(source) == before
        want = (torch.arange(1000) + before).to(dtype)
        assert torch.equal((y + 0).cpu(), want)
        # The same by c10d's functions, one after the other.
        passed = [ext.irecv(like[:, 1], before, tag=7), ext.isend(y + 0, after, tag=7)]
        for work in passed:
            work.wait()
        want = (torch.arange(1000) + (rank - 2) % n).to(dtype)
        assert torch.equal(like[:, 1].cpu(), want)


@pytest.mark.parametrize("size", (2, 3))
def test_messages_of_ranks_that_share_the_gpu(size: int) -> None:
    run(size, _messages, backend=GLOO)


def _mixed_devices_are_refused() -> None:
    device = _device()
    with pytest.raises((ValueError, RuntimeError), match="device"):
        torch.ops.c10d_ext.all_reduce_coalesced(
            [torch.ones(2), torch.ones(2, device=device)], "sum", group()
        )
    x = torch.ones(3, device=device) * (dist.get_rank() + 1)
    y = F.all_reduce(x, "sum", None)
    n = dist.get_world_size()
    assert torch.equal(y + 0, torch.full((3,), n * (n + 1) / 2, device=device))


@pytest.mark.parametrize(("size", "backend"), [(1, NCCL), (2, GLOO)])
def test_mixed_devices_are_refused(size: int, backend: str) -> None:
    run(size, _mixed_devices_are_refused, backend=backend)


def _by_device() -> None:
    """CPU tensors go over shm, and tensors of the GPU over the other backend of the group."""
    device, rank, n = _device(), dist.get_rank(), dist.get_world_size()
    for pg in (dist.group.WORLD, dist.new_group()):
        assert pg._get_backend(torch.device("cpu")).name() == "shm"
        assert pg._get_backend(device).name() != "shm"
        for where in ("cpu", device):
            x = torch.full((3,), rank + 1.0, device=where)
            want = torch.full((3,), n * (n + 1) / 2, device=where)
            with single_rank_shortcut(False):
                assert torch.equal(F.all_reduce(x, "sum", pg) + 0, want)
            dist.all_reduce(x, group=pg)
            assert torch.equal(x, want)


@pytest.mark.parametrize(("size", "backend"), [(1, "cpu:shm,cuda:nccl"), (2, "cpu:shm,cuda:gloo")])
def test_shm_beside_a_backend_for_the_gpu(size: int, backend: str) -> None:
    run(size, _by_device, backend=backend)
