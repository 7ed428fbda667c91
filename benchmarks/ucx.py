"""UCX between two emulated hosts against sockets and the engines that exist: part ``ucx``.

    python benchmarks/ucx.py [--rounds N] [--mbit N] [--delay-us N] [--record NAME]

Would a third engine between hosts, one of UCX, pay? A rank of one host sends to one of the other
and gets bytes back: as many, or 8 for a long message. Peers, all in turns in one run:

- a TCP socket (TCP_NODELAY) and UCX's tagged messages over TCP, in C++ (``_ucx.cpp``), each asleep
  while it waits, and busy;
- gloo and mpi by torch's send and recv, with what an engine of ours pays for threads and checks;
- MPICH alone through mpi4py, which is busy.

MPICH of pip brings a UCX of its own, which carries its messages, so it has processes of its own,
in which gloo and mpi are, too. Needs root, a C++ compiler, ``tools/get_peers.sh ucx mpich``, and
the mpich of ``make test-hosts``.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import _history  # noqa: E402
from benchmarks._report import Table, machine, today  # noqa: E402
from tests.harness.emulated_hosts import COMPILER, emulated_hosts, why_not  # noqa: E402

UCX = ROOT / "build" / "peers" / "ucx" / "libucx"
# Bytes there and back.
EXCHANGES = ((8, 8), (4 << 10, 4 << 10), (4 << 20, 8), (16 << 20, 8))
# Of the rate of an Ethernet of 1500-byte frames, what is left for data.
GOODPUT = 0.94
# Ranks 0 and 1 have sockets and UCX, 2 and 3 what may bring a UCX of its own.
PLACES = (0, 1, 0, 1)
OF_UCX = ("UCX", "UCX, busy")
ENGINES = ("gloo", "mpi", "MPICH")
PORT = 29700
DEADLINE = 150

Exchange = Callable[[int, int], Callable[[], Any]]


def compiled(folder: Path) -> Path:
    """The library of ``_ucx.cpp``."""
    library = folder / "_ucx.so"
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{UCX / 'include'}"),
            *("-o", str(library), str(ROOT / "benchmarks" / "_ucx.cpp")),
            *(f"-L{UCX / 'lib'}", "-lucp", "-lucs", f"-Wl,-rpath,{UCX / 'lib'}"),
        ],
        check=True,
        timeout=DEADLINE,
    )
    return library


def _sockets_and_ucx(library: str, rank: int) -> dict[str, Exchange]:
    """The peers of ranks 0 and 1; all ranks call this, and the others have none of them."""
    import torch.distributed as dist

    said: list[Any] = [None] * dist.get_world_size()
    if rank > 1:
        dist.all_gather_object(said, None)
        dist.barrier()
        return {}
    code = ctypes.CDLL(library)
    code.ucx_open.restype = ctypes.c_size_t
    code.ucx_open.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    code.ucx_connect.argtypes = [ctypes.c_int, ctypes.c_char_p]
    data_and_reply = (ctypes.c_void_p, ctypes.c_size_t) * 2
    code.ucx_exchange.argtypes = [ctypes.c_int, ctypes.c_int, *data_and_reply]
    code.socket_exchange.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, *data_and_reply]
    room = ctypes.create_string_buffer(1 << 16)
    own = []
    for sleeps in (0, 1):
        length = code.ucx_open(sleeps, room, len(room))
        own.append(room.raw[:length])
    server = socket.create_server(("", PORT)) if rank == 0 else None
    dist.all_gather_object(said, own)
    for sleeps, address in enumerate(said[1 - rank]):
        code.ucx_connect(sleeps, address)
    if server is not None:
        connection, _ = server.accept()
        server.close()
    else:
        connection = socket.create_connection((os.environ["MASTER_ADDR"], PORT))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    dist.barrier()

    def made_of(call: Callable[..., Any], *first: int) -> Exchange:
        def make(size: int, back: int) -> Callable[[], Any]:
            data = ctypes.create_string_buffer(size)
            reply = ctypes.create_string_buffer(back)
            return lambda: call(*first, rank == 0, data, size, reply, back)

        return make

    fd = connection.detach()
    return {
        "socket": made_of(code.socket_exchange, fd, 0),
        "UCX": made_of(code.ucx_exchange, 0),
        "socket, busy": made_of(code.socket_exchange, fd, 1),
        "UCX, busy": made_of(code.ucx_exchange, 1),
    }


def _engines(packages: str, rank: int) -> dict[str, Exchange]:
    """The peers of ranks 2 and 3; all ranks call this, and the others have none of them."""
    import torch
    import torch.distributed as dist

    from benchmarks import _on_host

    groups = {name: dist.new_group([2, 3], backend=f"cpu:{name}") for name in ("gloo", "mpi")}
    if rank < 2:
        return {}
    other, is_first = 5 - rank, rank == 2

    def by_torch(group: Any) -> Exchange:
        def make(size: int, back: int) -> Callable[[], Any]:
            data = torch.zeros(size, dtype=torch.uint8)
            reply = torch.zeros(back, dtype=torch.uint8)

            def send_first() -> None:
                dist.send(data, other, group)
                dist.recv(reply, other, group)

            def receive_first() -> None:
                dist.recv(data, other, group)
                dist.send(reply, other, group)

            return send_first if is_first else receive_first

        return make

    found = {name: by_torch(group) for name, group in groups.items()}
    mpi = _on_host.mpich(packages) if packages else None
    if mpi is None:
        return found

    def by_mpich(size: int, back: int) -> Callable[[], Any]:
        world, data, reply = mpi.COMM_WORLD, bytearray(size), bytearray(back)
        there = 1 - world.Get_rank()

        def send_first() -> None:
            world.Send([data, mpi.BYTE], there)
            world.Recv([reply, mpi.BYTE], there)

        def receive_first() -> None:
            world.Recv([data, mpi.BYTE], there)
            world.Send([reply, mpi.BYTE], there)

        return send_first if is_first else receive_first

    return {**found, "MPICH": by_mpich}


def run_rank(plan: dict[str, Any]) -> None:
    """Rank 0 prints a line for each exchange."""
    signal.alarm(DEADLINE)  # busy loops have no deadline of their own
    import torch.distributed as dist

    from benchmarks import _on_host

    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=DEADLINE))
    rank = dist.get_rank()
    mine = _sockets_and_ucx(plan["library"], rank) | _engines(plan["mpi4py"], rank)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(mine))
    names = everyone[0] + everyone[2]
    for size, back in plan["exchanges"]:
        calls = {name: mine[name](size, back) if name in mine else lambda: None for name in names}
        times = _on_host.measure(calls, plan["rounds"], f"{size} {back}")
        if rank == 0:
            print(json.dumps({"size": size, "back": back, "times": times}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 says: each exchange, with the seconds of each round by peer."""
    packages = sorted(ROOT.glob("build/peers/mpich/lib/python*/site-packages"))
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_hosts(2, options.mbit, options.delay_us) as network,
    ):
        plan = {
            "library": str(compiled(Path(folder))),
            "mpi4py": str(packages[0]) if packages else "",
            "rounds": options.rounds,
            "exchanges": EXCHANGES,
        }
        logs = [Path(folder) / str(rank) for rank in range(len(PLACES))]
        processes = []
        for rank, host in enumerate(PLACES):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": "29500",
                "WORLD_SIZE": str(len(PLACES)),
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            command = [sys.executable, __file__, "--rank", json.dumps(plan)]
            with open(logs[rank], "wb") as log:
                processes.append(network.start(host, command, environment, log.fileno()))
        until = time.monotonic() + DEADLINE + 10
        codes = [process.wait(max(1, until - time.monotonic())) for process in processes]
        if any(codes):
            said = "\n".join(log.read_text()[-2000:] for log in logs)
            raise RuntimeError(f"ranks ended with {codes}\n{said}")
        lines = logs[0].read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def table_of(said: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Medians of the rounds, and the faster UCX against the fastest engine of the same round."""
    rate = GOODPUT * options.mbit * 1e6 / 8
    names = list(said[0]["times"])
    engines = [name for name in ENGINES if name in names]
    table = Table(
        f"ucx: two hosts, {options.mbit:g} Mbit/s, {options.delay_us} µs one way",
        "Bytes there and back, and the time until they are back. bound: what the link allows, "
        f"without kernels and processes. Medians of {options.rounds} rounds in turns. The ratios "
        "are medians of those of one round: UCX against a socket, both busy, and the faster UCX "
        "against the fastest of gloo, mpi and MPICH.",
        ["exchange", *names, "bound", "UCX/socket", "UCX/engine"],
        1,
    )
    for case in said:
        times, size, back = case["times"], case["size"], case["back"]
        medians = {name: statistics.median(each) for name, each in times.items()}
        best = min(OF_UCX, key=medians.__getitem__)
        engine = min(engines, key=medians.__getitem__)
        bound = 2 * options.delay_us / 1e6 + (size + back) / rate
        table.rows.append(
            [
                f"{size:,} and {back:,}",
                *(_text(medians[name]) for name in names),
                _text(bound),
                f"{_ratio(times, 'UCX, busy', 'socket, busy'):.2f}",
                f"{_ratio(times, best, engine):.2f} ({engine})",
            ]
        )
    return table


def _ratio(times: dict[str, list[float]], name: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and records the run where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--delay-us", type=int, default=100)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    _history.add_option(parser)
    options = parser.parse_args(arguments)
    if options.rank:
        run_rank(options.rank)
        return 0
    reason = why_not() or ("" if UCX.exists() else "no UCX: tools/get_peers.sh ucx installs it")
    if reason:
        parser.error(f"this machine cannot measure UCX between hosts: {reason}")
    kind = machine("cpu")
    print(f"\n{today()}, {kind}", flush=True)
    table = table_of(measure(options), options)
    print(f"\n{table.text()}", flush=True)
    if options.record:
        given = sys.argv[1:] if arguments is None else arguments
        command = " ".join(["python benchmarks/ucx.py", *given])
        print(_history.record(f"{options.record}-ucx", kind, command, [table]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
