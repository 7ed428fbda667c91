"""Train one model on the ranks of two hosts, by data parallelism.

    python examples/train_over_two_hosts.py

starts four ranks of this machine and gives them two names of hosts, so that they find each other as
ranks of two machines do: shared memory inside each host, gloo between them. On two machines
torchrun starts the same `train` on each, without those names (docs/multi-host.md).

`--engine mpi` has MPI between the hosts, where `pip install mpich` has been done.

Expected output:

    [rank 0 on a] shm+gloo over hosts [[0, 1], [2, 3]]
    [rank 1 on a] shm+gloo over hosts [[0, 1], [2, 3]]
    [rank 2 on b] shm+gloo over hosts [[0, 1], [2, 3]]
    [rank 3 on b] shm+gloo over hosts [[0, 1], [2, 3]]
    the loss fell, and all ranks have the same weights to the bit
"""

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_c10d_ext

RANKS, STEPS = 4, 30
NAME = "TORCH_C10D_EXT_SHM_HOST"


def train(rank: int, port: int) -> None:
    """What every rank does. torchrun would say who meets where: ``init_process_group("shm")``."""
    store = dist.TCPStore("localhost", port)
    dist.init_process_group("shm", store=store, rank=rank, world_size=RANKS)
    hosts = dist.group.WORLD._get_backend(torch.device("cpu")).inner.hosts
    lines = [None] * RANKS
    dist.all_gather_object(
        lines,
        f"[rank {rank} on {os.environ[NAME]}] {torch_c10d_ext.backend_of()} over hosts {hosts}",
    )

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    teacher = torch.nn.Linear(64, 8)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(1 + rank)  # each rank has a part of its own
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, 64, generator=data)
        loss = torch.nn.functional.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        losses.append(loss.item())

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everybodys = [torch.empty_like(weights) for _ in range(RANKS)]
    dist.all_gather(everybodys, weights)
    assert losses[-1] < losses[0] / 2, losses
    assert all(torch.equal(weights, other) for other in everybodys)
    if rank == 0:
        print(*lines, sep="\n")
        print("the loss fell, and all ranks have the same weights to the bit", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks, two on each of two hosts; or is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="gloo", help="what carries data between hosts")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.rank, options.port)
        return
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, "--port", str(store.port)]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                NAME: "a" if rank < RANKS // 2 else "b",
                "TORCH_C10D_EXT_SHM_BETWEEN_HOSTS": options.engine,
            },
        )
        for rank in range(RANKS)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
