"""reduce_from_group: the sum over ranks, whose gradient is each rank's own."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext.functional as F
from tests.contract import FUNCTIONAL, ODD_SHAPES, Bad, Case, Collective, Contract, smooth_values
from tests.harness import run
from tests.harness.values import reduce_reference


class ReduceFromGroup(Collective):
    stem = "reduce_from_group"
    forms = (FUNCTIONAL,)
    sums = True
    replicated = True
    traced_as = "all_reduce"
    spmd_adjoint = False

    def cases(self, n: int) -> Iterable[Case]:
        yield Case.alike(n, (4, 3))

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        y = reduce_reference(xs, "sum")
        if not any(x.requires_grad for x in xs):
            return [y for _ in xs]
        # The sum's value, and the derivative of rank r's input alone.
        return [y.detach() + (x - x.detach()) for x in xs]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        yield Bad(lambda ops, group: ops.reduce_from_group(torch.ones(2), "nope"), "got 'nope'")


COLLECTIVE = ReduceFromGroup()


class TestReduceFromGroup(Contract):
    pass


def _tangent() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs, ts = ([smooth_values((2, 3), torch.float64, r, salt=s) for r in range(n)] for s in range(2))
    y, tangent = torch.func.jvp(lambda x: F.reduce_from_group(x, None), (xs[rank],), (ts[rank],))
    torch.testing.assert_close(y, sum(xs[1:], xs[0]))
    torch.testing.assert_close(tangent, sum(ts[1:], ts[0]))


@pytest.mark.parametrize("size", (1, 2))
def test_tangents_are_summed_as_values_are(size: int) -> None:
    run(size, _tangent)
