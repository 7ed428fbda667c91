"""The end of the process, while threads are on their way back to Python.

Without an interpreter CPython ends a thread that takes the GIL where it stands, and where that is a
destructor the process dies of SIGABRT after all its work was done. So the end waits for them:

- A gloo thread releases a collective's tensors after it has woken the waiting thread, and releasing
  a tensor that Python knows takes the GIL. torch joins the threads when the group goes, but a
  compiled function keeps the group to the end.
- A thread that waits for a work takes the GIL when that is over, as it is once its group is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from pathlib import Path

_GLOO = "pt_gloo"  # how torch names its threads
_PAUSE = 0.0005  # seconds in which the GIL is free
_QUIET_LOOKS = 3
_PATIENCE = 2.0


def register() -> None:
    atexit.register(let_threads_rest, _GLOO)


def let_threads_rest(name: str = "") -> None:
    """Returns when no other thread, of those so named, wants to run, or after two seconds.

    Of the threads that wait for the GIL one runs, or would like to, as soon as it is free. So where
    none does from one look to the next, none waits for it.
    """
    deadline = time.monotonic() + _PATIENCE
    before, quiet = _runs(name), 0
    while before and quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        now = _runs(name)
        quiet = quiet + 1 if now == before and None not in now.values() else 0
        before = now


def _runs(name: str) -> dict[str, int | None]:
    """How often each other thread whose name begins so has run; None: it does, or would like to."""
    runs: dict[str, int | None] = {}
    this = str(threading.get_native_id())
    with contextlib.suppress(FileNotFoundError):
        for thread in set(os.listdir("/proc/self/task")) - {this}:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/self/task/{thread}/status").read_text(errors="replace")
                lines = (line.partition(":\t") for line in text.splitlines())
                status = {word: value for word, _, value in lines}
                if status["Name"].startswith(name):
                    # Not every kernel counts.
                    switches = int(status.get("voluntary_ctxt_switches", 0))
                    switches += int(status.get("nonvoluntary_ctxt_switches", 0))
                    is_awake = status["State"][0] in "RD"  # proc(5); or it is about to be
                    runs[thread] = None if is_awake else switches
    return runs
