"""Accelerate, transformers, Lightning, torchmetrics and DeepSpeed, as their users run them.

Each program runs on gloo, on shm by name and, unmodified, on gloo under the switch. What gloo gives
is what the others must give.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clients.launch import on_every_way


def texts(said: Any) -> Any:
    """The texts in it, which are compared as they are; numbers may differ by their rounding."""
    if isinstance(said, dict):
        return {name: texts(value) for name, value in said.items()}
    if isinstance(said, list):
        return [texts(value) for value in said]
    return said if isinstance(said, str) else None


def numbers(said: Any) -> Any:
    """The same without the texts."""
    if isinstance(said, dict):
        return {name: numbers(value) for name, value in said.items()}
    if isinstance(said, list):
        return [numbers(value) for value in said]
    return 0 if isinstance(said, str) else said


def same(program: str, *arguments: str, ranks: int = 2, ignored: tuple[str, ...] = ()) -> Any:
    """Gloo's results by rank, which those of the other ways have turned out to be."""
    said = on_every_way(program, arguments, ranks)
    for results in said.values():
        for result in results:
            for name in ("step", *ignored):
                result.pop(name, None)
    for way in ("shm", "switched"):
        assert texts(said[way]) == texts(said["gloo"])
        torch.testing.assert_close(numbers(said[way]), numbers(said["gloo"]), rtol=1e-5, atol=2e-6)
    return said["gloo"]


@pytest.mark.parametrize("ranks", (2, 3))
def test_accelerate(ranks: int) -> None:
    results = same("with_accelerate.py", ranks=ranks)
    losses = results[0]["losses"]
    assert sum(losses[len(losses) // 2 :]) < sum(losses[: len(losses) // 2])
    assert results[0]["objects"] == [{"rank": rank} for rank in range(ranks)]
    assert results[0]["state"] == "DistributedType.MULTI_CPU"


def test_accelerate_with_an_fsdp2_plugin() -> None:
    results = same("with_accelerate.py", "fsdp2")
    # accelerate 1.15 shards on accelerators alone, and trains with DDP here, on gloo alike. FSDP2
    # itself is in test_torch.py.
    assert results[0]["state"] == "DistributedType.MULTI_CPU"
    losses = results[0]["losses"]
    assert sum(losses[len(losses) // 2 :]) < sum(losses[: len(losses) // 2])


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
