"""DeepSpeed's engine with ZeRO."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import BACKEND, data, median_step, mlp, parameters, report

# Its own all_reduce of the CPU, for inference alone, which it would compile here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend=BACKEND, verbose=False)
stage = int(sys.argv[2])
model = mlp()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    },
)
x, y = data()
rank, n = dist.get_rank(), dist.get_world_size()
losses: list[float] = []


def step(part: slice = slice(0, 8)) -> None:
    loss = F.cross_entropy(engine(x[part]), y[part])
    engine.backward(loss)
    engine.step()
    losses.append(round(loss.item(), 6))


for first in range(8 * rank, len(x), 8 * n):
    step(slice(first, first + 8))
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    trained = parameters(model)
report(losses=list(losses), parameters=trained, step=median_step(step, 15))
dist.destroy_process_group()
