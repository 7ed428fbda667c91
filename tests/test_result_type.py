"""An eager functional call returns an AsyncCollectiveTensor, whoever calls it and when.

Nothing that a user can see of a result (its type and attributes, what Dynamo guards on, how often
it compiles, warnings) depends on how far the collective has come, on the backend, the rank or the
world size.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torch_c10d_ext
import torch_c10d_ext.functional as F
from tests.harness import run
from tests.harness.flight import in_flight, quick_store, single_rank_shortcut
from tests.harness.worker import FALLBACK
from torch_c10d_ext._async import AsyncCollectiveTensor

# How long rank 0's results stay in flight where something is done with them that may wait.
FLIGHT = 0.005
PLACES = [(backend, size) for backend in ("gloo", "shm") for size in (1, 2, 3, 4)] + [(FALLBACK, 2)]
TORCH_DIFFERENTIATES = torch.__version__ >= "2.13"


@contextlib.contextmanager
def _state(flies: bool, blocks: bool = False) -> Iterator[Callable[[Any], Any]]:
    """A function that sees to it that a fresh result is complete, or in flight on rank 0.

    Where the call itself `blocks`, the collective is in flight for a while.
    """
    if not flies:
        yield (lambda y: y) if blocks else _completed
        return
    with in_flight(quick_store()) as gate:
        if blocks:
            gate.open_after(FLIGHT)
        yield (lambda y: y) if blocks else _flying
        gate.open()


def _completed(result: Any) -> Any:
    """The result when its collective is done, having asked nothing of the result itself."""
    ends = time.monotonic() + 10
    for y in result if isinstance(result, list | tuple) else [result]:
        while (work := F.work_of(y)) is not None and not work.is_completed():
            assert time.monotonic() < ends, "the collective takes longer than 10 s"
            time.sleep(0.0001)
    return result


def _flying(result: Any) -> Any:
    """The result, which must be in flight on rank 0."""
    if dist.get_rank() == 0 and dist.get_world_size() > 1:
        for y in result if isinstance(result, list | tuple) else [result]:
            work = F.work_of(y)
            assert work is not None and not work.is_completed(), "not in flight"
    return result


def _calls(n: int) -> dict[str, Callable[[Tensor], Any]]:
    """Every function that returns a result, of 2n x 2n values, and what they take beside it."""
    rank, ring = dist.get_rank(), [(m + 1) % n for m in range(n)]
    found: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda x: F.all_reduce(x, "sum", None),
        "all_reduce avg": lambda x: F.all_reduce(x, "avg", None),
        "all_reduce max": lambda x: F.all_reduce(x, "max", None),
        "all_reduce premul_sum": lambda x: F.all_reduce(x, "premul_sum", None, factor=0.5),
        "all_reduce_coalesced": lambda x: F.all_reduce_coalesced([x, x + 1], "sum", None),
        "all_gather": lambda x: F.all_gather(x, [2 * n] * n, None),
        "all_gather_single": lambda x: F.all_gather_single(x, 0, None),
        "all_gather_single along columns": lambda x: F.all_gather_single(x, 1, None),
        "all_gather_single_autograd": lambda x: F.all_gather_single_autograd(x, 1, None),
        "all_gather_single_coalesced": lambda x: F.all_gather_single_coalesced([x, x[0]], None),
        "all_gather_into_tensor_coalesced": lambda x: F.all_gather_into_tensor_coalesced([x], None),
        "all_gather_tensor": lambda x: F.all_gather_tensor(x, 0, None),
        "all_gather_tensor_autograd": lambda x: F.all_gather_tensor_autograd(x, 1, None),
        "reduce_scatter": lambda x: F.reduce_scatter(x, "sum", [2] * n, None),
        "reduce_scatter_single": lambda x: F.reduce_scatter_single(x, "sum", 0, None),
        "reduce_scatter_single along columns": lambda x: F.reduce_scatter_single(x, "avg", 1, None),
        "reduce_scatter_single_autograd": lambda x: F.reduce_scatter_single_autograd(
            x, "sum", 1, None
        ),
        "reduce_scatter_single_coalesced": lambda x: F.reduce_scatter_single_coalesced(
            [x, x * 2], "sum", [0, 1], None
        ),
        "reduce_scatter_tensor_coalesced": lambda x: F.reduce_scatter_tensor_coalesced(
            [x, x * 2], "sum", [0, 1], None
        ),
        "reduce_scatter_tensor": lambda x: F.reduce_scatter_tensor(x, "sum", 0, None),
        "reduce_scatter_tensor_autograd": lambda x: F.reduce_scatter_tensor_autograd(
            x, "sum", 1, None
        ),
        "all_to_all_single": lambda x: F.all_to_all_single(x, None, None, None),
        "all_to_all_single with splits": lambda x: F.all_to_all_single(x, [2] * n, [2] * n, None),
        "all_to_all_single_autograd": lambda x: F.all_to_all_single_autograd(
            x, [2] * n, [2] * n, None
        ),
        "broadcast": lambda x: F.broadcast(x, n - 1, None),
        "broadcast_coalesced": lambda x: F.broadcast_coalesced([x, x[0]], 0, None),
        "reduce": lambda x: F.reduce(x, "sum", n - 1, None),
        "gather": lambda x: F.gather(x, 0, None),
        "gather along columns": lambda x: F.gather(x, 0, None, gather_dim=1),
        "scatter": lambda x: F.scatter(x, 0, None),
        "scatter along columns": lambda x: F.scatter(x, 0, None, scatter_dim=1),
        "permute_tensor": lambda x: F.permute_tensor(x, ring, None),
        "barrier": lambda x: F.barrier(x, None),
        "reduce_from_group": lambda x: F.reduce_from_group(x, None),
        "of a result": lambda x: F.all_reduce(F.all_reduce(x, "sum", None), "sum", None),
        "of a view of a result": lambda x: F.broadcast(F.all_reduce(x, "sum", None).t(), 0, None),
        "of a column": lambda x: F.all_reduce(x[:, 1], "sum", None),
        "of a scalar": lambda x: F.all_reduce(x[0, 0], "sum", None),
        "of nothing": lambda x: F.all_reduce(x[:0], "sum", None),
        "of a parameter": lambda x: F.all_reduce(torch.nn.Parameter(x), "sum", None),
        "of integers": lambda x: F.all_reduce(x.to(torch.int32), "bor", None),
        "of bools": lambda x: F.all_reduce(x > 0, "sum", None),
        "of halves": lambda x: F.all_reduce(x.half(), "sum", None),
        "of float8": lambda x: F.all_reduce(x.to(torch.float8_e5m2), "sum", None),
        "of complex values": lambda x: F.all_reduce(torch.complex(x, x), "sum", None),
        "of conjugated values": lambda x: F.all_reduce(torch.complex(x, x).conj(), "sum", None),
        "under no_grad": lambda x: torch.no_grad()(lambda: F.all_reduce(x, "sum", None))(),
        "in inference mode": lambda x: torch.inference_mode()(lambda: F.broadcast(x, 0, None))(),
        "by keywords": lambda x: F.all_reduce(self=x, reduceOp="sum", group=None),
    }
    if n > 1:
        back = [ring.index(m) for m in range(n)]
        found |= {
            "isend_inplace, irecv_inplace": lambda x: [
                F.isend_inplace(x.detach().clone(), ring[rank]),
                F.irecv_inplace(torch.empty_like(x), back[rank]),
            ],
            "batch_p2p_ops_inplace": lambda x: F.batch_p2p_ops_inplace(
                ["isend", "irecv"],
                [ring[rank], back[rank]],
                [0, 0],
                [x.detach().clone(), torch.empty_like(x)],
            ),
        }
    return found


# They compute with a result, are no collectives, or have nothing to send.
_BLOCK = {
    "all_gather_single along columns",
    "all_gather_single_autograd",
    "all_gather_tensor_autograd",
    "gather along columns",
    "scatter along columns",
    "of a result",
    "of a view of a result",
    "of nothing",
    "isend_inplace, irecv_inplace",
    "batch_p2p_ops_inplace",
}

# Functions that return their argument, or what is no result of a collective.
_OTHERS = {
    "all_gather_inplace",
    "all_gather_tensor_inplace",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "allow_inflight_collective_as_graph_input_ctx",
    "batch_isend_irecv",
    "broadcast_inplace",
    "copy_to_group",
    "reduce_scatter_tensor_inplace",
    "wait_message",
    "wait_tensor",
    "work_of",
}


def test_every_function_is_called() -> None:
    called = {name.split(" ")[0] for name in run(2, _names_of_calls)[0]}
    functions = {name for name in F.__all__ if name[0].islower()}
    assert functions - called - {"irecv_inplace"} == _OTHERS


def _names_of_calls() -> list[str]:
    return [name.replace(",", "") for name in _calls(2)]


def _types(flies: bool) -> list[str]:
    n, rank, failures = dist.get_world_size(), dist.get_rank(), []
    for requires_grad in (False, True):
        for name, call in _calls(n).items():
            x = torch.arange(4.0 * n * n).reshape(2 * n, 2 * n) + rank
            x.requires_grad_(requires_grad)
            what = f"{name}, {requires_grad=}"
            with _state(flies, blocks=name in _BLOCK) as settle:
                y = settle(call(x))
                results = y if isinstance(y, list) else [y]
                others = {str(type(each)) for each in results} - {str(AsyncCollectiveTensor)}
            if others:
                failures.append(f"{what}: {others}")
            if isinstance(y, tuple):
                failures.append(f"{what}: a tuple")
            for each in results:
                F.wait_tensor(each)
    return failures


@pytest.mark.parametrize("flies", [False, True], ids=["complete", "in flight"])
@pytest.mark.parametrize(("backend", "size"), PLACES)
def test_every_result_is_of_the_class(backend: str, size: int, flies: bool) -> None:
    for failures in run(size, _types, flies, backend=backend):
        assert failures == []


def _types_of_one_rank_through_the_backend() -> list[str]:
    with single_rank_shortcut(False):
        return _types(False)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_single_ranks_results_are_of_the_class(backend: str) -> None:
    assert run(1, _types_of_one_rank_through_the_backend, backend=backend) == [[]]


def _others() -> None:
    """What is no result: an op's own, what is waited for, and what is written in place."""
    n, x = dist.get_world_size(), torch.ones(4)
    name = dist.group.WORLD.group_name
    y = torch.ops.c10d_ext.all_reduce(x, "sum", name)
    assert type(y) is Tensor
    assert type(F.wait_tensor(y)) is Tensor
    assert F.all_reduce_inplace(x, "sum", None) is x
    assert F.broadcast_inplace(x, 0, None) is x
    assert type(F.copy_to_group(x, None)) is Tensor  # communicates in backward alone
    out = torch.empty(4 * n)
    assert F.all_gather_tensor_inplace(out, x, None) is out
    y = F.all_reduce(x, "sum", None)
    assert isinstance(y, torch_functional.AsyncCollectiveTensor)
    assert isinstance(y, Tensor)
    assert torch_c10d_ext.AsyncCollectiveTensor is F.AsyncCollectiveTensor is AsyncCollectiveTensor
    assert issubclass(AsyncCollectiveTensor, torch_functional.AsyncCollectiveTensor)
    assert type(y.wait()) is type(F.wait_tensor(y)) is type(y + 0) is Tensor
    # In place on a result: the result itself.
    assert y.add_(1) is y
    assert F.all_reduce_inplace(y, "sum", None) is y
    assert type(y) is AsyncCollectiveTensor


@pytest.mark.parametrize(("backend", "size"), [("gloo", 1), ("gloo", 2), ("shm", 2)])
def test_what_is_no_result_is_no_wrapper(backend: str, size: int) -> None:
    run(size, _others, backend=backend)


# --- attributes ----------------------------------------------------------------------------------


_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "type": lambda y: type(y).__qualname__,
    "completed": lambda y: y.completed,
    "type of elem": lambda y: type(y.elem).__qualname__,
    "elem's shape": lambda y: tuple(y.elem.shape),
    "elem's history": lambda y: (y.elem.requires_grad, y.elem.grad_fn is None),
    "elem's version": lambda y: y.elem._version,
    "requires_grad": lambda y: y.requires_grad,
    "is_leaf": lambda y: y.is_leaf,
    "grad_fn": lambda y: type(y.grad_fn).__name__,
    "retains_grad": lambda y: y.retains_grad,
    "version": lambda y: y._version,
    "output_nr": lambda y: y.output_nr,
    "shape": lambda y: tuple(y.shape),
    "strides": lambda y: y.stride(),
    "storage_offset": lambda y: y.storage_offset(),
    "dtype": lambda y: y.dtype,
    "device": lambda y: y.device,
    "layout": lambda y: y.layout,
    "is_contiguous": lambda y: y.is_contiguous(),
    "bits": lambda y: (y.is_conj(), y.is_neg(), y.is_inference()),
    "is_view": lambda y: (y._is_view(), y._base is None),
    "nbytes": lambda y: (y.nbytes, y.element_size(), y.numel()),
    "dispatch keys": lambda y: str(torch._C._dispatch_keys(y)),
    "__dict__": lambda y: sorted(y.__dict__),
    "names": lambda y: y.names,
    "backward hooks": lambda y: y._backward_hooks,
    "flattened": lambda y: y.__tensor_flatten__(),
    "length": lambda y: len(y),
    "type of a view": lambda y: type(y.t()).__qualname__,
    "view's base": lambda y: (y.t()._is_view(), y.t()._base is y),
    "view's version": lambda y: y.t()._version,
    "type when detached": lambda y: type(y.detach()).__qualname__,
}
# What may wait.
_VALUES: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "str": str,
    "format": lambda y: f"{y}",
    "type of wait()": lambda y: type(y.wait()).__qualname__,
    "type of an op": lambda y: type(y + 0).__qualname__,
    "work": lambda y: F.work_of(y),
    "data_ptr": lambda y: y.data_ptr() == y.elem.data_ptr() != 0,
}
# Where torch's own class says the same.
_AS_TORCHS = {
    "completed",
    "type of elem",
    "requires_grad",
    "is_leaf",
    "retains_grad",
    "version",
    "output_nr",
    "shape",
    "strides",
    "layout",
    "is_contiguous",
    "bits",
    "is_view",
    "nbytes",
    "__dict__",
    "names",
    "backward hooks",
    "flattened",
    "length",
    "view's base",
    "type of wait()",
    "type of an op",
}


def _asked(y: Any, questions: dict[str, Callable[[Any], Any]]) -> dict[str, str]:
    found = {}
    for name, ask in questions.items():
        try:
            found[name] = str(ask(y))
        except Exception as error:
            found[name] = type(error).__name__
    return found


def _functional(ours: bool) -> Any:
    return F if ours else torch_functional


def _life(ours: bool, flies: bool, requires_grad: bool) -> dict[str, dict[str, str]]:
    """What a result tells of itself: fresh, read, and written."""
    module, rank = _functional(ours), dist.get_rank()
    # 24 on every rank, in every world.
    x = torch.full((2, 3), 24.0 if rank == 0 else 0.0, dtype=torch.float64)
    x.requires_grad_(requires_grad)
    told = {}
    with _state(flies) as settle:
        y = module.all_reduce(x, "sum", dist.group.WORLD)
        if ours:
            settle(y)
            work = F.work_of(y)
            assert isinstance(work, dist.Work), "no work behind what nobody has waited for"
        told["fresh"] = _asked(y, _ATTRIBUTES)
        if ours:
            assert isinstance(F.work_of(y), dist.Work), "asking for attributes waited"
    told["its values"] = _asked(y, _VALUES)
    told["waited"] = _asked(y, _ATTRIBUTES)
    with torch.no_grad():
        y.mul_(2)
    told["written"] = _asked(y, _ATTRIBUTES)
    told["detached"] = _asked(y.detach(), _ATTRIBUTES | _VALUES)
    return told


def _differences(one: dict[str, dict[str, str]], other: dict[str, dict[str, str]]) -> list[str]:
    return [
        f"{age}: {name}: {value}, not {one[age][name]}"
        for age, told in other.items()
        for name, value in told.items()
        if one[age][name] != value
    ]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_attributes_do_not_depend_on_where_and_when(requires_grad: bool) -> None:
    (first, _) = run(2, _life, True, False, requires_grad)
    assert first["fresh"]["type"] == first["waited"]["type"] == "AsyncCollectiveTensor"
    assert first["fresh"]["completed"] == "False"
    assert first["waited"]["completed"] == "True"
    assert first["its values"]["work"] == "None"
    assert first["fresh"]["elem's history"] == "(False, True)"
    assert (first["fresh"]["grad_fn"] != "NoneType") == requires_grad
    if not requires_grad:
        assert first["its values"]["repr"] == first["its values"]["str"]
        assert first["its values"]["str"] == f"AsyncCollectiveTensor({_TWENTY_FOUR!r})"
    for backend, size in PLACES:
        for flies in (False, True):
            for rank, told in enumerate(
                run(size, _life, True, flies, requires_grad, backend=backend)
            ):
                where = f"{backend}, {size} ranks, rank {rank}, {flies=}"
                differ = _differences(first, told)
                assert not differ, f"{where}\n" + "\n".join(differ)


_TWENTY_FOUR = torch.full((2, 3), 24.0, dtype=torch.float64)


@pytest.mark.parametrize(
    "requires_grad",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not TORCH_DIFFERENTIATES, reason="torch's results have no gradients before 2.13"
            ),
        ),
    ],
)
def test_attributes_are_those_of_torchs_class(requires_grad: bool) -> None:
    theirs = run(2, _life, False, False, requires_grad)[0]
    ours = run(2, _life, True, False, requires_grad)[0]
    theirs, ours = (
        {age: {k: v for k, v in told.items() if k in _AS_TORCHS} for age, told in each.items()}
        for each in (theirs, ours)
    )
    assert not _differences(theirs, ours), "\n".join(_differences(theirs, ours))


# --- what Dynamo makes of it ---------------------------------------------------------------------


def _double(y: Tensor) -> Tensor:
    return y * 2 + y.t().reshape(2, 3)


def _sequences(m: Any) -> dict[str, list[Callable[[], Tensor]]]:
    """What a compiled function is called with, in turn."""
    g = dist.group.WORLD
    x, leaf = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)

    def result() -> Any:
        return m.all_reduce(x, "sum", g)

    def with_history() -> Any:
        return m.all_reduce(leaf, "sum", g)

    def waited() -> Any:
        y = result()
        y.wait()
        return y

    def used() -> Any:
        y = result()
        y.sum().item()
        return y

    def written() -> Any:
        y = result()
        return y.mul_(2)

    return {
        "results": [result] * 4,
        "results, waited for or used before": [result, waited, result, used, result],
        "results that were written": [result, written, result],
        "with history, and without": [result, with_history, result, with_history],
        "plain tensors between": [result, lambda: x, result, lambda: x],
        "what wait() gave": [result, lambda: result().wait(), result],
        "views": [result, lambda: m.all_reduce(torch.ones(3, 2), "sum", g).t(), result],
        "views of a result's shape": [result, lambda: result().view(-1).view(2, 3), result],
        "of other collectives": [
            result,
            lambda: m.broadcast(x, 0, g),
            lambda: m.all_reduce_coalesced([x, x], "sum", g)[1],
        ],
        "detached": [result, lambda: with_history().detach(), result],
        "of a strided input": [result, lambda: m.all_reduce(torch.ones(3, 2).t(), "sum", g)],
    }


def _frames(ours: bool, flies: bool, backend: str) -> dict[str, tuple[list[int], list[Any]]]:
    """How often a function has been compiled after each call, and what was guarded on first."""
    found = {}
    for name, makers in _sequences(_functional(ours)).items():
        torch._dynamo.reset()
        counter, counts = CompileCounterWithBackend(backend), list[int]()
        guards = list[Any]()

        def note(each: Any, guards: list[Any] = guards) -> None:
            guards.append(sorted((str(guard.name), guard.create_fn_name()) for guard in each))

        step = torch._dynamo.optimize(counter, nopython=True, guard_export_fn=note)(_double)
        for make in makers:
            with in_flight(quick_store()) if flies else contextlib.nullcontext() as gate:
                if gate is not None:
                    gate.open_after(FLIGHT)
                y = make()
                if not flies and ours:
                    _completed(y)
                with warnings.catch_warnings():
                    # Dynamo looks for `.grad` of what is no leaf, and hides the warning.
                    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                    step(y)
            counts.append(counter.frame_count)
        found[name] = counts, guards
    return found


@pytest.mark.parametrize("compiler", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
def test_compiles_and_guards_as_torchs_results_do(compiler: str) -> None:
    theirs = run(2, _frames, False, False, compiler)[0]
    if compiler == "eager":
        assert theirs["results"][0] == [1, 1, 1, 1]
    places = [("gloo", 2, False), ("shm", 2, True)]
    if compiler == "eager":
        places += [("gloo", 2, True), ("gloo", 1, False), ("shm", 3, False)]
    for backend, size, flies in places:
        for rank, ours in enumerate(run(size, _frames, True, flies, compiler, backend=backend)):
            for name, (counts, guards) in ours.items():
                where = f"{name}: {backend}, {size} ranks, rank {rank}, {flies=}"
                assert counts == theirs[name][0], where
                assert guards == theirs[name][1], where


# --- warnings ------------------------------------------------------------------------------------


def _warnings_of_use(flies: bool) -> list[str]:
    """Everything that a plain use of a result warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for requires_grad in (False, True):
            x = torch.ones(2, 3, requires_grad=requires_grad)
            with _state(flies) as settle:
                y = settle(F.all_reduce(x, "sum", None))
                views = [y.t(), y[0], y.view(-1), y.detach()]
            repr(y)
            out = (y + 1).sum() + sum(v.sum() for v in views) + y.wait().sum()
            if requires_grad:
                out.backward()
            y.detach().numpy()
            y.detach().clone().add_(1)
            y.tolist()
            torch.equal(y, y)
            del y, views
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("flies", [False, True], ids=["complete", "in flight"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_nothing_warns(backend: str, flies: bool) -> None:
    for rank, warned in enumerate(run(2, _warnings_of_use, flies, backend=backend)):
        assert warned == [], rank
