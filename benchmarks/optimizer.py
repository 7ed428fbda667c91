"""What the communication optimizer makes of 12 programs, by its cost model, and how long it takes.

    python benchmarks/optimizer.py [--ranks 4] [--scaling]

No ranks are needed: the programs are traced in a fake world. Three links, by rule: what they send
takes as long as the rank computes (balanced), three times that (bandwidth), or the same in latency
alone (latency). Shares are of what can be hidden: (serial - step) / (serial - bound), where no
order takes less than the bound (see `lower_bound` in torch_c10d_ext/optimizer/_simulate.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.optimizer_programs import PROGRAMS, ddp_mlp, traced
from torch_c10d_ext import Compute, Link, communication_report
from torch_c10d_ext.optimizer import Settings, optimize_and_report
from torch_c10d_ext.optimizer._optimize import optimized_graph

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scaling", action="store_true", help="large graphs, too")
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    print(
        f"{'program':20} {'link':10} {'ms':>8} {'new ms':>8} {'ratio':>6} {'hidden':>7} {'new':>6} "
        f"{'n':>4} {'new':>4} {'peak':>6} {'s':>6}"
    )
    for budget in (None, "own peak"):
        if budget:
            print(f"\nat the {budget} of each graph")
        shares, ratios = [], []
        for program in PROGRAMS:
            graph = traced(program, options.ranks, GROUP)
            for kind, link in links(graph).items():
                name = program.__name__
                changes: dict[str, Any] = {}
                if budget:
                    settings = Settings.of(None, None, link=link, compute=COMPUTE)
                    _, about = optimize_and_report(graph, settings)
                    changes["memory_budget"] = int(about.peak_before)
                text, about = row(name, kind, graph, link, **changes)
                print(text, flush=True)
                shares.append(about.hidden)
                ratios.append(about.seconds_before / about.seconds)
        print(
            f"hidden: median {statistics.median(shares):.2f}, worst {min(shares):.2f}; "
            f"ratio: median {statistics.median(ratios):.2f}, worst {min(ratios):.2f}"
        )
    if options.scaling:
        scaling()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
