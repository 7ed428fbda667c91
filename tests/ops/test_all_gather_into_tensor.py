"""all_gather_into_tensor: every rank gets all ranks' equally shaped inputs, joined along dim 0."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tests.contract import (
    COALESCED,
    FUNCTIONAL,
    ODD_SHAPES,
    OUT,
    Bad,
    Case,
    Collective,
    Contract,
    Shape,
)


class AllGatherIntoTensor(Collective):
    stem = "all_gather_into_tensor"
    forms = (FUNCTIONAL, OUT, COALESCED)
    replicated = True

    def cases(self, n: int) -> Iterable[Case]:
        yield Case.alike(n, (4, 3), n)

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape, n) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        y = torch.cat([x.reshape(1) if x.dim() == 0 else x for x in xs])
        return [y for _ in xs]

    def out_shapes(self, case: Case, rank: int, shape: Shape) -> list[Shape]:
        n = len(case.shapes)
        return [shape, (n, *case.shapes[rank])]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        yield Bad(
            lambda ops, group: ops.all_gather_into_tensor(torch.ones(2), n + 1, group),
            f"got {n + 1}",
        )
        yield Bad(
            lambda ops, group: ops.all_gather_into_tensor(torch.ones(2), n, "nope"),
            "got 'nope'",
        )
        for shape in ((2 * n + 1,), (2, n + 5), (n, 3)):
            yield Bad(
                lambda ops, group, shape=shape: ops.all_gather_into_tensor_out(
                    torch.ones(2), n, group, out=torch.empty(shape)
                ),
                "out",
            )
        yield Bad(
            lambda ops, group: ops.all_gather_into_tensor_out(
                torch.ones(2), n, group, out=torch.empty(2 * n, dtype=torch.int32)
            ),
            "out",
            TypeError,
        )
        yield Bad(
            lambda ops, group: ops.all_gather_into_tensor_coalesced(
                [torch.ones(2), torch.ones(2, dtype=torch.int32)], n, group
            ),
            "dtype",
            TypeError,
        )


COLLECTIVE = AllGatherIntoTensor()


class TestAllGatherIntoTensor(Contract):
    pass
