"""broadcast: every rank gets the input of rank src."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import (
    COALESCED,
    COALESCED_INPLACE,
    FUNCTIONAL,
    INPLACE,
    ODD_SHAPES,
    Bad,
    Case,
    Collective,
    Contract,
)


class Broadcast(Collective):
    stem = "broadcast"
    forms = (FUNCTIONAL, INPLACE, COALESCED, COALESCED_INPLACE)
    replicated = True

    def cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, (4, 3), src) for src in range(n)]

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape, n - 1) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        (src,) = case.args[0]
        return [xs[src] * 1 if xs[src].requires_grad else xs[src] for _ in xs]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        for src in (-1, n, n + 7):
            yield Bad(
                lambda ops, group, src=src: ops.broadcast(torch.ones(2), src, group), f"got {src}"
            )
        yield Bad(lambda ops, group: ops.broadcast_(torch.ones(2), n, group), f"got {n}")
        yield Bad(lambda ops, group: ops.broadcast(torch.ones(2), 0, "nope"), "got 'nope'")
        yield Bad(
            lambda ops, group: ops.broadcast_coalesced(
                [torch.ones(2), torch.ones(2, dtype=torch.int8)], 0, group
            ),
            "dtype",
            TypeError,
        )
        yield Bad(
            lambda ops, group: ops.broadcast_(torch.ones(3, requires_grad=True), 0, group),
            "broadcast_",
            RuntimeError,
        )


COLLECTIVE = Broadcast()


class TestBroadcast(Contract):
    pass
