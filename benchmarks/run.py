"""Measures torch_c10d_ext against torch's own collectives, gloo and the MPIs: ``make bench``.

One run holds all peers, measured in turn in many short rounds; a ratio is the median of the ratios
of the rounds, with the interval that holds the true median with 99 % confidence. Times mean little
from one machine to the next, ratios from one run do.

    python benchmarks/run.py [--quick] [--seconds N] [--device cpu|cuda|all]
                             [--only SECTION ...] [--record NAME] [--algorithms RULES ...]

The shm backend has its own program, ``benchmarks/shm.py``, with more to choose from, and so have
several hosts, ``benchmarks/hosts.py``, which needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import _history, coalesced, compiled, functional, hosts, layer, shm
from benchmarks._measure import Timings, slowest
from benchmarks._ranks import Ranks, RanksFailed
from benchmarks._report import (
    Aims,
    Table,
    added_time,
    against_torch,
    machine,
    several,
    today,
)
from tests.harness.emulated_hosts import why_not

SECONDS, QUICK_SECONDS = 130.0, 14.0
OPS = ("calls", "layer", "large", "coalesced", "compiled")
SHM = "shm"
HOSTS = "hosts"
# Beyond its measuring time: first calls, calibration and, for some, compilation.
DEADLINE_SLACK = 300.0

FUNCTIONAL_NOTE = (
    "A functional call and the wait for its result; dist: torch has no functional form, so dist.* "
    "into fresh tensors. '1.00' would be as fast as torch."
)
LAYER_NOTE = (
    "The *_inplace functions, and dist.*, against the same call on the bare Backend object: what "
    "each adds."
)


@dataclass
class Section:
    """Something to measure on a set of ranks, its share of the time and its table."""

    name: str
    ranks: tuple[str, int, str]
    share: float
    measure: Callable[..., list[Timings]]
    arguments: tuple[Any, ...]
    table: Callable[[list[Timings]], Table]


def sections(device: str, aims: Aims, quick: bool) -> list[Section]:
    """All there is to measure on a device; shares are seconds of a full run."""
    gpu = device == "cuda"
    where = " on one GPU" if gpu else ""
    fake = ("fake", 2, "cpu")
    one = ("nccl" if gpu else "gloo", 1, device)
    two = ("gloo", 2, device)
    titles = {
        fake: "fake backend (does nothing; CPU time)",
        one: f"world size 1, {one[0]}{where}",
        two: f"world size 2, gloo{where}",
    }

    def of_calls(ranks: tuple[str, int, str], what: str, aim: Any) -> Any:
        title = f"{what}, {titles[ranks]}"
        return lambda timings: against_torch(title, FUNCTIONAL_NOTE, timings, aim)

    def of_layer(ranks: tuple[str, int, str], extra: str = "") -> Any:
        title = f"Time added to the backend's, {titles[ranks]}"
        return lambda t: added_time(title, LAYER_NOTE + extra, t, aims.five_microseconds)

    def of_blocks(ranks: tuple[str, int, str]) -> Any:
        aim = None if ranks == fake else aims.quarter
        return lambda timings: several(
            f"64 calls in a coalescing block, {titles[ranks]}",
            "torch.distributed and torch_c10d_ext.distributed, the block's end included, and the "
            "same 64 calls without a block.",
            timings,
            [("ours", "torch", aims.never_slower), ("ours", coalesced.OURS_SINGLE, aim)],
        )

    alone = " World size 1 is sent to the backend here (shortcut off)."
    chosen = [
        Section(
            "calls",
            fake,
            8,
            functional.calls_alone,
            (),
            of_calls(fake, "Functional calls", aims.never_slower),
        ),
        Section("layer", fake, 5, layer.added, ("cpu",), of_layer(fake)),
        Section(
            "calls",
            one,
            14,
            functional.small,
            (device,),
            of_calls(one, "Functional calls", aims.three_times),
        ),
        Section("layer", one, 7, layer.added, (device,), of_layer(one, alone)),
        Section(
            "layer",
            one,
            4,
            layer.with_shortcut,
            (device,),
            lambda timings: against_torch(
                f"The *_inplace functions against dist.*, {titles[one]}",
                "World size 1 is answered without the backend.",
                timings,
                aims.three_times,
                ("dist", "ours"),
            ),
        ),
        Section(
            "calls",
            two,
            36,
            functional.small,
            (device,),
            of_calls(two, "Functional calls", aims.never_slower),
        ),
        Section(
            "large",
            two,
            22,
            functional.large,
            (device,),
            of_calls(two, "Large messages", aims.never_slower),
        ),
        Section("layer", two, 14, layer.added, (device,), of_layer(two)),
        Section(
            "coalesced",
            two,
            10,
            coalesced.many,
            (device,),
            lambda timings: several(
                f"Many small tensors, {titles[two]}",
                "One coalesced call for 64 tensors, waits included, and 64 calls that are all "
                "started before the first wait.",
                timings,
                [
                    ("ours", "torch", aims.never_slower),
                    ("ours", coalesced.OURS_SINGLE, None),
                ],
            ),
        ),
        *(
            Section("coalesced", ranks, 6, coalesced.managed, (device,), of_blocks(ranks))
            for ranks in (fake, two)
        ),
        Section(
            "compiled",
            two,
            10,
            compiled.steps,
            (device, quick),
            lambda timings: several(
                f"Forward and backward of an MLP under torch.compile, {titles[two]}",
                "The same step written with torch's functional collectives; size is layers x "
                "rows x width x hidden, per rank.",
                timings,
                [
                    ("ours", "torch", aims.never_slower),
                    ("ours eager", "torch eager", aims.never_slower),
                ],
            ),
        ),
    ]
    return [section for section in chosen if not (gpu and section.ranks == fake)]


@contextlib.contextmanager
def started(chosen: list[Section]) -> Iterator[dict[tuple[str, int, str], Ranks]]:
    """The ranks of all sections, up before the first measurement."""
    with contextlib.ExitStack() as stack:
        places = dict.fromkeys(section.ranks for section in chosen)
        ranks = {place: stack.enter_context(Ranks(*place)) for place in places}
        for each in ranks.values():
            each.ready()
        yield ranks


def progress(began: float, text: str) -> None:
    """One line on stderr, so that the tables can be redirected alone."""
    print(f"[{time.monotonic() - began:3.0f} s] {text}", file=sys.stderr, flush=True)


def measure(
    device: str, options: argparse.Namespace, aims: Aims, began: float
) -> tuple[list[Table], int]:
    """Runs the sections of a device and prints their tables; the tables, and how many failed."""
    chosen = sections(device, aims, options.quick)
    if options.only:
        chosen = [section for section in chosen if section.name in options.only]
    scale = options.seconds / sum(s.share for s in sections(device, aims, options.quick))
    tables: list[Table] = []
    failures = 0
    lost: set[tuple[str, int, str]] = set()
    progress(began, f"starting the ranks ({device})")
    with started(chosen) as ranks:
        for section in chosen:
            backend, size, _ = section.ranks
            what = f"{section.name}, world size {size}, {backend}"
            if section.ranks in lost:
                print(f"\n== {what}: not measured, its ranks were lost", flush=True)
                failures += 1
                continue
            seconds = section.share * scale
            progress(began, f"measuring {what}, about {seconds:.0f} s")
            try:
                by_rank = ranks[section.ranks].run(
                    section.measure,
                    seconds,
                    *section.arguments,
                    deadline=2 * seconds + DEADLINE_SLACK,
                )
            except RanksFailed as error:
                print(f"\n== {what}: {error}", flush=True)
                lost.add(section.ranks)
                failures += 1
                continue
            tables.append(section.table(slowest(by_rank)))
            print(f"\n{tables[-1].text()}", flush=True)
    return tables, failures


def command(options: argparse.Namespace) -> str:
    """How to run the same again."""
    parts = ["python benchmarks/run.py", *(["--quick"] if options.quick else [])]
    parts += [f"--only {' '.join(options.only)}"] if options.only else []
    parts += [f"--device {options.device}"] if options.device != "cpu" else []
    return " ".join(parts)


def end(signum: int, frame: Any) -> None:
    """Leaves in good order, ranks and files included, when a time limit from outside strikes."""
    signal.signal(signum, signal.SIG_IGN)  # `timeout` signals twice
    sys.exit(128 + signum)


def main() -> int:
    """Measures, prints, and records the run where asked to."""
    parser = argparse.ArgumentParser(
        description="torch_c10d_ext against torch's own collectives, in one interleaved run"
    )
    parser.add_argument("--quick", action="store_true", help="a look in half a minute")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"how long to measure ({SECONDS:.0f}; --quick: {QUICK_SECONDS:.0f}), without "
        "starting and compiling",
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), default="cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*OPS, SHM, HOSTS),
        help="some of the sections",
    )
    _history.add_option(parser)
    parser.add_argument(
        "--algorithms",
        nargs="+",
        metavar="RULES",
        help="two or more choices of shm's algorithms (docs/shm.md) to compare, nothing else",
    )
    options = parser.parse_args()
    if options.algorithms:
        options.only = [SHM]
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    devices = ("cpu", "cuda") if options.device == "all" else (options.device,)
    if "cuda" in devices and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use")

    signal.signal(signal.SIGTERM, end)
    began = time.monotonic()
    failures = 0
    ops = not options.only or any(name in options.only for name in OPS)
    for device in devices if ops else ():
        aims = Aims()
        kind = machine(device)
        print(f"\n{today()}, {kind}", flush=True)
        tables, failed = measure(device, options, aims, began)
        failures += failed
        tables.append(aims.table())
        print(f"\n{tables[-1].text()}", flush=True)
        if options.record:
            name = f"{options.record}-ops" if device == "cpu" else f"{options.record}-ops-{device}"
            path = _history.record(name, kind, command(options), tables)
            progress(began, f"recorded: {path}")
    if SHM in options.only if options.only else devices == ("cpu",):
        arguments = ["--quick"] if options.quick else []
        arguments += ["--seconds", str(options.seconds)]
        arguments += ["--record", f"{options.record}-shm"] if options.record else []
        arguments += ["--algorithms", *options.algorithms] if options.algorithms else []
        try:
            shm.main(arguments)
        except RanksFailed as error:
            print(f"\n== shm: {error}", flush=True)
            failures += 1
    reason = why_not()
    if HOSTS in (options.only or ()) or (not options.only and devices == ("cpu",) and not reason):
        arguments = ["--rounds", "2"] if options.quick else []
        arguments += ["--record", options.record] if options.record else []
        try:
            hosts.main(arguments)
        except RuntimeError as error:
            print(f"\n== hosts: {error}", flush=True)
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
