"""The worker's side: join the group, then run functions by name until the parent says stop."""

from __future__ import annotations

import datetime as dt
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

STOP = b"stop"

# A collective whose peer is gone ends by itself, should the parent not be there to end it.
BACKEND_TIMEOUT = dt.timedelta(seconds=120)

# Warnings of torch about itself; all others are errors, as in the parent.
TORCH_WARNINGS = (
    r"ComplexHalf support is experimental.*",
    r".*torch\.jit.*is deprecated.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    # torch.export.load, in torch 2.11.
    r"The given buffer is not writable.*",
    # Its profiler and its sparse tensors, whatever is asked of them.
    r"Warning: Profiler clears events at the end of each cycle.*",
    r"Sparse invariant checks are implicitly disabled.*",
    # Dynamo instantiates every autograd.Function it meets.
    r".*torch\.autograd\.function\.Function'> should not be instantiated.*",
)


# The backend of this name is shm's fall-back.
FALLBACK = "fallback"
# "hosts:aab": shm with ranks 0 and 1 on one host, and rank 2 on another.
HOSTS = "hosts:"


def main(
    connection: Connection,
    rank: int,
    world_size: int,
    backend: str,
    scratch: str,
    search_path: list[str],
) -> None:
    log = os.open(os.path.join(scratch, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    stacks = open(os.path.join(scratch, f"{rank}.stacks"), "w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    sys.path[:] = search_path

    def join() -> None:
        import torch
        import torch.distributed as dist

        import torch_c10d_ext  # noqa: F401
        from tests.harness import delayed, python_group

        torch.set_num_threads(1)
        delayed.register()
        python_group.register()
        _make_warnings_errors()
        if backend == FALLBACK:
            os.environ["TORCH_C10D_EXT_SHM_DISABLE"] = "1"
        if backend.startswith(HOSTS):
            os.environ["TORCH_C10D_EXT_SHM_HOST"] = backend.removeprefix(HOSTS)[rank]
            # Tests are small, and are to try what goes between hosts.
            os.environ["TORCH_C10D_EXT_SHM_PIGGYBACK"] = "0"
        store = dist.FileStore(os.path.join(scratch, "rendezvous"), world_size)
        dist.init_process_group(
            "shm" if backend == FALLBACK or backend.startswith(HOSTS) else backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=BACKEND_TIMEOUT,
        )
        gc.collect()
        gc.freeze()  # collections during the tests need not walk torch's own objects

    connection.send_bytes(_answer(join))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:  # the parent is gone
            os._exit(1)
        if message == STOP:
            break
        connection.send_bytes(_answer(functools.partial(_call, message)))
    import torch.distributed as dist

    dist.destroy_process_group()
    from torch_c10d_ext import _mpi

    _mpi._close()  # MPICH leaves memory of its own in /dev/shm otherwise
    # Threads of a backend may outlive its group; interpreter shutdown would race with them.
    os._exit(0)


def _call(message: bytes) -> Any:
    os.ftruncate(1, 0)  # a report shows what this call printed
    module, qualname, args = pickle.loads(message)
    fn: Any = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    settings = _settings()
    try:
        return fn(*args)
    finally:
        _forget_compiled_code()
        for name in _settings():
            del os.environ[name]
        os.environ.update(settings)


def _answer(fn: Any) -> bytes:
    try:
        return pickle.dumps(("ok", fn()))
    except BaseException:  # SystemExit and pytest's own outcomes are failures here, too
        return pickle.dumps(("error", traceback.format_exc()))


def _settings() -> dict[str, str]:
    """Those of this package; Inductor puts some of its own into the environment, to stay."""
    return {name: v for name, v in os.environ.items() if name.startswith("TORCH_C10D_EXT_")}


def _forget_compiled_code() -> None:
    """Compiled code of one test must not answer for, or exhaust the cache of, the next."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _make_warnings_errors() -> None:
    warnings.simplefilter("error")
    for message in TORCH_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
