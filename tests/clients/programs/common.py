"""What the programs have in common. None of them knows torch_c10d_ext."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BACKEND = sys.argv[1]


def mlp(width: int = 16, layers: int = 3, classes: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(width, classes))


def data(rows: int = 64, width: int = 16, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, width, generator=generator)
    return x, (x[:, :classes] * 3).argmax(1)


def parameters(model: nn.Module) -> list[list[float]]:
    """The parameters, whole, of which a rank may have a part."""
    whole = []
    for p in model.parameters():
        full = p.full_tensor() if hasattr(p, "full_tensor") else p
        whole.append([round(v, 6) for v in full.detach().double().flatten().tolist()[:16]])
    return whole


def median_step(step: Callable[[], Any], times: int) -> float:
    """Seconds."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return sorted(took)[len(took) // 2]


def report(**said: Any) -> None:
    """The last line: what the test compares, and what served the default group."""
    served = dist.group.WORLD._get_backend(torch.device("cpu")).name()  # type: ignore[union-attr]
    named = dist.get_backend()
    line = json.dumps({"served": served, "named": named, **said}) + "\n"
    # In one piece: under a launcher the ranks share a pipe, which keeps such pieces whole.
    assert len(line) <= select.PIPE_BUF, len(line)
    sys.stdout.flush()
    os.write(1, line.encode())
