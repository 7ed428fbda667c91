"""all_gather: every rank gets all ranks' inputs, of different numbers of rows, joined."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import FUNCTIONAL, Bad, Case, Collective, Contract, Shape


def _case(sizes: list[int], tail: Shape = ()) -> Case:
    return Case(tuple((size, *tail) for size in sizes), ((sizes,),) * len(sizes))


class AllGather(Collective):
    stem = "all_gather"
    forms = (FUNCTIONAL,)
    replicated = True

    def cases(self, n: int) -> Iterable[Case]:
        yield _case([1 + 2 * rank for rank in range(n)], (3,))
        yield _case([4] * n, (3,))

    def odd_cases(self, n: int) -> Iterable[Case]:
        yield _case([n - rank for rank in range(n)])
        yield _case([0] * n)
        yield _case([2 + rank for rank in range(n)], (0,))
        yield _case([3 * (rank % 2) for rank in range(n)], (2,))  # rank 0 has nothing
        yield _case([2 if rank == 0 else 0 for rank in range(n)], (2, 2))

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        y = torch.cat(xs)
        return [y for _ in xs]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        yield Bad(lambda ops, group: ops.all_gather(torch.ones(3), [4] * n, group), "4")
        yield Bad(
            lambda ops, group: ops.all_gather(torch.ones(3), [3] * (n + 1), group),
            f"each of the {n} ranks",
        )
        yield Bad(lambda ops, group: ops.all_gather(torch.ones(()), [1] * n, group), "dim")
        yield Bad(lambda ops, group: ops.all_gather(torch.ones(3), [-3] * n, group), "-3")
        yield Bad(lambda ops, group: ops.all_gather(torch.ones(3), [3] * n, "nope"), "got 'nope'")


COLLECTIVE = AllGather()


class TestAllGather(Contract):
    pass
