"""install(): code written against torch.distributed compiles as if written against ours."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.algorithms._quantization.quantization import DQuantType, auto_quantize
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
from tests.backends.dist_ops import BY_NAME, DIST_OPS, How, inputs_of
from tests.contract import Report, calls_in, verify
from tests.harness import run, values
from torch_c10d_ext import _dynamo

COLLECTIVES = [collective.name for collective in DIST_OPS if "isend" not in collective.name]
DEADLINE = 30.0


def _captured(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    return backend


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _fails(function: Callable[..., Any], *args: Any) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo's, of what it cannot trace
            _compiled(function)(*args)
    except torch._dynamo.exc.Unsupported:
        return True
    return False


# --- every collective ----------------------------------------------------------------------------


# Not torch.distributed by that name, which the collectives call with eager means.
_HOWS = [How(root=1, async_op=async_op, api=c10d) for async_op in (False, True)]


def _every_collective() -> Any:
    """Sync and async, in one graph."""
    n, rank, report = dist.get_world_size(), dist.get_rank(), Report()
    calls = [(name, how) for how in _HOWS for name in COLLECTIVES]
    tensors = []
    for name, how in calls:
        collective = BY_NAME[name]
        world = inputs_of(collective, n, (6, 3), torch.float32, how)
        xs = [x.clone() for x in world[rank]]
        shapes = collective.outputs(n, rank, (6, 3), how.root)
        outs = xs if collective.inplace else [torch.zeros(shape) for shape in shapes]
        tensors.append((xs, outs, collective.reference(world, how)[rank]))

    def program(tensors: list[Any]) -> list[list[Tensor]]:
        results = []
        for (name, how), (xs, outs, _) in zip(calls, tensors, strict=True):
            work = BY_NAME[name].call(xs, outs, how)
            if work is not None:
                work.wait()
            results.append([out.clone() for out in outs])
        return results

    graphs: list[torch.fx.GraphModule] = []
    got = torch.compile(program, backend=_captured(graphs), fullgraph=True)(tensors)
    for (name, how), results, (_, outs, want) in zip(calls, got, tensors, strict=True):
        what = f"{name}{' async' if how.async_op else ''}"
        for result, out, w in zip(results, outs, want, strict=True):
            report.expect(what, values.mismatch(result, w, ulps=4))
            report.expect(f"{what}: target", values.mismatch(out, w, ulps=4))
    traced = [c for gm in graphs for c in calls_in(gm.graph) if "c10d" in c]
    report.expect(f"{traced}", not all(c.startswith("c10d_ext.") for c in traced))
    # The lists of a coalescing manager are one call.
    started = [c for c in traced if "wait" not in c]
    report.expect(f"{len(started)} of {len(calls)}: {started}", len(started) != len(calls))
    return report.result()


def _installed_for_every_collective() -> Any:
    before = dict(vars(c10d))
    functions: list[Any] = list(_dynamo.substitutes())
    codes = [function.__code__ for function in functions]
    with torch_c10d_ext.installed():
        result = _every_collective()
        # torch's modules are what they were, for eager calls.
        assert vars(c10d) == before
        assert all(f.__code__ is code for f, code in zip(functions, codes, strict=True))
        with pytest.raises(RuntimeError):  # gloo has no int16, ours has
            dist.all_reduce(torch.ones(2, dtype=torch.int16))
    return result


def test_every_collective_compiles_by_torchs_name() -> None:
    verify(2, _installed_for_every_collective, deadline=150)


def test_substitutes_every_collective_of_torch() -> None:
    names = set(_dynamo.substitutes().values())
    collectives = {name for name in c10d.__all__ if name in names}
    assert collectives >= {
        *("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier", "all_to_all"),
        *("all_gather", "reduce_scatter", "all_to_all_single", "all_gather_into_tensor"),
        *("reduce_scatter_tensor", "all_reduce_coalesced", "all_gather_coalesced"),
    }
    assert {"_coalescing_manager", "_all_gather_base", "_reduce_scatter_base"} <= names
    for theirs, name in _dynamo.substitutes().items():
        assert getattr(c10d, name, None) is theirs or getattr(dist, name, None) is theirs
        assert getattr(ours, name) is not theirs


# --- code of others ------------------------------------------------------------------------------


class _Bucket:
    """As much of a GradBucket as DDP's hooks read."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> Tensor:
        return self._buffer


def _quantized_all_to_all(x: Tensor) -> list[Tensor]:
    outs = [torch.empty_like(row) for row in x]
    auto_quantize(dist.all_to_all, DQuantType.FP16)(outs, [row * 1 for row in x])
    return outs


def _averages_by_ddps_hook(x: Tensor) -> list[Tensor]:
    bucket: Any = _Bucket(x * 1)
    return [default_hooks.allreduce_hook(None, bucket).wait() * 2]  # type: ignore[arg-type]


def _code_of_others() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(3.0 * n).view(n, 3) + 100 * rank
    for function in (_quantized_all_to_all, _averages_by_ddps_hook):
        want = function(x)
        assert _fails(function, x)
        with torch_c10d_ext.installed():
            got = _compiled(function)(x)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g, w), f"{function.__name__}: {g}, expected {w}"
        assert _fails(function, x)


def test_compiles_code_of_others_that_torch_does_not() -> None:
    # gloo of torch 2.11 has no all_to_all of lists.
    run(2, _code_of_others, backend="shm", deadline=120)


# --- on and off ----------------------------------------------------------------------------------


def _sums(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y.sum()


def _gradient(function: Callable[[Tensor], Tensor]) -> float:
    """2: as in eager, outside autograd; 4 on 2 ranks: as torch compiles it."""
    x = torch.ones(3, requires_grad=True)
    function(x).backward()
    assert x.grad is not None
    return float(x.grad[0])


def _turned_on_and_off() -> None:
    f = _compiled(_sums)
    theirs, mine = 2.0 * dist.get_world_size(), 2.0
    torch_c10d_ext.uninstall()  # never installed
    assert _gradient(f) == theirs
    torch_c10d_ext.install()
    torch_c10d_ext.install()
    assert _gradient(f) == mine
    assert _gradient(f) == mine
    torch_c10d_ext.uninstall()  # once is enough
    assert _gradient(f) == theirs
    with torch_c10d_ext.installed():
        with torch_c10d_ext.installed():
            assert _gradient(f) == mine
        assert _gradient(f) == mine
        torch_c10d_ext.install()
        torch_c10d_ext.uninstall()
        assert _gradient(f) == mine
        torch_c10d_ext.install()
    assert _gradient(f) == mine
    torch_c10d_ext.uninstall()
    with pytest.raises(KeyError), torch_c10d_ext.installed():
        raise KeyError
    assert _gradient(f) == theirs


def test_turns_on_and_off_and_serves_no_code_of_the_other_state() -> None:
    run(2, _turned_on_and_off, deadline=120)


def _in_threads() -> None:
    f = _compiled(_sums)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with torch_c10d_ext.installed():
            inside.set()
            assert leave.wait(DEADLINE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(DEADLINE)
    assert _gradient(f) == 2.0  # what one thread installs is installed in all
    with torch_c10d_ext.installed():
        leave.set()
        thread.join(DEADLINE)
        assert not thread.is_alive()
        assert _gradient(f) == 2.0  # the other block is over, this one is not
    assert _gradient(f) == 2.0 * dist.get_world_size()


def test_blocks_overlap_in_threads() -> None:
    run(2, _in_threads, deadline=120)


def _refused() -> None:
    for function in (torch_c10d_ext.install, torch_c10d_ext.uninstall):
        with pytest.raises(RuntimeError, match="must be called outside compiled code"):
            _compiled(lambda x, function=function: (function(), x * 2))(torch.ones(2))

    def another(*args: Any, **kwargs: Any) -> None:
        return None

    their_own = torch.compiler.substitute_in_graph(dist.reduce, skip_signature_check=True)(another)
    try:
        for enter in (torch_c10d_ext.install, torch_c10d_ext.installed().__enter__):
            with pytest.raises(RuntimeError, match="install: nothing else must be substituted"):
                enter()
        # Nothing is left half installed.
        assert _gradient(_compiled(_sums)) == 2.0 * dist.get_world_size()
        assert not _dynamo._substituted
    finally:
        _dynamo._take_back(dist.reduce, their_own)
    with torch_c10d_ext.installed():
        assert _gradient(_compiled(_sums)) == 2.0
    assert _gradient(_compiled(_sums)) == 2.0 * dist.get_world_size()


def test_refuses_to_be_traced_and_to_replace_what_others_substituted() -> None:
    run(2, _refused, deadline=120)
