"""What torch itself brings: loaders, RPC beside a group, profiler, pipelines, checkpoints."""

from __future__ import annotations

import datetime as dt
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from common import BACKEND, data, median_step, mlp, parameters, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TIMEOUT = dt.timedelta(seconds=60)


def train(model: nn.Module, batches: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 6))
    return losses


def loaders(method: str) -> None:
    """Workers that are forked, spawned or served, from a process with a group."""
    rank, n = dist.get_rank(), dist.get_world_size()
    ddp = DDP(mlp())
    losses: list[float] = []
    dataset = TensorDataset(*data())
    sampler = DistributedSampler(dataset, n, rank, shuffle=True, seed=3)
    loader = DataLoader(
        dataset,
        8,
        sampler=sampler,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=method,
        timeout=100,
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses += train(ddp, loader)
    report(losses=losses, parameters=parameters(ddp))


def _times(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (x * factor).sum()


def rpc(_: str) -> None:
    """RPC and distributed autograd beside a group whose collectives go on meanwhile."""
    import torch.distributed.autograd as autograd
    from torch.distributed import rpc

    rank, n = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{sys.argv[4]}", rpc_timeout=60, num_worker_threads=4
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=n, rpc_backend_options=options)
    peer = f"w{(rank + 1) % n}"
    x = torch.arange(3.0, requires_grad=True)
    factor = torch.full((3,), rank + 2.0, requires_grad=True)
    with autograd.context() as context:
        work = dist.all_reduce(summed := torch.full((4,), float(rank)), async_op=True)
        loss = rpc.rpc_sync(peer, _times, args=(x, factor))
        autograd.backward(context, [loss])
        gradients = autograd.get_gradients(context)
        got = [gradients[x].tolist(), gradients[factor].tolist()]
        work.wait()
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, got)
    rpc.shutdown()
    report(gathered=gathered, summed=summed.tolist())


def profiler(_: str) -> None:
    """A trace holds the group's collectives, with the backend that served them."""
    from torch.profiler import ProfilerActivity, profile

    ddp = DDP(mlp())
    x, y = data()
    train(ddp, [(x, y)])
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        train(ddp, [(x, y)])
        dist.barrier()
    path = f"trace{dist.get_rank()}.json"
    trace.export_chrome_trace(path)
    with open(path) as file:
        names = {e.get("name", "") for e in json.load(file)["traceEvents"]}
    backend = dist.group.WORLD._get_backend(torch.device("cpu")).name()  # type: ignore[union-attr]
    ours = sorted(n.replace(backend, "<backend>") for n in names if n.startswith(f"{backend}:"))
    report(events=ours)


def pipeline(schedule: str) -> None:
    """A stage on each rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(n)]
    kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
    stage = PipelineStage(stages[rank], rank, n, torch.device("cpu"))
    steps: Any = kind(stage, n_microbatches=4, loss_fn=F.mse_loss)
    x, _ = data(32)

    def step() -> list[float]:
        losses: list[torch.Tensor] = []
        if rank == 0:
            steps.step(x)
        else:
            steps.step(target=torch.ones(32, 16), losses=losses)
        return [round(loss.item(), 6) for loss in losses]

    losses = step()
    gradients = [p.grad.flatten()[:4].tolist() for p in stages[rank].parameters()]
    report(losses=losses, gradients=gradients, step=median_step(step, 10))


def ddp(_: str) -> None:
    model = DDP(mlp(64, 6))
    x, y = data(64, 64)
    losses = train(model, [(x, y)] * 3)
    step = median_step(lambda: train(model, [(x, y)]), 15)
    report(losses=losses, parameters=parameters(model), step=step)


def fsdp2(_: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = mlp(64, 6)
    fully_shard(model, mesh=mesh)
    x, y = data(64, 64)
    losses = train(model, [(x, y)] * 3)
    step = median_step(lambda: train(model, [(x, y)]), 15)
    report(losses=losses, parameters=parameters(model), step=step)


def tensor_parallel(_: str) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x, _ = data(16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return round(float(loss), 6)

    losses = [step() for _ in range(3)]
    report(losses=losses, parameters=parameters(model), step=median_step(step, 15))


def _sharded(n: int) -> tuple[nn.Module, Any]:
    model = mlp(32, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (n,)))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def save(_: str) -> None:
    """A checkpoint of sharded parameters and optimizer, synchronous and in the background."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = _sharded(dist.get_world_size())
    x, y = data(16, 32)
    for _step in range(2):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=sys.argv[4])
    report(parameters=parameters(model))


def load(_: str) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = _sharded(dist.get_world_size())
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=sys.argv[4])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    report(parameters=parameters(model))


if __name__ == "__main__":
    dist.init_process_group(BACKEND, timeout=TIMEOUT)
    globals()[sys.argv[2]](sys.argv[3])
    dist.destroy_process_group()
