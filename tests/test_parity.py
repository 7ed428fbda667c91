"""A program on torch.distributed and torch_c10d_ext.distributed: the same results and errors."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

import torch_c10d_ext.distributed as ours
from tests.backends.dist_ops import DIST_OPS, How, inputs_of
from tests.contract import Report, verify
from tests.harness import run, values

BACKENDS = ("gloo", "shm")
COLLECTIVES = [v for v in DIST_OPS if "isend" not in v.name]
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "P2POp"}

# The functions of torch.distributed that communicate, and where below each is compared.
COVERED = {
    *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "gather"),
    *("all_gather_into_tensor", "all_gather_single", "all_gather_coalesced", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
# They make, end or describe groups, and are torch's own or have tests of their own.
OF_GROUPS = {
    *("destroy_process_group", "get_backend_config", "get_backend", "get_rank", "get_world_size"),
    *("get_default_backend_for_device", "get_pg_count", "init_process_group", "is_initialized"),
    *("is_gloo_available", "is_mpi_available", "is_nccl_available", "is_ucc_available"),
    *("is_xccl_available", "is_backend_available", "is_torchelastic_launched", "new_group"),
    *("new_subgroups", "new_subgroups_by_enumeration", "supports_complex", "get_debug_level"),
    *("get_group_rank", "get_global_rank", "get_process_group_ranks", "get_node_local_rank"),
    *("split_group", "shrink_group", "record_comm"),
}


def test_every_function_of_torch_is_covered() -> None:
    functions = {name for name in c10d.__all__ if type(getattr(c10d, name)) is FunctionType}
    assert functions <= COVERED | OF_GROUPS | POINT_TO_POINT


def test_every_name_has_torchs_signature() -> None:
    wrong = []
    for name in c10d.__all__:
        theirs, mine = getattr(c10d, name), getattr(ours, name)
        if name in POINT_TO_POINT or type(theirs) is not FunctionType:
            assert name in POINT_TO_POINT or mine is theirs, name
            continue
        old, new = inspect.signature(theirs).parameters, inspect.signature(mine).parameters
        same = [(p.name, p.default, p.kind) for p in old.values()] == [
            (p.name, p.default, p.kind) for p in list(new.values())[: len(old)]
        ]
        more = set(new) - set(old)
        if not same or not all(new[key].default is not inspect.Parameter.empty for key in more):
            wrong.append(name)
    assert not wrong


# What torch's gloo refuses, and so has nothing to compare.
_NOT_ON_GLOO = {
    *("all_gather uneven", "reduce_scatter uneven", "all_to_all uneven"),
    *("all_gather_into_tensor stacked", "reduce_scatter_tensor stacked"),
}


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of its own deprecated names
        yield


if torch.__version__ < "2.12":
    _NOT_ON_GLOO.add("all_to_all")


def _results(api: Any) -> dict[str, list[Tensor]]:
    """What every collective gives on this rank."""
    n, rank, results = dist.get_world_size(), dist.get_rank(), {}
    collectives = [
        v for v in COLLECTIVES if v.name not in _NOT_ON_GLOO or dist.get_backend() != "gloo"
    ]
    for turn, (collective, dtype, async_op) in enumerate(
        itertools.product(collectives, (torch.float32, torch.int64), (False, True))
    ):
        for op in ("sum", "max") if collective.reduces else ("sum",):
            how = How(op, root=turn % n, async_op=async_op, api=api)
            xs = [x.clone() for x in inputs_of(collective, n, (4, 3), dtype, how)[rank]]
            shapes = collective.outputs(n, rank, (4, 3), how.root)
            outs = (
                xs if collective.inplace else [torch.zeros(shape, dtype=dtype) for shape in shapes]
            )
            name = f"{collective} {dtype} {op} {async_op}"
            work = collective.call(xs, outs, how)
            if work is not None:
                work.wait()
            # What torch leaves in a buffer that a rank only sends from is nobody's business.
            results[name] = outs if collective.name != "reduce" or rank == how.root else []
    for name, objects in _objects(api).items():
        results[name] = [torch.tensor(list(str(objects).encode()))]
    assert api.barrier() is None
    work = api.barrier(async_op=True)
    if work is not None:
        work.wait()
    return results


def _objects(api: Any) -> dict[str, Any]:
    n, rank = dist.get_world_size(), dist.get_rank()
    mine = {"rank": rank, "text": "x" * rank}
    everyone: list[Any] = [None] * n
    api.all_gather_object(everyone, mine)
    at_root: list[Any] | None = [None] * n if rank == n - 1 else None
    api.gather_object(mine, at_root, n - 1)
    told: list[Any] = [mine, rank]
    api.broadcast_object_list(told, n - 1)
    part: list[Any] = [None]
    api.scatter_object_list(part, list(range(n)) if rank == 0 else None, 0)
    passed: list[Any] = [None]
    if n > 1 and rank == 0:
        api.send_object_list([mine], 1)
    elif rank == 1:
        passed.append(api.recv_object_list(passed, 0))
    return {"gathered": everyone, "root": at_root, "told": told, "part": part, "passed": passed}


def _agrees() -> Any:
    report = Report()
    with _quiet():
        theirs, mine = _results(dist), _results(ours)
    assert list(theirs) == list(mine)
    for name, want in theirs.items():
        assert len(mine[name]) == len(want)
        for got, w in zip(mine[name], want, strict=True):
            report.expect(name, values.mismatch(got, w, ulps=4))
    return report.result()


@pytest.mark.parametrize(("backend", "size"), list(itertools.product(BACKENDS, (1, 2, 3, 4))))
def test_same_results(backend: str, size: int) -> None:
    verify(size, _agrees, backend=backend)


def _bad(api: Any) -> dict[str, Callable[[], Any]]:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(4)

    def source_of(work: Any) -> int:
        work.wait()
        return work._source_rank()

    return {
        "all_reduce: no tensor": lambda: api.all_reduce([x]),
        "all_reduce: a number": lambda: api.all_reduce(1.0),
        "broadcast: no tensor": lambda: api.broadcast(None, 0),
        "broadcast: both sources": lambda: api.broadcast(x, 0, group_src=0),
        "broadcast: no source": lambda: api.broadcast(x),
        "broadcast: source outside": lambda: api.broadcast(x, n),
        "reduce: both destinations": lambda: api.reduce(x, 0, group_dst=0),
        "reduce: no destination": lambda: api.reduce(x),
        "reduce: destination outside": lambda: api.reduce(x, n),
        "all_gather: no list": lambda: api.all_gather(x, x),
        "all_gather: no tensor": lambda: api.all_gather([x] * n, None),
        "all_gather: mixed dtypes": lambda: api.all_gather([x] + [x.double()] * (n - 1), x),
        "all_gather: too few": lambda: api.all_gather([x], x),
        "all_gather_single: dtype": lambda: api.all_gather_single(torch.ones(4 * n).double(), x),
        "all_gather_single: size": lambda: api.all_gather_single(torch.ones(3), x),
        "reduce_scatter: no list": lambda: api.reduce_scatter(x, x),
        "reduce_scatter: too few": lambda: api.reduce_scatter(x, [x]),
        "reduce_scatter_single: size": lambda: api.reduce_scatter_single(x, torch.ones(3)),
        "gather: list elsewhere": lambda: api.gather(x, [x] * n if rank else None),
        "scatter: list elsewhere": lambda: api.scatter(x, [x] * n if rank else None),
        "gather: too few": lambda: api.gather(x, [x] if rank == 0 else [x] * n),
        "all_to_all: no list": lambda: api.all_to_all(x, [x] * n),
        "all_to_all: too few": lambda: api.all_to_all([x], [x]),
        "all_to_all_single: dtype": lambda: api.all_to_all_single(x.double(), x),
        "all_gather_coalesced: dtype": lambda: api.all_gather_coalesced([[x.double()]] * n, [x]),
        "all_reduce_coalesced: dtypes": lambda: api.all_reduce_coalesced([x, x.double()]),
        "reduce_scatter_single: dtype": lambda: api.reduce_scatter_single(
            x[:2].double(), x.repeat(n)[: 2 * n]
        ),
        "all_reduce: source_rank": lambda: source_of(api.all_reduce(x, async_op=True)),
        "scatter_object_list: no slot": lambda: api.scatter_object_list([], [1] * n, 0),
        "broadcast_object_list: outside": lambda: api.broadcast_object_list([1], n),
    }


def _types() -> dict[str, list[list[str]]]:
    """The names of the classes that torch's error and ours have, most derived first."""
    found: dict[str, list[list[str]]] = {}
    with _quiet():
        for api in (dist, ours):
            for name, call in _bad(api).items():
                if not hasattr(dist, name.partition(":")[0]):
                    continue  # a younger torch has it
                try:
                    call()
                    kinds = ["nothing"]
                except Exception as error:
                    kinds = [kind.__name__ for kind in type(error).__mro__]
                found.setdefault(name, []).append(kinds)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_same_errors(backend: str) -> None:
    """Whoever catches torch's error catches ours, raised before anything is sent."""
    for rank, found in enumerate(run(2, _types, backend=backend)):
        for name, (theirs, mine) in found.items():
            assert mine != ["nothing"], name
            assert theirs[0] in mine, f"{name} on rank {rank}: torch {theirs[0]}, here {mine[0]}"
