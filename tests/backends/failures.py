"""How calls fail, as the tests of backends see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_c10d_ext import errors


class Report(NamedTuple):
    """A failure as a worker saw it."""

    kind: str
    text: str
    ranks: list[int]
    op: str
    seq: int
    at: float  # of the monotonic clock, which all processes share


def report(call: Callable[[], Any]) -> Report:
    """How `call` fails."""
    try:
        value = call()
    except errors.CollectiveError as error:
        at = time.monotonic()
        assert isinstance(error, dist.DistBackendError)
        assert f"group '{error.group}'" in str(error)
        return Report(type(error).__name__, str(error), error.ranks, error.op, error.seq, at)
    except (Exception, KeyboardInterrupt) as error:
        return Report(type(error).__name__, str(error), [], "", 0, time.monotonic())
    raise AssertionError(f"did not fail but returned {value!r}")


def check_works(group: dist.ProcessGroup | None = None) -> None:
    x = torch.tensor([float(2 ** dist.get_rank(group))])
    dist.all_reduce(x, group=group)
    assert x.item() == 2 ** dist.get_world_size(group) - 1
