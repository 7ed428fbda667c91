"""copy_to_group: the identity, whose gradient is the sum of all ranks' gradients."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext.functional as F
from tests.contract import FUNCTIONAL, ODD_SHAPES, Bad, Case, Collective, Contract, smooth_values
from tests.harness import run


class CopyToGroup(Collective):
    stem = "copy_to_group"
    forms = (FUNCTIONAL,)
    communicates = False
    spmd_adjoint = False

    def cases(self, n: int) -> Iterable[Case]:
        yield Case.alike(n, (4, 3))

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        if not any(x.requires_grad for x in xs):
            return xs
        total = sum(xs[1:], xs[0])
        # Rank r's value, and the derivative of the sum.
        return [x.detach() + (total - total.detach()) for x in xs]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        yield Bad(lambda ops, group: ops.copy_to_group(torch.ones(2), "nope"), "got 'nope'")


COLLECTIVE = CopyToGroup()


class TestCopyToGroup(Contract):
    pass


def _tangent() -> None:
    x, t = (smooth_values((2, 3), torch.float64, dist.get_rank(), salt=s) for s in range(2))
    y, tangent = torch.func.jvp(lambda x: F.copy_to_group(x, None), (x,), (t,))
    assert torch.equal(y, x)
    assert torch.equal(tangent, t)


@pytest.mark.parametrize("size", (1, 2))
def test_tangents_pass_as_values_do(size: int) -> None:
    run(size, _tangent)
