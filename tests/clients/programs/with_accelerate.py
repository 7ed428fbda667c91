"""Training, gathering and objects with Hugging Face accelerate."""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object, reduce, set_seed
from common import BACKEND, data, median_step, mlp, parameters, report
from torch.utils.data import DataLoader, TensorDataset

plugin: Any = None
if "fsdp2" in sys.argv:
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
accelerator = Accelerator(
    cpu=True, fsdp_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)]
)
set_seed(0)
model = mlp()
loader = DataLoader(TensorDataset(*data(60)), batch_size=8, shuffle=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _ in range(2):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(accelerator.gather(loss.detach().reshape(1)).mean().item(), 6))

model.eval()
predicted, labels = [], []
for x, y in loader:  # the last batch is uneven, which gather_for_metrics makes up for
    p, t = accelerator.gather_for_metrics((model(x).argmax(1), y))
    predicted += p.tolist()
    labels += t.tolist()
assert len(labels) == 60

rank = accelerator.process_index
objects = gather_object([{"rank": rank}])
total = reduce({"x": torch.ones(3) * (rank + 1)}, "sum")["x"].tolist()
with accelerator.main_process_first():
    pass
x, y = next(iter(loader))


def step() -> None:
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


report(
    losses=losses,
    predicted=predicted,
    objects=objects,
    total=total,
    parameters=parameters(model),
    step=median_step(step, 15),
    state=str(accelerator.distributed_type),
)
accelerator.end_training()
