"""gather: rank dst gets all ranks' inputs joined along dim 0, the others no rows."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import FUNCTIONAL, ODD_SHAPES, Bad, Case, Collective, Contract


class Gather(Collective):
    stem = "gather"
    forms = (FUNCTIONAL,)

    def cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, (4, 3), dst) for dst in range(n)]

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape, n - 1) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        (dst,) = case.args[0]
        rows = [x.reshape(1) if x.dim() == 0 else x for x in xs]
        nothing = torch.empty((0, *rows[0].shape[1:]), dtype=rows[0].dtype)
        return [torch.cat(rows) if rank == dst else nothing for rank in range(len(xs))]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        for dst in (-1, n):
            yield Bad(
                lambda ops, group, dst=dst: ops.gather(torch.ones(2), dst, group), f"got {dst}"
            )
        yield Bad(lambda ops, group: ops.gather(torch.ones(2), 0, "nope"), "got 'nope'")


COLLECTIVE = Gather()


class TestGather(Contract):
    pass
