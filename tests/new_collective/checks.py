"""shift: rank r gets the input of rank r - offset, counted around the group."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import FUNCTIONAL, INPLACE, ODD_SHAPES, Bad, Case, Collective, Contract


class Shift(Collective):
    stem = "shift"
    forms = (FUNCTIONAL, INPLACE)

    def cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, (4, 3), offset) for offset in (1, -1, 0, n + 2)]

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape, 1) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        (offset,) = case.args[0]
        moved = [xs[(r - offset) % len(xs)] for r in range(len(xs))]
        return [x * 1 for x in moved] if xs[0].requires_grad else moved

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        yield Bad(lambda ops, group: ops.shift(torch.ones(2), 1, "nope"), "got 'nope'")
        yield Bad(
            lambda ops, group: ops.shift_(torch.ones(1).expand(2), 1, group),
            "at a place of its own",
        )


COLLECTIVE = Shift()


class TestShift(Contract):
    pass
