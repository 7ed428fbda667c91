"""A rank on an emulated host: ``rank.py SCENARIO`` joins the group and says as JSON what it saw."""

from __future__ import annotations

import datetime as dt
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_c10d_ext
from tests.backends.dist_ops import all_gather_single, reduce_scatter_single
from tests.hosts.reductions import reductions
from torch_c10d_ext import _C

TIMEOUT = dt.timedelta(seconds=float(os.environ.get("TEST_TIMEOUT", "60")))


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def collectives() -> None:
    """Every way between hosts, and the groups of a mesh."""
    n, rank = dist.get_world_size(), dist.get_rank()
    # Of 10_001 leaders send all at once, of 15_001 on three hosts parts, which are uneven; a rail's
    # part of 20_002 is odd.
    for count in (1, 10_001, 15_001, 20_002, 70_000, 2_000_003):
        base = torch.arange(count) % 1000
        total, largest = base + rank, base + rank
        dist.all_reduce(total)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert torch.equal(total, n * base + n * (n - 1) // 2)
        assert torch.equal(largest, base + n - 1)
    there, here = (rank + 1) % n, (rank - 1) % n
    sent, got = dist.isend(torch.tensor([rank]), there), torch.zeros(1, dtype=torch.int64)
    dist.recv(got, here)
    sent.wait()
    assert got == here
    whole = torch.empty(n * 3)
    all_gather_single(whole, torch.full((3,), float(rank)))
    assert whole.tolist() == [float(r) for r in range(n) for _ in range(3)]
    parts = torch.empty(n)
    dist.all_to_all_single(parts, torch.arange(n, dtype=torch.float32) + n * rank)
    assert parts.tolist() == [float(rank + n * r) for r in range(n)]
    # Rank 0's parts are even, and the others' are not: it gives one element to every rank.
    counts = [1] + [1 if rank == 0 else 2] * (n - 1)
    mixed = torch.empty(sum(counts), dtype=torch.int64)
    dist.all_to_all_single(mixed, torch.arange(sum(counts)) + 100 * rank, counts, counts)
    begin = 2 * rank - 1 if rank else 0
    wanted = [rank] + [100 * r + begin + i for r in range(1, n) for i in range(counts[r])]
    assert mixed.tolist() == wanted
    dist.barrier()
    backend = torch_c10d_ext.backend_of()
    hosts = dist.group.WORLD._get_backend(torch.device("cpu")).inner.hosts
    one_each = dist.new_group([ranks[0] for ranks in hosts])
    names = [torch_c10d_ext.backend_of(one_each)] if rank in [r[0] for r in hosts] else []
    same = [dist.new_group(ranks) for ranks in hosts]
    mine = next(i for i, ranks in enumerate(hosts) if rank in ranks)
    names.append(torch_c10d_ext.backend_of(same[mine]) if len(hosts[mine]) > 1 else "shm")
    _say(backend=backend, hosts=hosts, groups=names)
    dist.barrier()
    dist.destroy_process_group()


def exchanges() -> None:
    """As much as travels with the calls where each rank has a part of it, and a little more."""
    n, rank = dist.get_world_size(), dist.get_rank()
    _C.start_tally(["gloo"])
    hosts = dist.group.WORLD._get_backend(torch.device("cpu")).inner.hosts
    usual = _C.usual_piggyback(max(len(ranks) for ranks in hosts), by_leaders=True)
    most = usual * len(hosts) // n // 4  # elements of a rank
    before, after = (rank - 1) % n, (rank + 1) % n

    def own(share: int, of: int) -> torch.Tensor:
        return torch.arange(rank * share, (rank + 1) * share, dtype=torch.float32) + 1000 * of

    def all_to_all(share: int) -> None:
        given = torch.arange(n * share, dtype=torch.float32) + 1000 * rank
        got = torch.empty(n * share)
        dist.all_to_all_single(got, given)
        assert torch.equal(got, torch.cat([own(share, of) for of in range(n)]))

    def reduce_scatter(share: int, dtype: torch.dtype = torch.float32) -> None:
        given = (torch.arange(n * share) % 10 + rank).to(dtype)
        got = torch.empty(share, dtype=dtype)
        reduce_scatter_single(got, given)
        whole = n * (torch.arange(n * share) % 10) + sum(range(n))
        assert torch.equal(got, whole[rank * share :][:share].to(dtype))

    def all_reduce(count: int, dtype: torch.dtype = torch.float32) -> None:
        x = (torch.arange(count) % 10 + rank).to(dtype)
        dist.all_reduce(x)
        assert torch.equal(x, (n * (torch.arange(count) % 10) + sum(range(n))).to(dtype))

    def halves(count: int) -> None:
        all_reduce(count, torch.bfloat16)

    def shares_of_halves(share: int) -> None:
        reduce_scatter(share, torch.float16)

    def to_the_next(count: int) -> None:
        given, got = torch.arange(count) + rank, torch.empty(count, dtype=torch.int64)
        counts = [[count if of == at else 0 for of in range(n)] for at in (before, after)]
        dist.all_to_all_single(got, given, *counts)
        assert torch.equal(got, torch.arange(count) + before)

    def scatter(count: int) -> None:
        root = n - 1
        given = [torch.arange(count) + of for of in range(n)] if rank == root else None
        got = torch.empty(count, dtype=torch.int64)
        dist.scatter(got, given, root)
        assert torch.equal(got, torch.arange(count) + rank)

    asked = {}
    for call, fits in (
        (all_to_all, most // n),
        # Leaders reduce what their hosts give, where that is as exact.
        (reduce_scatter, usual // 4 // n),
        (all_reduce, usual // 4 // len(hosts)),
        (halves, usual // 2 // n),
        (shares_of_halves, 2 * most // n),
        (to_the_next, most // 2),
        (scatter, most // 2),
    ):
        done = [_calls_of_gloo()]
        for size in (fits, fits + 1):
            call(size)
            done.append(_calls_of_gloo())
        asked[call.__name__] = [done[1] - done[0], done[2] - done[1]]
    _say(asked=asked)
    dist.barrier()
    dist.destroy_process_group()


def messages() -> None:
    """Between any two ranks: of rank 0's host, of one other host, and of two others."""
    n, rank = dist.get_world_size(), dist.get_rank()
    _C.start_tally(["gloo"])
    others = [of for of in range(n) if of != rank]
    limit = _C.LITTLE_MESSAGE // 4

    def data(source: int, to: int, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.float32) + 7 * source + 1000 * to

    def exchange(sizes: list[int], peers: list[int]) -> int:
        """Of each size there and back, with all at once. How often gloo was asked."""
        before = _calls_of_gloo()
        works, got = [], {}
        for count in sizes:
            for peer in peers:
                works.append(dist.isend(data(rank, peer, count), peer, tag=peer))
                got[peer, count] = torch.empty(count)
                works.append(dist.irecv(got[peer, count], peer, tag=rank))
        for work in works:
            work.wait()
        for (peer, count), tensor in got.items():
            assert torch.equal(tensor, data(peer, rank, count)), (peer, count)
        dist.barrier()
        return _calls_of_gloo() - before

    names: list[Any] = [None] * n
    dist.all_gather_object(names, socket.gethostname())
    hosts = [[of for of in range(n) if names[of] == name] for name in dict.fromkeys(names)]
    host = next(ranks for ranks in hosts if rank in ranks)
    next_host = hosts[(hosts.index(host) + 1) % len(hosts)]
    far = [of for of in others if of not in host]
    asked = [exchange([0, 1, 1025], far), exchange([limit + 1], far)]
    exchange([5, limit + 1, 6, limit, 7], others)
    # Over a line of two leaders less: words of collectives wait behind it.
    between = []
    for pair, count in (
        ((0, n - 1), limit),
        ((hosts[0][0], hosts[1][0]), limit // 4),
        ((hosts[0][0], hosts[1][0]), limit // 4 + 1),
    ):
        between.append(exchange([count], [of for of in pair if of != rank] if rank in pair else []))
    # From any source, one after the other; of each source in the order of its sends.
    if rank == n - 1:
        counts = dict.fromkeys(others, 0)
        for _ in range(3 * len(others)):
            one = torch.zeros(3)
            source = dist.recv(one, None, tag=n)
            counts[source] += 1
            assert torch.equal(one, torch.full((3,), 10.0 * source + counts[source]))
    else:
        for turn in (1.0, 2.0, 3.0):
            dist.send(torch.full((3,), 10.0 * rank + turn), n - 1, tag=n)
    # Every second element, of other types.
    for dtype in (torch.bfloat16, torch.complex64, torch.bool, torch.int8):
        numbers = (torch.arange(40) + rank) % 2 == 0 if dtype == torch.bool else torch.arange(40)
        sent = dist.isend(numbers.to(dtype)[::2], (rank + 1) % n)
        whole = torch.full((40,), 1, dtype=dtype)
        dist.recv(whole[::2], (rank - 1) % n)
        sent.wait()
        expected = (torch.arange(40) + (rank - 1) % n) % 2 == 0
        expected = expected if dtype == torch.bool else torch.arange(40)
        assert torch.equal(whole[::2], expected.to(dtype)[::2]) and bool((whole[1::2] == 1).all())
    failures = _failures_of_messages(host[0], next_host[-1])
    _after_a_leader_has_left(hosts)
    # Of all sizes, with a group that all leave before they have waited for any.
    group, got = dist.new_group(), {}
    for count in (1, limit, limit + 1, 5):
        for peer in others:
            got[peer, count] = torch.zeros(count)
            dist.isend(data(rank, peer, count), peer, group, tag=count)
            dist.irecv(got[peer, count], peer, group, tag=count)
    dist.destroy_process_group(group)
    for (peer, count), tensor in got.items():
        assert torch.equal(tensor, data(peer, rank, count)), (peer, count)
    _say(asked=asked, between=between, failures=failures)
    dist.barrier()
    dist.destroy_process_group()


def _failures_of_messages(source: int, to: int) -> list[str]:
    """What this rank, if it is the first of its host, sends to another host: that does not fit, or
    that nobody receives in time; and that nothing of it is left afterwards."""
    rank = dist.get_rank()
    texts = []
    group = dist.new_group(timeout=TIMEOUT)
    dist.barrier(group)

    def failure(call: Callable[[], Any], kind: str) -> None:
        try:
            call()
        except torch_c10d_ext.errors.CollectiveError as error:
            assert type(error).__name__ == kind, error
            texts.append(str(error).partition(", got")[0])
        else:
            raise AssertionError("no failure")

    pairs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pairs, (source, to) if rank == source else None)
    sends = [pair for pair in pairs if pair is not None]
    received = [torch.zeros(4) for _, there in sends if there == rank]
    sources = [at for at, there in sends if there == rank]
    works = [dist.irecv(t, at) for at, t in zip(sources, received, strict=True)]
    if rank == source:
        works.append(dist.isend(torch.zeros(3), to))
    for work in works:
        failure(work.wait, "CollectiveMismatch")
    dist.barrier()
    if rank == source:
        group.set_timeout(dt.timedelta(seconds=0.5))
        failure(lambda: dist.send(torch.ones(4), to, group=group), "CollectiveTimeout")
        group.set_timeout(TIMEOUT)
    dist.barrier()
    works = [dist.irecv(t, at, group=group) for at, t in zip(sources, received, strict=True)]
    if rank == source:
        dist.send(torch.full((4,), 2.0), to, group=group)
    for work in works:
        work.wait()
    assert all(tensor.tolist() == [2.0] * 4 for tensor in received)
    dist.barrier()
    return texts


def _after_a_leader_has_left(hosts: list[list[int]]) -> None:
    """The others go on, at once and when it passes on nothing any more."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=TIMEOUT)
    dist.barrier(group)
    if rank == hosts[1][0]:
        dist.destroy_process_group(group)
    there, back = hosts[1][-1], hosts[-1][-1]
    until = time.monotonic() + 3.0
    turn = 0
    while rank in (there, back) and there not in (back, hosts[1][0]):
        turn += 1
        goes_on = torch.full((2000 if turn % 2 else 20_000,), float(time.monotonic() < until))
        first = rank == there
        dist.send(goes_on, back, group) if first else dist.recv(goes_on, there, group)
        dist.recv(goes_on, back, group) if first else dist.send(goes_on, there, group)
        assert bool((goes_on == goes_on[0]).all())
        if not goes_on[0]:
            break
    dist.barrier()


def _calls_of_gloo() -> int:
    tally = _C.tally()
    return tally["gloo"][0] if "gloo" in tally else 0


def until_it_fails() -> None:
    """Calls one collective after the other, of both sizes."""
    x, large = torch.zeros(1000), torch.zeros(300_000)

    def call() -> None:
        dist.all_reduce(x)
        dist.all_reduce(large)
        time.sleep(0.001)

    _until_it_fails(call)


def large_until_it_fails() -> None:
    """Ranks are in the middle of a collective's data nearly all the time."""
    x = torch.zeros(16 << 20)
    _until_it_fails(lambda: dist.all_reduce(x))


def broadcasts_until_it_fails() -> None:
    """In parts, from the last rank's host to the others, one after the other."""
    x = torch.zeros(4 << 20)
    _until_it_fails(lambda: dist.broadcast(x, dist.get_world_size() - 1))


def shares_until_it_fails() -> None:
    """By messages on rails: what each rank gives to, and gets of, all; round three hosts."""
    n = dist.get_world_size()
    share, whole = torch.zeros(1 << 18), torch.zeros(n << 18)

    def call() -> None:
        dist.reduce_scatter_tensor(share, whole)
        dist.all_gather_into_tensor(whole, share)

    _until_it_fails(call)


def ends_after_a_large_one() -> None:
    """Rank TEST_ENDS ends at once when it has its third result, which the others get, too."""
    x, turns = torch.empty(8 << 20), itertools.count(1)

    def call() -> None:
        dist.all_reduce(x.fill_(1))
        if next(turns) == 3 and dist.get_rank() == int(os.environ["TEST_ENDS"]):
            os._exit(0)
        assert bool((x == dist.get_world_size()).all())

    _until_it_fails(call)


def sends_and_ends() -> None:
    """The last rank ends once its messages, for which others wait, are said."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.arange(_C.LITTLE_MESSAGE // 16, dtype=torch.float32)
    y = torch.zeros_like(x)
    # Kernels take little of it at a time.
    Path("/proc/sys/net/ipv4/tcp_wmem").write_text("4096 16384 16384")
    dist.barrier()
    group = dist.new_group()
    dist.barrier(group)
    if rank == last:
        time.sleep(1.0)  # it hears that they wait
        for work in [dist.isend(x + to, to, group) for to in (0, 1)]:
            work.wait()
    elif rank < 2:
        dist.recv(y, last, group)
        assert torch.equal(y, x + rank)
    dist.destroy_process_group()
    _say(ended=time.time())


def aborts_what_is_on_its_way() -> None:
    """Messages that would take half a minute, as they begin and later."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    texts = []
    for pause in (0.0, 0.0, 1.0):
        group = dist.new_group()
        dist.barrier(group)
        x = torch.ones(4 << 20)
        if rank in (0, last):
            work = dist.isend(x, last, group) if rank == 0 else dist.irecv(x, 0, group)
            if rank == 0:
                time.sleep(pause)
                dist.distributed_c10d._abort_process_group(group)
            try:
                work.wait()
            except dist.DistBackendError as error:
                texts.append(f"{type(error).__name__}: {str(error).partition(' (rank')[0]}")
        dist.barrier()
    _say(texts=texts)


def messages_with_one_that_stops() -> None:
    """Rank 1 has messages to and from the last rank, which has stopped: little and large ones."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == last:
        store.set("stopped", "")
        os.kill(os.getpid(), signal.SIGSTOP)
    store.wait(["stopped"], TIMEOUT)
    if rank == 1:
        said = []
        tensors = [torch.zeros(count) for count in (1000, 1000, 300_000, 300_000)]
        starts = (dist.isend, dist.irecv) * 2
        works = [starts[tag](tensor, last, tag=tag) for tag, tensor in enumerate(tensors)]
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                ranks = list(getattr(error, "ranks", []))
                said.append({"kind": type(error).__name__, "ranks": ranks, "text": str(error)})
        _say(said=said)
        store.set("over", "")
    elif rank == 0:
        store.wait(["over"], 5 * TIMEOUT)
        _say(over=True)
    sys.stdout.flush()
    os._exit(0)


def waits_for_one_that_stops() -> None:
    """The last rank waits for rank 0, which is stopped, for half a second."""
    dist.all_reduce(torch.ones(1))
    _say(ready=os.getpid())
    if dist.get_rank() == 0:
        time.sleep(TIMEOUT.total_seconds())
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while not os.path.exists(os.environ["TEST_STOPPED"]):
        time.sleep(0.01)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    print("waiting", flush=True)
    begun = time.monotonic()
    try:
        work.wait(dt.timedelta(seconds=0.5))
    except (RuntimeError, KeyboardInterrupt) as error:
        _say(kind=type(error).__name__, after=time.monotonic() - begun)
    sys.stdout.flush()
    os._exit(0)


def _until_it_fails(call: Callable[[], None]) -> None:
    dist.all_reduce(torch.ones(1))
    _say(ready=os.getpid())
    calls = 0
    try:
        while True:
            call()
            calls += 1
    except RuntimeError as error:
        _say(
            kind=type(error).__name__,
            ranks=list(getattr(error, "ranks", [])),
            text=str(error),
            at=time.time(),
            calls=calls,
        )
    sys.stdout.flush()
    # Others may wait for this one, which does not tell them by its end that they do so in vain.
    time.sleep(float(os.environ.get("TEST_LINGER", "0")))
    os._exit(0)


def random_calls() -> None:
    """Collectives of random sizes, dtypes and roots, each compared bit by bit."""
    calls = int(os.environ["TEST_CALLS"])
    n, rank = dist.get_world_size(), dist.get_rank()
    common = torch.Generator().manual_seed(7)

    def pick(high: int) -> int:
        return int(torch.randint(high, (1,), generator=common))

    for i in range(calls):
        collective, count = pick(7), pick(4) and 1 << pick(17)
        dtype = (torch.int32, torch.float32, torch.int64, torch.uint8)[pick(4)]
        root, seed = pick(n), pick(1 << 30)
        # Small integers, so that sums of all types are exact.
        of = [
            torch.randint(0, 20, (n, count), generator=torch.Generator().manual_seed(seed + r)).to(
                dtype
            )
            for r in range(n)
        ]
        total = sum(part.to(torch.int64) for part in of).to(dtype)
        own = of[rank].clone()
        if collective == 0:
            dist.all_reduce(own)
            want = total
        elif collective == 1:
            dist.broadcast(own, root)
            want = of[root]
        elif collective == 2:
            dist.reduce(own, root)
            want = total if rank == root else own
        elif collective == 3:
            out = torch.empty(n * n * count, dtype=dtype)
            all_gather_single(out, own.flatten())
            own, want = out, torch.cat([part.flatten() for part in of])
        elif collective == 4:
            out = torch.empty(count, dtype=dtype)
            reduce_scatter_single(out, own.flatten())
            own, want = out, total[rank]
        elif collective == 5:
            out = torch.empty(n, count, dtype=dtype)
            dist.all_to_all_single(out, own)
            own, want = out, torch.stack([part[rank] for part in of])
        else:
            out = torch.empty(n, count, dtype=dtype)
            request = dist.isend(own, (rank + 1) % n, tag=i % 5)
            dist.recv(out, (rank - 1) % n, tag=i % 5)
            request.wait()
            own, want = out, of[(rank - 1) % n]
        assert torch.equal(own, want), (i, collective, count, dtype, root)
    dist.barrier()
    _say(done=calls)
    dist.destroy_process_group()


def contract() -> None:
    """What the ops' contract asks of a backend, of every form of every collective.

    A trace does not see the backend: one form is compiled.
    """
    from tests import contract as ops
    from tests.contract import FUNCTIONAL, OUT

    failures: list[str] = []
    digests: dict[str, str] = {}
    checked = forms = 0
    for path in sorted((Path(__file__).parent.parent / "ops").glob("test_*.py")):
        module = f"tests.ops.{path.stem}"
        collective = getattr(importlib.import_module(module), "COLLECTIVE", None)
        if collective is None:
            continue
        checks: list[tuple[Any, ...]] = [(ops.check_errors, module), (ops.check_func, module)]
        for form in collective.forms:
            forms += 1
            checks += [(ops.check_values, module, form), (ops.check_layouts, module, form)]
            if form != OUT:
                checks += [(ops.check_gradients, module, form), (ops.check_vmap, module, form)]
            if form == FUNCTIONAL:
                checks += [(ops.check_compiled, module, form, "aot_eager", 1)]
        for check, *arguments in checks:
            began = time.monotonic()
            failed, found, count = check(*arguments)
            what = f"{check.__name__} {' '.join(map(str, arguments[:2]))}"
            print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)
            failures += [f"{what}: {text}" for text in failed]
            digests.update({f"{what} {key}": digest for key, digest in found.items()})
            checked += count
    dist.barrier()
    _say(failures=failures, digests=digests, checked=checked, forms=forms)
    dist.destroy_process_group()


def clients() -> None:
    """DDP, FSDP2, DTensor and tensor parallel modules, each against one process alone."""
    from tests.backends import test_shm_clients as shm

    done = []
    for fn, arguments in (
        (shm._ddp_against_one_process, ()),
        (shm._fully_sharded, (False, False)),
        (shm._fully_sharded, (False, True)),
        (shm._redistributes, ()),
        (shm._tensor_parallel, (False,)),
        (shm._tensor_parallel, (True,)),
        (shm._meshes, ()),
    ):
        fn(*arguments)
        done.append(fn.__name__)
    dist.barrier()
    _say(done=done)
    dist.destroy_process_group()


def main() -> None:
    dist.init_process_group("shm", timeout=TIMEOUT)
    {
        "collectives": collectives,
        "exchanges": exchanges,
        "reductions": lambda: _say(done=reductions()),
        "messages": messages,
        "contract": contract,
        "clients": clients,
        "until_it_fails": until_it_fails,
        "large_until_it_fails": large_until_it_fails,
        "broadcasts_until_it_fails": broadcasts_until_it_fails,
        "shares_until_it_fails": shares_until_it_fails,
        "ends_after_a_large_one": ends_after_a_large_one,
        "random_calls": random_calls,
        "sends_and_ends": sends_and_ends,
        "aborts_what_is_on_its_way": aborts_what_is_on_its_way,
        "messages_with_one_that_stops": messages_with_one_that_stops,
        "waits_for_one_that_stops": waits_for_one_that_stops,
    }[sys.argv[1]]()


if __name__ == "__main__":
    main()
