"""Optimize the communication of a fully sharded step, and look at it before and after.

    python examples/optimize_communication.py

With a folder as its argument it draws two timelines there. No ranks are needed: one process is rank
0 of 4 in a fake world. Each layer's weight is gathered just before it is used, and its gradient is
scattered as soon as it is there, and waited for at once.

Expected output:

    step 6,166.0 -> 3,859.8 us, hidden 0% -> 95%, launches 16 -> 12
    peak 71,303,168 -> 71,303,168 bytes
    done: 2 all_gather_into_tensor of group '0' in 1 launches
    done: 5 reduce_scatter_tensor of group '0' in 2 launches
    done: 15 of 16 collectives have more to run beside
    not: 8 all_gather before a product in parts: its rows are summed over
    not: 8 reduce_scatter of a product in parts: floats need numerics='rounding'
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_c10d_ext
import torch_c10d_ext.functional as fc
from torch_c10d_ext import Compute, Link, communication_report

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)


def step(x, shards):
    shards = [shard.detach().requires_grad_() for shard in shards]
    for shard in shards:
        x = torch.relu(x @ fc.all_gather_tensor(shard, 0))
    return torch.autograd.grad(x.sum(), shards)


x = torch.empty(1024, 1024)
shards = [torch.empty(256, 1024) for _ in range(8)]
graph = make_fx(step, tracing_mode="fake")(x, shards)

costs: dict[str, Any] = dict(link=Link(latency=20e-6, bandwidth=20e9), compute=Compute(2e11, 2e13))
better = torch_c10d_ext.optimize(graph, **costs, explain=True)

if len(sys.argv) > 1:
    for name, each in (("before", graph), ("after", better)):
        communication_report(each, **costs).save(Path(sys.argv[1]) / f"optimizer-{name}.svg")

# The same inside torch.compile, on real ranks:
#   torch.compile(step, options=torch_c10d_ext.communication_options(**costs))
dist.destroy_process_group()
