"""What the communication optimizer makes of 12 programs, by its cost model, and how long it takes.

    python benchmarks/optimizer.py [--ranks 4] [--scaling] [--torch] [--measure] [--graphs N]

No ranks are needed but for ``--measure``, which runs small forms of some programs on two ranks, the
old graph and the new one in turns. The programs are traced in a fake world. Three links, by rule:
what they send takes as long as the rank computes (balanced), three times that (bandwidth), or the
same in latency alone (latency). Shares are of what can be hidden: (serial - step) / (serial -
bound), where no order takes less than the bound (`lower_bound` in
torch_c10d_ext/optimizer/_bounds.py), which knows nothing of memory.

``--graphs`` optimizes so many random graphs of the tests, of 12 to 51 nodes, with budgets of 1 to
1.5 times what they take, every second with all_to_alls and several dtypes, every third with
rounding, and counts peaks above the budget by the checker's own count.

``--torch`` has torch's own pass (torch._inductor.fx_passes.overlap_scheduling, with buckets)
reorder the same graphs, in torch's ops. It is given this cost model as its estimates, as its own
ask for Triton, and a tenth more memory than the graph takes, as ours; the clock is the same.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import optimizer_programs
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


def row(name: str, kind: str, graph: Any, link: Link, **changes: Any) -> tuple[str, Any]:
    """A line of the table, and what the optimizer reports."""
    settings = Settings.of(None, None, link=link, compute=COMPUTE, **changes)
    began = time.perf_counter()
    _, about = optimize_and_report(graph, settings)
    took = time.perf_counter() - began
    text = (
        f"{name:20} {kind:10} {about.seconds_before * 1e3:8.2f} {about.seconds * 1e3:8.2f} "
        f"{about.seconds_before / about.seconds:6.2f} {about.hidden_before:7.2f} "
        f"{about.hidden:6.2f} {about.launches_before:4} {about.launches:4} "
        f"{about.peak / about.peak_before:6.2f} {took:6.2f}"
    )
    return text, about


def scaling() -> None:
    """How long the pass takes on large graphs, without making a module of the result."""
    print(f"{'nodes':>8} {'collectives':>12} {'seconds':>8} {'steps':>10}")
    for layers in (75, 250, 750, 2700):
        step, _ = ddp_mlp(4, GROUP)
        weights = [torch.empty(16, 16) for _ in range(layers)]
        graph = make_fx(step, tracing_mode="fake")(torch.empty(8, 16), weights)
        settings = Settings.of(None, None, link=Link(1e-6, 1e9, shared="wire"), compute=COMPUTE)
        began = time.perf_counter()
        _, about = optimized_graph(graph.graph, settings)
        took = time.perf_counter() - began
        print(f"{len(graph.graph.nodes):8} {layers:12} {took:8.2f} {about.work:10}", flush=True)


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


def against_torch(ranks: int) -> None:
    """Torch's own pass and ours on the same graphs."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    print(
        f"\n{'program':20} {'link':10} {'ms':>8} {'torch ms':>8} {'n':>4} {'ours':>8} {'ratio':>6}"
    )
    ratios = []
    for program in PROGRAMS:
        graph = traced(program, ranks, GROUP)
        for kind, link in links(graph).items():
            theirs, launches = torchs_pass(graph, link)
            settings = Settings.of(None, None, link=link, compute=COMPUTE)
            _, about = optimize_and_report(graph, settings)
            # Where their pass loses, its user goes without.
            best = min(theirs, about.seconds_before)
            ratios.append(best / about.seconds)
            print(
                f"{program.__name__:20} {kind:10} {about.seconds_before * 1e3:8.2f} "
                f"{theirs * 1e3:8.2f} {launches:4} {about.seconds * 1e3:8.2f} {ratios[-1]:6.2f}",
                flush=True,
            )
    print(
        "best of torch's pass and none, over ours: median "
        f"{statistics.median(ratios):.2f}, worst {min(ratios):.2f}"
    )


def random_graphs(count: int) -> None:
    """Whether peaks keep to budgets, and what else becomes of random graphs."""
    from tests.optimizer.graphs import join_fake_world, random_graph

    rng = random.Random(0)
    seen = dict.fromkeys(("changed", "in parts", "refused by the checker", "above"), 0)
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
        seen["refused by the checker"] += "checker" in str(about)
        seen["above"] += about.changed and peak_bytes(new.graph, bytes_of) > budget
        if (seed + 1) % 500 == 0 or seed + 1 == count:
            counts = ", ".join(f"{n} {what}" for what, n in seen.items())
            print(f"{seed + 1} random graphs: {counts}", flush=True)


# Programs that run, and about what a collective costs on one machine.
MEASURED = [ddp_mlp, fsdp_step, zero1_update, sequence_parallel]
MACHINE = {"gloo": Link(300e-6, 1e9, shared="wire"), "shm": Link(8e-6, 5e9, shared="wire")}


def measure_on_ranks(rank: int, backend: str, store: str) -> None:
    """One of two ranks: medians of the old graph and the new one, each run by turns."""
    torch.set_num_threads(1)
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)
    optimizer_programs.WIDTH = optimizer_programs.TOKENS = 64
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
        if rank == 0:
            old, took = (statistics.median(t[5:]) * 1e3 for t in times)
            ratio = statistics.median(
                a / b for a, b in zip(times[0][5:], times[1][5:], strict=True)
            )
            print(
                f"{backend:5} {program.__name__:20} {old:8.2f} {took:8.2f} ms, ratio {ratio:5.2f}, "
                f"launches {about.launches_before} -> {about.launches}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scaling", action="store_true", help="large graphs, too")
    parser.add_argument("--torch", action="store_true", help="torch's own pass, too")
    parser.add_argument("--measure", action="store_true", help="on two ranks alone")
    parser.add_argument("--graphs", type=int, help="so many random graphs alone")
    options = parser.parse_args()
    if options.measure:
        for backend in MACHINE:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure_on_ranks, (backend, f"{folder}/store"), nprocs=2)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    if options.graphs:
        random_graphs(options.graphs)
        dist.destroy_process_group()
        return
    print(
        f"{'program':20} {'link':10} {'ms':>8} {'new ms':>8} {'ratio':>6} {'hidden':>7} {'new':>6} "
        f"{'n':>4} {'new':>4} {'peak':>6} {'s':>6}"
    )
    for budget in (None, 1.01, 1.0):
        if budget:
            print(f"\nat {budget:g} times the own peak of each graph")
        shares, ratios = [], []
        for program in PROGRAMS:
            graph = traced(program, options.ranks, GROUP)
            for kind, link in links(graph).items():
                name = program.__name__
                changes: dict[str, Any] = {}
                if budget:
                    settings = Settings.of(None, None, link=link, compute=COMPUTE)
                    _, about = optimize_and_report(graph, settings)
                    changes["memory_budget"] = int(about.peak_before * budget)
                text, about = row(name, kind, graph, link, **changes)
                print(text, flush=True)
                shares.append(about.hidden)
                ratios.append(about.seconds_before / about.seconds)
        print(
            f"hidden: median {statistics.median(shares):.2f}, worst {min(shares):.2f}; "
            f"ratio: median {statistics.median(ratios):.2f}, worst {min(ratios):.2f}"
        )
    if options.torch:
        against_torch(options.ranks)
    if options.scaling:
        scaling()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
