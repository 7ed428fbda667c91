"""Measures groups on several hosts, emulated by namespaces of one machine: part ``hosts``.

    python benchmarks/hosts.py [--layout 2x2 ...] [--rounds N] [--mbit N] [--delay-us N]
                               [--only COLLECTIVE ...] [--record NAME]

Peers: gloo, the flat fall-back of shm, backend mpi and MPICH itself (through mpi4py, where
``tools/get_peers.sh mpich`` has installed it), against shm with gloo and with mpi between hosts.
Each is called as its users call it: gloo by torch.distributed, ours by torch_c10d_ext.distributed,
MPICH by mpi4py. All are measured in turns in the same processes, and before and after them Open
MPI, by TCP and by UCX (``_open_mpi.py``; ``tools/get_peers.sh openmpi``). ``bound``: what the link
allows, see ``docs/results-hosts.md``. send_recv is a message there and back, between rank 0 and the
last one, and between rank 1 and the last one (``_others``), and on three hosts and more between two
of which neither is on rank 0's host (``_far``). A broadcast's root is rank 0 and the last one in
turns. The fall-back is measured by two groups, for how two peers that do the same differ. Needs
root, for the namespaces.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import _history, _open_mpi  # noqa: E402
from benchmarks._on_host import CONTROL  # noqa: E402
from benchmarks._report import TARGETS, Table, machine, today  # noqa: E402
from benchmarks.shm import label  # noqa: E402
from tests.harness.emulated_hosts import emulated_hosts, why_not  # noqa: E402
from torch_c10d_ext import _C, Link, Topology  # noqa: E402

COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    *("send_recv", "send_recv_others", "send_recv_far"),
)
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)
# Of the rate of an Ethernet of 1500-byte frames, what is left for data.
GOODPUT = 0.94
# Of the all_reduce from which the model is told what a step takes, and what busy processors move.
STEPS = 1 << 20
LARGE = (4 << 20, 16 << 20)
OPS = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
# What is aimed at: of the bound of the largest all_reduce, and of every large collective; over the
# latency, in seconds; of the model.
LARGEST, EVERY_LARGE, OVER_LATENCY, OFF = 1.1, 1.25, {"2x2": 60e-6, "4x2": 150e-6}, 0.15
LAYOUTS = {"2x1": (2, 1), "2x2": (2, 2), "4x1": (4, 1), "4x2": (4, 2)}
MBIT, DELAY_US = 1000.0, 100  # of the links that the aims are for
DEADLINE = 560.0


def bound(collective: str, size: int, hosts: int, ranks: int, rate: float, latency: float) -> float:
    """Seconds that the link alone takes; ``size``: bytes of a rank's larger buffer."""
    n = hosts * ranks
    share = size / n
    if collective == "all_reduce":
        return max(2 * (hosts - 1) / hosts * size / rate, latency)
    if collective.startswith("send_recv"):
        return 2 * (latency + size / rate)
    if collective in ("all_gather", "reduce_scatter"):
        return latency + (hosts - 1) * ranks * share / rate
    if collective == "all_to_all":
        return latency + (hosts - 1) * ranks**2 * share / rate
    return latency + size / rate


def measure(layout: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 of one layout says: the link, then each case."""
    hosts, ranks = LAYOUTS[layout]
    places = [host for host in range(hosts) for _ in range(ranks)]
    wanted = [
        (collective, size)
        for collective in options.only
        for size in options.sizes
        if collective != "send_recv_far" or hosts > 2
    ]
    if not wanted:
        raise ValueError(f"{layout}: send_recv_far must be measured on more than 2 hosts, got 2")
    packages = sorted(ROOT.glob("build/peers/mpich/lib/python*/site-packages"))
    plan = {
        "engines": ["gloo", "mpi"],
        "places": places,
        "mpi4py": options.mpi4py or (str(packages[0]) if packages else ""),
        "rounds": options.rounds,
        "cases": wanted,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        emulated_hosts(hosts, options.mbit, options.delay_us) as network,
    ):
        others: dict[str, list[Any]] = {name: [] for name in options.open_mpi}

        def measure_others(rounds: int) -> None:
            for name, found in others.items():
                found.append(_open_mpi.measure(name, network, hosts, ranks, rounds, wanted))

        measure_others(options.rounds - options.rounds // 2)
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
        measure_others(options.rounds // 2)
    *cases, link = [json.loads(line) for line in lines if line.startswith("{")]
    for case in cases:
        key = (case["collective"], case["size"])
        for name, (before, after) in others.items():
            case["times"][name] = before[key] + after[key]
    return [link, *cases]


def model_of(layout: str, link: dict[str, Any], cases: list[dict[str, Any]]) -> Topology:
    """The topology that the link and the smallest collectives say this is.

    The rate is that of all hosts at once; what 8 B take beyond one way, in the middle of all
    collectives, is the leaders', and a step of a ring what gloo takes for an all_reduce of them.
    What an all_reduce of 1 MiB takes beyond that is the time of its steps. What hosts send and
    receive at most is what they did in those of 4 and 16 MiB, the middle of both, where that is
    less than their links carry.
    """
    hosts, ranks = LAYOUTS[layout]
    n = hosts * ranks
    sums = {_size(case): case for case in cases if case["collective"] == "all_reduce"}
    least = min(sums)
    little = [
        _ours(case)
        for case in cases
        if _size(case) == least and not case["collective"].startswith("send_recv")
    ]
    per_rank = max(0.0, statistics.geometric_mean(little) - link["latency"]) / (n - 1)
    by_gloo = statistics.median(sums[least]["times"]["gloo"])
    hop = max(0.0, by_gloo - link["latency"]) / (2 * (n - 1))
    model = Topology(
        ranks,
        inside=Link(latency=0.0, bandwidth=link["inside"] or math.inf),
        between=Link(latency=link["latency"], bandwidth=link["together"], hop=hop),
        per_rank=per_rank,
    )
    if STEPS in sums:
        beyond = _ours(sums[STEPS]) - model.times("all_reduce", n, STEPS)["rails"]
        model = dataclasses.replace(model, per_step=max(0.0, beyond / _steps(model, n, STEPS)))
    moved = 4 * (hosts - 1) / hosts  # of its size, in and out
    rates = [
        moved * size / (_ours(sums[size]) - _steps(model, n, size) * model.per_step)
        for size in LARGE
        if size in sums
    ]
    if rates and statistics.geometric_mean(rates) < 0.9 * 2 * link["together"]:
        model = dataclasses.replace(model, host_bandwidth=statistics.geometric_mean(rates))
    return model


def _steps(model: Topology, ranks: int, size: int) -> float:
    """How many an all_reduce takes."""
    slow, free = (dataclasses.replace(model, per_step=each) for each in (1.0, 0.0))
    difference = slow.times("all_reduce", ranks, size)["rails"]
    return difference - free.times("all_reduce", ranks, size)["rails"]


def _is_modelled(cases: list[dict[str, Any]]) -> bool:
    """Whether the all_reduces are there that the model is told of."""
    return any(c["collective"] == "all_reduce" and _size(c) == SIZES[0] for c in cases)


def _name(layout: str, options: argparse.Namespace) -> str:
    """Other links than the usual ones have tables and targets of their own."""
    unusual = [f"{options.mbit:g} Mbit/s"] if options.mbit != MBIT else []
    unusual += [f"{options.delay_us} µs"] if options.delay_us != DELAY_US else []
    return f"hosts {layout}" + (f" at {', '.join(unusual)}" if unusual else "")


def _ours(case: dict[str, Any]) -> float:
    return statistics.median(case["times"]["shm+gloo"])


def _size(case: dict[str, Any]) -> int:
    return int(case["size"])


def time_text(seconds: float) -> str:
    """In microseconds, or milliseconds where it is long."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


def table_of(layout: str, said: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """The medians of the rounds, and the ratios of the best of ours to its bound and to gloo."""
    hosts, ranks = LAYOUTS[layout]
    link, *cases = said
    rate = GOODPUT * options.mbit * 1e6 / 8
    names = list(cases[0]["times"])
    model = model_of(layout, link, cases) if _is_modelled(cases) else None
    table = Table(
        f"{_name(layout, options)}: {options.mbit:g} Mbit/s, {options.delay_us} µs one way",
        f"One way takes {link['latency'] * 1e6:.0f} µs by a socket, which moves "
        f"{link['rate'] / 1e6:.0f} MB/s, {link['together'] / 1e6:.0f} where all hosts send; "
        f"a rank takes {link['inside'] / 1e6:.0f} MB/s from those of its host. size: bytes of a "
        f"rank's larger buffer. Median of {options.rounds} rounds in turns; of the slowest rank. "
        "ours: the faster of shm+gloo and shm+mpi, against the bound, and in the "
        "same round against the fastest of the others; model: what Topology says of shm+gloo, "
        f"and what was measured against it.{_by_torch(cases)}",
        ["collective", "size", *names, "bound", "ours/bound", "ours/best other", "model"],
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
                *_modelled(model, case, hosts * ranks, medians["shm+gloo"]),
            ]
        )
    return table


def _by_torch(cases: list[dict[str, Any]]) -> str:
    """What the smallest all_reduce takes where torch.distributed calls it."""
    sums = [case for case in cases if case.get("by_torch")]
    if not sums:
        return ""
    least = min(sums, key=_size)
    seconds = statistics.median(least["by_torch"])
    return (
        f" An all_reduce of {label(_size(least))} by shm+gloo takes {time_text(seconds)} where "
        "torch.distributed calls it."
    )


def judged(layout: str, said: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """What is aimed at, and what came of it."""
    hosts, ranks = LAYOUTS[layout]
    link, *cases = said
    rate = GOODPUT * options.mbit * 1e6 / 8
    head = ["", "target", "measured", "outcome"]
    table = Table(f"{TARGETS}: {_name(layout, options)}", "", head, left=4)

    def add(what: str, target: str, measured: str, missed: Sequence[bool]) -> None:
        met = len(missed) - sum(missed)
        outcome = f"{met} of {len(missed)} met" if len(missed) > 1 else "missed"
        table.rows.append([what, target, measured, outcome if any(missed) else "met"])

    def over_bound(case: dict[str, Any], *names: str) -> float:
        limit = bound(case["collective"], _size(case), hosts, ranks, rate, link["latency"])
        return min(statistics.median(case["times"][name]) for name in names) / limit

    def called(case: dict[str, Any]) -> str:
        return f"{case['collective']} {label(_size(case))}"

    ours = ("shm+gloo", "shm+mpi")
    collectives = [case for case in cases if not case["collective"].startswith("send_recv")]
    sums = {_size(case): case for case in cases if case["collective"] == "all_reduce"}
    if LARGE[-1] in sums:
        largest, gloo = (over_bound(sums[LARGE[-1]], *names) for names in (ours, ("gloo",)))
        what = f"all_reduce of {label(LARGE[-1])}, against the link's bound"
        measured = f"{largest:.2f} times (gloo {gloo:.2f})"
        add(what, f"<= {LARGEST} times", measured, [largest > LARGEST])
    large = {called(case): over_bound(case, *ours) for case in collectives if _size(case) in LARGE}
    if large:
        worst = max(large, key=large.__getitem__)
        add(
            f"every collective of {label(LARGE[0])} and more, against its bound",
            f"<= {EVERY_LARGE} times",
            f"at worst {large[worst]:.2f} times ({worst})",
            [ratio > EVERY_LARGE for ratio in large.values()],
        )
    if min(sums, default=0) == SIZES[0] and layout in OVER_LATENCY:
        times = sums[SIZES[0]]["times"]
        over = min(statistics.median(times[name]) for name in ours) - link["latency"]
        aim = OVER_LATENCY[layout]
        what = f"all_reduce of {label(SIZES[0])}, over the latency"
        add(what, f"<= {aim * 1e6:.0f} us", f"{over * 1e6:.0f} us", [over > aim])
    slower = {called(case): _against_gloo(case, "shm+gloo") for case in cases}
    add(
        "shm+gloo against gloo and the flat fall-back, every size"
        + (", messages too" if len(cases) > len(collectives) else ""),
        "<= 1 times beyond noise",
        _at_worst(slower) + _of_control({called(case): case for case in cases}),
        [min(ratios) > 1 for ratios in slower.values()],
    )
    if _is_modelled(cases):
        model = model_of(layout, link, cases)
        off = [
            abs(_ours(case) / _predicted(model, case, hosts * ranks) - 1) for case in collectives
        ]
        add(
            "the model's times",
            f"within {OFF:.0%}",
            f"median {statistics.median(off):.0%} off, worst {max(off):.0%}",
            [each > OFF for each in off],
        )
    return table


def _against_gloo(case: dict[str, Any], name: str) -> list[float]:
    """Round by round, against the faster of gloo and the flat fall-back."""
    times = {**case["times"], CONTROL: case["again"]}
    rounds = zip(times[name], times["gloo"], times["flat"], strict=True)
    return [one / min(gloo, flat) for one, gloo, flat in rounds]


def _at_worst(slower: dict[str, list[float]]) -> str:
    worst = max(slower, key=lambda name: statistics.median(slower[name]))
    return f"at worst {statistics.median(slower[worst]):.2f} times ({worst})"


def _of_control(cases: dict[str, dict[str, Any]]) -> str:
    """By the same rule, a second group that does what the fall-back does."""
    slower = {name: _against_gloo(case, CONTROL) for name, case in cases.items()}
    met = sum(min(ratios) <= 1 for ratios in slower.values())
    return f"; the fall-back again {_at_worst(slower)}, {met} of {len(slower)} met"


def _modelled(
    model: Topology | None, case: dict[str, Any], ranks: int, measured: float
) -> list[str]:
    """The model's time, and the measured one against it."""
    if model is None or case["collective"].startswith("send_recv"):
        return ["-"]
    seconds = _predicted(model, case, ranks)
    return [f"{time_text(seconds)} ({measured / seconds:.2f})"]


def _predicted(model: Topology, case: dict[str, Any], ranks: int) -> float:
    """Of the algorithm that is used."""
    name, size = case["collective"], case["size"]
    times = model.times(OPS.get(name, name), ranks, size)
    little = name == "all_reduce" and size <= _C.ALL_REDUCE_BY_LEADERS
    algorithm = "piggyback" if "piggyback" in times else "leaders" if little else "rails"
    if algorithm not in times:
        algorithm = "flat"
    return times[algorithm]


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, and records the run where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["2x2", "4x2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=MBIT)
    parser.add_argument("--delay-us", type=int, default=DELAY_US)
    parser.add_argument("--only", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--mpi4py", help="a directory with mpi4py, for MPICH as a peer")
    parser.add_argument(
        "--open-mpi",
        nargs="*",
        choices=_open_mpi.ENGINES,
        default=list(_open_mpi.ENGINES) if _open_mpi.is_there() else [],
        help="by what data goes between its hosts",
    )
    _history.add_option(parser)
    options = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        parser.error(f"this machine cannot emulate hosts: {reason}")
    kind = machine("cpu")
    print(f"\n{today()}, {kind}", flush=True)
    if not _open_mpi.is_there():
        print("without Open MPI, which tools/get_peers.sh openmpi installs")
    tables = []
    for layout in options.layout:
        said = measure(layout, options)
        tables += [table_of(layout, said, options), judged(layout, said, options)]
        print(f"\n{tables[-2].text()}\n\n{tables[-1].text()}", flush=True)
    if options.record:
        given = sys.argv[1:] if arguments is None else arguments
        command = " ".join(["python benchmarks/hosts.py", *given])
        print(_history.record(f"{options.record}-hosts", kind, command, tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
