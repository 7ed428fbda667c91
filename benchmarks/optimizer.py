"""What the communication optimizer makes of 12 programs, by its cost model, and how long it takes.

    python benchmarks/optimizer.py [--ranks 4] [--graphs 10000] [--record NAME] [--parts PART ...]

The programs are traced in a fake world. Three links, by rule: what they send takes as long as the
rank computes (balanced), three times that (bandwidth), or the same in latency alone (latency).
Shares are of what can be hidden: (serial - step) / (serial - bound), where no order takes less than
the bound (`lower_bound` in torch_c10d_ext/optimizer/_bounds.py), which knows nothing of memory.

Its parts: ``model``, the programs with a tenth more memory than they take, with 1 % more and with
no more; ``torch``, torch's own pass (torch._inductor.fx_passes.overlap_scheduling, with buckets) on
the same graphs, given this cost model as its estimates, as its own ask for Triton, and as much
memory as ours; ``scaling``, the processor time of large graphs; ``ranks``, some programs on two
ranks of gloo and of shm, old graph and new one in turns, without a link of a timer; ``graphs``, so
many random graphs of the tests, of 12 to 51 nodes, with budgets of 1 to 1.5 times what they take,
every second with all_to_alls and several dtypes, every third with rounding, whose peaks are counted
by the checker's own count; ``tests``, those of values and of ranks that differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import _history, optimizer_programs
from benchmarks._report import TARGETS, Table, machine
from benchmarks.optimizer_programs import (
    PROGRAMS,
    ddp_mlp,
    fsdp_step,
    sequence_parallel,
    traced,
    zero1_update,
)
from torch_c10d_ext import Compute, Link, communication_report
from torch_c10d_ext._op_info import op_info
from torch_c10d_ext.optimizer import Settings, optimize_and_report
from torch_c10d_ext.optimizer._checker import peak_bytes
from torch_c10d_ext.optimizer._collectives import op_of, value_of, wire_bytes
from torch_c10d_ext.optimizer._decide import copy_of, problem_of
from torch_c10d_ext.optimizer._optimize import optimized_graph
from torch_c10d_ext.optimizer._settings import DEFAULT_MEMORY
from torch_c10d_ext.optimizer._simulate import simulate

ROOT = Path(__file__).resolve().parent.parent
COMPUTE = Compute(memory_bandwidth=2e10, flops=1e11)
GROUP = "0"


def links(graph: Any) -> dict[str, Link]:
    """The three links of a program, from what it computes and sends."""
    report = communication_report(graph, link=Link(0.0, 1e9), compute=COMPUTE)
    busy = sum(end - start for start, end in report.busy)
    wire = sum(call.wire_bytes for call in report.calls)
    return {
        "latency": Link(busy / len(report.calls), wire / busy * 20, shared="wire"),
        "balanced": Link(busy / len(report.calls) / 20, wire / busy, shared="wire"),
        "bandwidth": Link(busy / len(report.calls) / 20, wire / busy / 3, shared="wire"),
    }


PARTS = ("model", "torch", "scaling", "ranks", "tests", "graphs")
LARGE = (75, 250, 750, 2700)


def shown(table: Table) -> Table:
    print(table.text(), end="\n\n", flush=True)
    return table


def by_the_model(ranks: int, budget: float | None) -> tuple[Table, list[list[str]]]:
    """The programs with a budget of so many times their own peak; the default has a tenth more."""
    rows, shares, launches = [], [], []
    for program in PROGRAMS:
        graph = traced(program, ranks, GROUP)
        for kind, link in links(graph).items():
            changes: dict[str, Any] = {}
            if budget is not None:
                settings = Settings.of(None, None, link=link, compute=COMPUTE)
                _, about = optimize_and_report(graph, settings)
                changes["memory_budget"] = int(about.peak_before * budget)
            settings = Settings.of(None, None, link=link, compute=COMPUTE, **changes)
            began = time.process_time()
            _, about = optimize_and_report(graph, settings)
            took = time.process_time() - began
            rows.append(
                [
                    program.__name__,
                    kind,
                    f"{about.seconds_before * 1e3:.2f}",
                    f"{about.seconds * 1e3:.2f}",
                    f"{about.seconds_before / about.seconds:.2f}",
                    f"{about.hidden_before:.2f}",
                    f"{about.hidden:.2f}",
                    str(about.launches_before),
                    str(about.launches),
                    f"{about.peak / about.peak_before:.2f}",
                    f"{took:.2f}",
                ]
            )
            shares.append(about.hidden)
            if program is ddp_mlp:
                launches.append(f"{about.launches_before} to {about.launches} ({kind})")
    head = ["program", "link", "ms", "new ms", "ratio", "hidden", "new", "n", "new n", "peak", "s"]
    where = {None: "", 1.0: ", at the own peak"}.get(budget, f", at {budget} times the own peak")
    table = Table(
        f"The optimizer by the cost model, {ranks} ranks{where}",
        "hidden: the share of what can be hidden, before and after; n: launches; s: the pass",
        head,
        2,
        rows,
    )
    found = f"{statistics.median(shares):.2f}, {min(shares):.2f}"
    met = statistics.median(shares) >= 0.95 and min(shares) >= 0.8
    if budget is None:
        aims = [
            aim(
                "hidden share of what can be hidden, 12 programs x 3 links, by the cost model",
                "median >= 0.95, worst >= 0.8",
                found,
                met,
            ),
            [
                "launches of per-gradient DDP",
                "8 times fewer",
                ", ".join(launches),
                "met where launches cost",
            ],
        ]
    else:
        times = "the graph's own peak" if budget == 1 else f"{budget} times its own peak"
        aims = [aim(f"the same at {times} of memory", "worst >= 0.8", found, min(shares) >= 0.8)]
    return table, aims


def aim(what: str, target: str, measured: str, met: bool) -> list[str]:
    return [what, target, measured, "met" if met else "missed"]


def scaling() -> tuple[Table, list[list[str]]]:
    """How long the pass takes on large graphs, without making a module of the result."""
    rows, aims = [], []
    for layers in LARGE:
        step, _ = ddp_mlp(4, GROUP)
        weights = [torch.empty(16, 16) for _ in range(layers)]
        graph = make_fx(step, tracing_mode="fake")(torch.empty(8, 16), weights)
        settings = Settings.of(None, None, link=Link(1e-6, 1e9, shared="wire"), compute=COMPUTE)
        found = []
        for _ in range(3):
            began = time.process_time()
            _, about = optimized_graph(graph.graph, settings)
            found.append(time.process_time() - began)
        took, nodes = statistics.median(found), len(graph.graph.nodes)
        rows.append([str(nodes), str(layers), f"{took:.2f}", str(about.work)])
        bound = {750: 1, 2700: 4}.get(layers)
        if bound:
            aims.append(
                aim(
                    f"processor time at {nodes:,} nodes",
                    f"<= {bound} s",
                    f"{took:.2f} s",
                    took <= bound,
                )
            )
    head = ["nodes", "collectives", "seconds", "steps"]
    return Table("How long the pass takes", "The median of three.", head, 0, rows), aims


def torch_scheduled(graph: Any, link: Link, compute: Any = COMPUTE) -> GraphModule:
    """A graph after torch's own pass, which is given this cost model."""
    from torch._inductor.fx_passes import overlap_scheduling
    from torch.utils import _runtime_estimation

    ops = torch.ops._c10d_functional
    new = GraphModule(graph, copy_of(graph.graph))
    for node in new.graph.nodes:
        op = op_of(node)
        name = op._schema.name.split("::")[1] if op is not None else ""
        if op is not None and op.namespace == "c10d_ext" and hasattr(ops, name):
            node.target = getattr(ops, name).default
    costs = Settings.of(None, None, link=link, compute=compute).costs()

    def milliseconds(node: Any, *_: Any) -> float:
        op = op_of(node)
        form = op_info(op) if op is not None else None
        if op is None or (form is not None and form.kind == "wait_tensor"):
            return 0.0
        if form is None:
            return 1e3 * costs.seconds(node, op)
        ranks = dist.get_world_size()
        out = node.kwargs.get("out")
        sent = costs.bytes_of([value_of(n) for n in node.all_input_nodes if n is not out])
        wire = wire_bytes(form.kind, ranks, sent, costs.bytes_of(value_of(node)))
        return 1e3 * (link.seconds(form.kind, ranks, wire) + link.busy_seconds(wire))

    overlap_scheduling.estimate_roofline_runtime_ms = milliseconds
    _runtime_estimation.get_gpu_dram_gbps = lambda: COMPUTE.memory_bandwidth / 1e9
    return overlap_scheduling.schedule_overlap_bucketing(
        new,
        collective_bucketing=True,
        custom_runtime_estimation=milliseconds,
        compute_estimator="analytical",
        max_memory_increase_ratio=DEFAULT_MEMORY - 1,
    )


def torchs_pass(graph: Any, link: Link) -> tuple[float, int]:
    """What a graph takes, and launches, after torch's own pass, by the cost model."""
    new = torch_scheduled(graph, link)
    costs = Settings.of(None, None, link=link, compute=COMPUTE).costs()
    p = problem_of(new.graph, costs)
    timing = simulate(p, list(range(len(p.nodes) - 1)))
    return timing.total, timing.launches


def against_torch(ranks: int) -> tuple[Table, list[list[str]]]:
    """Torch's own pass and ours on the same graphs."""
    rows, ratios = [], []
    for program in PROGRAMS:
        graph = traced(program, ranks, GROUP)
        for kind, link in links(graph).items():
            theirs, launches = torchs_pass(graph, link)
            settings = Settings.of(None, None, link=link, compute=COMPUTE)
            _, about = optimize_and_report(graph, settings)
            # Where their pass loses, its user goes without.
            ratios.append(min(theirs, about.seconds_before) / about.seconds)
            times = (about.seconds_before, theirs, about.seconds)
            none, by_torch, ours = (f"{t * 1e3:.2f}" for t in times)
            name = program.__name__
            rows.append([name, kind, none, by_torch, str(launches), ours, f"{ratios[-1]:.2f}"])
    head = ["program", "link", "none ms", "torch ms", "n", "ours ms", "ratio"]
    title = f"Torch's own pass and the optimizer by the cost model, {ranks} ranks"
    note = "ratio: the better of torch's pass and none, over ours"
    median = statistics.median(ratios)
    measured = f"median {median:.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
    what = "the best of torch's own pass and none, over ours, by the cost model"
    return Table(title, note, head, 2, rows), [aim(what, ">= 1.3 times", measured, median >= 1.3)]


def random_graphs(count: int) -> tuple[Table, list[list[str]]]:
    """Whether peaks keep to budgets, and what else becomes of random graphs."""
    from tests.optimizer.graphs import join_fake_world, random_graph

    rng = random.Random(0)
    seen = dict.fromkeys(("changed", "in parts", "without the rules", "above"), 0)
    logging.getLogger("torch_c10d_ext").setLevel(logging.ERROR)
    for seed in range(count):
        ranks = 2 + seed % 3
        if dist.get_world_size() != ranks:
            join_fake_world(ranks)
        graph = random_graph(seed, GROUP, ranks, 12 + seed % 40, moves=bool(seed % 2))
        link = Link(10 ** rng.uniform(-7, -5), 10 ** rng.uniform(6, 9), shared="wire")
        compute = Compute(10 ** rng.uniform(8, 10), 10 ** rng.uniform(7, 10))
        settings = Settings.of(
            None, None, link=link, compute=compute, numerics=["bitwise", "rounding"][seed % 3 == 0]
        )
        bytes_of = settings.costs().storage_bytes
        own = peak_bytes(graph.graph, bytes_of)
        budget = int(own * rng.choice([1.0, 1.0, rng.uniform(1.0, 1.5)]))
        new, about = optimize_and_report(graph, replace(settings, memory_budget=budget))
        seen["changed"] += about.changed
        seen["in parts"] += " parts\n" in str(about)
        seen["without the rules"] += "checker" in str(about)
        seen["above"] += about.changed and peak_bytes(new.graph, bytes_of) > budget
    note = "without the rules: the checker could not follow them, and they were left out"
    table = Table(
        "Random graphs with budgets",
        note,
        ["graphs", *seen],
        0,
        [[str(count), *map(str, seen.values())]],
    )
    above = seen["above"]
    return table, [
        aim(f"peak above the budget, {count:,} random graphs", "0", str(above), not above)
    ]


def suites() -> tuple[Table, list[list[str]]]:
    """The tests of values and of safety, as they are in the suite."""
    divergences = "tests/optimizer/test_agreement.py"
    found = (
        ("values bit for bit, shm and gloo", "tests/optimizer/test_values.py"),
        ("ranks that differ, 10,000 times: each named, no hang", divergences),
    )
    rows, aims = [], []
    for what, path in found:
        command = [sys.executable, "-m", "pytest", "-q", path]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        last = done.stdout.strip().splitlines()[-1]
        rows.append([path, last])
        aims.append(aim(what, "every test", re.sub(r" in .*", "", last), done.returncode == 0))
    return Table("Tests", "", ["file", "outcome"], 2, rows), aims


# Programs that run, and about what a collective costs on one machine.
MEASURED = [ddp_mlp, fsdp_step, zero1_update, sequence_parallel]
MACHINE = {"gloo": Link(300e-6, 1e9, shared="wire"), "shm": Link(8e-6, 5e9, shared="wire")}


def measure_on_ranks(rank: int, backend: str, folder: str) -> None:
    """One of two ranks: medians of the old graph and the new one, each run by turns."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    optimizer_programs.WIDTH = optimizer_programs.TOKENS = 64
    rows = []
    for program in MEASURED:
        step, inputs = program(2, GROUP)
        filled = torch.utils._pytree.tree_map(torch.randn_like, inputs)
        graph = make_fx(step)(*filled)
        settings = Settings.of(None, None, link=MACHINE[backend], memory_budget=2**30)
        new, about = optimize_and_report(graph, settings)
        times: list[list[float]] = [[], []]
        for _ in range(40):
            for k, each in enumerate((graph, new)):
                dist.barrier()
                began = time.perf_counter()
                each(*filled)
                times[k].append(time.perf_counter() - began)
        old, took = (statistics.median(t[5:]) * 1e3 for t in times)
        ratio = statistics.median(a / b for a, b in zip(times[0][5:], times[1][5:], strict=True))
        launches = f"{about.launches_before} to {about.launches}"
        name = program.__name__
        rows.append([backend, name, launches, f"{old:.2f}", f"{took:.2f}", f"{ratio:.2f}"])
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks() -> tuple[Table, list[list[str]]]:
    """Some programs on two ranks, as the backends are."""
    rows, aims = [], []
    for backend in MACHINE:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure_on_ranks, (backend, folder), nprocs=2)
            found = json.loads(Path(folder, "rows").read_text())
        rows += found
        ratios = sorted(float(each[-1]) for each in found)
        what = f"step on real ranks, {backend}, {len(found)} programs"
        measured = ", ".join(f"{ratio:.2f}" for ratio in ratios) + " times"
        aims.append(aim(what, ">= 1 times", measured, ratios[0] >= 1))
    head = ["backend", "program", "launches", "old ms", "new ms", "old / new"]
    return Table("The optimizer on 2 ranks", "", head, 2, rows), aims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--graphs", type=int, default=10_000, help="so many random graphs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    _history.add_option(parser)
    options = parser.parse_args()
    heading = machine("cpu")
    logging.getLogger("torch").setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    steps: dict[str, list[Callable[[], tuple[Table, list[list[str]]]]]] = {
        "model": [partial(by_the_model, options.ranks, budget) for budget in (None, 1.01, 1.0)],
        "torch": [partial(against_torch, options.ranks)],
        "scaling": [scaling],
        "ranks": [on_ranks],
        "tests": [suites],
        "graphs": [partial(random_graphs, options.graphs)],
    }
    tables, aims = [], []
    for part in PARTS:
        for step in steps[part] if part in options.parts else ():
            table, found = step()
            tables.append(shown(table))
            aims += found
    dist.destroy_process_group()
    head = ["", "target", "measured", "outcome"]
    tables.append(shown(Table(f"{TARGETS}: optimizer", "", head, 4, aims)))
    if options.record:
        command = " ".join(["python", "benchmarks/optimizer.py", *sys.argv[1:]])
        _history.record(options.record, heading, command, tables)


if __name__ == "__main__":
    main()
