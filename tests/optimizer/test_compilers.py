"""The optimizer in torch.compile: forward and backward, caches, the user's passes, kernels."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

import torch_c10d_ext
from tests.harness import run
from tests.optimizer.graphs import bits
from torch_c10d_ext import Compute, Link

INDUCTOR_DEADLINE = 200.0
SETTINGS: dict[str, Any] = {
    "link": Link(latency=500e-6, bandwidth=1e9, shared="wire"),
    "compute": Compute(memory_bandwidth=1e9, flops=1e10),
    "memory_budget": 2**30,
}

ext = torch.ops.c10d_ext


def _group() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


class _Layers(torch.nn.Module):
    """Fully sharded layers: weights are gathered in forward, gradients scattered in backward."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        n = dist.get_world_size()
        self.shards = torch.nn.ParameterList(
            torch.randn(width // n, width) / 8 for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, group = dist.get_world_size(), _group()
        for shard in self.shards:
            w = ext.wait_tensor(ext.all_gather_into_tensor(shard, n, group))
            x = torch.relu(x @ w) + x
        return x.sum()


def _trained(module: torch.nn.Module, call: Any, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    loss = call(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters())]


def _aot_eager() -> str:
    module, x = _Layers(), torch.randn(128, 64)
    want = _trained(module, module, x)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        backend = torch_c10d_ext.communication_backend(explain=True, **SETTINGS)
        call = torch.compile(module, backend=backend, fullgraph=True)
        got = _trained(module, call, x)
    assert bits(got) == bits(want)
    assert bits(_trained(module, call, x)) == bits(want)
    return out.getvalue()


def test_forward_and_backward_are_optimized_before_they_run() -> None:
    for text in run(2, _aot_eager, backend="shm"):
        assert len(re.findall("^step ", text, re.MULTILINE)) == 2, text
        assert "all_gather_into_tensor of group" in text
        assert "reduce_scatter_tensor of group" in text


def _inductor() -> tuple[str, list[str]]:
    module, x = _Layers(), torch.randn(128, 64)
    want = _trained(module, torch.compile(module, fullgraph=True), x)
    torch.compiler.reset()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        options = torch_c10d_ext.communication_options(explain=True, **SETTINGS)
        call = torch.compile(module, options=options, fullgraph=True)
        got, codes = run_and_get_code(_trained, module, call, x)
    assert bits(got) == bits(want)
    assert bits(_trained(module, call, x)) == bits(want)
    return out.getvalue(), codes


def test_inductor_compiles_what_was_optimized() -> None:
    for text, codes in run(2, _inductor, backend="shm", deadline=INDUCTOR_DEADLINE):
        assert len(re.findall("^step ", text, re.MULTILINE)) == 2, text
        assert any("all_gather_into_tensor_coalesced" in code for code in codes)
        for code in codes:
            # The ranks' comparison comes before the first collective.
            names = re.findall(r"torch\.ops\.(c10d_ext\w*\.\w+)", code)
            assert names[0] == "c10d_ext_optimizer.agree_before_", names


def _kernels_overlap() -> str:
    """The kernels' order: S for a start, W for a wait, m for a product of matrices."""

    def step(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        group = _group()
        results = []
        for w in ws:
            y = ext.wait_tensor(ext.all_reduce(x @ w, "sum", group))
            results.append(torch.relu(y) @ w)
        return results

    x, ws = torch.randn(64, 64), [torch.randn(64, 64) for _ in range(4)]
    want = torch.compile(step, fullgraph=True)(x, ws)
    torch.compiler.reset()
    options = torch_c10d_ext.communication_options(bucket=False, **SETTINGS)
    got, (code,) = run_and_get_code(torch.compile(step, options=options, fullgraph=True), x, ws)
    assert bits(got) == bits(want)
    lines = [
        line
        for line in code.splitlines()
        if re.search(r"all_reduce_\.default\(|wait_tensor\.default\(|extern_kernels\.mm\(", line)
    ]
    return "".join(
        "S" if "all_reduce_" in line else "W" if "wait" in line else "m" for line in lines
    )


def test_kernels_run_between_starts_and_waits() -> None:
    for text in run(2, _kernels_overlap, backend="shm", deadline=INDUCTOR_DEADLINE):
        assert text.count("S") == text.count("W") == 4
        # As it was written, each wait stands behind its start: m S W m m S W m ...
        assert text.count("SW") <= 1, text
        assert re.search("Sm+", text), text


class _Mark(CustomGraphPass):
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, graph: Any) -> None:
        self.seen += 1

    def uuid(self) -> Any:
        return "mark"


def _composes() -> None:
    mark = _Mark()
    options = torch_c10d_ext.communication_options(
        {"post_grad_custom_post_pass": mark, "max_autotune": False}, **SETTINGS
    )
    assert options["max_autotune"] is False
    assert options["post_grad_custom_post_pass"].uuid() is not None
    again = torch_c10d_ext.communication_options(options, **SETTINGS)
    assert len(again["reorder_for_compute_comm_overlap_passes"]) == 1
    module, x = _Layers(2), torch.randn(8, 64)
    torch.compile(module, options=options)(x)
    assert mark.seen == 1
    plain = torch_c10d_ext.communication_options(
        {"post_grad_custom_post_pass": lambda graph: None}, **SETTINGS
    )
    assert plain["post_grad_custom_post_pass"].uuid() is None
    other = torch_c10d_ext.communication_options(numerics="rounding", **SETTINGS)
    a, b = (o["post_grad_custom_post_pass"].uuid() for o in (options, other))
    assert a != b


def test_the_users_passes_come_first() -> None:
    run(1, _composes, deadline=INDUCTOR_DEADLINE)


# On two ranks: compiles a step, drops what is in memory, and compiles once more, from the caches.
_COMPILE_TWICE = """
import sys
import torch, torch.distributed as dist, torch._inductor.compile_fx
from torch._dynamo.utils import counters
import torch.multiprocessing as mp
import torch_c10d_ext
from tests.optimizer import test_compilers as here

torch._inductor.config.cpp.simdlen = 1

def main(rank, store):
    backend = sys.argv[2]
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    module, x = here._Layers(3), torch.randn(16, 64)
    def step(**changes):
        options = torch_c10d_ext.communication_options(**{**here.SETTINGS, **changes})
        with torch.no_grad():
            return torch.compile(module, options=options)(x)
    step()
    torch.compiler.reset()
    counters.clear()
    step()
    said = [f"hits {counters['inductor']['fxgraph_cache_hit']}"]
    # As if one rank had other code in its cache.
    torch.compiler.reset()
    try:
        step(bucket=rank == 0)
    except torch_c10d_ext.errors.CollectiveMismatch as error:
        said.append(str(error))
    sys.stdout.write(f"{rank} {' '.join(said)}\\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")
"""


@pytest.mark.long
def test_cached_code_compares_plans_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_COMPILE_TWICE)
    environment = os.environ | {
        "PYTHONPATH": str(Path(torch_c10d_ext.__file__).parent.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store"), "gloo"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=INDUCTOR_DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2, done.stdout
    for rank, line in enumerate(lines):
        assert line.startswith(f"{rank} hits 1 "), line
        assert "as number 0 of the graph: rank 0: all_gather_into_tensor(" in line
