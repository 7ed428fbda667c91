"""Bad input to the user functions: one error, with the values, before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_c10d_ext.functional as F
from tests.contract import group
from tests.harness import run

# A dimension that is not there: torch says IndexError, bad values are ValueErrors.
_DIM_ERROR: Any = (IndexError, ValueError)


def _matrix() -> Tensor:
    return torch.ones(4, 6)


def _mixed_devices() -> list[Tensor]:
    return [torch.ones(2), torch.ones(2, device="meta")]


def _mixed_dtypes() -> list[Tensor]:
    return [torch.ones(2), torch.ones(2, dtype=torch.float64)]


# What is done, what the message must say (n being the group's size), and the type of the error.
_CALLS: dict[str, tuple[Callable[[int], Any], str, Any]] = {
    "gather_dim too large": (lambda n: F.all_gather_single(_matrix(), 2, None), "2", _DIM_ERROR),
    "gather_dim too small": (lambda n: F.all_gather_tensor(_matrix(), -3, None), "-3", _DIM_ERROR),
    "scatter_dim too large": (
        lambda n: F.reduce_scatter_single(_matrix(), "sum", 5, None),
        "5",
        _DIM_ERROR,
    ),
    "scatter_dim of scatter": (
        lambda n: F.scatter(_matrix(), 0, None, scatter_dim=4),
        "4",
        _DIM_ERROR,
    ),
    "gather_dim of gather": (
        lambda n: F.gather(_matrix(), 0, None, gather_dim=-4),
        "-4",
        _DIM_ERROR,
    ),
    "gather_dim of uneven": (
        lambda n: F.all_gather(_matrix(), [4] * n, None, gather_dim=7),
        "7",
        _DIM_ERROR,
    ),
    "scatter_dim of uneven": (
        lambda n: F.reduce_scatter(_matrix(), "sum", [2] * n, None, scatter_dim=3),
        "3",
        _DIM_ERROR,
    ),
    "indivisible rows": (
        lambda n: F.reduce_scatter_single(torch.ones(2 * n + 1, 2), "sum", 0, None),
        "{2n+1}",
        ValueError,
    ),
    "indivisible columns": (
        lambda n: F.reduce_scatter_tensor(torch.ones(2, 2 * n + 1), "sum", 1, None),
        "{2n+1}",
        ValueError,
    ),
    "indivisible scatter": (
        lambda n: F.scatter(torch.ones(2 * n + 1), 0, None),
        "{2n+1}",
        ValueError,
    ),
    "indivisible all_to_all": (
        lambda n: F.all_to_all_single(torch.ones(2 * n + 1), None, None, None),
        "{2n+1}",
        ValueError,
    ),
    "unknown reduce op": (lambda n: F.all_reduce(_matrix(), "mean", None), "'mean'", ValueError),
    "unknown reduce op of reduce": (
        lambda n: F.reduce(_matrix(), "first", 0, None),
        "'first'",
        ValueError,
    ),
    "unknown group": (
        lambda n: F.all_reduce(_matrix(), "sum", "tensor-parallel"),
        "'tensor-parallel'",
        ValueError,
    ),
    "src outside": (lambda n: F.broadcast(_matrix(), n, None), "got {n}", ValueError),
    "negative src": (lambda n: F.broadcast(_matrix(), -1, None), "got -1", ValueError),
    "dst outside": (lambda n: F.reduce(_matrix(), "sum", n + 3, None), "got {n+3}", ValueError),
    "gather dst outside": (lambda n: F.gather(_matrix(), n, None), "got {n}", ValueError),
    "scatter src outside": (lambda n: F.scatter(_matrix(), n, None), "got {n}", ValueError),
    "splits that do not add up": (
        lambda n: F.all_to_all_single(torch.ones(n + 1), [1] * n, [1] * n, None),
        "{n+1}",
        ValueError,
    ),
    "too many splits": (
        lambda n: F.all_to_all_single(torch.ones(n + 1), [1] * (n + 1), [1] * (n + 1), None),
        "each of the {n} ranks",
        ValueError,
    ),
    "not a permutation": (
        lambda n: F.permute_tensor(_matrix(), [0] * n, None),
        "permutation",
        ValueError,
    ),
    "sizes that do not fit": (lambda n: F.all_gather(_matrix(), [3] * n, None), "3", ValueError),
    "sizes of wrong length": (
        lambda n: F.reduce_scatter(_matrix(), "sum", [4], None),
        "4",
        ValueError,
    ),
    "factor without premul_sum": (
        lambda n: F.all_reduce(_matrix(), "sum", None, factor=2.0),
        "factor",
        ValueError,
    ),
    "premul_sum without factor": (
        lambda n: F.all_reduce(_matrix(), "premul_sum", None),
        "factor",
        ValueError,
    ),
    "avg of integers": (
        lambda n: F.all_reduce(torch.ones(3, dtype=torch.int64), "avg", None),
        "avg",
        TypeError,
    ),
    "max of complex": (
        lambda n: F.all_reduce(torch.ones(3, dtype=torch.complex64), "max", None),
        "max",
        TypeError,
    ),
    "bitwise of floats": (
        lambda n: F.reduce_scatter_single(_matrix(), "bxor", 0, None),
        "bxor",
        TypeError,
    ),
    "mixed dtypes": (
        lambda n: F.all_reduce_coalesced(_mixed_dtypes(), "sum", None),
        "dtype",
        TypeError,
    ),
    "mixed dtypes gathered": (
        lambda n: F.all_gather_single_coalesced(_mixed_dtypes(), None),
        "dtype",
        TypeError,
    ),
    "empty list": (lambda n: F.all_reduce_coalesced([], "sum", None), "empty", ValueError),
    "dims of wrong length": (
        lambda n: F.reduce_scatter_single_coalesced([torch.ones(n)], "sum", [0, 0], None),
        "got [0, 0]",
        ValueError,
    ),
}

# Not where a tracer can see them: devices are one per graph, and these are not tensors.
_EAGER_ONLY: dict[str, tuple[Callable[[int], Any], str, Any]] = {
    "mixed devices": (
        lambda n: F.all_reduce_coalesced(_mixed_devices(), "sum", None),
        "device",
        ValueError,
    ),
    "sparse": (
        lambda n: F.all_reduce(torch.ones(2, 2).to_sparse(), "sum", None),
        "SparseCPU",
        NotImplementedError,
    ),
    "not a tensor": (
        lambda n: F.all_reduce([1.0, 2.0], "sum", None),  # type: ignore[arg-type]
        "Expected a value of type 'Tensor'",
        RuntimeError,
    ),
    "reduce op not a string": (
        lambda n: F.all_reduce(_matrix(), 3, None),  # type: ignore[arg-type]
        "Expected a value of type 'str'",
        RuntimeError,
    ),
    "leaf that requires grad, in place": (
        lambda n: F.all_reduce_inplace(torch.ones(2, requires_grad=True), "sum", dist.group.WORLD),
        "leaf",
        RuntimeError,
    ),
}


def _text_of(call: Callable[[], Any], error: Any) -> str:
    try:
        call()
    except error as e:
        return f"{e}"
    except Exception as e:
        return f"<{type(e).__name__} instead of {error}> {e}"
    return "<nothing raised>"


def _filled_in(part: str, n: int) -> str:
    for text, value in (("n", n), ("n+1", n + 1), ("n+3", n + 3), ("2n+1", 2 * n + 1)):
        part = part.replace(f"{{{text}}}", str(value))
    return part


def _refused(name: str) -> None:
    n = dist.get_world_size()
    call, part, error = {**_CALLS, **_EAGER_ONLY}[name]
    part = _filled_in(part, n)
    text = _text_of(lambda: call(n), error)
    assert part in text and "<" not in text[:1], f"eager: {part!r} not in {text!r}"
    if name not in _EAGER_ONLY and "group_name must" not in text:
        assert f"(rank {dist.get_rank()}/{n}, group" in text, f"does not say where: {text!r}"
    _assert_usable()
    if name in _EAGER_ONLY:
        return
    with FakeTensorMode():
        faked = _text_of(lambda: call(n), error)
    assert part in faked and "<" not in faked[:1], f"fake: {part!r} not in {faked!r}"
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda: call(n), backend=backend, fullgraph=True)
        raised = _text_of(compiled, Exception)
        assert part in raised, f"compiled by {backend}: {part!r} not in {raised!r}"
        _assert_usable()


def _assert_usable() -> None:
    n = dist.get_world_size()
    y = F.all_reduce(torch.tensor([1, 10]) * (dist.get_rank() + 1), "sum", None)
    assert y.tolist() == [n * (n + 1) // 2, 10 * n * (n + 1) // 2]


@pytest.mark.parametrize("name", [*_CALLS, *_EAGER_ONLY])
def test_refused(name: str) -> None:
    run(2, _refused, name)


def _expanded_destination() -> None:
    x = torch.zeros(1).expand(3)
    with pytest.raises(ValueError, match="each element at a place of its own"):
        torch.ops.c10d_ext.all_reduce_(x, "sum", group())
    with pytest.raises(ValueError, match="each element at a place of its own"):
        torch.ops.c10d_ext.all_reduce_out(torch.ones(3), "sum", group(), out=x)
    _assert_usable()


def test_refuses_to_write_where_elements_share_memory() -> None:
    run(2, _expanded_destination)


def _without_a_group() -> str:
    import torch.distributed.distributed_c10d as c10d

    saved = c10d._world.default_pg
    c10d._world.default_pg = None
    try:
        return _text_of(lambda: F.all_reduce(torch.ones(2), "sum", None), Exception)
    finally:
        c10d._world.default_pg = saved


def test_says_that_there_is_no_default_group() -> None:
    (text,) = run(1, _without_a_group)
    assert "init_process_group" in text or "initialized" in text, text


# What has a meaning when there is one rank; every size is divisible then.
_FINE_ALONE = ("not a permutation", "sizes of wrong length")


def _errors_at_size_one() -> list[str]:
    failures = []
    for name, (call, part, error) in _CALLS.items():
        if name in _FINE_ALONE or name.startswith("indivisible"):
            continue
        text = _text_of(lambda: call(1), error)  # noqa: B023
        if _filled_in(part, 1) not in text or text.startswith("<"):
            failures.append(f"{name}: {part!r} not in {text!r}")
    return failures


def test_world_size_one_is_as_strict() -> None:
    (failures,) = run(1, _errors_at_size_one)
    assert not failures, "\n".join(failures)
