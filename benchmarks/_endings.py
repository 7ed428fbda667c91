"""A rank whose process ends, and when the ranks that wait for it hear of that.

Run as ``python _endings.py <end> <store> <rank> <size>`` it is one of them: the last rank ends, and
prints when; the others print when they were told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

DEADLINE = 120.0


def _raise() -> NoReturn:
    raise ValueError("as planned")


ENDS: dict[str, Callable[[], None]] = {
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": _raise,
    "returns": lambda: None,
    "exits at once": lambda: os._exit(0),
}


def times_of(end: str, size: int, *, fallback: bool = False) -> list[float]:
    """Seconds from the end of the last rank's code to ``RankLost``, on each of the others."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        disabled = {"TORCH_C10D_EXT_SHM_DISABLE": "1"} if fallback else {}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, end, f"{folder}/store", str(rank), str(size)],
                env={**os.environ, **disabled},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(size)
        ]
        for rank in ranks:
            processes.callback(rank.communicate)
            processes.callback(rank.kill)
        *told, ended = [int(rank.communicate(timeout=DEADLINE)[0]) for rank in ranks]
    return [(at - ended) / 1e9 for at in told]


def main(end: str, store: str, rank: int, size: int) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    import torch_c10d_ext

    dist.init_process_group("shm", store=dist.FileStore(store, size), rank=rank, world_size=size)
    x = torch.ones(4)
    for _ in range(10):
        dist.all_reduce(x)
    if rank == size - 1:
        time.sleep(0.3)  # until the others are asleep
        print(time.monotonic_ns(), flush=True)
        ENDS[end]()
        return
    try:
        dist.all_reduce(x)
    except torch_c10d_ext.errors.RankLost:
        print(time.monotonic_ns(), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
