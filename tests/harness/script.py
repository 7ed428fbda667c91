"""Scripts as torchrun starts them, on forks of a server that has imported torch already."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from tests.harness import pool


def torchrun(ranks: int, script: Path, arguments: Sequence[str], deadline: float) -> str:
    """What the script prints to stdout; an AssertionError when a rank fails or does not end."""
    import torch.distributed as dist

    folder = Path(tempfile.mkdtemp(dir=pool._scratch()))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    context = pool._context()
    processes = []
    try:
        for rank in range(ranks):
            mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            args = (str(script), list(arguments), mine, str(folder))
            process = context.Process(target=_main, args=args, daemon=True)
            process.start()
            processes.append(process)
        running = {process.sentinel: process for process in processes}
        ends = time.monotonic() + deadline
        while running and not any(process.exitcode for process in processes):
            ready = wait(list(running), max(0.0, ends - time.monotonic()))
            if not ready:
                break
            for sentinel in ready:
                running.pop(sentinel).join()  # type: ignore[arg-type]
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join(pool.STOP_DEADLINE)
    out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
    said = f"exit codes {codes} (None: running after {deadline:g} s)\n{out}\n{err[-4000:]}"
    assert codes == [0] * ranks, said
    return out


def _main(script: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.setsid()  # what it starts ends with it
    for number, name in enumerate(("out", "err"), 1):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        sys.last_value = error  # as an interpreter does
        raise
    finally:
        atexit._run_exitfuncs()  # a fork would end without them
        sys.stdout.flush()
