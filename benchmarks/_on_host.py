"""A rank of ``benchmarks/hosts.py``: all peers in one process, measured in turns.

Each is called as its users call it: gloo by ``torch.distributed``, ours by
``torch_c10d_ext.distributed``, MPICH by mpi4py.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import torch_c10d_ext
import torch_c10d_ext.distributed as ours
from benchmarks._open_mpi import roots_in_turn, there_and_back

Call = Callable[[], Any]

# shm+gloo, called by torch.distributed.
BY_TORCH = "shm+gloo by torch"
# The flat fall-back a second time: how two peers that do the same differ.
CONTROL = "flat again"
BLOCK = 0.12  # seconds of calls between two looks at the clock
MOST = 400


@contextmanager
def _environment(**words: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(words)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _groups(engines: list[str], places: list[int]) -> dict[str, Any]:
    groups = {"gloo": dist.group.WORLD}
    with _environment(TORCH_C10D_EXT_SHM_DISABLE="1"):
        groups["flat"] = dist.new_group(backend="shm")
        groups[CONTROL] = dist.new_group(backend="shm")
    if "mpi" in engines:
        groups["mpi"] = dist.new_group(backend="cpu:mpi")
    for engine in engines:
        with _environment(TORCH_C10D_EXT_SHM_BETWEEN_HOSTS=engine):
            groups[f"shm+{engine}"] = dist.new_group(backend="shm")
    for name, group in groups.items():
        if name.startswith("shm+"):
            engine = name.removeprefix("shm+")
            is_alone = len(set(places)) == len(places)  # a rank per host
            found = torch_c10d_ext.backend_of(group)
            assert found == (engine if is_alone else name), found
    return groups


def _calls(collective: str, size: int, groups: dict[str, Any], mpi: Any) -> dict[str, Call]:
    """By peer; ``size``: bytes of a rank's larger buffer."""
    n = dist.get_world_size()
    is_shared = collective in ("all_gather", "reduce_scatter", "all_to_all")
    count = max(size // 4 // n * n if is_shared else size // 4, n if is_shared else 2)
    whole, part = torch.zeros(count), torch.zeros(max(count // n, 1))
    other = torch.zeros(count)

    def by(module: Any, group: Any) -> Call:
        # torch 2.13 has them under other names.
        gather = getattr(module, "all_gather_single", module.all_gather_into_tensor)
        scatter = getattr(module, "reduce_scatter_single", module.reduce_scatter_tensor)
        root = roots_in_turn(n)
        return {
            "all_reduce": lambda: module.all_reduce(whole, group=group),
            "broadcast": lambda: module.broadcast(whole, root(), group=group),
            "all_gather": lambda: gather(whole, part, group=group),
            "reduce_scatter": lambda: scatter(part, whole, group=group),
            "all_to_all": lambda: module.all_to_all_single(other, whole, group=group),
            **there_and_back(
                dist.get_rank(),
                n,
                lambda peer: module.send(whole, peer, group=group),
                lambda peer: module.recv(whole, peer, group=group),
            ),
        }[collective]

    calls = {name: by(dist if name == "gloo" else ours, group) for name, group in groups.items()}
    if collective == "all_reduce":
        calls[BY_TORCH] = by(dist, groups["shm+gloo"])
    if mpi is not None:
        world = mpi.COMM_WORLD
        a, b, c = whole.numpy(), part.numpy(), other.numpy()
        root = roots_in_turn(n)
        calls["MPICH"] = {
            "all_reduce": lambda: world.Allreduce(mpi.IN_PLACE, a),
            "broadcast": lambda: world.Bcast(a, root()),
            "all_gather": lambda: world.Allgather(b, a),
            "reduce_scatter": lambda: world.Reduce_scatter_block(a, b),
            "all_to_all": lambda: world.Alltoall(a, c),
            **there_and_back(
                dist.get_rank(),
                n,
                lambda peer: world.Send(a, peer),
                lambda peer: world.Recv(a, peer),
            ),
        }[collective]
    return calls


def _agree(value: float) -> float:
    """The largest of all ranks."""
    t = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return float(t)


def measure(calls: dict[str, Call], rounds: int, case: str) -> dict[str, list[float]]:
    """Seconds of each round; every case has an order of its peers, the same on all ranks."""
    counts = {}
    for name, call in calls.items():
        call()
        dist.barrier()
        start = time.perf_counter()
        call()
        call()
        each = _agree((time.perf_counter() - start) / 2)
        counts[name] = max(1, min(MOST, int(BLOCK / each)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(case)
    for _ in range(rounds):
        names = list(calls)
        order.shuffle(names)
        for name in names:
            call, count = calls[name], counts[name]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append(_agree((time.perf_counter() - start) / count))
    return times


class _LinkProbe:
    """A socket from rank 0's host to the next one, for what the link itself takes."""

    def __init__(self, hosts: list[int]) -> None:
        self._is_first = dist.get_rank() == 0
        self._is_last = dist.get_rank() == hosts.index(1)
        self._medians: list[float] = []
        port = 29700
        if self._is_first:
            server = socket.create_server(("", port))
        dist.barrier()
        if self._is_first:
            self._peer = server.accept()[0]
            server.close()
        elif self._is_last:
            self._peer = socket.create_connection((os.environ["MASTER_ADDR"], port))
        if self._is_first or self._is_last:
            self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def look(self) -> None:
        """Measures its latency once more, while the other ranks sleep."""
        dist.barrier()
        trips = []
        for _ in range(100):
            if self._is_first:
                start = time.perf_counter()
                self._peer.sendall(b"12345678")
                self._peer.recv(8)
                trips.append((time.perf_counter() - start) / 2)
            elif self._is_last:
                self._peer.sendall(self._peer.recv(8))
        self._medians += [statistics.median(trips)] if self._is_first else []
        dist.barrier()

    def latency(self) -> float:
        """Seconds one way, the median of all looks. Rank 0's."""
        return statistics.median(self._medians)

    def rate(self) -> float:
        """Bytes per second. Rank 0's."""
        size, seconds = 1 << 25, 1.0
        if self._is_first:
            start = time.perf_counter()
            self._peer.sendall(bytes(size))
            self._peer.recv(1)
            seconds = time.perf_counter() - start
        elif self._is_last:
            left, buffer = size, bytearray(1 << 20)
            while left:
                left -= self._peer.recv_into(buffer)
            self._peer.sendall(b"1")
        return size / seconds


def _rate_of_all(hosts: list[int]) -> float:
    """Bytes per second that each host sends to the next one while all do, of the slowest."""
    count, rank = max(hosts) + 1, dist.get_rank()
    first = [hosts.index(host) for host in range(count)]
    names: list[Any] = [None] * len(hosts)
    dist.all_gather_object(names, socket.gethostbyname(socket.gethostname()))
    seconds, size, port = 0.0, 1 << 25, 29701
    if rank in first:
        server = socket.create_server(("", port))
    dist.barrier()
    if rank in first:
        after = first[(first.index(rank) + 1) % count]
        to = socket.create_connection((names[after], port))
        peer = server.accept()[0]
    dist.barrier()
    if rank in first:
        start = time.perf_counter()
        sender = threading.Thread(target=to.sendall, args=(bytes(size),))
        sender.start()
        left, buffer = size, bytearray(1 << 20)
        while left:
            left -= peer.recv_into(buffer)
        sender.join()
        seconds = time.perf_counter() - start
        for connection in (to, peer, server):
            connection.close()
    return size / _agree(seconds)


def _rate_inside(hosts: list[int]) -> float:
    """Bytes per second that a rank takes from the others of its host in a reduce_scatter, while
    those of all hosts do the same."""
    members = [[r for r, at in enumerate(hosts) if at == host] for host in range(max(hosts) + 1)]
    groups = [dist.new_group(ranks, backend="shm") for ranks in members]
    here = hosts[dist.get_rank()]
    n, size = len(members[here]), 4 << 20
    whole, part = torch.zeros(size // 4 // n * n), torch.zeros(size // 4 // n)
    seconds = []
    for _ in range(20):
        dist.barrier()
        start = time.perf_counter()
        ours.reduce_scatter_tensor(part, whole, group=groups[here])
        seconds.append(time.perf_counter() - start)
    return (n - 1) / n * size / _agree(statistics.median(seconds))


def mpich(packages: str) -> Any:
    """mpi4py in the MPI that the groups have started; None where there is no mpi4py."""
    sys.path.append(packages)
    try:
        import mpi4py
    except ImportError:
        return None
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    return importlib.import_module("mpi4py.MPI")


def main() -> None:
    """Measures what the first argument says, as JSON.

    Rank 0 prints a line for each case, and one for the link, whose latency is measured between
    cases: at any one time the machine may be slow.
    """
    plan = json.loads(sys.argv[1])
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=120))
    groups = _groups(plan["engines"], plan["places"])
    mpi = mpich(plan["mpi4py"]) if "mpi" in plan["engines"] else None
    link = _LinkProbe(plan["places"])
    rates = {
        "rate": link.rate(),
        "together": _rate_of_all(plan["places"]),
        "inside": _rate_inside(plan["places"]),
    }
    for collective, size in plan["cases"]:
        link.look()
        calls = _calls(collective, size, groups, mpi)
        times = measure(calls, plan["rounds"], f"{collective} {size}")
        apart = {"by_torch": times.pop(BY_TORCH, None), "again": times.pop(CONTROL)}
        if dist.get_rank() == 0:
            case = {"collective": collective, "size": size, "times": times, **apart}
            print(json.dumps(case), flush=True)
    if dist.get_rank() == 0:
        whole = {"latency": link.latency(), **rates, "mpich": mpi is not None}
        print(json.dumps(whole), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
