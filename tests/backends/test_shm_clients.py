"""What torch itself builds on its process groups runs on shm unchanged.

Each client is a function that returns plain data; it must give the same on shm as on gloo, and,
where one process can compute the same, as that.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from tests.harness import run

ROOT = Path(__file__).resolve().parent.parent.parent


def same_as_gloo(fn: Callable[..., Any], *args: Any, size: int = 2, tolerance: float = 1e-5) -> Any:
    """Run a client on both backends; shm's results by rank."""
    ours = run(size, fn, *args, backend="shm")
    theirs = run(size, fn, *args, backend="gloo")
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return ours


class Net(nn.Module):
    """Several buckets, a buffer, and a branch that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 40)
        self.norm = nn.BatchNorm1d(40)
        self.side = nn.Linear(40, 40)
        self.down = nn.Linear(40, 3)

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        y = F.relu(self.norm(self.up(x)))
        return self.down(self.side(y) if side else y)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(rank: int, step: int = 0, rows: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 6, dtype=torch.float64, generator=generator)


def state(module: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in module.state_dict().values()]


def train(model: nn.Module, optimizer: Any, steps: int = 3, side: bool = True) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(dist.get_rank(), step), side).square().mean().backward()
        optimizer.step()


# --- data parallel -------------------------------------------------------------------------------


def _ddp(kind: str) -> Any:
    model = net()
    options: dict[str, Any] = {"bucket_cap_mb": 0.002}
    side = True
    if kind == "static graph":
        options["static_graph"] = True
    elif kind == "bucket views":
        options["gradient_as_bucket_view"] = True
    elif kind == "unused parameters":
        options["find_unused_parameters"] = True
        side = False
    elif kind == "powerSGD hook":
        options["bucket_cap_mb"] = 25
    ddp = DDP(model, **options)
    if kind == "allreduce hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    elif kind == "bfloat16 hook":
        # By another name: torch takes its own for CUDA alone.
        hook = default_hooks.bf16_compress_hook
        ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    elif kind == "float16 hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "powerSGD hook":
        # It communicates in callbacks, in an order that only a single bucket makes the same on all
        # ranks; gloo's ranks hang otherwise.
        powers = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        ddp.register_comm_hook(powers, powerSGD_hook.powerSGD_hook)
    elif kind == "builtin hook":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, side=side)
    return state(model)


@pytest.mark.parametrize(
    "kind",
    (
        *("plain", "static graph", "bucket views", "unused parameters", "allreduce hook"),
        *("builtin hook", "bfloat16 hook", "float16 hook", "powerSGD hook"),
    ),
)
def test_ddp(kind: str) -> None:
    by_rank = same_as_gloo(_ddp, kind)
    parameters = [i for i, (name, _) in enumerate(net().state_dict().items()) if "norm" not in name]
    for i in parameters:
        assert torch.equal(by_rank[0][i], by_rank[1][i])


def _ddp_against_one_process() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    ddp = DDP(copy.deepcopy(alone), bucket_cap_mb=0.001)
    for step in range(2):
        # Gradients of two micro batches add up before they are reduced.
        with ddp.no_sync():
            ddp(batch(rank, 10 + step)).square().mean().backward()
        ddp(batch(rank, step)).square().mean().backward()
        for r in range(n):
            for s in (10 + step, step):
                (alone(batch(r, s)).square().mean() / n).backward()
        for p, q in zip(alone.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", (2, 4))
def test_ddp_accumulates_and_averages(size: int) -> None:
    run(size, _ddp_against_one_process, backend="shm")


def _ddp_in_mixed_precision() -> Any:
    model = net().float()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(batch(dist.get_rank(), step).float()).square().mean()
        loss.backward()
        optimizer.step()
    low = DDP(net().bfloat16())
    low(batch(dist.get_rank()).bfloat16()).square().mean().backward()
    return state(model), [p.grad.clone() for p in low.parameters()]


def test_ddp_in_mixed_precision() -> None:
    same_as_gloo(_ddp_in_mixed_precision, tolerance=1e-2)


def _joins_with_uneven_inputs() -> Any:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    ddp = DDP(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with Join([ddp, optimizer]):
        for step in range(2 + 3 * rank):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()
    with ddp.join():
        for step in range(4 - rank):
            ddp(batch(rank, step)).square().mean().backward()
    return state(model)


def test_joins_with_uneven_inputs() -> None:
    same_as_gloo(_joins_with_uneven_inputs)


def _zero_redundancy_optimizer() -> Any:
    rank = dist.get_rank()
    model, alone = net(), net()
    ddp = DDP(model)
    sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    whole = torch.optim.Adam(alone.parameters(), lr=0.01)
    train(ddp, sharded)
    other = DDP(alone)
    train(other, whole)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
    sharded.consolidate_state_dict(to=1)
    if rank == 1:
        assert len(sharded.state_dict()["state"]) == len(list(model.parameters()))
    return [p.detach().clone() for p in model.parameters()]


def test_zero_redundancy_optimizer() -> None:
    same_as_gloo(_zero_redundancy_optimizer)


# --- sharded -------------------------------------------------------------------------------------


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 3)
    )


def _fully_sharded(mixed: bool, hybrid: bool) -> Any:
    n, rank = dist.get_world_size(), dist.get_rank()
    shape, names = ((2, n // 2), ("replicate", "shard")) if hybrid else ((n,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, alone = _mlp(), _mlp()
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, alone)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(rank, step).float()).square().mean().backward()
        for r in range(n):
            (alone(batch(r, step).float()).square().mean() / n).backward()
        for optimizer in optimizers:
            optimizer.step()
    parameters = []
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(p, DTensor)
        full = p.full_tensor()
        torch.testing.assert_close(full, q, rtol=0.05, atol=0.03 if mixed else 1e-5)
        parameters.append(full.detach())
    return parameters


@pytest.mark.parametrize(
    ("size", "mixed", "hybrid"), [(2, False, False), (2, True, False), (4, False, True)]
)
def test_fully_shard(size: int, mixed: bool, hybrid: bool) -> None:
    same_as_gloo(_fully_sharded, mixed, hybrid, size=size, tolerance=2e-2 if mixed else 1e-5)


def _redistributes() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(7 * 10, dtype=torch.float64).reshape(7, 10)
    kinds = [Shard(0), Shard(1), Replicate()]
    for given in kinds:
        for wanted in kinds:
            x = distribute_tensor(whole, mesh, [given]).redistribute(mesh, [wanted])
            want = distribute_tensor(whole, mesh, [wanted], src_data_rank=None)
            assert torch.equal(x.to_local(), want.to_local()), (given, wanted)
            assert torch.equal(x.full_tensor(), whole)
    for wanted in kinds:
        for op in ("sum", "avg", "max"):
            part = DTensor.from_local(whole * (rank + 1), mesh, [Partial(op)])
            factor = {"sum": n * (n + 1) / 2, "avg": (n + 1) / 2, "max": n}[op]
            assert torch.equal(part.redistribute(mesh, [wanted]).full_tensor(), whole * factor)
    a, b = (
        distribute_tensor(whole, mesh, [Shard(1)]),
        distribute_tensor(whole.t(), mesh, [Shard(0)]),
    )
    torch.testing.assert_close((a @ b).full_tensor(), whole @ whole.t())


@pytest.mark.parametrize("size", (2, 4))
def test_dtensor_redistribute(size: int) -> None:
    run(size, _redistributes, backend="shm")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _tensor_parallel(sequence: bool) -> None:
    n = dist.get_world_size()
    torch.manual_seed(0)
    alone = Block().double()
    x = torch.randn(2, 4 * n, 8, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (n,))
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    model = parallelize_module(copy.deepcopy(alone), mesh, plan)
    given: Any = distribute_tensor(x, mesh, [Shard(1)]) if sequence else x
    y = model(given.to_local() if sequence else given)
    y.square().sum().backward()
    want = alone(x)
    want.square().sum().backward()
    got = DTensor.from_local(y, mesh, [Shard(1)]).full_tensor() if sequence else y
    torch.testing.assert_close(got, want)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        if not sequence:
            torch.testing.assert_close(grad, q.grad)


@pytest.mark.parametrize("sequence", (False, True))
def test_tensor_parallel(sequence: bool) -> None:
    run(2, _tensor_parallel, sequence, backend="shm")


def _meshes() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, mates in (
        ("dp", [rank % 2, rank % 2 + 2]),
        ("tp", [rank // 2 * 2, rank // 2 * 2 + 1]),
    ):
        group = mesh.get_group(name)
        assert dist.get_backend(group) == "shm"
        assert dist.get_process_group_ranks(group) == mates
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        assert x == sum(mates)
    flat = mesh._flatten("all")
    x = torch.ones(1)
    dist.all_reduce(x, group=flat.get_group())
    assert x == 4
    torch.manual_seed(0)
    module = parallelize_module(
        nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Tanh()),
        mesh["tp"],
        {"0": ColwiseParallel(), "1": RowwiseParallel()},
    )
    fully_shard(module, mesh=mesh["dp"])
    module(torch.randn(3, 8)).sum().backward()
    distributed = distribute_module(nn.Linear(4, 4), mesh["tp"])
    assert isinstance(distributed.weight, DTensor)


def test_two_dimensional_mesh() -> None:
    run(4, _meshes, backend="shm")


# --- checkpoints and objects ---------------------------------------------------------------------


def _saves_and_loads(directory: str) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(35.0).reshape(7, 5)
    saved = {"x": distribute_tensor(whole, mesh, [Shard(0)]), "y": torch.ones(3) * 7, "z": "text"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp warns about itself
        dcp.save(saved, checkpoint_id=f"{directory}/first")
        # Read back sharded another way.
        loaded = {
            "x": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)]),
            "y": torch.zeros(3),
            "z": "",
        }
        dcp.load(loaded, checkpoint_id=f"{directory}/first")
        assert torch.equal(loaded["x"].full_tensor(), whole)
        assert torch.equal(loaded["y"], saved["y"]) and loaded["z"] == "text"
        dcp.async_save(saved, checkpoint_id=f"{directory}/second").result(timeout=30)
        loaded["x"] = distribute_tensor(torch.zeros_like(whole), mesh, [Replicate()])
        dcp.load(loaded, checkpoint_id=f"{directory}/second")
        assert torch.equal(loaded["x"].to_local(), whole)
    assert rank < n


def test_distributed_checkpoint(tmp_path: Path) -> None:
    run(2, _saves_and_loads, str(tmp_path), backend="shm")


def _objects() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()

    def thing(r: int) -> Any:
        return {"rank": r, "data": list(range(1000 * r)), "tensor": torch.arange(3.0) + r}

    def check(got: Any, r: int) -> None:
        assert got["rank"] == r and len(got["data"]) == 1000 * r
        assert torch.equal(got["tensor"], torch.arange(3.0) + r)

    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, thing(rank))
    for r in range(n):
        check(gathered[r], r)
    gathered = [None] * n
    dist.gather_object(thing(rank), gathered if rank == 1 else None, dst=1)
    if rank == 1:
        for r in range(n):
            check(gathered[r], r)
    shared = [thing(5), "text"] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    check(shared[0], 5)
    assert shared[1] == "text"
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [thing(r) for r in range(n)] if rank == 0 else None, src=0)
    check(mine[0], rank)
    if rank == 0:
        dist.send_object_list([thing(3)], dst=1)
    elif rank == 1:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=0)
        check(received[0], 3)


@pytest.mark.parametrize("size", (2, 4))
def test_object_collectives(size: int) -> None:
    run(size, _objects, backend="shm")


def _functional_collectives() -> Any:
    n, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    x = torch.arange(4.0 * n).reshape(2 * n, 2) + 100 * rank
    all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    uneven = ([2, 0], [3, 0]) if rank else ([1, 3], [1, 2])
    results = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_reduce(x, "max", group),
        funcol.broadcast(x, 1, group),
        all_gather(x, 0, group),
        all_gather(x, 1, group),
        reduce_scatter(x, "sum", 0, group),
        funcol.all_to_all_single(x, None, None, group),
        funcol.all_to_all_single(x[:3], *uneven, group),
        funcol.permute_tensor(x[:, 0].contiguous(), [(r + 1) % n for r in range(n)], group),
        *funcol.all_reduce_coalesced([x, 2 * x], "sum", group),
    ]
    leaf = x.clone().requires_grad_()
    y = funcol.all_reduce(leaf, "sum", group)
    y.wait().square().sum().backward() if hasattr(y, "wait") else y.square().sum().backward()
    return [(y.wait() if hasattr(y, "wait") else y).clone().detach() for y in results], leaf.grad


def _compiled_functional_collectives() -> Any:
    group = dist.group.WORLD

    def f(x: Tensor) -> Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        return funcol.broadcast(y + 1, 0, group) * 3

    x = torch.arange(6.0) + dist.get_rank()
    return torch.compile(f, fullgraph=True)(x).clone()


def test_functional_collectives_of_torch() -> None:
    same_as_gloo(_functional_collectives)
    same_as_gloo(_compiled_functional_collectives)


# --- ways to start -------------------------------------------------------------------------------

PROGRAM = """
import datetime, os, sys
import torch, torch.distributed as dist
import torch_c10d_ext

def main(rank=None):
    kwargs = {} if rank is None else dict(
        rank=rank, world_size=2, init_method=f"file://{sys.argv[2]}"
    )
    dist.init_process_group(sys.argv[1], timeout=datetime.timedelta(seconds=30), **kwargs)
    x = torch.arange(1000.0) + dist.get_rank()
    dist.all_reduce(x)
    assert torch.equal(x, 2 * torch.arange(1000.0) + 1)
    y = torch.ops.c10d_ext.all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name)
    assert torch.ops.c10d_ext.wait_tensor(y).tolist() == [2, 2, 2]
    dist.barrier()
    os.write(1, f"fine {dist.get_rank()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torch.multiprocessing.spawn(main, nprocs=2)
"""


@pytest.mark.long
@pytest.mark.parametrize("starter", ("torchrun", "mp.spawn"))
def test_started_by(starter: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable]
    if starter == "torchrun":
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [
            *launcher,
            str(program),
            "cpu:shm,cuda:gloo" if starter == "torchrun" else "shm",
            str(tmp_path / "f"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),  # where the starters leave what they write
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == ["fine 0", "fine 1"]


# --- detail mode ---------------------------------------------------------------------------------


def _ddp_with_a_dropped_group() -> None:
    """A model's group may go while another is in use."""
    group = dist.new_group()
    ddp = DDP(net(), process_group=group)
    ddp(batch(dist.get_rank())).sum().backward()
    with contextlib.suppress(AttributeError):
        ddp.reducer._remove_autograd_hooks()
    del ddp
    dist.destroy_process_group(group)
    dist.barrier()


def test_groups_of_models_come_and_go() -> None:
    run(2, _ddp_with_a_dropped_group, backend="shm")
