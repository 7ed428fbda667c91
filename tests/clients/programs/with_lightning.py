"""Lightning: Trainer and Fabric."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from common import BACKEND, data, median_step, mlp, parameters, report
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

HALF_A_MINUTE = timedelta(seconds=30)
L.seed_everything(0, verbose=False)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)
        self.took: list[float] = []
        self.losses: list[float] = []
        self.start = 0.0

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(round(loss.item(), 6))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.took.append(time.perf_counter() - self.start)


def train() -> None:
    model = Classifier()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist_size(),
        strategy=DDPStrategy(process_group_backend=BACKEND, timeout=HALF_A_MINUTE),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(TensorDataset(*data()), batch_size=4)
    trainer.fit(model, loader, loader)
    took = sorted(model.took[3:])
    report(
        losses=model.losses,
        metrics={k: round(float(v), 6) for k, v in trainer.callback_metrics.items()},
        parameters=parameters(model),
        step=took[len(took) // 2],
        strategy=trainer.strategy._process_group_backend,
    )


def with_fabric() -> None:
    fabric = L.Fabric(
        accelerator="cpu",
        devices=dist_size(),
        strategy=FabricDDP(process_group_backend=BACKEND, timeout=HALF_A_MINUTE),
    )
    fabric.launch()
    model = mlp()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*data()), batch_size=4))
    losses = []

    def step(x: Any, y: Any) -> None:
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(fabric.all_reduce(loss.detach()).item(), 6))

    for x, y in loader:
        step(x, y)
    gathered = fabric.all_gather(torch.tensor([float(fabric.global_rank)])).flatten().tolist()
    said = fabric.broadcast({"from": fabric.global_rank}, src=1)
    fabric.barrier()
    report(
        losses=list(losses),
        gathered=gathered,
        said=said,
        parameters=parameters(model),
        step=median_step(lambda: step(x, y), 15),
    )


def dist_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


with_fabric() if "fabric" in sys.argv else train()
dist.destroy_process_group()
