"""Exported programs and AOTInductor packages run in a process that has only the package."""

import datetime as dt
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_c10d_ext.functional as F
from tests.contract import calls_in, smooth_values
from tests.harness import run, values

FRESH_DEADLINE = 200.0


class Block(torch.nn.Module):
    """A tensor-parallel layer: sharded weights, gather and reduce-scatter along the rows."""

    def __init__(self, n: int, rank: int) -> None:
        super().__init__()
        weight = smooth_values((4, 2 * n), torch.float32, 5).chunk(n, 1)[rank]
        self.up = torch.nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
        weight = smooth_values((2 * n, 4), torch.float32, 6).chunk(n)[rank]
        self.down = torch.nn.Parameter(weight.clone(memory_format=torch.contiguous_format))

    def forward(self, x: Tensor) -> Tensor:
        h = F.all_gather_single(x, 0, None)
        h = F.reduce_scatter_single((h @ self.up).relu() @ self.down, "sum", 0, None)
        return x + F.all_reduce(h, "avg", None)


def _inputs(rows: int) -> list[Tensor]:
    return [
        smooth_values((rows, 4), torch.float32, r, salt=9) for r in range(dist.get_world_size())
    ]


def _want(rows: int) -> Tensor:
    n, rank = dist.get_world_size(), dist.get_rank()
    xs = _inputs(rows)
    up, down = (
        smooth_values((4, 2 * n), torch.float32, 5),
        smooth_values((2 * n, 4), torch.float32, 6),
    )
    return xs[rank] + sum((x @ up).relu() @ down for x in xs) / n


def _package(program: torch.export.ExportedProgram, path: str) -> None:
    """Packages it in a folder of its own.

    torch's folder is that of all programs of this source: of all ranks, whose weights differ.
    """
    with torch._inductor.config.patch({"aot_inductor.output_path": f"{path}.files"}):
        torch._inductor.aoti_compile_and_package(program, package_path=path)


def _save(directory: str, strict: bool, package: bool) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    with torch.no_grad():
        block = Block(n, rank)
        x = _inputs(6)[rank]
        program = torch.export.export(
            block, (x,), strict=strict, dynamic_shapes=({0: torch.export.Dim.AUTO},)
        )
        calls = calls_in(program.graph)
        assert sum("wait_tensor" in call for call in calls) == 3, calls
        torch.export.save(program, f"{directory}/{rank}.program.pt2")
        if package:
            _package(program, f"{directory}/{rank}.package.pt2")


def _load(directory: str, package: bool) -> None:
    path = f"{directory}/{dist.get_rank()}"
    if package:
        module = torch._inductor.aoti_load_package(f"{path}.package.pt2")
    else:
        module = torch.export.load(f"{path}.program.pt2").module()
    for rows in (6, 10, 4):
        got = module(_inputs(rows)[dist.get_rank()])
        text = values.close(got + 0, _want(rows), tolerance=1e-5)
        assert not text, f"{rows} rows: {text}"


# What a fresh process knows: torch and this package, nothing of what made the files.
_FRESH = """
import sys
import torch, torch.distributed as dist
import torch_c10d_ext
rank, directory = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(directory + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
data = torch.load(f"{directory}/{rank}.pt")
path = f"{directory}/{rank}"
for module in (
    torch._inductor.aoti_load_package(f"{path}.package.pt2"),
    torch.export.load(f"{path}.program.pt2").module(),
):
    for x, want in data:
        torch.testing.assert_close(module(x), want, rtol=1e-5, atol=1e-5)
dist.destroy_process_group()
print("fresh process agrees")
"""


def _save_data(directory: str) -> None:
    data = [(_inputs(rows)[dist.get_rank()], _want(rows)) for rows in (6, 10, 4)]
    torch.save(data, f"{directory}/{dist.get_rank()}.pt")


def _run_fresh(directory: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _FRESH, str(rank), str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=FRESH_DEADLINE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}:\n{output}"
        assert "fresh process agrees" in output


@pytest.mark.parametrize("strict", [False, True])
def test_exported_program_is_saved_and_loaded(strict: bool, tmp_path: Path) -> None:
    run(2, _save, str(tmp_path), strict, False)
    run(2, _load, str(tmp_path), False)


def _threads_run_while_a_package_waits(directory: str) -> None:
    """AOTInductor keeps the GIL, which what a collective waits for may need."""
    module = torch._inductor.aoti_load_package(f"{directory}/{dist.get_rank()}.package.pt2")
    x, want = _inputs(6)[dist.get_rank()], _want(6)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:

        def let_the_other_rank_go() -> None:
            time.sleep(0.05)
            store.set("tests/package", "")

        thread = threading.Thread(target=let_the_other_rank_go)
        thread.start()
        got = module(x)
        thread.join(30)
    else:
        store.wait(["tests/package"], dt.timedelta(seconds=30))
        got = module(x)
    text = values.close(got + 0, want, tolerance=1e-5)
    assert not text, text


@pytest.mark.long
def test_aotinductor_package_and_program_in_this_and_a_fresh_process(tmp_path: Path) -> None:
    run(2, _save, str(tmp_path), False, True, deadline=FRESH_DEADLINE)
    run(2, _load, str(tmp_path), True, deadline=FRESH_DEADLINE)
    for backend in ("gloo", "shm"):
        run(2, _threads_run_while_a_package_waits, str(tmp_path), backend=backend)
    run(2, _save_data, str(tmp_path))
    _run_fresh(tmp_path)


class EveryOp(torch.nn.Module):
    """Every function once, each on a temporary."""

    def forward(self, x: Tensor) -> list[Tensor]:
        from tests.test_compile import _functional_calls

        n = dist.get_world_size()
        results: list[Tensor] = []
        for call in _functional_calls(n, None).values():
            y = call(x * 2)
            results += [y] if isinstance(y, Tensor) else y
        return [y + 1 for y in results]


def _package_every_op(directory: str) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = smooth_values((2 * n, 2 * n), torch.float32, rank)
    with torch.no_grad():
        program = torch.export.export(EveryOp(), (x,))
        path = f"{directory}/{rank}.pt2"
        _package(program, path)
        want = EveryOp()(x)
        got = torch._inductor.aoti_load_package(path)(x)
    assert len(got) == len(want)
    for position, (y, w) in enumerate(zip(got, want, strict=True)):
        text = values.close(y + 0, w + 0, tolerance=1e-6)
        assert not text, f"result {position}: {text}"


def test_aotinductor_takes_every_op(tmp_path: Path) -> None:
    run(2, _package_every_op, str(tmp_path), deadline=FRESH_DEADLINE)


class Dispatch(torch.nn.Module):
    """Rows to the ranks they are meant for, as many as the data says."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        theirs = F.all_to_all_single(counts, None, None, None)
        return F.all_to_all_single(x, theirs.tolist(), counts.tolist(), None) * 2


def _data_dependent(strict: bool) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    program = None
    for turn in range(3):
        matrix = [[1 + (i + 2 * j + turn) % 4 for j in range(n)] for i in range(n)]
        xs = [smooth_values((sum(row), 3), torch.float64, r) for r, row in enumerate(matrix)]
        args = (xs[rank], torch.tensor(matrix[rank]))
        if program is None:
            auto = torch.export.Dim.AUTO
            program = torch.export.export(
                Dispatch(), args, strict=strict, dynamic_shapes=({0: auto}, None)
            ).module()
        want = 2 * torch.cat([x.split(matrix[r])[rank] for r, x in enumerate(xs)])
        text = values.close(program(*args) + 0, want)
        assert not text, f"turn {turn}: {text}"


@pytest.mark.parametrize("strict", [False, True])
def test_data_dependent_splits_export(strict: bool) -> None:
    run(2, _data_dependent, strict)


def _every_function_exports(strict: bool) -> list[str]:
    from tests.test_compile import _functional_calls

    n, rank = dist.get_world_size(), dist.get_rank()
    x = smooth_values((2 * n, 2 * n), torch.float64, rank)
    failures = []

    class Module(torch.nn.Module):
        def __init__(self, f: object) -> None:
            super().__init__()
            self.f = f

        def forward(self, x: Tensor) -> object:
            return self.f(x)  # type: ignore[operator]

    for name, call in _functional_calls(n, None).items():
        try:
            want = call(x)
            program = torch.export.export(Module(call), (x,), strict=strict)
            got = program.module()(x)
            pairs = [(got, want)] if isinstance(want, Tensor) else list(zip(got, want, strict=True))
            for y, w in pairs:
                text = values.close(y + 0, w + 0)
                assert not text, text
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:600]}")
    return failures


@pytest.mark.parametrize("strict", [False, True])
def test_every_function_exports(strict: bool) -> None:
    failures = run(2, _every_function_exports, strict, deadline=120)
    assert not failures[0] and not failures[1], "\n".join(failures[0] or failures[1])
