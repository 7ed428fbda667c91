"""Accelerate, transformers, Lightning, torchmetrics and DeepSpeed, as their users run them.

Each program runs on gloo, on shm by name and, unmodified, on gloo under the switch. What gloo gives
is what the others must give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clients.launch import on_every_way


def same(program: str, *arguments: str, ranks: int = 2, ignored: tuple[str, ...] = ()) -> Any:
    """Gloo's results by rank, which those of the other ways have turned out to be."""
    said = on_every_way(program, arguments, ranks)
    for results in said.values():
        for result in results:
            for name in ("step", *ignored):
                result.pop(name, None)
    for way in ("shm", "switched"):
        torch.testing.assert_close(said[way], said["gloo"], rtol=1e-5, atol=2e-6)
    return said["gloo"]


@pytest.mark.parametrize("ranks", (2, 3))
def test_accelerate(ranks: int) -> None:
    results = same("with_accelerate.py", ranks=ranks)
    assert results[0]["losses"][-1] < results[0]["losses"][0]
    assert results[0]["objects"] == [{"rank": rank} for rank in range(ranks)]
    assert results[0]["state"] == "DistributedType.MULTI_CPU"


def test_accelerate_with_fsdp2() -> None:
    results = same("with_accelerate.py", "fsdp2")
    assert results[0]["state"] == "DistributedType.FSDP"
    assert results[0]["losses"][-1] < results[0]["losses"][0]


def test_transformers_trainer() -> None:
    results = same("with_transformers.py")
    history = results[0]["history"]
    assert [e for e in history if "eval_loss" in e]
    assert [e for e in history if "loss" in e]


def test_lightning_trainer() -> None:
    results = same("with_lightning.py", ignored=("strategy",))
    assert set(results[0]["metrics"]) == {"loss", "accuracy"}
    assert results[0]["metrics"] == results[1]["metrics"]


def test_lightning_fabric() -> None:
    results = same("with_lightning.py", "fabric")
    assert results[0]["gathered"] == [0.0, 1.0]
    assert results[0]["said"] == {"from": 1}


@pytest.mark.parametrize("ranks", (2, 3))
def test_torchmetrics(ranks: int) -> None:
    results = same("with_torchmetrics.py", ranks=ranks)
    assert all(result == results[0] for result in results)
    assert len(results[0]["metrics"]["all"]) == sum(20 + 3 * rank for rank in range(ranks))


@pytest.mark.parametrize("stage", (1, 3))
def test_deepspeed(stage: int) -> None:
    results = same("with_deepspeed.py", str(stage))
    assert results[0]["parameters"] == results[1]["parameters"]
