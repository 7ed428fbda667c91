"""Measures groups on several hosts, emulated by namespaces of one machine: part ``hosts``.

    python benchmarks/hosts.py [--layout 2x2 ...] [--rounds N] [--mbit N] [--delay-us N]
                               [--only COLLECTIVE ...] [--record NAME]

Peers: gloo, the flat fall-back of shm, backend mpi and MPICH itself (through mpi4py, where
``tools/get_peers.sh mpich`` has installed it), against shm with gloo and with mpi between hosts.
All are measured in turns in the same processes. ``bound``: what the link allows, see
``docs/multi-host.md``. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import _history  # noqa: E402
from benchmarks._report import Table, machine, today  # noqa: E402
from tests.harness.emulated_hosts import emulated_hosts, why_not  # noqa: E402

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
# Of the rate of an Ethernet of 1500-byte frames, what is left for data.
GOODPUT = 0.94
LAYOUTS = {"2x1": (2, 1), "2x2": (2, 2), "4x1": (4, 1), "4x2": (4, 2)}
DEADLINE = 560.0


def bound(collective: str, size: int, hosts: int, ranks: int, rate: float, latency: float) -> float:
    """Seconds that the link alone takes; ``size``: bytes of a rank's larger buffer."""
    n = hosts * ranks
    share = size / n
    if collective == "all_reduce":
        return max(2 * (hosts - 1) / hosts * size / rate, latency)
    if collective in ("all_gather", "reduce_scatter"):
        return latency + (hosts - 1) * ranks * share / rate
    if collective == "all_to_all":
        return latency + (hosts - 1) * ranks**2 * share / rate
    return latency + size / rate


def measure(layout: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 of one layout says: the link, then each case."""
    hosts, ranks = LAYOUTS[layout]
    places = [host for host in range(hosts) for _ in range(ranks)]
    packages = sorted(ROOT.glob("build/peers/mpich/lib/python*/site-packages"))
    plan = {
        "engines": ["gloo", "mpi"],
        "places": places,
        "mpi4py": options.mpi4py or (str(packages[0]) if packages else ""),
        "rounds": options.rounds,
        "cases": [(collective, size) for collective in options.only for size in options.sizes],
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_hosts(hosts, options.mbit, options.delay_us) as network,
    ):
        logs = [Path(folder) / str(rank) for rank in range(len(places))]
        processes = []
        for rank, host in enumerate(places):
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": "29500",
                "WORLD_SIZE": str(len(places)),
                "RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            command = [sys.executable, str(ROOT / "benchmarks/_on_host.py"), json.dumps(plan)]
            with open(logs[rank], "wb") as log:
                processes.append(network.start(host, command, environment, log.fileno()))
        until = time.monotonic() + DEADLINE
        codes = [process.wait(max(1, until - time.monotonic())) for process in processes]
        if any(codes):
            said = "\n".join(log.read_text()[-2000:] for log in logs)
            raise RuntimeError(f"{layout}: ranks ended with {codes}\n{said}")
        lines = logs[0].read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def time_text(seconds: float) -> str:
    """In microseconds, or milliseconds where it is long."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def table_of(layout: str, said: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """The medians of the rounds, and the ratios of the best of ours to its bound and to gloo."""
    hosts, ranks = LAYOUTS[layout]
    link, *cases = said
    rate = GOODPUT * options.mbit * 1e6 / 8
    names = list(cases[0]["times"])
    table = Table(
        f"hosts {layout}: {options.mbit:g} Mbit/s, {options.delay_us} µs one way",
        f"One way takes {link['latency'] * 1e6:.0f} µs by a socket, which moves "
        f"{link['rate'] / 1e6:.0f} MB/s. size: bytes of a rank's larger buffer. Median of "
        f"{options.rounds} rounds in turns; of the slowest rank. ours: the faster of shm+gloo and "
        "shm+mpi, against the bound, and in the same round against the fastest of the others.",
        ["collective", "size", *names, "bound", "ours/bound", "ours/best other"],
        1,
    )
    for case in cases:
        times = case["times"]
        medians = {name: statistics.median(each) for name, each in times.items()}
        best = min(("shm+gloo", "shm+mpi"), key=medians.__getitem__)
        others = [name for name in names if name not in ("shm+gloo", "shm+mpi")]
        other = min(others, key=medians.__getitem__)
        ratio = statistics.median(a / b for a, b in zip(times[best], times[other], strict=True))
        limit = bound(case["collective"], case["size"], hosts, ranks, rate, link["latency"])
        table.rows.append(
            [
                case["collective"],
                f"{case['size']:,}",
                *(time_text(medians[name]) for name in names),
                time_text(limit),
                f"{medians[best] / limit:.2f}",
                f"{ratio:.2f} ({other})",
            ]
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and records the run where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["2x2", "4x2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--delay-us", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--mpi4py", help="a directory with mpi4py, for MPICH as a peer")
    _history.add_option(parser)
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        parser.error(f"this machine cannot emulate hosts: {reason}")
    kind = machine("cpu")
    print(f"\n{today()}, {kind}", flush=True)
    tables = []
    for layout in options.layout:
        tables.append(table_of(layout, measure(layout, options), options))
        print(f"\n{tables[-1].text()}", flush=True)
    if options.record:
        given = sys.argv[1:] if arguments is None else arguments
        command = " ".join(["python benchmarks/hosts.py", *given])
        print(_history.record(f"{options.record}-hosts", kind, command, tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
