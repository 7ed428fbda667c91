"""Groups of shm on several hosts, here ranks of one machine that are told apart by a setting.

They are held to what test_shm.py and the contract of the ops ask of shm. A backend's name here,
"hosts:aabb", says which rank is on which host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
from tests import contract
from tests.backends import test_checked as checked
from tests.backends import test_rendezvous as rendezvous
from tests.backends import test_shm as shm
from tests.backends import test_shm_faults as faults
from tests.backends.dist_ops import all_gather_single, reduce_scatter_single
from tests.contract import FUNCTIONAL, verify
from tests.harness import pool, run
from tests.harness.crew import crew
from tests.harness.script import torchrun
from torch_c10d_ext import _C, _tally

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent.parent
# Even and uneven, contiguous and not, and a host of one rank.
PLACES = ("aab", "abab", "aabb", "abbb")
DEADLINE = 120.0

places = pytest.mark.parametrize("hosts", PLACES)


@pytest.fixture(autouse=True)
def _pools(request: pytest.FixtureRequest) -> Iterator[None]:
    """One pool at a time: there are many."""
    yield
    hosts = getattr(getattr(request.node, "callspec", None), "params", {}).get("hosts")
    for other in PLACES:
        if other != hosts:
            pool.stop(f"hosts:{other}")


@pytest.fixture(scope="module", autouse=True)
def _last_pools() -> Iterator[None]:
    yield
    for hosts in PLACES:
        pool.stop(f"hosts:{hosts}")


def _hosts_of(names: str) -> list[list[int]]:
    order = list(dict.fromkeys(names))
    return [[r for r, name in enumerate(names) if name == host] for host in order]


def _is_hierarchical(group: Any = None) -> None:
    backend = (group or dist.group.WORLD)._get_backend(CPU)
    assert type(backend) is _C.CheckedBackend and backend.name() == "shm"
    assert type(backend.inner) is _C.HierarchicalBackend
    assert torch_c10d_ext.backend_of(group) == "shm+gloo"


def _knows_its_hosts(names: str) -> None:
    _is_hierarchical()
    assert dist.group.WORLD._get_backend(CPU).inner.hosts == _hosts_of(names)


@places
def test_hosts_are_found(hosts: str) -> None:
    run(len(hosts), _knows_its_hosts, hosts, backend=f"hosts:{hosts}")


# --- the contract of the ops ---------------------------------------------------------------------


def _contracts() -> list[tuple[str, str]]:
    pairs = []
    for path in sorted((ROOT / "csrc" / "ops").glob("*.cpp")):
        module = importlib.import_module(f"tests.ops.test_{path.stem}")
        collective = getattr(module, "COLLECTIVE", None)
        if collective is not None:
            pairs += [(module.__name__, form) for form in collective.forms]
    assert len(pairs) > 10
    return pairs


@places
def test_ops_keep_the_contract(hosts: str) -> None:
    for module, form in _contracts():
        verify(len(hosts), contract.check_values, module, form, backend=f"hosts:{hosts}")
        if form == FUNCTIONAL:
            verify(len(hosts), contract.check_layouts, module, form, backend=f"hosts:{hosts}")


# --- the collectives of torch.distributed -------------------------------------------------------


def _conforms(*fns: str) -> Any:
    _is_hierarchical()
    report = None
    for name in fns:
        fn = getattr(shm, name)
        report = fn(*(("shm",) if name in ("reduces", "moves") else ()))
    dist.barrier()
    checked._is_empty()
    return report


@places
def test_dist_ops(hosts: str) -> None:
    for what in ("reduces", "moves", "moves_less_than_bytes", "lays_out", "refuses"):
        verify(len(hosts), _conforms, what, backend=f"hosts:{hosts}")


@places
def test_messages_works_and_groups(hosts: str) -> None:
    run(
        len(hosts),
        _conforms,
        *("_sends_and_receives", "_receives_from_anyone", "_many_in_flight"),
        *("_completes_without_a_wait", "_futures", "_durations", "_barriers"),
        *("_sequence_numbers", "_sparse_sums", "_single_machine_errors", "_one_tensor_in_flight"),
        backend=f"hosts:{hosts}",
        deadline=DEADLINE,
    )


@places
def test_groups(hosts: str) -> None:
    """Subgroups are on one host, on several, or have one rank on each."""
    for fn in ("_subgroups", "_groups_in_any_order", "_groups_come_and_go", "_splits", "_shrinks"):
        run(len(hosts), _conforms, fn, backend=f"hosts:{hosts}")


def _same_bits() -> list[bytes]:
    """Sums that depend on the order of their terms, by every schedule."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for count in (1, 7, 1000, 4001, 10_001, 20_003, 70_003, 1_500_001):
            x = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
            dist.all_reduce(x)
            found.append(x.view(torch.uint8).numpy().tobytes())
    return found


@places
def test_all_ranks_have_the_same_bits(hosts: str) -> None:
    first, *others = run(len(hosts), _same_bits, backend=f"hosts:{hosts}")
    assert all(other == first for other in others)


def _large() -> None:
    """In parts, which are in different steps at once."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for count in (300_000, 700_001, 2_000_003):
        x = torch.arange(count, dtype=torch.int32) % 1000 + rank
        dist.all_reduce(x)
        assert torch.equal(x, (torch.arange(count, dtype=torch.int32) % 1000) * n + sum(range(n)))


@places
def test_large_tensors_travel_in_parts(hosts: str) -> None:
    run(len(hosts), _large, backend=f"hosts:{hosts}")


def _large_parts(count: int) -> None:
    """Each rank's part from where it is, also where that is a part of the result."""
    n, rank = dist.get_world_size(), dist.get_rank()

    def part(of: int, to: int = 0) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32) % 1000 + 10_000 * of + 1000 * to

    for at in (None, rank, (rank + 1) % n):
        out = torch.zeros(n, count, dtype=torch.int32)
        own = part(rank) if at is None else out[at].copy_(part(rank))
        all_gather_single(out, own)
        assert torch.equal(out, torch.stack([part(r) for r in range(n)])), at

        given = torch.stack([part(rank, to) for to in range(n)])
        out = torch.zeros(count, dtype=torch.int32) if at is None else given[at]
        reduce_scatter_single(out, given)
        assert torch.equal(out, sum(part(r, rank) for r in range(n))), at

    given = torch.stack([part(rank, to) for to in range(n)])
    for out in (torch.zeros_like(given), given):
        dist.all_to_all_single(out, given.view(n, count))
        assert torch.equal(out, torch.stack([part(r, rank) for r in range(n)]))

    def sizes(of: int) -> list[int]:
        return [count * ((of + to) % 3) // 2 for to in range(n)]

    uneven = torch.cat([part(rank, to).repeat(2)[:k] for to, k in enumerate(sizes(rank))])
    got = [sizes(r)[rank] for r in range(n)]
    out = torch.zeros(sum(got), dtype=torch.int32)
    dist.all_to_all_single(out, uneven, got, sizes(rank))
    want = [part(r, rank).repeat(2)[:k] for r, k in enumerate(got)]
    assert torch.equal(out, torch.cat(want))


@places
def test_large_parts_travel_from_where_they_are(hosts: str) -> None:
    for count in (40_001, 700_003):
        run(len(hosts), _large_parts, count, backend=f"hosts:{hosts}")


def _reduced_parts(count: int) -> None:
    """Whatever is reduced, in one order of ranks or another."""
    n, rank = dist.get_world_size(), dist.get_rank()

    def given(of: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.arange(n * count, dtype=torch.int64)
        return ((x * 7 + 3 * of) % 5 + 1).to(dtype)

    for dtype, op, reduced in (
        (torch.float64, dist.ReduceOp.AVG, lambda x: x.mean(0)),
        (torch.bfloat16, dist.ReduceOp.SUM, lambda x: x.sum(0)),
        (torch.int64, dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
        (torch.float32, dist.ReduceOp.MAX, lambda x: x.amax(0)),
        (torch.uint8, dist.ReduceOp.BXOR, lambda x: functools.reduce(torch.bitwise_xor, x)),
        (torch.complex64, dist.ReduceOp.SUM, lambda x: x.sum(0)),
    ):
        out = torch.empty(count, dtype=dtype)
        reduce_scatter_single(out, given(rank, dtype), op)
        want = reduced(torch.stack([given(of, dtype) for of in range(n)]))
        torch.testing.assert_close(out, want[rank * count :][:count])


@pytest.mark.parametrize("hosts", ["abcabc", "aabbcc", "abcdbcda"])
def test_large_parts_go_round_hosts(hosts: str) -> None:
    """In two parts and in more, the last of which is smaller; and of less to all at once."""
    try:
        for count in (40_001, 131_071, 131_072, 200_003, 700_003):
            run(len(hosts), _large_parts, count, backend=f"hosts:{hosts}")
        run(len(hosts), _reduced_parts, 530_001, backend=f"hosts:{hosts}")
    finally:
        pool.stop(f"hosts:{hosts}")


def _messages_beside_exchanges() -> None:
    """An all_to_all's own messages are nobody's else, and its tag is refused."""
    n, rank = dist.get_world_size(), dist.get_rank()
    there, here = (rank + n // 2) % n, (rank + n - n // 2) % n
    for tag in (0, 2**31 - 2):
        got = torch.zeros(1000, dtype=torch.int64)
        works = [dist.irecv(got, here, tag=tag)]
        exchanged = torch.empty(n * 1000, dtype=torch.int64)
        exchange = dist.all_to_all_single(
            exchanged, torch.arange(n).repeat_interleave(1000) + 100 * rank, async_op=True
        )
        works += [dist.isend(torch.full((1000,), -rank), there, tag=tag), exchange]
        for work in works:
            work.wait()
        assert (got == -here).all()
        assert torch.equal(exchanged, (torch.arange(n) * 100).repeat_interleave(1000) + rank)
    last = 2**31 - 1
    work = dist.isend(got, there, tag=last) if rank < n // 2 else dist.irecv(got, here, tag=last)
    with pytest.raises(RuntimeError, match=f"a tag between hosts must be less than {last}, got"):
        work.wait()


def test_messages_beside_exchanges() -> None:
    run(4, _messages_beside_exchanges, backend="hosts:aabb")


def _broadcasts(count: int) -> None:
    """From every rank, in one piece and in parts that go from host to host."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for root in range(n):
        want = torch.arange(count, dtype=torch.int32) + 1_000_000 * root
        x = want.clone() if rank == root else torch.zeros(count, dtype=torch.int32)
        dist.broadcast(x, root)
        assert torch.equal(x, want), root


@pytest.mark.parametrize("hosts", ["abc", "aabbcc", "abcabc", "aabccc", "cabbdd"])
def test_broadcasts_go_from_host_to_host(hosts: str) -> None:
    """Three hosts and four, even and not; the root leads its host or does not."""
    try:
        for count in (1000, 131_073, 1_000_003):
            run(len(hosts), _broadcasts, count, backend=f"hosts:{hosts}")
    finally:
        pool.stop(f"hosts:{hosts}")


# --- checks and faults ---------------------------------------------------------------------------


@contextlib.contextmanager
def _another_default(odd: int = 1, piggyback: int | None = None, **kwargs: Any) -> Iterator[Any]:
    os.environ["TORCH_C10D_EXT_SHM_PIGGYBACK"] = "" if piggyback is None else str(piggyback)
    world, group = dist.group.WORLD, dist.new_group(backend="shm", **kwargs)
    _is_hierarchical(group)
    c10d._update_default_pg(group)
    try:
        yield group
    finally:
        c10d._update_default_pg(world)
        dist.destroy_process_group(group)


def _as_fallen_back(names: tuple[str, ...]) -> None:
    """What test_checked.py does with a group that falls back to gloo, with one on several hosts."""
    fallen_back = checked.fallen_back
    checked.fallen_back = _another_default
    try:
        for name in names:
            getattr(checked, name)()
    finally:
        checked.fallen_back = fallen_back


@pytest.mark.parametrize("hosts", ("aab",))
def test_checks_and_ends_of_groups(hosts: str) -> None:
    names = (
        *("_says_what_is_wrong", "_mixed_lists", "_ours", "_ours_and_torchs_meet", "_keeps_nan"),
        *("_in_a_block", "_callbacks_may_wait", "_times_out", "_never_is_a_timeout", "_ends"),
    )
    run(len(hosts), _as_fallen_back, names, backend=f"hosts:{hosts}", deadline=DEADLINE)


@pytest.mark.parametrize("name", ("all_reduce of 64 MiB", "barrier", "recv", "op"))
@pytest.mark.parametrize("hosts", ("aab", "aba"))
def test_a_killed_rank_is_named_on_all_survivors(name: str, hosts: str) -> None:
    faults.test_a_killed_rank_is_named_on_all_survivors(name, f"hosts:{hosts}")


@pytest.mark.parametrize("hosts", ("aab", "abb"))
def test_who_leaves_waits_for_its_messages(hosts: str) -> None:
    faults.test_who_leaves_waits_for_its_messages(f"hosts:{hosts}")


ENDS = """
import datetime as dt, os, time
import torch, torch.distributed as dist
from torch_c10d_ext import _backends

_backends._GRACE = dt.timedelta(seconds=30)  # on a busy machine
rank = int(os.environ["RANK"])
os.environ["TORCH_C10D_EXT_SHM_HOST"] = "aab"[rank]
dist.init_process_group("shm")
dist.barrier()
x = torch.arange(1 << 20)
if rank == 0:
    # To its host, and another one.
    works = [dist.isend(x[:count], to, tag=count) for to in (1, 2) for count in (3, 1 << 20)]
else:
    time.sleep(0.3)
    for count in (3, 1 << 20):
        y = torch.empty(count, dtype=torch.int64)
        dist.recv(y, 0, tag=count)
        assert torch.equal(y, x[:count])
"""


def test_what_a_rank_has_sent_arrives_though_its_process_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ENDS)
    torchrun(3, program, [], 100)


def _one_must_not_share() -> None:
    rank = dist.get_rank()
    if rank == 2:
        os.environ["TORCH_C10D_EXT_SHM_DISABLE"] = "1"
    try:
        group = dist.new_group()
    finally:
        os.environ.pop("TORCH_C10D_EXT_SHM_DISABLE", None)
    assert torch_c10d_ext.backend_of(group) == "gloo"
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x[0] == dist.get_world_size()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("hosts", ("aab",))
def test_a_rank_that_must_not_share_memory_sends_all_to_gloo(hosts: str) -> None:
    run(len(hosts), _one_must_not_share, backend=f"hosts:{hosts}")


# --- what carries data between hosts -------------------------------------------------------------

ENGINE = "TORCH_C10D_EXT_SHM_BETWEEN_HOSTS"


@contextlib.contextmanager
def _asking_for(engine: str) -> Iterator[None]:
    before = os.environ.get(ENGINE)
    os.environ[ENGINE] = engine
    try:
        yield
    finally:
        if before is None:
            del os.environ[ENGINE]
        else:
            os.environ[ENGINE] = before


def _a_registered_one() -> None:
    made = []

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        made.append(size)
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    name = "mine_between_hosts"
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, make, devices=["cpu"])
    with _asking_for(name):
        group = dist.new_group(backend="shm")
    hosts = group._get_backend(CPU).inner.hosts
    assert sorted(made) == [len(hosts), dist.get_world_size()]  # a rail, and all
    x = torch.full((50_000,), float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    assert x[0] == x[-1] == sum(range(dist.get_world_size()))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("hosts", ("abab",))
def test_a_registered_backend_goes_between_hosts(hosts: str) -> None:
    run(len(hosts), _a_registered_one, backend=f"hosts:{hosts}")


@pytest.mark.parametrize("hosts", ("aab",))
@pytest.mark.parametrize("odd", (0, 2))
def test_ranks_of_different_builds_are_refused_on_all_ranks(hosts: str, odd: int) -> None:
    run(len(hosts), rendezvous.check_builds, odd, "shm", backend=f"hosts:{hosts}")


def _unknown_and_mixed() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    with _asking_for("nothing"), pytest.raises(ValueError) as error:
        dist.new_group(backend="shm")
    assert f"{ENGINE}: must be one of " in str(error.value)
    assert f"got 'nothing' on rank 0 (rank {rank}/{n}, " in str(error.value)
    with _asking_for("gloo" if rank else "mpi"), pytest.raises(dist.DistBackendError) as mixed:
        dist.new_group(backend="shm")
    assert f"{ENGINE} must be the same on all ranks, got 'mpi' on rank 0, 'gloo' on rank 1" in str(
        mixed.value
    )


@pytest.mark.parametrize("hosts", ("aab",))
def test_engines_that_are_none_or_differ_are_refused_on_all_ranks(hosts: str) -> None:
    run(len(hosts), _unknown_and_mixed, backend=f"hosts:{hosts}")


@pytest.mark.parametrize("engine", ("gloo", "mpi"))
def test_the_report_counts_the_whole_and_what_goes_between(engine: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/train_over_two_hosts.py"), "--engine", engine],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TORCH_C10D_EXT_TALLY": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, rows = _tally.read(tmp_path)
    whole, between = rows[f"shm+{engine}"], rows[engine]
    assert whole.calls > 30 and whole.bytes > 0 and whole.busy > 0
    assert whole.waited is not None and whole.waited > 0
    # An all_reduce of gradients is some messages between hosts; losses travel with their calls.
    assert between.calls > 20 and 0 < between.bytes < 2 * whole.bytes  # sent and received


# --- memory --------------------------------------------------------------------------------------

MIB = 1 << 20
KEPT = "TORCH_C10D_EXT_RESULT_CACHE"


def _what_was_put_aside_is_kept() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(8.0 * MIB // 4 // n * n) % 512 + rank
    out = torch.empty(len(x) // n)
    want = (torch.arange(float(len(x))) % 512 * n + sum(range(n)))[rank * len(out) :][: len(out)]
    _C.release_idle_results()
    most = 0  # it is kept for a while, from a moment after the call on
    for _ in range(5):
        ours.reduce_scatter_tensor(out, x)
        until = time.monotonic() + 1.0
        while most < MIB and time.monotonic() < until:
            most = max(most, _C.idle_result_bytes())
        assert torch.equal(out, want)
    assert most >= MIB
    _C.release_idle_results()


@pytest.mark.parametrize("hosts", ("aabb", "aab"))
def test_what_a_collective_puts_aside_is_kept_for_the_next_one(hosts: str) -> None:
    run(len(hosts), _what_was_put_aside_is_kept, backend=f"hosts:{hosts}")


def _a_wrong_setting_is_told_at_once() -> None:
    rank = dist.get_rank()
    os.environ[KEPT] = "much" if rank == 2 else "1048576"
    os.environ["TORCH_C10D_EXT_SHM_HOST"] = "aabb"[rank]
    said = f"{KEPT}: must be a whole number .*, got 'much' on rank 2 .rank {rank}/4"
    with pytest.raises(ValueError, match=said):
        dist.new_group(backend="shm")


def test_a_wrong_setting_of_what_is_kept_is_told_when_the_group_is_made() -> None:
    with crew(4, "gloo") as ranks:
        ranks.run(_a_wrong_setting_is_told_at_once)
