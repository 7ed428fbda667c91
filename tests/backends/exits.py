"""Ends processes of a group in many ways and prints what they exit with.

Run as ``python exits.py <directory> <scenario>...``. Every rank is a child forked before anything
of the backend has started, so that it costs no imports, and ends as a script does: by returning
from its main module, with the interpreter's whole shutdown. What the ranks print goes to stderr.

``starved_threads.cpp`` of the native tests must be preloaded.

Where this user may, it all happens above an empty /dev/shm and an empty /tmp, and whatever is found
there afterwards is an error.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import torch_c10d_ext

_DEADLINE = 120.0
_NEW_MOUNTS = 0x00020000
_PRIVATE = 0x4000 | (1 << 18)


def _empty(*directories: str) -> bool:
    """Put empty file systems of this process' own over the directories."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0 or libc.mount(None, b"/", None, _PRIVATE, None) != 0:
        return False
    return all(libc.mount(b"tmpfs", d.encode(), b"tmpfs", 0, None) == 0 for d in directories)


def _expect_loss(call: object) -> None:
    """Ends this process with 7 when `call` reports that rank 1 is gone."""
    begin = time.monotonic()
    try:
        call()  # type: ignore[operator]
    except torch_c10d_ext.errors.RankLost as error:
        assert error.ranks == [1], error
        print(f"  after {time.monotonic() - begin:.3f} s: {error}", flush=True)
        sys.exit(7)
    raise AssertionError("rank 1 is still there")


def _all_reduce(count: int = 1, async_op: bool = False) -> dist.Work | None:
    return dist.all_reduce(torch.ones(count), async_op=async_op)


class Lingering:
    """The end of its process takes until rank 0's is over."""

    def __init__(self) -> None:
        self.stat = Path(f"/proc/{pids[0]}/stat")
        self.sleep, self.clock = time.sleep, time.monotonic

    def __del__(self) -> None:
        ends = self.clock() + 60
        while self.stat.exists() and ") Z " not in self.stat.read_text():
            if self.clock() > ends:
                os._exit(9)
            self.sleep(0.01)


def main(scenario: str, rank: int) -> None:
    _all_reduce()
    if scenario == "destroys":
        dist.destroy_process_group()
    elif scenario == "exits with 3":
        sys.exit(3)
    elif scenario == "raises":
        raise ValueError("as planned")
    elif scenario.startswith("one ") and scenario != "one gone":
        if rank == 0:
            _expect_loss(_all_reduce)
        time.sleep(0.3)
        if "lingers" in scenario:
            main.lingering = Lingering()  # type: ignore
        if "raises" in scenario:
            raise ValueError("as planned")
        if "returns" in scenario:
            return
        if scenario == "one exits":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    elif scenario == "in flight":
        # Nobody waits for these.
        main.works = [_all_reduce(1 << 20, async_op=True) for _ in range(8)]  # type: ignore
    elif scenario == "in flight and raises":
        main.works = [_all_reduce(1 << 20, async_op=True) for _ in range(8)]  # type: ignore
        raise ValueError("as planned")
    elif scenario == "in flight on one":
        if rank == 0:
            main.work = _all_reduce(async_op=True)  # type: ignore
    elif scenario == "messages in flight":
        x, group = torch.arange(1 << 20), dist.new_group()
        if rank == 1:
            torch_c10d_ext._backends._GRACE = dt.timedelta(seconds=30)  # on a busy machine
            main.works = [  # type: ignore
                dist.isend(x[:count] + tag, 0, of, tag=tag)
                for of in (group, None)
                for tag, count in enumerate((3, 1 << 20))
            ]
        else:
            time.sleep(0.3)
            for of in (group, None):
                for tag, count in enumerate((3, 1 << 20)):
                    y = torch.empty(count, dtype=torch.int64)
                    dist.recv(y, 1, of, tag=tag)
                    assert torch.equal(y, x[:count] + tag)
    elif scenario == "one gone":
        if rank == 0:
            time.sleep(0.5)
    elif scenario == "thread in a collective":
        # It waits for a rank that has returned, or until it is cut off.
        threading.Thread(target=_all_reduce, daemon=True).start() if rank == 0 else None
        time.sleep(0.2)
    elif scenario in ("threads at works", "late threads at works"):
        works = [_all_reduce(async_op=True) for _ in range(4 if rank == 0 else 0)]
        for wait in [w.wait for w in works[:2]] + [w.get_future().wait for w in works[2:]]:
            threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.2 + 0.2 * rank)
        if scenario.startswith("late") and rank == 0:
            # Of the preloaded library: threads that are woken, as by the end of their group, get no
            # further for a while.
            ctypes.c_int.in_dll(ctypes.CDLL(None), "starve").value = 1
            raise ValueError("as planned")
        if scenario.startswith("late"):
            time.sleep(2)
    else:
        assert scenario == "returns", scenario


def start(scenario: str, rank: int, path: str) -> int:
    """Returns the child's pid, and in the child 0."""
    pid = os.fork()
    if pid == 0:
        os.dup2(2, 1)
        store = dist.FileStore(path, 2)
        dist.init_process_group(
            "shm", store=store, rank=rank, world_size=2, timeout=dt.timedelta(seconds=30)
        )
    return pid


def finish(pid: int) -> int:
    ends = time.monotonic() + _DEADLINE
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -999  # never ended


directory = os.open(sys.argv[1], os.O_PATH)  # still there when /tmp is not
alone = _empty("/dev/shm", "/tmp")
child = None
running: dict[str, list[int]] = {}
for number, name in enumerate(sys.argv[2:]):
    pids = running[name] = []
    for rank in (0, 1):
        pid = start(name, rank, f"/proc/self/fd/{directory}/{number}")
        if pid == 0:
            child = (name, rank)
            break
        pids.append(pid)
    if child:
        break

if child:
    main(*child)
else:
    for name, pids in running.items():
        print(f"= {name}: {tuple(map(finish, pids))}", flush=True)
    left = [str(p) for d in ("/dev/shm", "/tmp") for p in Path(d).iterdir()] if alone else []
    if left:
        print("left behind:", left)
        sys.exit(1)
    if not alone:
        print("not allowed to mount: what is left in /dev/shm and /tmp was not looked at")
