"""torchmetrics: states of every kind that ranks put together, of even and of uneven sizes."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torchmetrics
from common import BACKEND, median_step, report

dist.init_process_group(BACKEND)
rank = dist.get_rank()
generator = torch.Generator().manual_seed(rank)
scores = torch.rand(20 + 3 * rank, generator=generator)
labels = (torch.rand(20 + 3 * rank, generator=generator) > 0.5).long()
metrics = torchmetrics.MetricCollection(
    {
        "accuracy": torchmetrics.Accuracy(task="binary"),
        "auroc": torchmetrics.AUROC(task="binary"),  # lists, of uneven sizes
        "mean": torchmetrics.MeanMetric(),
        "largest": torchmetrics.MaxMetric(),
        "all": torchmetrics.CatMetric(),
        "pearson": torchmetrics.PearsonCorrCoef(),
    }
)
for name, metric in metrics.items():
    if name in ("accuracy", "auroc"):
        metric.update(scores, labels)
    elif name == "pearson":
        metric.update(scores, labels.float())
    else:
        metric.update(scores)


def compute() -> dict[str, torch.Tensor]:
    for metric in metrics.values():
        metric._computed = None
    return metrics.compute()


got = {name: value.flatten().double().tolist() for name, value in compute().items()}
report(
    metrics={name: [round(v, 6) for v in values] for name, values in got.items()},
    step=median_step(compute, 5),
)
dist.destroy_process_group()
