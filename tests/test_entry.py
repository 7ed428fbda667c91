"""The short way into the ops from eager Python: torch.ops in everything but its price."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_c10d_ext.functional as F
from tests.contract import group
from tests.harness import run
from torch_c10d_ext import _C
from torch_c10d_ext._async import work_of

_wait = torch.ops.c10d_ext.wait_tensor.default


def _overload(name: str) -> Any:
    return getattr(torch.ops.c10d_ext, name).default


def test_every_op_has_an_entry() -> None:
    names = [
        name.removeprefix("c10d_ext::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("c10d_ext::")
    ]
    assert len(names) > 20
    # Eager messages are no ops: the backend has the caller's own tensors.
    messages = ["batch_isend_irecv", "wait_message"]
    assert sorted([*_C.ops, *messages]) == sorted(names)


def test_every_op_that_writes_its_arguments_has_a_second_one() -> None:
    names = [name for name in _C.ops if _overload(name)._schema.is_mutable]
    assert len(names) > 8
    assert sorted(_C.writes) == sorted(names)


def _same_results() -> None:
    """Positional, keyword and left-out arguments of every kind of parameter."""
    n, name = dist.get_world_size(), group()
    x = torch.arange(2.0 * n) + dist.get_rank()
    sizes = [2] * n
    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
        "all_reduce": [
            ((x, "sum", name), {}),
            ((x,), {"group_name": name, "reduce_op": "max"}),
            ((x, "premul_sum", name), {"factor": 0.5}),
            ((x, "premul_sum", name), {"factor": 2}),
            ((x + 1j, "premul_sum", name), {"factor": 2j}),
            ((x, "sum", name), {"factor": None}),
        ],
        "all_reduce_coalesced": [(([x, x + 1], "sum", name), {}), (((x, 2 * x), "sum", name), {})],
        "all_gather_into_tensor": [
            ((x, n, name), {}),
            ((x,), {"group_size": n, "group_name": name}),
        ],
        "all_to_all_single": [
            ((x, sizes, sizes, name), {}),
            ((x, tuple(sizes), torch.Size(sizes), name), {}),
        ],
        "permute_tensor": [((x, list(range(n)), name), {})],
        "scatter": [
            ((x, 0, name), {}),
            ((x, 0, name), {"size": None}),
            ((x, 0, name), {"size": 2}),
        ],
    }
    for op, each in calls.items():
        for args, kwargs in each:
            ours, theirs = _C.ops[op](*args, **kwargs), _overload(op)(*args, **kwargs)
            assert type(ours) is type(theirs), op
            pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
            for a, b in pairs:
                assert torch.equal(_wait(a), _wait(b)), op
    # A keyword that is no literal is no interned string.
    y = _C.ops["all_reduce"](x, "sum", **{"".join(["group", "_", "name"]): name})
    assert torch.equal(_wait(y), _wait(_overload("all_reduce")(x, "sum", name)))
    z = x.clone()
    assert _C.ops["all_reduce_"](z, "sum", name) is z
    out = torch.empty_like(x)
    assert _C.ops["all_reduce_out"](x, "sum", name, out=out) is out
    assert torch.equal(_wait(out), _wait(z))


@pytest.mark.parametrize("size", (1, 2))
def test_results_are_those_of_torch_ops(size: int) -> None:
    run(size, _same_results)


def _raised(call: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        call()
    return caught.type, str(caught.value)


def _same_errors() -> None:
    x, name = torch.ones(2), group()
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("all_reduce", (x, "sun", name), {}),
        ("all_reduce", (x, "avg", name), {"factor": 2**70}),
        ("all_reduce", (x.int(), "avg", name), {}),
        ("all_reduce", (x, "sum", "no such group"), {}),
        ("all_reduce", (x, "sum"), {}),
        ("all_reduce", (x, "sum", name, 1.0), {}),
        ("all_reduce", (x, "sum", name), {"faktor": 1.0}),
        ("all_reduce", (x, "sum", name), {"input": x}),
        ("all_reduce", (None, "sum", name), {}),
        ("all_reduce", (x, 7, name), {}),
        ("all_reduce_coalesced", ([], "sum", name), {}),
        ("all_reduce_coalesced", ([x, 1], "sum", name), {}),
        ("broadcast", (x, 1.5, name), {}),
        ("broadcast", (x, 2**70, name), {}),
        ("broadcast", (x, -1, name), {}),
        ("all_gather_into_tensor_out", (x, 1, name), {}),
    ]
    for op, args, kwargs in calls:
        ours = _raised(lambda op=op, a=args, k=kwargs: _C.ops[op](*a, **k))
        theirs = _raised(lambda op=op, a=args, k=kwargs: _overload(op)(*a, **k))
        assert ours == theirs, (op, args, kwargs)


def test_errors_are_those_of_torch_ops() -> None:
    run(1, _same_errors)


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def _watched() -> None:
    """Whoever follows calls of torch.ops follows these."""
    x, name, op = torch.ones(2, 3), group(), _overload("all_reduce")
    with Functions() as functions:
        F.all_reduce(x, "sum", name)
    assert op in functions.seen
    with Ops() as ops:
        F.all_reduce(x, "sum", name)
        F.all_reduce_inplace(x, "sum", name)
    assert op in ops.seen
    assert type(_C.ops["all_reduce"](x.as_subclass(Marked), "sum", name)) is Marked
    with FakeTensorMode() as mode:
        fake = F.all_reduce(mode.from_tensor(x), "sum", name)
    assert isinstance(fake, FakeTensor)
    for tracing in ("real", "fake", "symbolic"):

        def function(x: Tensor) -> Tensor:
            return F.all_gather_single(F.all_reduce(x, "sum", name), 0, name)

        graph = make_fx(function, tracing_mode=tracing)(x).graph
        targets = [node.target for node in graph.nodes]
        assert {op, _overload("all_gather_into_tensor")} <= set(targets), tracing
    batched = torch.vmap(lambda row: F.all_reduce(row, "sum", name))(x)
    assert torch.equal(batched + 0, x * dist.get_world_size())
    gradient = torch.func.grad(lambda y: F.all_reduce(y, "sum", name).sum())(x)
    assert torch.equal(gradient, torch.full_like(x, dist.get_world_size()))
    with torch.profiler.profile(acc_events=True) as profile:
        F.all_reduce(x, "sum", name)
    assert "c10d_ext::all_reduce" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("size", (1, 2))
def test_modes_subclasses_and_transforms_see_the_op(size: int) -> None:
    run(size, _watched)


def _written() -> None:
    """Complete on return, or in flight; never a gradient."""
    n, name = dist.get_world_size(), group()
    x = torch.arange(3.0, requires_grad=True)
    want = n * torch.arange(3.0)
    assert _C.writes["all_reduce_"](False, x, "sum", group_name=name)
    assert work_of(x) is None and x.is_leaf and torch.equal(x.detach(), want)
    y = torch.arange(3.0)
    assert _C.writes["all_reduce_coalesced_"](True, [y], "sum", name)
    assert (work_of(y) is not None) == (n > 1)
    assert torch.equal(_wait(y), want)
    out = torch.empty(3 * n)
    assert _C.writes["all_gather_into_tensor_out"](False, want, n, name, out=out)
    assert work_of(out) is None and torch.equal(out, want.repeat(n))
    with pytest.raises(ValueError, match="all_reduce: reduce_op must be one of"):
        _C.writes["all_reduce_"](False, x.detach(), "sun", name)


def _not_written() -> None:
    """Whoever else needs to know of the call: it says no, and has done nothing."""
    x, name = torch.ones(2), group()
    write = _C.writes["all_reduce_"]
    with Functions():
        assert not write(False, x, "sum", name)
    with Ops():
        assert not write(False, x, "sum", name)
    with FakeTensorMode() as mode:
        assert not write(False, mode.from_tensor(x), "sum", name)
    assert not write(False, x.as_subclass(Marked), "sum", name)
    assert not write(False, torch.ones(2, device="meta"), "sum", name)
    assert not _C.writes["all_reduce_coalesced_"](False, [x, x.as_subclass(Marked)], "sum", name)
    said: list[bool] = []

    def function(y: Tensor) -> Tensor:
        said.append(write(False, y, "sum", name))
        return y

    torch.func.vmap(function)(x)
    torch.func.jvp(function, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        function(torch.autograd.forward_ad.make_dual(x, x))
    assert said == [False] * 3
    for arguments in ((x,), (x, "sum", name, 1.0, 2), (x, 7, name), (None, "sum", name)):
        assert not write(False, *arguments)
    assert torch.equal(x, torch.ones(2))
    assert work_of(x) is None


@pytest.mark.parametrize("size", (1, 2))
def test_writes_are_complete_on_return(size: int) -> None:
    # With the delayed backend nothing is complete by itself.
    run(size, _written, backend="delayed")


@pytest.mark.parametrize("size", (1, 2))
def test_writes_refuse_what_others_need_to_know(size: int) -> None:
    run(size, _not_written)
