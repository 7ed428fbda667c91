"""The pass over Inductor's kernels: what it reads of them, and the orders that it gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_c10d_ext
from tests.harness.crew import crew
from tests.optimizer.graphs import join_fake_world
from tests.optimizer.test_compilers import SETTINGS
from torch_c10d_ext.optimizer import _inductor

RANKS = 2
GROUP = "0"
DEADLINE = 200.0

ext, native = torch.ops.c10d_ext, torch.ops._c10d_functional


def _gathers(space: Any) -> Callable[..., Tensor]:
    def step(x: Tensor, shards: list[Tensor]) -> Tensor:
        for shard in shards:
            w = space.wait_tensor(space.all_gather_into_tensor(shard, RANKS, GROUP))
            x = torch.relu(x @ w) + x
        return x

    return step


def _gradients(space: Any) -> Callable[..., list[Tensor]]:
    def step(x: Tensor, shards: list[Tensor]) -> list[Tensor]:
        given = [space.all_reduce(x @ torch.cat([s, s]), "sum", GROUP) for s in shards]
        return [space.wait_tensor(g) * 2 for g in given]

    return step


def _exchanges(space: Any) -> Callable[..., list[Tensor]]:
    def step(x: Tensor, shards: list[Tensor]) -> list[Tensor]:
        even = [x.shape[0] // RANKS] * RANKS
        sent = [space.all_to_all_single(x * k, even, even, GROUP) for k in range(1, 4)]
        return [space.wait_tensor(y) @ torch.cat([shards[0], shards[0]]) for y in sent]

    return step


PROGRAMS = [_gathers, _gradients, _exchanges]


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _read(bucket: bool) -> int:
    """Each program's kernels are read in full; how many programs got another order."""
    from torch._inductor import ir

    join_fake_world(RANKS)
    heard = _Heard()
    logging.getLogger("torch_c10d_ext").addHandler(heard)
    moved = 0
    seen: list[tuple[list[Any], Any, Any]] = []
    read, order_of = _inductor._problem_of, _inductor._order_of

    def problem_of(kernels: list[Any], costs: Any) -> Any:
        p = read(kernels, costs)
        seen.append((kernels, p, None))
        return p

    def noted(kernels: list[Any], settings: Any) -> Any:
        order = order_of(kernels, settings)
        seen[-1] = (*seen[-1][:2], order)
        return order

    x = torch.ones(128, 64)
    shards = [torch.ones(64 // RANKS, 64) for _ in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_inductor, "_problem_of", problem_of)
        patch.setattr(_inductor, "_order_of", noted)
        for program in PROGRAMS:
            for space in (ext, native):
                seen.clear()
                torch._dynamo.reset()
                options = torch_c10d_ext.communication_options(bucket=bucket, **SETTINGS)
                with torch._inductor.config.patch(fx_graph_cache=False):
                    torch.compile(program(space), fullgraph=True, options=options)(x, shards)
                assert seen, program.__name__
                for kernels, p, order in seen:
                    inner = [n.node for k in kernels for n in k.get_nodes()]
                    waits = [k for k in inner if isinstance(k, ir._WaitKernel)]
                    starts = [
                        k
                        for k in inner
                        if isinstance(k, ir._CollectiveKernel) and not isinstance(k, ir._WaitKernel)
                    ]
                    assert starts
                    assert waits
                    assert len(p.collectives) == len(starts)
                    assert len(p.started_by) == len(waits)
                    assert set(p.started_by.values()) == set(p.collectives)
                    if order is None:
                        continue
                    moved += 1
                    # Starts keep their order: another one might differ between ranks.
                    assert [i for i in order if i in p.collectives] == sorted(p.collectives)
    logging.getLogger("torch_c10d_ext").removeHandler(heard)
    assert not heard.said
    return moved


@pytest.mark.parametrize("bucket", [False, True])
def test_kernels_are_read_in_full(bucket: bool) -> None:
    with crew(1, "gloo") as made:
        made.start(0, _read, bucket)
        moved = made.result(0, deadline=DEADLINE)
    assert moved > 0
