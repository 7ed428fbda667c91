"""reduce_scatter_tensor: rank r gets the r-th of N equal row blocks of the reduction."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract import (
    COALESCED,
    FUNCTIONAL,
    OUT,
    Bad,
    Case,
    Collective,
    Contract,
    group,
    wait,
)
from tests.harness import run, values
from tests.harness.values import reduce_reference


class ReduceScatterTensor(Collective):
    stem = "reduce_scatter_tensor"
    forms = (FUNCTIONAL, OUT, COALESCED)
    reduces = True

    def cases(self, n: int) -> Iterable[Case]:
        yield Case.alike(n, (2 * n, 3), n)

    def odd_cases(self, n: int) -> Iterable[Case]:
        shapes = ((n,), (3 * n,), (0,), (0, 2), (n, 0), (n, 2, 3), (2 * n, 1, 1))
        return [Case.alike(n, shape, n) for shape in shapes]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        op, n = case.args[0]
        return list(reduce_reference(xs, op, case.kwargs.get("factor")).chunk(n))

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        if n > 1:
            yield Bad(
                lambda ops, group: ops.reduce_scatter_tensor(
                    torch.ones(2 * n + 1, 3), "sum", n, group
                ),
                f"{2 * n + 1}",
            )
            yield Bad(
                lambda ops, group: ops.reduce_scatter_tensor_coalesced(
                    [torch.ones(n), torch.ones(n + 1)], "sum", n, group
                ),
                f"{n + 1}",
            )
        yield Bad(
            lambda ops, group: ops.reduce_scatter_tensor(torch.ones(()), "sum", n, group), "dim"
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter_tensor(torch.ones(6, 2), "sum", n + 2, group),
            f"got {n + 2}",
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter_tensor(torch.ones(n), "mean", n, group),
            "got 'mean'",
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter_tensor(
                torch.ones(n, dtype=torch.int64), "avg", n, group
            ),
            "avg",
            TypeError,
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter_tensor(torch.ones(n), "sum", n, "nope"),
            "got 'nope'",
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter_tensor_out(
                torch.ones(2 * n, 3), "sum", n, group, out=torch.empty(2, 4)
            ),
            "out",
        )
        yield Bad(
            lambda ops, group: ops.reduce_scatter_tensor_coalesced(
                [torch.ones(n), torch.ones(n, dtype=torch.float16)], "sum", n, group
            ),
            "dtype",
            TypeError,
        )


COLLECTIVE = ReduceScatterTensor()


class TestReduceScatterTensor(Contract):
    pass


def _stacked_input() -> None:
    """The input may be one slice per rank, (N, *out.shape), as well as their concatenation."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for shape in ((), (2,), (3, 2), (0, 4), (1, 1, 2)):
        for dtype in (torch.float32, torch.int16, torch.bfloat16):
            xs = [values.values((n, *shape), dtype, r) for r in range(n)]
            out = values.empty_like(shape, dtype, "strided" if shape else "contiguous")
            torch.ops.c10d_ext.reduce_scatter_tensor_out(xs[rank], "sum", n, group(), out=out)
            want = reduce_reference(xs, "sum")[rank]
            text = values.mismatch(wait(out), want)
            assert not text, f"{shape} {dtype}: {text}"


@pytest.mark.parametrize("size", (1, 2, 3))
def test_out_takes_a_slice_per_rank(size: int) -> None:
    run(size, _stacked_input)
