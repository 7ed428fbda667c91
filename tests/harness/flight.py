"""Keep rank 0's collectives in flight, unread and unwritten, for as long as a test wants.

gloo runs collectives on two threads, first in, first out. Rank 0 gives each of them a collective
that the other ranks join only when the gate opens: until then everything rank 0 starts stays in the
queue, its inputs not yet read and its outputs not yet written.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import torch_c10d_ext

_DEADLINE = dt.timedelta(seconds=30)
_GLOO_THREADS = 2
_numbers = itertools.count()


class Gate:
    """What holds the other ranks back."""

    def __init__(self, key: str, store: dist.Store | None = None) -> None:
        self._key = key
        self._opened = False
        self._store = store or dist.distributed_c10d._get_default_store()

    def open(self) -> None:
        """Let the other ranks go on (on rank 0; elsewhere nothing)."""
        self.open_after(0.0)

    def open_after(self, seconds: float) -> None:
        """Open in a while; this rank may be blocked in a wait by then, with or without the GIL."""
        if dist.get_rank() == 0 and not self._opened:
            self._opened = True
            self._store.set(self._key, str(seconds))

    def wait(self) -> None:
        if dist.get_rank() != 0:
            self._store.wait([self._key], _DEADLINE)
            time.sleep(float(self._store.get(self._key)))


@contextlib.contextmanager
def single_rank_shortcut(enabled: bool) -> Iterator[None]:
    """Within the block, a group of one rank is answered with or without its backend."""
    torch_c10d_ext._C.set_single_rank_shortcut(enabled)
    try:
        yield
    finally:
        torch_c10d_ext._C.set_single_rank_shortcut(True)


@functools.cache
def quick_store() -> dist.Store:
    """A store that answers at once, for tests with hundreds of gates: a file is asked every 10 ms.

    All ranks must call this.
    """
    slow, key = dist.distributed_c10d._get_default_store(), "tests/quick store"
    if dist.get_rank() == 0:
        made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        slow.set(key, str(made.port))
        return made
    return dist.TCPStore("127.0.0.1", int(slow.get(key)), is_master=False, timeout=_DEADLINE)


@contextlib.contextmanager
def in_flight(store: dist.Store | None = None) -> Iterator[Gate]:
    """Within the block, what rank 0 starts completes only after `open`; others enter after it.

    Rank 0 must open the gate before it blocks on a result.
    """
    gate = Gate(f"tests/gate/{next(_numbers)}", store)
    gate.wait()
    jam = [dist.all_reduce(torch.zeros(1), async_op=True) for _ in range(_GLOO_THREADS)]
    try:
        yield gate
    finally:
        gate.open()
        for work in jam:
            work.wait(_DEADLINE)
