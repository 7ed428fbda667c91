"""transformers' Trainer with evaluation on a small random model."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from common import BACKEND, parameters, report
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

set_seed(0)
config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)


class Sentences(Dataset):
    def __len__(self) -> int:
        return 44

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(12) * (i + 3)) % 64
        return {
            "input_ids": words,
            "attention_mask": torch.ones_like(words),
            "labels": torch.tensor(i % 3),
        }


class Clock(TrainerCallback):
    """The time of each step."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.took.append(time.perf_counter() - self.start)


clock = Clock()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        use_cpu=True,
        ddp_backend=BACKEND,
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        dataloader_num_workers=0,
    ),
    train_dataset=Sentences(),
    eval_dataset=Sentences(),
    compute_metrics=lambda got: {
        "right": float((got.predictions.argmax(-1) == got.label_ids).mean())
    },
    callbacks=[clock],
)
trainer.train()
evaluated = trainer.evaluate()
history = [
    {k: round(v, 5) for k, v in entry.items() if k in ("loss", "eval_loss", "eval_right")}
    for entry in trainer.state.log_history
]
assert not math.isnan(evaluated["eval_loss"])
took = sorted(clock.took[3:])
report(
    history=[entry for entry in history if entry],
    parameters=parameters(model)[:4],
    step=took[len(took) // 2],
)
dist.destroy_process_group()
