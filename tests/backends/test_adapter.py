"""A backend that somebody else brings: compiled, registered with what it can do, and used.

`tests/native/store_backend.cpp` has two collectives and messages. Everything else is made of them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import importlib.util
import shlex
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._dynamo import compiled_autograd
from torch.utils import cpp_extension

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
import torch_c10d_ext.functional as F
from tests.backends.dist_ops import DIST_OPS, How
from tests.backends.test_shm import check
from tests.contract import Report, verify
from tests.harness import run
from tests.native import build
from torch_c10d_ext import _C
from torch_c10d_ext.errors import CollectiveMismatch, InvalidArgument

NAME = "c10d_ext_store_backend"
TIMEOUT = dt.timedelta(seconds=60)
CAN = ("allreduce", "all_to_all_single", "send", "recv")
COLLECTIVES = [collective for collective in DIST_OPS if "isend" not in collective.name]


@pytest.fixture(scope="module")
def plugin() -> str:
    """The plug-in's extension module, compiled against the installed torch."""
    torch_dir = Path(torch.__file__).parent
    source = build.PROGRAMS / "store_backend.cpp"
    command = [
        *shlex.split("c++ -shared -fPIC -std=c++20 -O1 -g0 -fvisibility=hidden"),
        f"-DTORCH_EXTENSION_NAME={NAME}",
        *(f"-I{path}" for path in cpp_extension.include_paths()),
        f"-I{sysconfig.get_paths()['include']}",
        str(source),
        f"-L{torch_dir / 'lib'}",
        *shlex.split("-ltorch -ltorch_cpu -ltorch_python -lc10"),
    ]
    out = build.ROOT / "build" / "native" / "plain" / "store_backend.so"
    return str(build._make(out, command, [source]))


@functools.cache
def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def create(options: Any, _: Any, splits: bool = True) -> Any:
        return module.create(options.store, options.group_rank, options.group_size, splits)

    def create_checked(options: Any, _: Any, splits: bool = True) -> Any:
        ranks = _C.GlobalRanks(options.store, options.global_ranks_in_group)
        backend, store = create(options, _, splits), options.store
        return _C.CheckedBackend(backend, store, TIMEOUT, options.group_id, ranks, True, "checked")

    create_whole = functools.partial(create_checked, splits=False)
    for name, by in (("store", create), ("checked", create_checked), ("whole", create_whole)):
        dist.Backend.register_backend(name, by, extended_api=True, devices=["cpu"])
    return module


@contextlib.contextmanager
def plugged_in(path: str, methods: tuple[str, ...], name: str = "store") -> Iterator[Any]:
    """A group of the plug-in's backend as the default group."""
    _load(path)
    torch_c10d_ext.register_backend_capabilities("store", methods=methods, reduces_bitwise=False)
    world = dist.group.WORLD
    group = dist.new_group(backend=name)
    c10d._update_default_pg(group)
    try:
        yield group
    finally:
        c10d._update_default_pg(world)
        dist.destroy_process_group(group)


def _has_meaning(op: str, dtype: torch.dtype) -> bool:
    if op == "avg":
        return dtype.is_floating_point
    if op == "max":
        return not dtype.is_complex
    return op != "bxor" or not (dtype.is_floating_point or dtype.is_complex)


def _conforms(path: str, methods: tuple[str, ...]) -> Any:
    n, report = dist.get_world_size(), Report()
    with plugged_in(path, methods):
        for turn, collective in enumerate(COLLECTIVES):
            for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64, torch.bool):
                for op in (
                    ("sum", "product", "avg", "max", "bxor") if collective.reduces else ("sum",)
                ):
                    if not _has_meaning(op, dtype):
                        continue
                    how = How(op, None, root=turn % n, async_op=turn % 2 == 0, api=ours)
                    check(report, f"{collective} {dtype} {op}", collective, (5, 3), dtype, how)
        F.wait_tensor(F.barrier(torch.ones(1)))
        report.expect("in flight", torch_c10d_ext.pending_count() != 0)
    return report.result()


@pytest.mark.parametrize("methods", (CAN, ("all_to_all_single",)), ids="-".join)
@pytest.mark.parametrize("size", (1, 2, 3))
def test_every_collective_is_made_of_what_the_backend_has(
    size: int, methods: tuple[str, ...], plugin: str
) -> None:
    verify(size, _conforms, plugin, methods)


# Their calls need another one, or are no collectives.
NOT_ALONE = {"wait_message", "wait_tensor", "in_order"}


def _every_op(x: torch.Tensor, group: str, rank: int, n: int) -> dict[str, list[torch.Tensor]]:
    """A call of each op in each of its forms, on `x` of two rows."""
    ops, results = torch.ops.c10d_ext, {}
    wide = torch.cat([x * (r + 1) for r in range(n)])
    pair, wides = [x, 2 * x], [wide, wide + 1]
    rows = [r + 1 for r in range(n)]
    ragged = torch.cat([x[:1] * (r + 2) for r in range(sum(rows))])
    sent = [1 + (rank + r) % 2 for r in range(n)]
    exchanged = torch.cat([x[:1] * (r + 3) for r in range(sum(sent))])
    around = [(r + 1) % n for r in range(n)]
    calls = {
        "all_reduce": lambda: ops.all_reduce(x, "max", group),
        "all_reduce_": lambda: ops.all_reduce_(x.clone(), "sum", group),
        "all_reduce_out": lambda: ops.all_reduce_out(x, "sum", group, out=torch.empty_like(x)),
        "all_reduce_coalesced": lambda: ops.all_reduce_coalesced(pair, "sum", group),
        "all_reduce_coalesced_": lambda: ops.all_reduce_coalesced_(
            [t.clone() for t in pair], "min", group
        ),
        "reduce": lambda: ops.reduce(x, "sum", 0, group),
        "reduce_": lambda: ops.reduce_(x.clone(), "avg", n - 1, group),
        "broadcast": lambda: ops.broadcast(x, n - 1, group),
        "broadcast_": lambda: ops.broadcast_(x.clone(), 0, group),
        "broadcast_coalesced": lambda: ops.broadcast_coalesced(pair, 0, group),
        "broadcast_coalesced_": lambda: ops.broadcast_coalesced_(
            [t.clone() for t in pair], n - 1, group
        ),
        "all_gather_into_tensor": lambda: ops.all_gather_into_tensor(x, n, group),
        "all_gather_into_tensor_out": lambda: ops.all_gather_into_tensor_out(
            x, n, group, out=torch.empty_like(wide)
        ),
        "all_gather_into_tensor_coalesced": lambda: ops.all_gather_into_tensor_coalesced(
            pair, n, group
        ),
        "all_gather": lambda: ops.all_gather(ragged[: rows[rank]], rows, group),
        "reduce_scatter_tensor": lambda: ops.reduce_scatter_tensor(wide, "sum", n, group),
        "reduce_scatter_tensor_out": lambda: ops.reduce_scatter_tensor_out(
            wide, "max", n, group, out=torch.empty_like(x)
        ),
        "reduce_scatter_tensor_coalesced": lambda: ops.reduce_scatter_tensor_coalesced(
            wides, "sum", n, group
        ),
        "reduce_scatter": lambda: ops.reduce_scatter(ragged, "sum", rows, group),
        "all_to_all_single": lambda: ops.all_to_all_single(exchanged, sent, sent, group),
        "all_to_all_single_out": lambda: ops.all_to_all_single_out(
            wide, [2] * n, [2] * n, group, out=torch.empty_like(wide)
        ),
        "gather": lambda: ops.gather(x, 0, group),
        "scatter": lambda: ops.scatter(wide, n - 1, group),
        "permute_tensor": lambda: ops.permute_tensor(x, around, group),
        "barrier": lambda: ops.barrier(x, group),
        "reduce_from_group": lambda: ops.reduce_from_group(x, group),
        "copy_to_group": lambda: ops.copy_to_group(x, group),
    }
    for name, call in calls.items():
        y = call()
        outs = [F.wait_tensor(t) for t in (y if isinstance(y, list) else [y])]
        results[name] = outs
    return results


def _ops_of_ours() -> set[str]:
    schemas = torch._C._jit_get_all_schemas()
    names = {s.name.removeprefix("c10d_ext::") for s in schemas if s.name.startswith("c10d_ext::")}
    return names - NOT_ALONE - {"batch_isend_irecv"}


def _compiles(path: str, methods: tuple[str, ...]) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    expected = _every_op(x, dist.group.WORLD.group_name, rank, n)
    assert expected.keys() == _ops_of_ours()
    with plugged_in(path, methods) as group:
        torch._dynamo.reset()
        compiled = torch.compile(_every_op, backend="inductor", fullgraph=True)
        for call in (_every_op, compiled):
            results = call(x, group.group_name, rank, n)
            assert results.keys() == expected.keys()
            for name, ys in results.items():
                for y, want in zip(ys, expected[name], strict=True):
                    assert torch.equal(y, want), (name, y, want)
        # Gradients, too. Compiled autograd calls its nodes with the GIL, the backend is without.
        for compiles in (False, True):
            y = x.clone().requires_grad_()
            loss = F.all_reduce(y * 1, "sum", None).sum()
            with compiled_autograd._enable(lambda g: g) if compiles else contextlib.nullcontext():
                loss.backward()
            assert torch.equal(y.grad, torch.full_like(x, float(n)))


@pytest.mark.parametrize("methods", (("allreduce", "all_to_all_single"),), ids="-".join)
def test_all_ops_work_eager_and_compiled(methods: tuple[str, ...], plugin: str) -> None:
    """With two methods, every op in every form: the same values as on the default group."""
    run(2, _compiles, plugin, methods, deadline=200)


def _messages(path: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    with plugged_in(path, CAN):
        x, y = torch.full((3,), float(rank)), torch.empty(3)
        ops = [
            ours.P2POp(ours.isend, x, (rank + 1) % n),
            ours.P2POp(ours.irecv, y, (rank - 1) % n),
        ]
        for work in ours.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(y, torch.full((3,), float((rank - 1) % n)))


def test_messages(plugin: str) -> None:
    run(3, _messages, plugin)


def _lacks(path: str) -> None:
    with plugged_in(path, ("allreduce",)):
        x = torch.ones(2)
        assert torch.equal(F.all_reduce(x, "sum", None) + 0, x * dist.get_world_size())
        with pytest.raises(InvalidArgument, match=r"broadcast: .*all_to_all_single.*got 'store'"):
            F.broadcast(x, 0, None)
    with pytest.raises(InvalidArgument, match="methods must be of allreduce, .*got 'all_reduce'"):
        torch_c10d_ext.register_backend_capabilities("x", methods=["all_reduce"])


def test_a_missing_capability_is_named(plugin: str) -> None:
    run(2, _lacks, plugin)


def _is_checked(path: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    with plugged_in(path, CAN, "checked") as group:
        backend = group._get_backend(torch.device("cpu"))
        assert isinstance(backend, _C.CheckedBackend) and backend.name() == "checked"
        x = torch.full((4,), rank + 1.0)
        assert torch.equal(F.all_reduce(x, "sum", None) + 0, torch.full((4,), n * (n + 1) / 2))
        y = x.clone()
        dist.broadcast(y, 0, group=group)  # c10d's own, through the same checks
        assert torch.equal(y, torch.ones(4))
        with pytest.raises(CollectiveMismatch, match="all_reduce") as caught:
            F.all_reduce(torch.ones(4 + rank), "sum", None) + 0
        assert caught.value.ranks == list(range(1, n))


def test_checks_compose_with_any_backend(plugin: str) -> None:
    run(2, _is_checked, plugin)


def _is_checked_store(group: Any, n: int) -> None:
    """Whether the group of ``n`` is the plug-in's, and checked."""
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, _C.CheckedBackend) and backend.name() == "checked"
    assert backend.inner.name() == "store" and backend.inner.size() == group.size() == n
    x = torch.full((2,), group.rank() + 1.0)
    group.allreduce([x]).wait()
    assert torch.equal(x, torch.full((2,), n * (n + 1) / 2))
    with pytest.raises(CollectiveMismatch, match="broadcast"):
        group.broadcast(torch.ones(2 + group.rank()), 0).wait()


def _groups_of_a_checked_group(path: str) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    with plugged_in(path, CAN, "checked") as group:
        backend = group._get_backend(torch.device("cpu"))
        assert backend.supports_splitting and backend.supports_shrinking
        for ranks in ([1, 2], [0, 2]):
            name = f"part {ranks}"
            part = group.split_group(ranks, TIMEOUT, None, name, name)
            assert (part is not None) == (rank in ranks)
            if part is not None:
                _is_checked_store(part, len(ranks))
        if rank != 1:
            rest = backend.shrink([1], 0, None)
            assert rest.inner.name() == "store" and (rest.rank(), rest.size()) == (rank // 2, 2)
            x = torch.full((2,), rank + 1.0)
            rest.allreduce([x]).wait()
            assert torch.equal(x, torch.full((2,), 4.0))
        elif n > 1:
            with pytest.raises(ValueError, match="shrink: the ranks that remain must call it"):
                backend.shrink([1], 0, None)


def test_groups_of_a_checked_group_are_checked_and_of_its_backend(plugin: str) -> None:
    run(3, _groups_of_a_checked_group, plugin)


def _merges(path: str) -> None:
    """Groups of some ranks become one of all, of the same backend and with the same checks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    with plugged_in(path, CAN, "checked"):
        parts = [dist.new_group(ranks, backend="checked") for ranks in ([0, 2], [1])]
        store = dist.PrefixStore("merged", c10d._get_default_store())
        merged = parts[rank % 2].merge_remote_group(store, n, TIMEOUT, "merged", "merged")
        _is_checked_store(merged, n)
        # The groups that it was made of go on.
        x = torch.ones(2)
        dist.all_reduce(x, group=parts[rank % 2])
        assert torch.equal(x, torch.full((2,), float(2 - rank % 2)))
        dist.barrier()
        merged.shutdown()
        dist.destroy_process_group(parts[rank % 2])


def test_checked_groups_merge_into_a_checked_one(plugin: str) -> None:
    run(3, _merges, plugin)


def _cannot_split(path: str) -> None:
    with plugged_in(path, CAN, "whole") as group:
        backend = group._get_backend(torch.device("cpu"))
        assert not backend.supports_splitting and not backend.supports_shrinking
        with pytest.raises(InvalidArgument, match=r"split: the backend .*got 'store'.*rank [01]/2"):
            group.split_group([0, 1], TIMEOUT, None, "part", "part")
        with pytest.raises(InvalidArgument, match=r"shrink: the backend .*got 'store'"):
            backend.shrink([1], 0, None)


def test_what_cannot_split_is_not_split_when_it_is_checked(plugin: str) -> None:
    run(2, _cannot_split, plugin)
