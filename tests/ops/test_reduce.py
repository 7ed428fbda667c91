"""reduce: rank dst gets the reduction, the others zeros (or, in place, keep what they have)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import FUNCTIONAL, INPLACE, ODD_SHAPES, Bad, Case, Collective, Contract
from tests.harness.values import reduce_reference


class Reduce(Collective):
    stem = "reduce"
    forms = (FUNCTIONAL, INPLACE)
    reduces = True

    def cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, (4, 3), dst) for dst in range(n)]

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape, n - 1) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        op, dst = case.args[0]
        y = reduce_reference(xs, op, case.kwargs.get("factor"))
        return [y if rank == dst else torch.zeros_like(x) for rank, x in enumerate(xs)]

    def inplace_reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        op, dst = case.args[0]
        y = reduce_reference(xs, op, case.kwargs.get("factor"))
        return [y if rank == dst else x for rank, x in enumerate(xs)]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        for dst in (-1, n):
            yield Bad(
                lambda ops, group, dst=dst: ops.reduce(torch.ones(2), "sum", dst, group),
                f"got {dst}",
            )
        yield Bad(lambda ops, group: ops.reduce_(torch.ones(2), "median", 0, group), "got 'median'")
        yield Bad(lambda ops, group: ops.reduce(torch.ones(2), "sum", 0, "nope"), "got 'nope'")
        yield Bad(lambda ops, group: ops.reduce(torch.ones(2), "band", 0, group), "band", TypeError)
        yield Bad(
            lambda ops, group: ops.reduce_(torch.ones(3, requires_grad=True), "sum", 0, group),
            "reduce_",
            RuntimeError,
        )


COLLECTIVE = Reduce()


class TestReduce(Contract):
    pass
