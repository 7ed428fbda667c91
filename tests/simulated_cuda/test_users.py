"""What users do on GPUs: DDP, FSDP2, tensor parallel DTensor, our ops in training, coalescing,
messages.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torch_c10d_ext.distributed as ext
import torch_c10d_ext.functional as F
from tests.simulated_cuda.on_cuda import device, run_on_devices

pytestmark = pytest.mark.cuda

NCCL = "cpu:shm,cuda:nccl"


def _model(where: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(where)


def _batches(n: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 8) for _ in range(n)]


def _plain_gradients(n: int) -> list[Tensor]:
    """Of the mean over all ranks' losses, on the CPU."""
    model = _model(torch.device("cpu"))
    for x in _batches(n):
        (model(x).square().mean() / n).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _same(got: list[Tensor], want: list[Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.cpu(), w, rtol=1e-5, atol=1e-6)


def _ddp(static: bool) -> None:
    mine, n = device(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(
        _model(mine), device_ids=[mine.index], static_graph=static, bucket_cap_mb=1
    )
    x = _batches(n)[dist.get_rank()].to(mine)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    _same([p.grad for p in model.parameters()], _plain_gradients(n))


@pytest.mark.parametrize("static", [False, True])
def test_ddp(static: bool) -> None:
    run_on_devices(2, _ddp, static, backend=NCCL)


def _fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mine, n = device(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (n,))
    model = _model(mine)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = _batches(n)[dist.get_rank()].to(mine)
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()
    _same([p.grad.full_tensor() for p in model.parameters()], _plain_gradients(n))


def test_fsdp2() -> None:
    run_on_devices(2, _fsdp2, backend=NCCL)


def _tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mine, n = device(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (n,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(_model(mine), mesh, plan)
    x = _batches(1)[0].to(mine)
    model(x).square().mean().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    _same(grads, _plain_gradients(1))


def test_tensor_parallel() -> None:
    run_on_devices(2, _tensor_parallel, backend=NCCL)


def _trained() -> list[float]:
    """Our own ops in a model, forward and backward, eager and compiled."""
    mine, n, rank = device(), dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    weight = torch.randn(8, 8)
    losses = []
    for compiled in (False, True):
        w = weight.chunk(n, 0)[rank].to(mine).requires_grad_()

        def step(x: Tensor, w: Tensor) -> Tensor:
            hidden = F.all_gather_single(x @ w.t(), 1, None)
            return F.all_reduce(hidden.relu().sum(), "avg", None)

        f = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
        x = _batches(1)[0].to(mine)
        for _ in range(3):
            loss = f(x, w)
            (grad,) = torch.autograd.grad(loss, w)
            with torch.no_grad():
                w -= 0.01 * grad
        losses.append(float(loss.detach()))
    return losses


def test_functional_ops_train() -> None:
    (eager, compiled), other = run_on_devices(2, _trained, backend=NCCL)
    assert eager == pytest.approx(compiled, rel=1e-6) and other == [eager, compiled]


def _coalesced() -> None:
    mine, n, rank = device(), dist.get_world_size(), dist.get_rank()
    xs = [torch.full((100,), float(rank + i), device=mine) for i in range(3)]
    with ext._coalescing_manager(device=mine, async_ops=True) as manager:
        for x in xs:
            ext.all_reduce(x)
    manager.wait()
    for i, x in enumerate(xs):
        assert torch.equal(x, torch.full_like(x, float(sum(r + i for r in range(n)))))


def test_coalescing() -> None:
    run_on_devices(2, _coalesced, backend=NCCL)


def _ring() -> None:
    mine, n, rank = device(), dist.get_world_size(), dist.get_rank()
    for turn in range(3):
        x = torch.full((1000,), float(rank + turn), device=mine)
        y = torch.empty_like(x)
        ops = [
            ext.P2POp(ext.isend, x, (rank + 1) % n),
            ext.P2POp(ext.irecv, y, (rank - 1) % n),
        ]
        for work in ext.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(y, torch.full_like(y, float((rank - 1) % n + turn)))


def test_batched_messages() -> None:
    run_on_devices(2, _ring, backend=NCCL)


def _ddp_mixed_precision() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    mine, n = device(), dist.get_world_size()
    low = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.parallel.DistributedDataParallel(
        _model(mine), device_ids=[mine.index], mixed_precision=low
    )
    x = _batches(n)[dist.get_rank()].to(mine)
    for _ in range(2):
        model.zero_grad()
        out = model(x)
        assert out.dtype is torch.bfloat16
        out.float().square().mean().backward()
    got = [p.grad for p in model.parameters()]
    assert {g.dtype for g in got} == {torch.float32}
    for g, w in zip(got, _plain_gradients(n), strict=True):
        torch.testing.assert_close(g.cpu(), w, rtol=0.05, atol=2e-3)


def test_ddp_with_mixed_precision() -> None:
    run_on_devices(2, _ddp_mixed_precision, backend=NCCL)


def _optimizer_in_backward() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    mine, n = device(), dist.get_world_size()
    model = _model(mine)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[mine.index])
    x = _batches(n)[dist.get_rank()].to(mine)
    ddp(x).square().mean().backward()
    steps = zip(before, _plain_gradients(n), strict=True)
    _same([p.detach() for p in model.parameters()], [b - 0.5 * g for b, g in steps])


def test_ddp_with_the_optimizer_in_backward() -> None:
    run_on_devices(2, _optimizer_in_backward, backend=NCCL)


def _future() -> None:
    n = dist.get_world_size()
    for then in (False, True):
        x = torch.full((1000,), float(dist.get_rank() + 1), device=device())
        future = ext.all_reduce(x, async_op=True).get_future()
        total = n * (n + 1) / 2
        if then:
            doubled = future.then(lambda done: done.value()[0] * 2).wait()
            assert doubled.cpu().tolist() == [2 * total] * 1000
        else:
            future.wait()
            assert x.cpu().tolist() == [total] * 1000


def test_future_completes_though_nobody_waits_for_the_work() -> None:
    run_on_devices(2, _future, backend=NCCL)


def _ddp_hook(static: bool) -> None:
    mine, n = device(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(
        _model(mine), device_ids=[mine.index], static_graph=static
    )

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no texts for types
        work = ext.all_reduce(bucket.buffer().div_(n), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    x = _batches(n)[dist.get_rank()].to(mine)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    _same([p.grad for p in model.parameters()], _plain_gradients(n))


@pytest.mark.parametrize("static", [False, True])
def test_ddp_with_a_hook_of_ours(static: bool) -> None:
    run_on_devices(2, _ddp_hook, static, backend=NCCL)
