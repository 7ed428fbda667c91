"""Unmodified programs, each rank a fork of a server that has imported the libraries already.

A rank is what torchrun makes of it: the program as `__main__`, RANK and so on in its environment.
The server has run torch's entry points, as every interpreter that imports torch does; it has
imported nothing of torch_c10d_ext but what these import.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).resolve().parent / "programs"
SWITCH = "TORCH_C10D_EXT_SHM_FOR_GLOO"
STOP_DEADLINE = 10.0
DEADLINE = 300.0

# How a program runs: what it passes as the name of the backend, and the environment it runs in.
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "gloo": ("gloo", {}),
    "shm": ("shm", {}),
    "switched": ("gloo", {SWITCH: "1"}),
}

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ACCELERATE_USE_CPU": "true",
    "DS_ACCELERATOR": "cpu",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}

_server: Any = None


def _context() -> Any:
    global _server
    if _server is None:
        old = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        try:
            _server = multiprocessing.get_context("forkserver")
            _server.set_forkserver_preload(["tests.clients.preload"])
            multiprocessing.forkserver.ensure_running()  # type: ignore[attr-defined]
        finally:
            for name, value in old.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
    return _server


def stop() -> None:
    """Ends the server."""
    if _server is not None:
        multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]


def launch(
    program: str,
    arguments: Sequence[str] = (),
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    deadline: float = DEADLINE,
) -> list[Any]:
    """What each rank of a program prints as its last line, in JSON."""
    import torch.distributed as dist

    folder = Path(tempfile.mkdtemp(prefix="c10d-clients-"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **ENVIRONMENT,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TMPDIR": str(folder),
        **(environment or {}),
    }
    processes = []
    try:
        for rank in range(ranks):
            mine = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _context().Process(
                target=_main,
                args=(str(PROGRAMS / program), list(arguments), mine, str(folder)),
                daemon=False,
            )
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
        outs = [(folder / f"{rank}.out").read_text() for rank in range(ranks)]
        errs = "\n".join((folder / f"{r}.err").read_text()[-6000:] for r in range(ranks))
        assert codes == [0] * ranks, f"exit codes {codes} (None: running)\n{outs}\n{errs}"
        return [json.loads(out.splitlines()[-1]) for out in outs]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started
            process.join(STOP_DEADLINE)
        shutil.rmtree(folder, ignore_errors=True)


def _main(program: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.setsid()  # what it starts ends with it
    faulthandler.enable()
    for number, name in enumerate(("out", "err"), 1):
        path = f"{folder}/{environment['RANK']}.{name}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", closefd=False)
    os.environ.update(environment)
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(PROGRAMS))
    os.chdir(folder)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def on_every_way(
    program: str, arguments: Sequence[str] = (), ranks: int = 2, **kwargs: Any
) -> dict[str, list[Any]]:
    """What the ranks say, by way; that each was served by what it should be is checked here."""
    said = {}
    for way, (backend, environment) in WAYS.items():
        said[way] = launch(program, [backend, *arguments], ranks, environment, **kwargs)
        served = "gloo" if way == "gloo" else "shm"
        assert [one.pop("served") for one in said[way]] == [served] * ranks, way
        assert [one.pop("named") for one in said[way]] == [backend] * ranks, way
    return said
