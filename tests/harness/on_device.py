"""The contract's checks with every op on the tensors of a device other than the CPU.

The checks make CPU tensors and look at CPU tensors. In between, what an op is given goes to the
device and what it returns comes back, differentiably, as a user's program would do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests import contract
from tests.contract import Case, Collective


@contextlib.contextmanager
def moved(device: torch.device) -> Iterator[None]:
    """On a worker: the contract's calls and computations take place on `device`."""
    plain_computation = contract.computation

    def call(
        c: Collective, form: str, case: Case, xs: Sequence[Tensor], outs: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        there = [x.to(device) for x in xs], [out.to(device) for out in outs]
        return [contract.wait(y).cpu() for y in contract.start(c, form, case, *there)]

    def computation(c: Collective, form: str, case: Case) -> Callable[..., Any]:
        f = plain_computation(c, form, case)

        def on_device(*xs: Tensor) -> Any:
            ys = f(*[x.to(device) for x in xs])
            return ys.cpu() if isinstance(ys, Tensor) else [y.cpu() for y in ys]

        return on_device

    with (
        mock.patch.object(contract, "call", call),
        mock.patch.object(contract, "computation", computation),
    ):
        yield
