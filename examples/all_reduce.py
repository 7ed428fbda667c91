"""Sum a tensor over the ranks: eagerly, without waiting, and inside a compiled function.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/all_reduce.py

Expected output:

    [rank 0] eager [3.0, 3.0, 3.0], compiled [4.0, 4.0, 4.0]
    [rank 1] eager [3.0, 3.0, 3.0], compiled [4.0, 4.0, 4.0]
"""

import torch
import torch.distributed as dist
from reporting import print_by_rank

import torch_c10d_ext.functional as fc


@torch.compile(fullgraph=True)
def mean_plus_one(x: torch.Tensor) -> torch.Tensor:
    return fc.all_reduce(x * 2, "avg", group=None) + 1  # None: the default group


dist.init_process_group("gloo")
x = torch.full((3,), float(dist.get_rank() + 1))

total = fc.all_reduce(x, "sum", group=None)  # returns at once; the sum is on its way
work_meanwhile = x.square().sum()  # runs while the ranks communicate
# The first real use of `total` waits for it; fc.wait_tensor(total) would do so explicitly.
print_by_rank(f"eager {total.tolist()}, compiled {mean_plus_one(x).tolist()}")

dist.destroy_process_group()
