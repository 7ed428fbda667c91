"""The end of the process, while gloo's threads still hold tensors.

A gloo thread releases a collective's tensors after it has woken the waiting thread, and releasing a
tensor that Python knows takes the GIL. If the interpreter ends in between, CPython ends the thread
in the middle of a destructor, and the process dies of SIGABRT after all its work was done. torch
joins the threads when the group goes, but a compiled function keeps the group to the end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time

_WORKER = "pt_gloo"  # how torch names them
_PAUSE = 0.0005  # seconds in which the GIL is free
_QUIET_LOOKS = 3
_PATIENCE = 2.0


def register() -> None:
    atexit.register(_let_gloo_threads_rest)


def _let_gloo_threads_rest() -> None:
    """Returns when no thread of gloo wants to run, or after two seconds."""
    deadline = time.monotonic() + _PATIENCE
    quiet = 0
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        states = _states()
        if not states:
            return
        quiet = 0 if "R" in states else quiet + 1
        time.sleep(_PAUSE)


def _states() -> list[str]:
    """What the threads of gloo do, by the letters of proc(5): R runs or would like to."""
    states = []
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
                name, _, rest = file.read().partition(" (")[2].rpartition(") ")
                if name.startswith(_WORKER):
                    states.append(rest[0])
    return states
