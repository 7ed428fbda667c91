"""reduce_scatter: rank r gets its sizes[r] rows of the reduction."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import FUNCTIONAL, Bad, Case, Collective, Contract, Shape
from tests.harness.values import reduce_reference


def _case(sizes: list[int], tail: Shape = ()) -> Case:
    return Case.alike(len(sizes), (sum(sizes), *tail), sizes)


class ReduceScatter(Collective):
    stem = "reduce_scatter"
    forms = (FUNCTIONAL,)
    reduces = True

    def cases(self, n: int) -> Iterable[Case]:
        yield _case([1 + 2 * rank for rank in range(n)], (3,))
        yield _case([2] * n, (3,))

    def odd_cases(self, n: int) -> Iterable[Case]:
        yield _case([n - rank for rank in range(n)])
        yield _case([0] * n)
        yield _case([2 + rank for rank in range(n)], (0,))
        yield _case([3 * (rank % 2) for rank in range(n)], (2,))  # rank 0 gets nothing
        yield _case([2 if rank == 0 else 0 for rank in range(n)], (2, 2))

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        op, sizes = case.args[0]
        return list(reduce_reference(xs, op, case.kwargs.get("factor")).split(sizes))

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        yield Bad(
            lambda ops, group: ops.reduce_scatter(torch.ones(n + 1), "sum", [1] * n, group),
            f"{n + 1}",
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter(torch.ones(n + 1), "sum", [1] * (n + 1), group),
            f"each of the {n} ranks",
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter(torch.ones(()), "sum", [1] * n, group), "dim"
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter(torch.ones(n), "sum", [-1] * n, group), "-1"
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter(torch.ones(n), "sum", [1] * n, "nope"),
            "got 'nope'",
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter(
                torch.ones(n, dtype=torch.uint8), "avg", [1] * n, group
            ),
            "avg",
            TypeError,
        )


COLLECTIVE = ReduceScatter()


class TestReduceScatter(Contract):
    pass
