"""all_reduce: every rank gets the reduction of all ranks' inputs."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract import (
    COALESCED,
    COALESCED_INPLACE,
    FUNCTIONAL,
    INPLACE,
    ODD_SHAPES,
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


class AllReduce(Collective):
    stem = "all_reduce"
    forms = (FUNCTIONAL, INPLACE, OUT, COALESCED, COALESCED_INPLACE)
    reduces = True
    replicated = True

    def cases(self, n: int) -> Iterable[Case]:
        yield Case.alike(n, (4, 3))

    def odd_cases(self, n: int) -> Iterable[Case]:
        return [Case.alike(n, shape) for shape in ((), *ODD_SHAPES)]

    def reference(self, case: Case, xs: list[Tensor]) -> list[Tensor]:
        op, *_ = case.args[0]
        y = reduce_reference(xs, op, case.kwargs.get("factor"))
        return [y for _ in xs]

    def bad_calls(self, n: int, rank: int) -> Iterable[Bad]:
        names = "sum, avg, product, min, max, band, bor, bxor, premul_sum"
        yield Bad(
            lambda ops, group: ops.all_reduce(torch.ones(2), "foo", group),
            f"reduce_op must be one of {names}, got 'foo'",
        )
        yield Bad(lambda ops, group: ops.all_reduce_(torch.ones(2), "", group), "got ''")
        yield Bad(
            lambda ops, group: ops.all_reduce(torch.ones(2), "sum", "nope"),
            "group_name must name a process group of this process (known: ",
        )
        yield Bad(lambda ops, group: ops.all_reduce(torch.ones(2), "premul_sum", group), "factor")
        yield Bad(
            lambda ops, group: ops.all_reduce(torch.ones(2), "sum", group, factor=2.0), "factor"
        )
        ints, floats, zs = torch.int32, torch.float32, torch.complex64
        for op, dtype in (
            ("avg", ints),
            ("avg", torch.bool),
            ("premul_sum", torch.bool),
            ("min", zs),
            ("max", zs),
            ("band", zs),
            ("bor", floats),
            ("bxor", torch.bfloat16),
        ):
            factor = {"factor": 2} if op == "premul_sum" else {}
            yield Bad(
                lambda ops, group, op=op, dtype=dtype, factor=factor: ops.all_reduce(
                    torch.ones(2, dtype=dtype), op, group, **factor
                ),
                op,
                TypeError,
            )
        yield Bad(
            lambda ops, group: ops.all_reduce_out(torch.ones(2), "sum", group, out=torch.empty(3)),
            "out",
        )
        yield Bad(
            lambda ops, group: ops.all_reduce_out(
                torch.ones(2), "sum", group, out=torch.empty(2, dtype=torch.float64)
            ),
            "out",
            TypeError,
        )
        yield Bad(
            lambda ops, group: ops.all_reduce_coalesced(
                [torch.ones(2), torch.ones(2, dtype=torch.float64)], "sum", group
            ),
            "dtype",
            TypeError,
        )
        yield Bad(
            lambda ops, group: ops.all_reduce_(torch.ones(3, requires_grad=True), "sum", group),
            "all_reduce_",
            RuntimeError,
        )


COLLECTIVE = AllReduce()


class TestAllReduce(Contract):
    pass


def _names_in_any_case() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = [values.values((5,), torch.int32, r) for r in range(n)]
    for name in ("SUM", "Sum", "sUm", "MAX", "BXOR"):
        y = wait(torch.ops.c10d_ext.all_reduce(xs[rank], name, group()))
        text = values.mismatch(y, reduce_reference(xs, name))
        assert not text, f"{name}: {text}"


def test_reduce_ops_are_named_in_any_case() -> None:
    run(2, _names_in_any_case)


def _many_elements() -> None:
    """Odd counts past every vector width, thread and cache size, in every conversion."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for count in (1023, 70_001):
        for dtype in values.DTYPES:
            xs = [values.values((count,), dtype, r) for r in range(n)]
            y = wait(torch.ops.c10d_ext.all_reduce(xs[rank], "sum", group()))
            text = values.mismatch(y, reduce_reference(xs, "sum"))
            assert not text, f"{count} {dtype}: {text}"


@pytest.mark.parametrize("size", (2, 3))
def test_many_elements(size: int) -> None:
    run(size, _many_elements)
