"""The mpi backend: MPICH and Open MPI of pip, opened at run time.

Its groups are held to what test_shm.py and the contract of the ops ask of shm. Ranks that no
launcher of MPI has started, those of the pools here as those of torchrun, have MPICH.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import torch_c10d_ext
from tests import contract
from tests.backends import test_checked as checked
from tests.backends import test_rendezvous as rendezvous
from tests.backends import test_shm as shm
from tests.backends import test_shm_faults as faults
from tests.backends.dist_ops import all_gather_single, reduce_scatter_single
from tests.backends.failures import check_works
from tests.contract import FUNCTIONAL, INPLACE, verify
from tests.harness import pool, run
from tests.native import build
from torch_c10d_ext import _C, functional

CPU = torch.device("cpu")
MPI = "cpu:mpi"
ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = (1, 2, 3, 4)
STEMS = sorted(path.stem for path in (ROOT / "csrc" / "ops").glob("*.cpp"))
DEADLINE = 120.0


@pytest.fixture(scope="module", autouse=True)
def _pools() -> Iterator[None]:
    yield
    pool.stop(MPI)


def _names_of_segments() -> list[str]:
    with open("/proc/self/maps") as maps:
        return [line.split(maxsplit=5)[-1].strip() for line in maps if "/mpich_shm_" in line]


def _keeps_no_name_of_its_memory() -> None:
    dist.all_reduce(torch.ones(1))
    names = _names_of_segments()
    assert names
    assert all(name.endswith("(deleted)") for name in names), names


def test_memory_is_not_left_behind_by_ranks_that_are_killed() -> None:
    run(2, _keeps_no_name_of_its_memory, backend=MPI)


# --- the contract of the ops ---------------------------------------------------------------------


def _contracts() -> list[tuple[str, str]]:
    pairs = []
    for stem in STEMS:
        module = importlib.import_module(f"tests.ops.test_{stem}")
        collective = getattr(module, "COLLECTIVE", None)
        if collective is not None:
            pairs += [(module.__name__, form) for form in collective.forms]
    assert len(pairs) > 10
    return pairs


forms = pytest.mark.parametrize(
    ("module", "form"), _contracts(), ids=lambda text: text.removeprefix("tests.ops.test_")
)


@forms
@pytest.mark.parametrize("size", SIZES)
def test_ops_have_the_values_of_the_contract(module: str, form: str, size: int) -> None:
    verify(size, contract.check_values, module, form, backend=MPI)


@forms
def test_ops_take_every_layout(module: str, form: str) -> None:
    verify(3, contract.check_layouts, module, form, backend=MPI)


@forms
@pytest.mark.parametrize("size", (1,))
def test_a_group_of_one_goes_through_the_backend(module: str, form: str, size: int) -> None:
    verify(size, contract.check_values_of_one_rank, module, form, backend=MPI)


@pytest.mark.parametrize(
    ("module", "form"), [pair for pair in _contracts() if pair[1] in (FUNCTIONAL, INPLACE)]
)
def test_ops_have_gradients(module: str, form: str) -> None:
    verify(3, contract.check_gradients, module, form, backend=MPI)


# --- the collectives of torch.distributed -------------------------------------------------------


def _is_mpi(group: Any = None) -> None:
    backend = (group or dist.group.WORLD)._get_backend(CPU)
    assert type(backend) is _C.CheckedBackend and backend.name() == "mpi"
    assert type(backend.inner) is _C.MpiBackend
    assert torch_c10d_ext.backend_of(group) == "mpi"


def _conforms(*fns: str) -> Any:
    _is_mpi()
    report = None
    for name in fns:
        fn = getattr(shm, name)
        report = fn(*(("shm",) if name in ("reduces", "moves") else ()))
    dist.barrier()
    checked._is_empty()
    return report


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "what", ("reduces", "moves", "moves_less_than_bytes", "lays_out", "refuses")
)
def test_dist_ops(what: str, size: int) -> None:
    if what == "refuses" and size == 1:
        size = 2
    verify(size, _conforms, what, backend=MPI)


@pytest.mark.parametrize("size", (2, 3, 4))
def test_messages_works_and_groups(size: int) -> None:
    run(
        size,
        _conforms,
        *("_sends_and_receives", "_receives_from_anyone", "_many_in_flight"),
        *("_completes_without_a_wait", "_futures", "_callbacks_block", "_durations", "_barriers"),
        *("_sequence_numbers", "_sparse_sums", "_single_machine_errors"),
        *("_one_tensor_in_flight", "_chains_in_flight"),
        backend=MPI,
        deadline=DEADLINE,
    )


@pytest.mark.parametrize("size", (2, 3, 4))
def test_groups(size: int) -> None:
    for fn in ("_subgroups", "_groups_in_any_order", "_groups_come_and_go", "_splits", "_shrinks"):
        run(size, _conforms, fn, backend=MPI)


def _same_bits() -> list[bytes]:
    """Sums that depend on the order of their terms, of every size from one step to many parts."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        for count in (1, 7, 1000, 4001, 70_003):
            x = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
            dist.all_reduce(x)
            found.append(x.view(torch.uint8).numpy().tobytes())
            if dtype != torch.complex64:
                dist.all_reduce(x, dist.ReduceOp.AVG)
                found.append(x.view(torch.uint8).numpy().tobytes())
    return found


@pytest.mark.parametrize("size", (3, 4))
def test_all_ranks_have_the_same_bits(size: int) -> None:
    first, *others = run(size, _same_bits, backend=MPI)
    assert all(other == first for other in others)


def _in_parts() -> None:
    """With messages of at most 1000 bytes, as if all of these were longer than 1 GiB."""
    os.environ["TORCH_C10D_EXT_MPI_MAX_MESSAGE"] = "1000"
    try:
        group = dist.new_group()
    finally:
        del os.environ["TORCH_C10D_EXT_MPI_MAX_MESSAGE"]
    _every_collective(10_007, group)
    dist.destroy_process_group(group)


def _every_collective(count: int, group: dist.ProcessGroup | None = None) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(count, dtype=torch.int64) * (rank + 1)
    for op in ("all_reduce", "reduce"):
        y = x.clone()
        if op == "reduce":
            dist.reduce(y, n - 1, group=group)
        else:
            dist.all_reduce(y, group=group)
        if op == "all_reduce" or rank == n - 1:
            assert torch.equal(y, torch.arange(count) * (n * (n + 1) // 2)), op
    everyone = torch.empty(n * count, dtype=torch.int64)
    all_gather_single(everyone, x, group)
    assert torch.equal(everyone, torch.cat([torch.arange(count) * (r + 1) for r in range(n)]))
    mine = torch.empty(count, dtype=torch.int64)
    reduce_scatter_single(mine, everyone, dist.ReduceOp.SUM, group)
    assert torch.equal(mine, torch.arange(count) * (rank + 1) * n)
    for root in range(n):
        y = x.clone()
        dist.broadcast(y, root, group)
        assert torch.equal(y, torch.arange(count) * (root + 1)), root
    sizes = [count // (2 * n * n) * (r + 1) for r in range(n)]
    parts = functional.all_to_all_single(
        x[: sizes[rank] * n], [sizes[r] for r in range(n)], [sizes[rank]] * n, group
    )
    for r, part in enumerate(parts.split(sizes)):
        assert torch.equal(part, torch.arange(sizes[r] * rank, sizes[r] * (rank + 1)) * (r + 1))
    there, here = (rank + 1) % n, (rank - 1) % n
    got = torch.empty(count, dtype=torch.int64)
    works = [dist.isend(x, there, group), dist.irecv(got, here, group)]
    for work in works:
        work.wait()
    assert torch.equal(got, torch.arange(count) * (here + 1))


@pytest.mark.parametrize("size", (2, 3))
def test_what_is_too_long_for_one_message_travels_in_parts(size: int) -> None:
    run(size, _in_parts, backend=MPI)


@pytest.mark.parametrize("count", (101, 5_003, 20_003, 100_003))
@pytest.mark.parametrize("size", (3, 5))
def test_steps_of_collectives_by_size(size: int, count: int) -> None:
    """Along a tree or a chain, around a ring, in shares that ranks pass on, from each to each."""
    run(size, _every_collective, count, backend=MPI)


_FAKE_UCX = """
extern "C" void* ucp_tag_send_nbx(void*, const void*, unsigned long count, unsigned long,
                                  const void*) {
  return reinterpret_cast<void*>(count == 0 ? -25L : 0x1000L);
}
"""
_FAKE_MPI = """
extern "C" void* ucp_tag_send_nbx(void*, const void*, unsigned long, unsigned long, const void*);
extern "C" long test_send(unsigned long count) {
  return reinterpret_cast<long>(ucp_tag_send_nbx(nullptr, nullptr, count, 0, nullptr));
}
"""


@pytest.mark.parametrize("flags", [[], ["-Wl,-z,relro,-z,now", "-fno-plt"]], ids=["plt", "relro"])
def test_a_send_that_ucx_refuses_does_not_end_the_process(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPICH writes to a null request then."""
    for name, text, more in (("ucx", _FAKE_UCX, []), ("mpi", _FAKE_MPI, ["-L.", "-lucx"])):
        (tmp_path / f"{name}.cpp").write_text(text)
        command = ["c++", "-shared", "-fPIC", "-O1", *flags, f"{name}.cpp", "-o", f"lib{name}.so"]
        rpath = f"-Wl,-rpath,{tmp_path}"
        subprocess.run([*command, *more, rpath], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setenv("C10D_EXT_FAKE_MPI", str(tmp_path / "libmpi.so"))
    output = build.run(build.build("ucx_sends_test", ["ucx_sends"]))
    assert output.endswith("tests passed\n"), output


def _refuses_a_tag() -> None:
    rank, tag = dist.get_rank(), -1
    x = torch.ones(1)
    work = dist.irecv(x, 1, tag=tag) if rank == 0 else dist.isend(x, 0, tag=tag)
    with pytest.raises(RuntimeError, match=r"the tag must be from 0 to \d+, which MPI has, got -1"):
        work.wait()
    check_works()


def test_a_tag_that_mpi_does_not_have_is_refused() -> None:
    run(2, _refuses_a_tag, backend=MPI)


@contextlib.contextmanager
def _another_default(odd: int = 1, piggyback: int | None = None, **kwargs: Any) -> Iterator[Any]:
    os.environ["TORCH_C10D_EXT_SHM_PIGGYBACK"] = "" if piggyback is None else str(piggyback)
    world, group = dist.group.WORLD, dist.new_group(backend=MPI, **kwargs)
    _is_mpi(group)
    c10d._update_default_pg(group)
    try:
        yield group
    finally:
        c10d._update_default_pg(world)
        dist.destroy_process_group(group)


def _as_fallen_back(name: str) -> None:
    """What test_checked.py does with a group that falls back to gloo, with one of mpi."""
    fallen_back = checked.fallen_back
    checked.fallen_back = _another_default
    try:
        getattr(checked, name)()
    finally:
        checked.fallen_back = fallen_back


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize(
    "name",
    (
        *("_says_what_is_wrong", "_mixed_lists", "_ours", "_ours_and_torchs_meet", "_keeps_nan"),
        *("_in_a_block", "_callbacks_may_wait", "_times_out", "_never_is_a_timeout", "_ends"),
    ),
)
def test_checks_and_ends_of_groups(name: str, size: int) -> None:
    """What test_checked.py asks of groups over gloo."""
    run(size, _as_fallen_back, name, backend=MPI)


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ("all_reduce of 64 MiB", "barrier", "future", "recv", "send of 64 MiB", "op")
)
def test_a_killed_rank_is_named_on_all_survivors(name: str) -> None:
    faults.test_a_killed_rank_is_named_on_all_survivors(name, MPI)


@pytest.mark.parametrize("name", faults.BESIDE)
def test_a_killed_rank_ends_messages_of_others(name: str) -> None:
    faults.test_a_killed_rank_ends_messages_of_others(name, MPI)


@pytest.mark.parametrize("victim", (0, 1))
def test_the_group_can_be_shrunk_to_the_survivors(victim: int) -> None:
    faults.test_the_group_can_be_shrunk_to_the_survivors(victim, MPI)


@pytest.mark.parametrize(
    "test",
    (
        faults.test_groups_without_the_lost_rank_go_on,
        faults.test_a_rank_that_left_the_group_is_named,
        faults.test_what_was_completed_before_a_death_stays_complete,
        faults.test_a_wait_with_a_timeout_of_its_own_names_who_is_missing,
        faults.test_ranks_hear_at_the_wait_that_they_disagree,
        faults.test_errors_name_what_was_called,
        faults.test_another_order_is_a_mismatch,
        faults.test_messages_around_one_that_is_refused_arrive,
        faults.test_a_receive_gives_up_at_its_deadline,
        faults.test_messages_pass_between_ranks_that_stay,
        faults.test_who_leaves_waits_for_its_messages,
        faults.test_a_destroyed_group_says_so,
        faults.test_a_forked_child_cannot_use_the_group_and_does_not_harm_it,
    ),
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_faults(test: Any) -> None:
    test(MPI)


def test_a_rank_killed_before_it_joins_a_group_is_named() -> None:
    rendezvous.test_a_rank_killed_before_it_joins_a_group_is_named("split_group", MPI, "")
