"""Export a model with collectives to a file and run the file in fresh processes.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/export_and_run.py

The ranks export a model whose batch size is dynamic, and rank 0 saves it. Then every rank starts
a new Python that knows nothing of the model's code: it forms a process group of its own, loads
the file and runs it on another batch size. The exported graph refers to its group by name, so a
group of that name (here "0", the default group) must exist where it runs.

Expected output:

    [rank 0] exported calls: all_reduce, all_gather_into_tensor
    [rank 1] exported calls: all_reduce, all_gather_into_tensor
    [rank 0] fresh process: 3 rows in, (6, 2) out, equal to the model: True
    [rank 1] fresh process: 3 rows in, (6, 2) out, equal to the model: True
"""

import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from reporting import print_by_rank

import torch_c10d_ext.functional as fc


class CentredRows(torch.nn.Module):
    """Project this rank's rows, subtract the mean over all ranks' rows, gather everyone's."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(8.0).reshape(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        y = y - fc.all_reduce(y.mean(0), "avg", group=None)
        return fc.all_gather_single(y, 0, group=None)


def rows(count: int) -> torch.Tensor:
    """This rank's input: different on every rank."""
    return torch.arange(count * 4.0).reshape(count, 4) * (dist.get_rank() + 1)


def export(folder: Path):
    """Save the model to ``folder``, its result on 3 rows next to it."""
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(CentredRows(), (rows(5),), dynamic_shapes={"x": {0: batch}})
    calls = [str(n.target).split(".")[1] for n in program.graph.nodes if "c10d" in str(n.target)]
    print_by_rank("exported calls: " + ", ".join(c for c in calls if c != "wait_tensor"))
    if dist.get_rank() == 0:
        torch.export.save(program, folder / "model.pt2")
    torch.save(CentredRows()(rows(3)).detach(), folder / f"expected{dist.get_rank()}.pt")


def run_file(folder: Path, rank: int, world: int):
    """In a fresh process: form a new group, load the file, run it."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, timedelta(seconds=60), world_size=world, rank=rank)
    model = torch.export.load(folder / "model.pt2").module()
    result = model(rows(3))
    same = torch.equal(result, torch.load(folder / f"expected{rank}.pt"))
    print_by_rank(
        f"fresh process: 3 rows in, {tuple(result.shape)} out, equal to the model: {same}"
    )
    dist.destroy_process_group()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        dist.broadcast_object_list(shared, src=0)
        export(Path(shared[0]))
        dist.barrier()  # the file is complete
        command = [sys.executable, __file__, shared[0], str(rank), str(world)]
        subprocess.run(command, check=True, timeout=120)
        dist.barrier()  # nobody needs rank 0's folder any more
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        run_file(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
