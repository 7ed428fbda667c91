"""torch's functional collectives by the names of torch 2.13, whatever the version."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


def _either(new: str, old: str) -> Any:
    # Not the old name where there is a new one: it warns there, which takes time.
    return getattr(functional, new, None) or getattr(functional, old)


all_reduce = functional.all_reduce
all_reduce_coalesced = functional.all_reduce_coalesced
all_to_all_single = functional.all_to_all_single
broadcast = functional.broadcast
permute_tensor = functional.permute_tensor
all_gather_single = _either("all_gather_single", "all_gather_tensor")
all_gather_single_autograd = _either("all_gather_single_autograd", "all_gather_tensor_autograd")
all_gather_single_coalesced = _either(
    "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
)
reduce_scatter_single = _either("reduce_scatter_single", "reduce_scatter_tensor")
reduce_scatter_single_autograd = _either(
    "reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"
)
reduce_scatter_single_coalesced = _either(
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)


def wait(result: Any) -> Tensor:
    """Waits in the fastest way torch has: its ``wait_tensor`` goes through Python dispatch."""
    return result.wait()


def wait_all(results: list[Any]) -> list[Tensor]:
    """Waits for several results."""
    return [result.wait() for result in results]


def can_all_gather(device: str) -> bool:
    """False where a functional all-gather of torch's ends the process: by gloo, on CUDA tensors."""
    return device == "cpu" or dist.get_backend() != "gloo"
