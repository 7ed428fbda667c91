"""What becomes of a graph: a copy that is faster by the cost model and has passed the checker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from torch.fx import Graph, Node

from torch_c10d_ext._groups import (
    group_rank,
    group_size,
    sums_in_rank_order,
)
from torch_c10d_ext._op_info import op_info
from torch_c10d_ext.optimizer._algebra import Simplified, simplify
from torch_c10d_ext.optimizer._bounds import lower_bound
from torch_c10d_ext.optimizer._buckets import bucket_key, is_exact, is_packed
from torch_c10d_ext.optimizer._checker import check_rewrite, peak_bytes
from torch_c10d_ext.optimizer._chunks import Site, Sites, find_sites, gain, write_parts
from torch_c10d_ext.optimizer._collectives import Collective, op_of, tensors_in, value_of
from torch_c10d_ext.optimizer._costs import Costs
from torch_c10d_ext.optimizer._plan import TOLERANCE, Plan, choose_plan
from torch_c10d_ext.optimizer._problem import Problem, Unsupported, read_problem
from torch_c10d_ext.optimizer._rewrite import apply_schedule
from torch_c10d_ext.optimizer._schedule import Step
from torch_c10d_ext.optimizer._settings import DEFAULT_MEMORY, Optimization, Settings
from torch_c10d_ext.optimizer._simulate import hidden_share, simulate

# Nodes of a graph that sets of sites are tried on, one after the other.
_MUCH = 4_000


@dataclass(frozen=True)
class Decision:
    """A graph that has passed the checker, and how it came to be.

    Attributes:
        graph: the new graph.
        order: of its nodes, as a problem numbers them.
        parts: by the number of a site's start, in how many parts it is made.
    """

    graph: Graph
    order: tuple[Step, ...]
    parts: tuple[tuple[int, int], ...]


class TooMuch(Exception):
    """What the copies of packed launches hold does not fit into memory."""


def decide(given: Graph, settings: Settings, about: Optimization, pack: bool = True) -> Decision:
    """A copy of a graph that is faster and has passed the checker, and the order of its nodes."""
    if not _has_collectives(given):
        raise Unsupported("it has no collectives")
    costs = settings.costs()
    graph = copy_of(given)
    p = problem_of(graph, costs)
    own = choose_plan(p, {}, {}, cap=1, memory=None, overlap=False)
    _describe(p, own, about)
    about.seconds_before, about.peak_before = own.before.total, own.peak_before
    about.launches_before = own.before.launches
    may_share = bucket_keys(p, settings, costs, Optimization(), pack)[0] if settings.bucket else {}
    bound = lower_bound(p, may_share)
    about.hidden_before = hidden_share(p, own.before.total, bound)
    about.seconds, about.peak = about.seconds_before, about.peak_before
    about.launches, about.hidden = about.launches_before, about.hidden_before
    budget = settings.memory_budget
    memory = own.peak_before * DEFAULT_MEMORY if budget is None else float(budget)
    if own.peak_before > memory:
        raise Unsupported(
            f"it holds {own.peak_before:,.0f} bytes in its own order, more than the budget of "
            f"{memory:,.0f}"
        )
    rules = apply_rules(graph, p, settings) if settings.algebra else Simplified()
    simplified = rules.done
    about.missed += rules.missed
    if simplified:
        p = problem_of(graph, costs)
    keys: dict[int, Hashable] = {}
    sizes: dict[int, float] = {}
    if settings.bucket:
        keys, sizes = bucket_keys(p, settings, costs, about, pack)
    plan = choose_plan(
        p, keys, sizes, cap=settings.bucket_bytes, memory=memory, overlap=settings.overlap
    )
    about.work = plan.work
    parts: tuple[tuple[int, int], ...] = ()
    if settings.chunk and settings.overlap and plan.peak <= memory:
        better = _in_parts(graph, p, settings, costs, plan, memory, about, pack)
        if better is not None:
            graph, p, keys, plan, parts = better
    # Comparing takes a small collective per group.
    price = 0.0
    if settings.agree == "every":
        groups = {c.group: c.ranks for c in p.collectives.values() if c.ranks > 1}
        for group, ranks in groups.items():
            link, wire = costs.link_of(group), 40.0 * ranks
            price += link.seconds("all_gather_into_tensor", ranks, wire) + link.busy_seconds(wire)
    gained = plan.timing.total + price < own.before.total * (1 - TOLERANCE)
    fewer = bool(simplified) and plan.timing.total + price <= own.before.total
    if not (gained or fewer) or plan.peak > memory:
        about.done.clear()
        raise Unsupported(
            "no schedule is faster by the cost model than its own, "
            f"{own.before.total * 1e6:,.1f} us"
        )
    about.done += simplified
    _describe(p, plan, about)
    for group, lines in rules.folded.items():
        about.plan[group] = [*lines, *about.plan[group]]
    apply_schedule(graph, p, plan.order)
    held = plan.peak
    if any(isinstance(step, tuple) and step[0] in p.copying for step in plan.order):
        held = peak_bytes(graph, costs.storage_bytes)
        if held > memory:
            raise TooMuch
    about.peak = held
    about.seconds, about.launches = plan.timing.total, plan.timing.launches
    if simplified or parts:
        bound = lower_bound(p, keys)
    about.hidden = hidden_share(p, plan.timing.total, bound)
    check_rewrite(
        given,
        graph,
        memory,
        lambda group: (
            settings.numerics == "rounding" or group_size(group) <= 2 or sums_in_rank_order(group)
        ),
        costs.storage_bytes,
        settings.numerics == "rounding",
        _place_in,
        settings.spmd,
    )
    return Decision(graph, plan.order, parts)


def _in_parts(
    given: Graph,
    p: Problem,
    settings: Settings,
    costs: Costs,
    plan: Plan,
    memory: float,
    about: Optimization,
    pack: bool,
) -> tuple[Graph, Problem, dict[int, Hashable], Plan, tuple[tuple[int, int], ...]] | None:
    """A copy of a graph with sites made in parts, where that is faster; and what it takes."""
    sites = _sites(given, p, settings)
    stalls: dict[int, float] = {}
    simulate(p, plan.order, stalls)
    least = TOLERANCE * plan.timing.total
    wanted: list[tuple[float, Site, int]] = []
    for site in sites.found:
        stall = stalls.get(site.start, 0.0)
        saved, parts = max((gain(p, costs, site, n), -n) for n in site.parts())
        if stall <= least:
            sites.miss(site.what, "nothing waits for it")
        elif min(saved, stall) <= least:
            sites.miss(site.what, "launches and copies cost what it gains, by the cost model")
        else:
            wanted.append((min(saved, stall), site, -parts))
    wanted.sort(key=lambda entry: (-entry[0], entry[1].start))
    taken: set[Node] = set()
    for entry in list(wanted):
        if taken & {*entry[1].products}:
            wanted.remove(entry)
            sites.miss(entry[1].what, "its product is in parts for another collective")
        taken.update(entry[1].products)
    best = None
    too_large = False
    # All of them, and where that is too much for memory or the link, the most worthwhile alone.
    counts = [len(wanted), -(-len(wanted) // 2), 1] if wanted else []
    if len(p.nodes) > _MUCH:
        counts = counts[:1]
    for count in sorted(set(counts), reverse=True):
        chosen = tuple(sorted((site.start, parts) for _, site, parts in wanted[:count]))
        graph = copy_of(given)
        write_sites(graph, problem_of(graph, costs), settings, chosen)
        q = problem_of(graph, costs)
        keys: dict[int, Hashable] = {}
        sizes: dict[int, float] = {}
        if settings.bucket:
            keys, sizes = bucket_keys(q, settings, costs, Optimization(), pack)
        other = choose_plan(
            q, keys, sizes, cap=settings.bucket_bytes, memory=memory, overlap=settings.overlap
        )
        about.work += other.work
        too_large |= other.peak > memory
        total = best[3].timing.total if best is not None else plan.timing.total
        if other.peak <= memory and other.timing.total < total * (1 - TOLERANCE):
            best = graph, q, keys, other, chosen
    made = dict(best[4]) if best is not None else {}
    for _, site, _ in wanted:
        if site.start not in made:
            why = "parts take more memory than there is" if too_large else "no schedule is faster"
            sites.miss(site.what, why)
    about.missed += sites.lines()
    done: dict[tuple[str, int], int] = {}
    for _, site, _ in wanted:
        if site.start in made:
            key = site.what, made[site.start]
            done[key] = done.get(key, 0) + 1
    about.done += [f"{count} {what} in {parts} parts" for (what, parts), count in done.items()]
    return best


def _sites(graph: Graph, p: Problem, settings: Settings) -> Sites:
    return find_sites(p, graph, settings.numerics, _same_bits(settings))


def write_sites(
    graph: Graph, p: Problem, settings: Settings, chosen: tuple[tuple[int, int], ...]
) -> None:
    by_start = {site.start: site for site in _sites(graph, p, settings).found}
    write_parts(graph, [(by_start[start], parts) for start, parts in chosen])


def _place_in(group: str) -> tuple[int, int]:
    return group_rank(group), group_size(group)


def apply_rules(graph: Graph, p: Problem, settings: Settings) -> Simplified:
    return simplify(
        graph,
        p,
        settings.numerics,
        _same_bits(settings),
        group_rank,
        settings.spmd,
    )


def copy_of(given: Graph) -> Graph:
    # Not deepcopy, which copies what describes the inputs, too, with a warning of torch's.
    graph = Graph(tracer_cls=getattr(given, "_tracer_cls", None))
    copied = graph.graph_copy(given, {}, return_output_node=True)
    assert isinstance(copied, tuple)
    value, old = copied
    graph.output(value, type_expr=old.type).meta = copy.copy(old.meta)
    graph.set_codegen(given._codegen)
    graph.owning_module = given.owning_module  # which holds nested graphs
    return graph


def _has_collectives(graph: Graph) -> bool:
    for node in graph.nodes:
        op = op_of(node)
        form = op_info(op) if op is not None else None
        if form is not None:
            return True
    return False


def problem_of(graph: Graph, costs: Costs) -> Problem:
    sizes: dict[str, int] = {}

    def size_of(name: str) -> int:
        if name not in sizes:
            try:
                sizes[name] = group_size(name)
            except ValueError as error:
                raise Unsupported(str(error)) from error
        return sizes[name]

    return read_problem(graph, costs, size_of)


def _same_bits(settings: Settings) -> Callable[[Collective], bool]:
    known: dict[str, bool] = {}

    def same(c: Collective) -> bool:
        if c.group not in known:
            known[c.group] = sums_in_rank_order(c.group)
        return settings.numerics == "rounding" or known[c.group] or is_exact(c)

    return same


def bucket_keys(
    p: Problem, settings: Settings, costs: Costs, about: Optimization, pack: bool
) -> tuple[dict[int, Hashable], dict[int, float]]:
    same = _same_bits(settings)
    keys: dict[int, Hashable] = {}
    sizes: dict[int, float] = {}
    why_not: dict[tuple[str, str], int] = {}
    output = p.nodes[-1]
    written = _written(p)
    for i, c in p.collectives.items():
        key, why = bucket_key(c, same, written)
        if key is not None and not pack and is_packed([c]):
            key, why = None, "copying into and out of one message takes more memory than there is"
        if key is not None and output in c.node.users:
            key, why = None, "it is returned in flight"
        if key is None:
            why_not[c.kind, why] = why_not.get((c.kind, why), 0) + 1
            continue
        keys[i] = key
        sizes[i] = costs.bytes_of(value_of(c.inputs[0]))
        if is_packed([c]):
            p.copying[i] = costs.copy_seconds(value_of(c.inputs[0]))
    if p.fixed_order and keys:
        about.missed.append("buckets: ranks move different sizes, so that the order is kept")
    for (kind, why), count in why_not.items():
        about.missed.append(f"{count} {kind} in no bucket: {why}")
    counts: dict[Hashable, int] = {}
    for key in keys.values():
        counts[key] = counts.get(key, 0) + 1
    alone = {i for i, key in keys.items() if counts[key] == 1}
    return {i: k for i, k in keys.items() if i not in alone}, sizes


def _written(p: Problem) -> set[int]:
    """The storages that some computation writes after they are made."""
    found: set[int] = set()
    for node in p.nodes:
        op = op_of(node)
        if op is None or not op._schema.is_mutable or op_info(op) is not None:
            continue
        arguments = dict(zip((a.name for a in op._schema.arguments), node.args, strict=False))
        arguments.update(node.kwargs)
        for a in op._schema.arguments:
            if a.alias_info is None or not a.alias_info.is_write:
                continue
            given = arguments.get(a.name)
            for n in given if isinstance(given, list | tuple) else [given]:
                if isinstance(n, Node):
                    found.update(t.untyped_storage()._cdata for t in tensors_in(value_of(n)))
    return found


def _describe(p: Problem, plan: Plan, about: Optimization) -> None:
    """The launches of each group in words, as ranks compare them, and what became of them."""
    about.plan.clear()
    about.order.clear()
    numbers: dict[int, str] = {}
    buckets: dict[str, list[int]] = {}
    for step in plan.order:
        members = step if isinstance(step, tuple) else (step,)
        first = p.collectives.get(members[0])
        if first is None:
            start = p.started_by.get(members[0])
            if start is not None:
                group = p.collectives[start].group
                about.order.append(("wait", group, numbers[start]))
            continue
        text = " | ".join(p.collectives[i].describe() for i in members)
        lines = about.plan.setdefault(first.group, [])
        for i in members:
            numbers[i] = str(len(lines))
        lines.append(text)
        about.order.append(("start", first.group, text))
        if len(members) > 1:
            buckets.setdefault(f"{first.kind} of group '{first.group}'", []).append(len(members))
    for what, sizes in buckets.items():
        about.done.append(f"{sum(sizes)} {what} in {len(sizes)} launches")
    if plan.changed:
        own = {i: k for k, i in enumerate(range(len(p.nodes)))}
        place: dict[int, int] = {}
        for k, step in enumerate(plan.order):
            for i in step if isinstance(step, tuple) else (step,):
                place[i] = k
        ahead = sum(
            1
            for start, waits in p.waits().items()
            for wait in waits
            if place[wait] - place[start] > own[wait] - own[start]
        )
        about.done.append(f"{ahead} of {len(p.collectives)} collectives have more to run beside")
