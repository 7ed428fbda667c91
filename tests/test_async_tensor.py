"""The eager result of a functional collective: waits on first real use, and is never a trap.

One file, for all of it is about one class.
"""

import copy
import datetime as dt
import gc
import io
import pickle
import resource
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor

import torch_c10d_ext
import torch_c10d_ext.functional as F
from tests.harness import run
from tests.harness.flight import in_flight, single_rank_shortcut


def _input(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(-9, 10, shape, generator=generator).to(dtype)
    if dtype.is_complex:
        x = x + 1j * torch.randint(-9, 10, shape, generator=generator)
    return x


def _sum(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    """What all_reduce(_input(...)) must give."""
    total = torch.zeros(shape, dtype=dtype)
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(-9, 10, shape, generator=generator).to(dtype)
        if dtype.is_complex:
            x = x + 1j * torch.randint(-9, 10, shape, generator=generator)
        total += x
    return total


def _reduced(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (2, 3)) -> Tensor:
    return F.all_reduce(_input(dtype, shape), "sum", None)


def _assert_in_flight(y: Tensor) -> None:
    """On rank 0, whose peers are held back."""
    if dist.get_rank() == 0:
        work = F.work_of(y)
        assert work is not None, "no work behind the tensor"
        assert not work.is_completed(), "waited too early"


# --- waiting -------------------------------------------------------------------------------------


def _result_waits_on_first_use() -> None:
    with in_flight() as gate:
        y = _reduced()
        assert type(y) is torch_c10d_ext.AsyncCollectiveTensor
        _assert_in_flight(y)
        gate.open_after(0.05)
        assert torch.equal(y + 0, _sum())
        assert type(y + 0) is Tensor
        assert F.work_of(y) is None


def test_waits_on_first_use() -> None:
    run(2, _result_waits_on_first_use)


_METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda y: y.shape,
    "size()": lambda y: y.size(),
    "size(0)": lambda y: y.size(0),
    "stride": lambda y: y.stride(),
    "dtype": lambda y: y.dtype,
    "device": lambda y: y.device,
    "layout": lambda y: y.layout,
    "dim": lambda y: y.dim(),
    "ndim": lambda y: y.ndim,
    "numel": lambda y: y.numel(),
    "len": lambda y: len(y),
    "nbytes": lambda y: y.nbytes,
    "is_contiguous": lambda y: y.is_contiguous(),
    "is_floating_point": lambda y: y.is_floating_point(),
    "requires_grad": lambda y: y.requires_grad,
    "grad_fn": lambda y: y.grad_fn,
    "is_leaf": lambda y: y.is_leaf,
    "storage_offset": lambda y: y.storage_offset(),
    "element_size": lambda y: y.element_size(),
    "is_conj": lambda y: y.is_conj(),
    "is_sparse": lambda y: y.is_sparse,
    "is_cuda": lambda y: y.is_cuda,
    "hash": lambda y: hash(y),
    "isinstance": lambda y: isinstance(y, Tensor),
}


def _metadata_does_not_wait() -> None:
    plain = _sum()
    with in_flight() as gate:
        y = _reduced()
        for name, ask in _METADATA.items():
            got = ask(y)
            if name != "hash":
                assert got == ask(plain), f"{name}: {got}"
            _assert_in_flight(y)
        gate.open()
        F.wait_tensor(y)


def test_metadata_does_not_wait() -> None:
    run(2, _metadata_does_not_wait)


_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda y: y.view(-1),
    "reshape": lambda y: y.reshape(3, 2),
    "transpose": lambda y: y.t(),
    "index": lambda y: y[1],
    "slice": lambda y: y[:, 1:],
    "unsqueeze": lambda y: y.unsqueeze(0),
    "expand": lambda y: y.expand(4, 2, 3),
    "narrow": lambda y: y.narrow(1, 1, 2),
    "permute": lambda y: y.permute(1, 0),
    "flatten": lambda y: y.flatten(),
    "view_as": lambda y: y.view_as(y),
    "detach": lambda y: y.detach(),
    "alias": lambda y: torch.ops.aten.alias(y),
    "chunk": lambda y: y.chunk(2)[1],
    "split": lambda y: y.split([1, 2], 1)[1],
    "unbind": lambda y: y.unbind()[1],
    "contiguous": lambda y: y.contiguous(),
    "as_strided": lambda y: y.as_strided((3,), (2,), 1),
    "view dtype": lambda y: y.view(torch.int64),
    "squeeze": lambda y: y.squeeze(),
    "view of view": lambda y: y.t()[1:].unsqueeze(2),
}


def _views_do_not_wait() -> None:
    for name, view in _VIEWS.items():
        with in_flight() as gate:
            y = _reduced()
            v = view(y)
            _assert_in_flight(y)
            assert v.shape == view(_sum()).shape
            gate.open_after(0.01)
            assert torch.equal(v + 0, view(_sum()) + 0), name
            assert torch.equal(y + 0, _sum()), f"{name}: base"


def test_views_do_not_wait() -> None:
    run(2, _views_do_not_wait)


_LAZY_BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "conj": lambda y: y.conj(),
    "conj of view": lambda y: y.t().conj(),
    "view of conj": lambda y: y.conj()[1:],
    "imag": lambda y: y.imag,
    "real": lambda y: y.real,
    "imag of conj": lambda y: y.conj().imag,
    "adjoint": lambda y: y.mH,
    "resolve_conj": lambda y: y.conj().resolve_conj(),
    "double conj": lambda y: y.conj().conj(),
}


def _conj_and_neg_bits_survive() -> None:
    for name, view in _LAZY_BITS.items():
        with in_flight() as gate:
            y = _reduced(torch.complex128)
            gate.open_after(0.01)
            v = view(y)
            want = view(_sum(torch.complex128))
            assert torch.equal(v + 0, want + 0), name
            assert torch.equal((v * 2).sum(), (want * 2).sum()), name
            assert torch.equal(torch.clone(v), torch.clone(want)), name


def test_conj_and_neg_bits_survive() -> None:
    run(2, _conj_and_neg_bits_survive)


# --- every way to get at the data ----------------------------------------------------------------


def _saved(y: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    return torch.load(file)


def _saved_by_torch_types(y: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"y": y}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["y"]


def _assigned(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:] = y
    return z


def _set_data(y: Tensor) -> Tensor:
    z = torch.zeros(2, 3, dtype=y.dtype)
    z.data = y
    return z + 0


def _through_pointer(y: Tensor) -> Tensor:
    import ctypes

    pointer = y.data_ptr()
    assert pointer != 0
    data = (ctypes.c_double * 6).from_address(pointer)
    return torch.tensor(list(data), dtype=torch.float64).reshape(2, 3)


def _through_storage(y: Tensor) -> Tensor:
    return torch.empty(0, dtype=y.dtype).set_(y.untyped_storage()).reshape(2, 3) + 0


def _through_thread(y: Tensor) -> Tensor:
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(y + 0))
    thread.start()
    thread.join(30)
    return results[0]


def _added_in_place(y: Tensor) -> Tensor:
    y.add_(5)
    return y - 5


def _written(y: Tensor) -> Tensor:
    kept = y[0, 0].clone()
    y[0, 0] = 100
    assert y[0, 0].item() == 100
    y[0, 0] = kept
    return y + 0


def _as_out(y: Tensor) -> Tensor:
    kept = y.clone()
    torch.add(torch.zeros_like(kept), kept, out=y)
    return y + 0


def _like_a_plain_tensor(f: Callable[..., Any], *args: Any) -> Any:
    """A plain tensor makes numpy warn here, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return f(*args)


def _shared(y: Tensor) -> Tensor:
    y.share_memory_()
    assert y.is_shared()
    return y + 0


_USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda y: y + 0,
    "function": lambda y: torch.mul(y, 1),
    "second argument": lambda y: torch.zeros(2, 3, dtype=y.dtype) + y,
    "clone": lambda y: y.clone(),
    "cat": lambda y: torch.cat([y, y])[:2],
    "stack": lambda y: torch.stack([y])[0],
    "where": lambda y: torch.where(torch.ones(2, 3, dtype=torch.bool), y, y),
    "to": lambda y: y.to(torch.float32).to(torch.float64),
    "double": lambda y: y.double() + 0,
    "cpu": lambda y: y.cpu() + 0,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "torch.save": _saved,
    "torch.save in a dict": _saved_by_torch_types,
    "deepcopy": lambda y: copy.deepcopy(y),
    "copy": lambda y: copy.copy(y) + 0,
    "numpy": lambda y: torch.from_numpy(y.numpy()),
    "numpy force": lambda y: torch.from_numpy(y.numpy(force=True)),
    "numpy.asarray": lambda y: torch.from_numpy(np.asarray(y)),
    "numpy.array": lambda y: torch.from_numpy(_like_a_plain_tensor(np.array, y)),
    "__array__": lambda y: torch.from_numpy(y.__array__()),
    "numpy ufunc": lambda y: torch.from_numpy(np.asarray(_like_a_plain_tensor(np.add, y, 0))),
    "torch.from_dlpack": lambda y: torch.from_dlpack(y) + 0,
    "numpy.from_dlpack": lambda y: torch.from_numpy(np.from_dlpack(y).copy()),
    "share_memory_": _shared,
    "data_ptr": _through_pointer,
    "data": lambda y: y.data + 0,
    "untyped_storage": _through_storage,
    "set_": lambda y: torch.empty(0, dtype=y.dtype).set_(y) + 0,
    "tolist": lambda y: torch.tensor(y.tolist(), dtype=y.dtype),
    "item": lambda y: torch.tensor(
        [[y[i, j].item() for j in range(3)] for i in range(2)], dtype=y.dtype
    ),
    "float": lambda y: torch.tensor([[float(v) for v in row] for row in y], dtype=y.dtype),
    "iteration": lambda y: torch.stack(list(y)),
    "fancy indexing": lambda y: y[[0, 1]],
    "mask": lambda y: y[torch.ones(2, 3, dtype=torch.bool)].reshape(2, 3),
    "assignment from": _assigned,
    "assignment to": _written,
    "in place": _added_in_place,
    "as out": _as_out,
    "another thread": _through_thread,
    "wait_tensor": lambda y: F.wait_tensor(y) + 0,
    "torch's wait_tensor": lambda y: torch_functional.wait_tensor(y) + 0,
    "wait method": lambda y: y.wait() + 0,
    "trigger_wait": lambda y: y.trigger_wait() + 0,
    "matmul": lambda y: torch.eye(2, dtype=y.dtype) @ y,
    "linear": lambda y: torch.nn.functional.linear(y, torch.eye(3, dtype=y.dtype)),
    "no_grad": lambda y: torch.no_grad()(lambda: y + 0)(),
    "inference_mode": lambda y: torch.inference_mode()(lambda: (y + 0).clone())().clone(),
    "torch.tensor": lambda y: torch.as_tensor(y) + 0,
    "new tensor": lambda y: torch.tensor(y.tolist(), dtype=y.dtype),
    "type": lambda y: y.type(torch.float64) + 0,
    "Parameter": lambda y: torch.nn.Parameter(y.detach(), requires_grad=False) + 0,
}

_TEXTS: dict[str, Callable[[Tensor], str]] = {
    "repr": repr,
    "str": str,
    "format": lambda y: f"{y[0, 0]:.2f}",
    "format width": lambda y: f"{y[1, 2]:>10.3f}|",
    "format default": lambda y: f"{y}",
    "percent": lambda y: f"{y.sum()!s}",
}


def _use_sees_the_result(name: str) -> None:
    use = _USES[name]
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.02)
        got = use(y)
        assert isinstance(got, Tensor)
        got = got.clone() if type(got) is Tensor else got + 0
        assert torch.equal(got, _sum()), f"{got} instead of {_sum()}"
        del y
    assert torch_c10d_ext.pending_count() == 0


@pytest.mark.parametrize("name", _USES)
def test_use_sees_the_finished_value(name: str) -> None:
    run(2, _use_sees_the_result, name)


def _text_shows_the_result(name: str) -> None:
    show = _TEXTS[name]
    want = show(_sum())
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.02)
        text = show(y)
    values = want.replace("tensor(", "").strip("()")
    assert values.split(", dtype")[0].replace(" ", "") in text.replace(" ", ""), (text, want)


@pytest.mark.parametrize("name", _TEXTS)
def test_text_shows_the_finished_value(name: str) -> None:
    run(2, _text_shows_the_result, name)


_BELOW_PYTHON: dict[str, Callable[[Tensor], Any]] = {
    "to_dlpack": lambda y: torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)) + 0,
    "set data of another": _set_data,
}


def _refused_in_words(name: str) -> None:
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.02)
        with pytest.raises(RuntimeError, match="must be reached through .wait()"):
            _BELOW_PYTHON[name](y)
        assert torch.equal(_BELOW_PYTHON[name](y.wait()), _sum())


@pytest.mark.parametrize("name", _BELOW_PYTHON)
def test_what_reads_memory_below_python_is_refused_in_words(name: str) -> None:
    run(2, _refused_in_words, name)


def _unpickles_as_a_plain_tensor() -> None:
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.02)
        z = pickle.loads(pickle.dumps(y))
        assert type(z) is Tensor, type(z)
        assert torch.equal(z, _sum())


def test_pickle_stores_a_plain_tensor() -> None:
    run(2, _unpickles_as_a_plain_tensor)


def _deepcopy_is_independent() -> None:
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.02)
        z = copy.deepcopy(y)
        z += 1
        assert torch.equal(y + 0, _sum())


def test_deepcopy_is_independent() -> None:
    run(2, _deepcopy_is_independent)


_REPLACEMENTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "data": (lambda y, other: setattr(y, "data", other), lambda other: other),
    "set_": (lambda y, other: y.set_(other), lambda other: other),
    "resize_": (lambda y, other: y.resize_(3), lambda other: _sum().reshape(-1)[:3]),
    "larger storage": (
        lambda y, other: y.untyped_storage().resize_(4096),
        lambda other: _sum(),
    ),
}


def _replacing_the_memory() -> None:
    for name, (change, expected) in _REPLACEMENTS.items():
        with in_flight() as gate:
            y = _reduced()
            gate.open_after(0.02)
            other = torch.full((2, 3), 7.0, dtype=torch.float64)
            change(y, other)
            want = expected(other)
            assert y.shape == want.shape, f"{name}: {y.shape}"
            assert torch.equal(y + 0, want), f"{name}: {y + 0}"


def test_replacing_the_memory_replaces_the_values() -> None:
    run(2, _replacing_the_memory)


# --- lifetime ------------------------------------------------------------------------------------


def _dropped_result_still_completes() -> None:
    with in_flight() as gate:
        x = _input()
        y = F.all_reduce(x, "sum", None)
        del x
        if dist.get_rank() == 0:
            del y
            gc.collect()
            # Memory that the collective no longer owned would be given out again here.
            junk = [torch.full((2, 3), -77.0, dtype=torch.float64) for _ in range(100)]
            gate.open()
            time.sleep(0.05)
            assert all(torch.equal(j, junk[0]) for j in junk)
        else:
            assert torch.equal(y + 0, _sum())
    _assert_nothing_pending()


def _assert_nothing_pending() -> None:
    ends = time.monotonic() + 10
    while torch_c10d_ext.pending_count() and time.monotonic() < ends:
        time.sleep(0.01)
    assert torch_c10d_ext.pending_count() == 0


def test_dropped_result_still_completes() -> None:
    run(2, _dropped_result_still_completes)


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _growth_of_unwaited_calls(calls: int) -> float:
    """Bytes of resident memory per call that was never waited for.

    What leaks does so in every third of the calls; what a heap takes once does not.
    """
    x = _input(shape=(16,))

    def call(count: int) -> None:
        for _ in range(count):
            F.all_reduce(x, "sum", None)
        _assert_nothing_pending()
        gc.collect()

    growths = []
    for _ in range(3):
        before = _resident()
        call(calls // 3)
        growths.append((_resident() - before) / (calls // 3))
    return min(growths)


def test_unwaited_calls_leave_nothing_behind() -> None:
    growths = run(2, _growth_of_unwaited_calls, 6_000, deadline=120)
    assert max(growths) < 64, growths


def _growth_at_size_one(calls: int) -> float:
    with single_rank_shortcut(False):
        return _growth_of_unwaited_calls(calls)


def test_hundred_thousand_unwaited_calls_leave_nothing_behind() -> None:
    growths = run(1, _growth_at_size_one, 100_000, deadline=120)
    assert max(growths) < 32, growths


def _most_in_flight(calls: int) -> int:
    """How many collectives rank 0 gets into flight while rank 1 is late."""
    x = _input(shape=(16,))
    store = dist.distributed_c10d._get_default_store()
    told = dist.get_rank() == 1
    dist.barrier()
    if told:
        store.wait(["tests/many in flight"], dt.timedelta(seconds=30))
    most = 0
    for _ in range(calls):
        F.all_reduce(x, "sum", None)
        most = max(most, torch_c10d_ext.pending_count())
        if most >= 200 and not told:
            told = True
            store.set("tests/many in flight", "")
    _assert_nothing_pending()
    return most


def test_a_loop_that_never_waits_is_held_back() -> None:
    most, _ = run(2, _most_in_flight, 2000)
    assert 200 <= most <= 300


def _groups_in_opposite_order(calls: int) -> None:
    """Each rank starts first what the other starts last."""
    x = _input(shape=(16,))
    other = dist.new_group()

    def many() -> list[torch.Tensor]:
        return [F.all_reduce(x, "sum", None) for _ in range(calls)]

    def one() -> None:
        assert torch.equal(F.all_reduce(x, "sum", other) + 0, _sum(shape=(16,)))

    if dist.get_rank() == 0:
        results = many()
        one()
    else:
        one()
        results = many()
    for result in results:
        assert torch.equal(result + 0, _sum(shape=(16,)))
    dist.destroy_process_group(other)


@pytest.mark.long
def test_holding_back_ends_where_the_ranks_wait_for_each_other() -> None:
    run(2, _groups_in_opposite_order, 400)


def _growth_of_large_unwaited_results() -> float:
    """MiB that stay when results of 1 MiB are dropped unwaited, after a round that warms up."""
    x = torch.ones(1 << 18)

    def call(count: int) -> int:
        for done in range(count):
            F.all_reduce(x, "sum", None)
            if done % 20 == 0:
                dist.barrier()
        _assert_nothing_pending()
        gc.collect()
        return _resident()

    before = call(100)
    return (call(300) - before) / 2**20


def test_large_unwaited_results_are_freed() -> None:
    growths = run(2, _growth_of_large_unwaited_results)
    assert max(growths) < 60, growths


# --- company of other code -----------------------------------------------------------------------


def _waits_interoperate() -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    x = _input()
    with in_flight() as gate:
        ours = torch.ops.c10d_ext.all_reduce(x, "sum", name)
        theirs = torch.ops._c10d_functional.all_reduce(x, "sum", name)
        gate.open_after(0.02)
        assert torch.equal(torch.ops._c10d_functional.wait_tensor(ours), _sum())
        assert torch.equal(torch.ops.c10d_ext.wait_tensor(theirs), _sum())
    with in_flight() as gate:
        theirs = torch_functional.all_reduce(x, "sum", dist.group.WORLD)
        gate.open_after(0.02)
        assert torch.equal(F.wait_tensor(theirs) + 0, _sum())
    with in_flight() as gate:
        gate.open_after(0.02)  # torch's own result is waited for before ours starts
        y = F.all_reduce(torch_functional.all_reduce(x, "sum", dist.group.WORLD), "sum", None)
        assert torch.equal(y + 0, 2 * _sum())
    assert torch_c10d_ext.pending_count() == 0


def test_waits_of_torch_and_ours_interoperate() -> None:
    run(2, _waits_interoperate)


def _python_objects_outlive_nothing() -> list[str]:
    """A backend's thread drops its tensors when it likes: it must never need the GIL for that."""
    failures = []
    n, rank = dist.get_world_size(), dist.get_rank()
    g = dist.group.WORLD.group_name  # type: ignore[union-attr]
    ops = torch.ops.c10d_ext
    calls: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda x: F.all_reduce(x, "sum", g),
        "all_reduce of a view": lambda x: F.all_reduce(x.t(), "avg", g),
        "premul_sum": lambda x: F.all_reduce(x, "premul_sum", g, factor=0.5),
        "all_reduce_coalesced": lambda x: F.all_reduce_coalesced([x, x + 1], "sum", g),
        "all_reduce_": lambda x: ops.all_reduce_(x, "sum", g),
        "all_reduce_ of a view": lambda x: ops.all_reduce_(x.t(), "max", g),
        "reduce": lambda x: F.reduce(x, "sum", 0, g),
        "broadcast": lambda x: F.broadcast(x, n - 1, g),
        "broadcast_": lambda x: ops.broadcast_(x, n - 1, g),
        "broadcast_coalesced": lambda x: F.broadcast_coalesced([x, x + 1], 0, g),
        "all_gather": lambda x: F.all_gather(x, [2 * n] * n, g),
        "all_gather_single": lambda x: F.all_gather_single(x, 0, g),
        "all_gather_single_coalesced": lambda x: F.all_gather_single_coalesced([x, x * 2], g),
        "reduce_scatter": lambda x: F.reduce_scatter(x, "sum", [2] * n, g),
        "reduce_scatter_single": lambda x: F.reduce_scatter_single(x, "sum", 0, g),
        "reduce_scatter_single_coalesced": lambda x: F.reduce_scatter_single_coalesced(
            [x, x * 2], "sum", [0, 0], g
        ),
        "all_to_all_single": lambda x: F.all_to_all_single(x, None, None, g),
        "gather": lambda x: F.gather(x, 0, g),
        "scatter": lambda x: F.scatter(x, 0, g),
        "permute_tensor": lambda x: F.permute_tensor(x, [(m + 1) % n for m in range(n)], g),
        "barrier": lambda x: F.barrier(x, g),
    }
    for name, call in calls.items():
        x = torch.arange(4.0 * n * n).view(2 * n, 2 * n) + rank
        with in_flight() as gate:
            y = call(x)
            tensors = y if isinstance(y, list | tuple) else [y]
            is_op = name.split(" ")[0].endswith("_")  # its own result, unwrapped
            known = [x] + [t if is_op else t.elem for t in tensors]
            seen = [weakref.ref(t) for t in known]
            y = tensors = known = x = None  # type: ignore[assignment]
            if rank == 0 and torch_c10d_ext.pending_count() == 0:
                failures.append(f"{name}: not in flight")
            if rank == 0 and any(ref() is not None for ref in seen):
                failures.append(f"{name}: holds {sum(ref() is not None for ref in seen)}")
            gate.open()
    return failures


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_what_is_in_flight_holds_no_python_object(backend: str) -> None:
    assert run(2, _python_objects_outlive_nothing, backend=backend)[0] == []


def _chained_without_waiting() -> None:
    with in_flight() as gate:
        gate.open_after(0.05)
        y = F.all_reduce(F.all_reduce(_input(), "sum", None), "sum", None)
        assert torch.equal(y + 0, 2 * _sum())


def test_collective_of_an_unfinished_result() -> None:
    run(2, _chained_without_waiting)


def _wait_from_a_thread_that_did_not_start_it() -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with in_flight() as gate:
        y = torch.ops.c10d_ext.all_reduce(_input(), "sum", name)
        seen: list[Tensor] = []

        def other() -> None:
            seen.append(torch.ops.c10d_ext.wait_tensor(y).clone())

        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.02)
        if dist.get_rank() == 0:  # the others are not held back
            assert not seen, "the wait did not wait"
        gate.open()
        thread.join(30)
        assert torch.equal(seen[0], _sum())


def test_wait_from_another_thread() -> None:
    run(2, _wait_from_a_thread_that_did_not_start_it)


def _work_behind_a_tensor() -> None:
    with in_flight() as gate:
        y = _reduced()
        if dist.get_rank() == 0:
            work = F.work_of(y)
            assert isinstance(work, dist.Work)
            assert not work.is_completed()
            assert F.work_of(y[0]) is not None, "a view has the same work"
            future = work.get_future()
            assert not future.done()
            gate.open()
            future.wait()
            ends = time.monotonic() + 10
            while not work.is_completed() and time.monotonic() < ends:
                time.sleep(0.001)
            assert work.is_completed()
            assert work.is_success()
        assert torch.equal(y + 0, _sum())
    assert F.work_of(y) is None
    assert F.work_of(torch.ones(2)) is None


def test_work_of_a_tensor() -> None:
    run(2, _work_behind_a_tensor)


def _works_of_every_kind() -> list[int]:
    numbers = []
    n = dist.get_world_size()
    x = torch.arange(2.0 * n).reshape(n, 2)
    pg = dist.group.WORLD
    assert pg is not None
    for collective in (
        lambda: F.all_reduce(x, "sum", None),
        lambda: F.all_reduce(x.half(), "avg", None),
        lambda: F.all_gather_single(x, 0, None),
        lambda: F.all_gather_single_coalesced([x, x + 1], None)[1],
        lambda: F.all_gather(x, [n] * n),
        lambda: F.reduce_scatter_single(x, "sum", 0, None),
        lambda: F.reduce_scatter_single_coalesced([x, x + 1], "sum", [0, 0], None)[1],
        lambda: F.reduce_scatter(x, "sum", [1] * n),
        lambda: F.all_to_all_single(x, None, None, None),
    ):
        with in_flight() as gate:
            y = collective()
            numbers.append(pg._get_sequence_number_for_group())
            if dist.get_rank() == 0:
                work = F.work_of(y)
                assert work is not None
                assert not work.is_completed()
                future = work.get_future()
                assert not future.done()
                gate.open()
                future.wait()
                assert work.is_completed()
            F.wait_tensor(y)
    return numbers


def test_works_are_asynchronous_with_a_future_and_counted() -> None:
    numbers = run(2, _works_of_every_kind)[0]
    assert len(numbers) == 9
    assert numbers == sorted(set(numbers)), numbers


def _finished_results_are_wrapped() -> None:
    y = F.all_reduce(_input(), "sum", None)
    assert type(y) is torch_c10d_ext.AsyncCollectiveTensor, "world size 1 is finished at once"
    assert torch.equal(y, _sum())
    with torch.no_grad():
        assert torch.equal(F.wait_tensor(y), _sum())


def test_finished_result_is_of_the_same_class() -> None:
    run(1, _finished_results_are_wrapped)


def _dtensor_recognises_it() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    n, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (n,))
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.05)
        d = DTensor.from_local(y, mesh, [Replicate()], run_check=False)
        assert torch.equal((d + 1).to_local() + 0, _sum() + 1)
        assert torch.equal(d.full_tensor() + 0, _sum())
        sharded = d.redistribute(mesh, [Shard(0)])
        want = _sum().chunk(n)[rank] if rank < len(_sum().chunk(n)) else _sum()[:0]
        assert torch.equal(sharded.to_local() + 0, want)
    with in_flight() as gate:
        gate.open_after(0.05)
        local = torch.arange(4.0).reshape(2, 2) + rank
        d = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        gathered = F.all_gather_single(d.to_local(), 0, mesh)
        assert torch.equal(
            gathered + 0, torch.cat([torch.arange(4.0).reshape(2, 2) + r for r in range(n)])
        )


def test_dtensor_recognises_it() -> None:
    run(2, _dtensor_recognises_it)


def _autograd_through_it() -> None:
    n = dist.get_world_size()
    x = _input().requires_grad_()
    w = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + dist.get_rank()
    with in_flight() as gate:
        gate.open_after(0.02)
        y = F.all_reduce(x, "sum", None)
        assert y.requires_grad
        (y.t() * w.t()).sum().backward()
        total = n * torch.arange(6.0, dtype=torch.float64).reshape(2, 3) + n * (n - 1) / 2
        assert torch.equal(x.grad, total)
        assert torch.equal(y.detach() + 0, _sum())


def test_autograd_through_it() -> None:
    run(2, _autograd_through_it)


def _compiled_function_takes_it() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(y: Tensor) -> Tensor:
        return y * 2 + 1

    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.5)
        assert torch.equal(double(y) + 0, 2 * _sum() + 1)


def test_compiled_function_takes_an_unfinished_result() -> None:
    run(2, _compiled_function_takes_it)


def _equality_and_truth() -> None:
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.02)
        assert bool((y == _sum()).all())
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.02)
        assert torch.equal(y, _sum())
    with in_flight() as gate:
        y = _reduced()
        gate.open_after(0.02)
        torch.testing.assert_close(y, _sum())
    with in_flight() as gate:
        y = _reduced(shape=(1,))
        gate.open_after(0.02)
        assert bool(y) == bool(_sum(shape=(1,)))
        assert _sum(shape=(1,)).item() in y


def test_comparison_and_truth() -> None:
    run(2, _equality_and_truth)


def _garbage_collected_mid_flight_many() -> None:
    """Results dropped by the hundred while in flight, with views alive longer than their bases."""
    with in_flight() as gate:
        views = [_reduced(shape=(3, 4))[1:, ::2] for _ in range(100)]
        gc.collect()
        gate.open()
        want = _sum(shape=(3, 4))[1:, ::2]
        assert all(torch.equal(v + 0, want) for v in views)


def test_views_keep_the_result_alive() -> None:
    run(2, _garbage_collected_mid_flight_many)


def _pending_counts() -> None:
    assert torch_c10d_ext.pending_count() == 0
    with in_flight() as gate:
        ys = [_reduced() for _ in range(3)]
        if dist.get_rank() == 0:
            assert torch_c10d_ext.pending_count() == 3
        gate.open()
        for y in ys:
            F.wait_tensor(y)
            F.wait_tensor(y)  # twice is once
        assert torch_c10d_ext.pending_count() == 0


def test_pending_count() -> None:
    run(2, _pending_counts)
