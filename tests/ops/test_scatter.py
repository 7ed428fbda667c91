"""scatter: rank r gets the r-th of N equal row blocks of rank src's input."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import FUNCTIONAL, Bad, Case, Collective, Contract, Shape


def _sized(n: int, src: int, k: int, tail: Shape, others: int) -> Case:
    """Only src holds rows to cut; the other ranks' inputs have `others` rows of the same kind."""
    shapes = tuple(((n * k if rank == src else others), *tail) for rank in range(n))
    return Case(shapes, ((src,),) * n, {"size": k})


class Scatter(Collective):
    stem = "scatter"
    forms = (FUNCTIONAL,)

    def cases(self, n: int) -> Iterable[Case]:
        yield from [Case.alike(n, (2 * n, 3), src) for src in range(n)]
        yield _sized(n, n - 1, 2, (3,), 0)

    def odd_cases(self, n: int) -> Iterable[Case]:
        src = n - 1
        for shape in ((n,), (3 * n,), (0,), (0, 2), (n, 0), (n, 2, 3)):
            yield Case.alike(n, shape, src)
        yield _sized(n, 0, 3, (), 0)
        yield _sized(n, src, 1, (2,), 5)
        yield _sized(n, src, 0, (2,), 0)

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        (src,) = case.args[0]
        n = len(xs)
        k = xs[src].size(0) // n
        return [xs[src][r * k : (r + 1) * k] for r in range(n)]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        for src in (-1, n):
            yield Bad(
                lambda ops, group, src=src: ops.scatter(torch.ones(n), src, group), f"got {src}"
            )
        if n > 1:
            yield Bad(lambda ops, group: ops.scatter(torch.ones(n + 1), 0, group), f"{n + 1}")
        yield Bad(lambda ops, group: ops.scatter(torch.ones(()), 0, group), "dim")
        yield Bad(lambda ops, group: ops.scatter(torch.ones(n), 0, group, size=-2), "-2")
        yield Bad(lambda ops, group: ops.scatter(torch.ones(n), 0, "nope"), "got 'nope'")


COLLECTIVE = Scatter()


class TestScatter(Contract):
    pass
