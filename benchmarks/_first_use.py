"""What runs on a rank to time the first use of a result that is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as theirs

from benchmarks._ranks import time_calls
from torch_c10d_ext import functional as ours

# Of every block: so many results are made, and each is used once.
COUNT = 200
SIZE = 8

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "y + 1": lambda y: y + 1,
    "y.view(2, 1)": lambda y: y.view(2, 1),
    "y.wait()": lambda y: y.wait(),  # type: ignore[attr-defined]
}
CALL_AND_USE = "F.all_reduce(x), then y + 1"


def block(use: str, maker: str) -> float:
    """Seconds per first use on rank 0: of ``plain`` tensors, ``torch``'s results or ``ours``."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(SIZE // 4)
    functional = theirs if maker == "torch" else ours
    if use == CALL_AND_USE:
        dist.barrier()
        return time_calls(lambda: functional.all_reduce(x, "sum", group) + 1, COUNT)[0] / COUNT
    if maker == "plain":
        results = [x.clone() for _ in range(COUNT)]
    else:
        dist.barrier()
        if group.rank() != 0:
            time.sleep(0.01)  # so that rank 0's are in flight when they are made
        results = [functional.all_reduce(x, "sum", group) for _ in range(COUNT)]
        dist.barrier()
        time.sleep(0.002)
    if group.rank() != 0:
        return 0.0
    fn = USES[use]
    began = time.perf_counter()
    for y in results:
        fn(y)
    taken = time.perf_counter() - began
    if maker != "plain":
        kinds = {type(y).__name__ for y in results}
        assert kinds == {"AsyncCollectiveTensor"}, kinds
    return taken / COUNT
