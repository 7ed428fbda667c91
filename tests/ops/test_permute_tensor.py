"""permute_tensor: rank m's input becomes the output of rank src_dst[m]."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import FUNCTIONAL, ODD_SHAPES, Bad, Case, Collective, Contract


class PermuteTensor(Collective):
    stem = "permute_tensor"
    forms = (FUNCTIONAL,)

    def cases(self, n: int) -> Iterable[Case]:
        ring = [(m + 1) % n for m in range(n)]
        swap = list(reversed(range(n)))
        fixed = [0, *(1 + (m + 1) % max(n - 1, 1) for m in range(n - 1))]
        for src_dst in (ring, swap, fixed, list(range(n))):
            yield Case.alike(n, (4, 3), src_dst)

    def odd_cases(self, n: int) -> Iterable[Case]:
        ring = [(m + 1) % n for m in range(n)]
        return [Case.alike(n, shape, ring) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        (src_dst,) = case.args[0]
        return [
            xs[src_dst.index(r)] * 1 if xs[0].requires_grad else xs[src_dst.index(r)]
            for r in range(len(xs))
        ]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        for src_dst in ([0] * (n + 1), [n, *range(1, n)], [-1, *range(1, n)], []):
            yield Bad(
                lambda ops, group, src_dst=src_dst: ops.permute_tensor(
                    torch.ones(2), src_dst, group
                ),
                "src_dst must be a permutation",
            )
        if n > 1:
            yield Bad(
                lambda ops, group: ops.permute_tensor(torch.ones(2), [0] * n, group),
                "src_dst must be a permutation",
            )
        yield Bad(
            lambda ops, group: ops.permute_tensor(torch.ones(2), list(range(n)), "nope"),
            "got 'nope'",
        )


COLLECTIVE = PermuteTensor()


class TestPermuteTensor(Contract):
    pass
