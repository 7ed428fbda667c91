"""all_to_all_single: rank r's output joins the r-th block of rows of every rank."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import FUNCTIONAL, OUT, Bad, Case, Collective, Contract, Shape


def _case(matrix: list[list[int]], tail: Shape = ()) -> Case:
    """matrix[i][j]: how many rows rank i sends to rank j."""
    n = len(matrix)
    shapes = tuple((sum(row), *tail) for row in matrix)
    args = tuple(([matrix[i][r] for i in range(n)], list(matrix[r])) for r in range(n))
    return Case(shapes, args)


class AllToAllSingle(Collective):
    stem = "all_to_all_single"
    forms = (FUNCTIONAL, OUT)

    def cases(self, n: int) -> Iterable[Case]:
        yield _case([[2] * n] * n, (3,))
        yield _case([[1 + (i + 2 * j) % 3 for j in range(n)] for i in range(n)], (3,))

    def odd_cases(self, n: int) -> Iterable[Case]:
        yield _case([[1] * n] * n)
        yield _case([[0] * n] * n)
        yield _case([[0] * n] * n, (2,))
        yield _case([[2] * n] * n, (0,))
        yield _case([[2] * n] * n, (2, 3))
        # Rank 0 sends everything, the others nothing.
        yield _case([[3 + j if i == 0 else 0 for j in range(n)] for i in range(n)], (2,))
        # Everything goes to the last rank.
        yield _case([[1 + i if j == n - 1 else 0 for j in range(n)] for i in range(n)])

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        blocks = [x.split(inputs) for x, (_, inputs) in zip(xs, case.args, strict=True)]
        return [torch.cat([each[r] for each in blocks]) for r in range(len(xs))]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        ones = [1] * n
        yield Bad(
            lambda ops, group: ops.all_to_all_single(torch.ones(n + 1), ones, ones, group),
            f"{n + 1}",
        )
        yield Bad(
            lambda ops, group: ops.all_to_all_single(torch.ones(n), [*ones, 1], ones, group),
            f"each of the {n} ranks",
        )
        yield Bad(
            lambda ops, group: ops.all_to_all_single(torch.ones(n + 1), ones, [*ones, 1], group),
            f"each of the {n} ranks",
        )
        yield Bad(
            lambda ops, group: ops.all_to_all_single(
                torch.ones(n), ones, [-1, *ones[1:-1], n + 2][:n] if n > 1 else [-1], group
            ),
            "-1",
        )
        yield Bad(
            lambda ops, group: ops.all_to_all_single(torch.ones(()), ones, ones, group), "dim"
        )
        yield Bad(
            lambda ops, group: ops.all_to_all_single(torch.ones(n), ones, ones, "nope"),
            "got 'nope'",
        )
        yield Bad(
            lambda ops, group: ops.all_to_all_single_out(
                torch.ones(n, 2), ones, ones, group, out=torch.empty(n, 3)
            ),
            "out",
        )


COLLECTIVE = AllToAllSingle()


class TestAllToAllSingle(Contract):
    pass
