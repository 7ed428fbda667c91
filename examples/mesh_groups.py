"""Communicate along one dimension of a device mesh at a time.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/mesh_groups.py

Four ranks form a 2 x 2 mesh; each belongs to one group per dimension:

                 tp=0    tp=1
         dp=0   rank 0  rank 1     groups along tp: {0, 1} and {2, 3}
         dp=1   rank 2  rank 3     groups along dp: {0, 2} and {1, 3}

Expected output:

    [rank 0] tp gather [0, 1]  dp gather [0, 2]  tp sum 1  dp sum 2  swapped along tp 1
    [rank 1] tp gather [0, 1]  dp gather [1, 3]  tp sum 1  dp sum 4  swapped along tp 0
    [rank 2] tp gather [2, 3]  dp gather [0, 2]  tp sum 5  dp sum 2  swapped along tp 3
    [rank 3] tp gather [2, 3]  dp gather [1, 3]  tp sum 5  dp sum 4  swapped along tp 2
"""

import torch
import torch.distributed as dist
from reporting import print_by_rank
from torch.distributed.device_mesh import init_device_mesh

import torch_c10d_ext.functional as fc

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
rank = torch.tensor([dist.get_rank()])

# A group can be a 1-D mesh, (mesh, dimension), a ProcessGroup, its name, or lists of ranks.
tp_gather = fc.all_gather_single(rank, 0, mesh["tp"])
dp_gather = fc.all_gather_single(rank, 0, (mesh, 0))
tp_sum = fc.all_reduce(rank, "sum", mesh.get_group("tp"))
dp_sum = fc.all_reduce(rank, "sum", [[0, 2], [1, 3]])
swapped = fc.permute_tensor(rank, [1, 0], mesh["tp"])  # ranks within the group: 0 -> 1, 1 -> 0

print_by_rank(
    f"tp gather {tp_gather.tolist()}  dp gather {dp_gather.tolist()}  "
    f"tp sum {tp_sum.item()}  dp sum {dp_sum.item()}  swapped along tp {swapped.item()}"
)
dist.destroy_process_group()
