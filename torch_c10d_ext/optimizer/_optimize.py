"""``optimize``: what users call, and the order in which the optimizer's parts do their work."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from torch_c10d_ext._groups import (
    group_name,
    group_rank,
    group_size,
    has_cpu,
    is_fake,
    process_group,
    sums_in_rank_order,
)
from torch_c10d_ext._op_info import op_info
from torch_c10d_ext.errors import InvalidArgument
from torch_c10d_ext.optimizer import _agreement
from torch_c10d_ext.optimizer._algebra import Simplified, simplify
from torch_c10d_ext.optimizer._bounds import lower_bound
from torch_c10d_ext.optimizer._buckets import bucket_key, is_exact, is_packed
from torch_c10d_ext.optimizer._checker import CheckFailed, check_rewrite, peak_bytes
from torch_c10d_ext.optimizer._chunks import Site, Sites, find_sites, gain, write_parts
from torch_c10d_ext.optimizer._collectives import Collective, op_of, tensors_in, value_of
from torch_c10d_ext.optimizer._costs import Costs
from torch_c10d_ext.optimizer._plan import TOLERANCE, Plan, choose_plan
from torch_c10d_ext.optimizer._problem import Problem, Unsupported, read_problem
from torch_c10d_ext.optimizer._rewrite import apply_schedule
from torch_c10d_ext.optimizer._schedule import Step
from torch_c10d_ext.optimizer._simulate import hidden_share, simulate
from torch_c10d_ext.report import Compute, Link

_log = logging.getLogger("torch_c10d_ext")

Program = TypeVar("Program", GraphModule, ExportedProgram)

# What a schedule may hold where nothing is said: so many times what the graph's own order holds.
DEFAULT_MEMORY = 1.1

_MEBI = 1024 * 1024

# Nodes of a graph that sets of sites are tried on, one after the other.
_MUCH = 4_000


@dataclass(frozen=True)
class Settings:
    """What :func:`optimize` and ``communication_options`` take; see there."""

    link: Link = field(default_factory=lambda: Link(shared="network"))
    links: tuple[tuple[str, Link], ...] = ()
    compute: Compute | Callable[[Node], float] = field(default_factory=Compute)
    sizes: tuple[tuple[str, int], ...] = ()
    memory_budget: int | None = None
    bucket_bytes: int = 64 * _MEBI
    numerics: str = "bitwise"
    overlap: bool = True
    bucket: bool = True
    algebra: bool = True
    chunk: bool = True
    agree: str = "every"
    spmd: bool = False

    def __post_init__(self) -> None:
        if self.numerics not in ("bitwise", "rounding"):
            raise InvalidArgument(
                f"optimize: numerics must be 'bitwise' or 'rounding', got {self.numerics!r}"
            )
        if self.agree not in ("every", "first", "never"):
            raise InvalidArgument(
                f"optimize: agree must be 'every', 'first' or 'never', got {self.agree!r}"
            )
        if self.bucket_bytes <= 0:
            raise InvalidArgument(
                f"optimize: bucket_bytes must be positive, got {self.bucket_bytes}"
            )
        if self.memory_budget is not None and self.memory_budget < 0:
            raise InvalidArgument(
                f"optimize: memory_budget must be 0 or more, got {self.memory_budget}"
            )

    @staticmethod
    def of(
        links: Mapping[Any, Link] | None, sizes: Mapping[str, int] | None, **rest: Any
    ) -> Settings:
        """Settings from arguments as users give them; None is the default."""
        named = tuple(sorted((group_name(g), cost) for g, cost in (links or {}).items()))
        given = {k: v for k, v in rest.items() if v is not None}
        return Settings(links=named, sizes=tuple(sorted((sizes or {}).items())), **given)

    def without_agreement(self) -> Settings:
        return replace(self, agree="never")

    def key(self) -> str | None:
        """What a cache may tell these settings from others by; None where nothing does."""
        return repr(self) if isinstance(self.compute, Compute) else None

    def costs(self) -> Costs:
        return Costs(self.link, dict(self.links), self.compute, dict(self.sizes))


@dataclass
class Optimization:
    """What was done with a graph; ``str`` makes a text of it.

    Attributes:
        changed: whether the graph is another one.
        reason: why it is not.
        done: what was done, a line each.
        missed: what was not, and why.
        seconds_before, seconds: of a run, by the cost model.
        peak_before, peak: bytes held at once by results of the graph's nodes.
        launches_before, launches: collectives that are started.
        hidden_before, hidden: the share of what computation can hide that it does.
        plan: by group, the launches in their order, as the ranks compare them.
        order: launches and waits, as :func:`find_deadlock` takes them.
        work: steps that it took to decide.
    """

    changed: bool = False
    reason: str = ""
    done: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    seconds_before: float = 0.0
    seconds: float = 0.0
    peak_before: float = 0.0
    peak: float = 0.0
    launches_before: int = 0
    launches: int = 0
    hidden_before: float = 1.0
    hidden: float = 1.0
    plan: dict[str, list[str]] = field(default_factory=dict)
    order: list[tuple[str, str, str]] = field(default_factory=list)
    work: int = 0

    def __str__(self) -> str:
        lines = []
        if self.changed:
            lines.append(
                f"step {self.seconds_before * 1e6:,.1f} -> {self.seconds * 1e6:,.1f} us, "
                f"hidden {self.hidden_before:.0%} -> {self.hidden:.0%}, launches "
                f"{self.launches_before} -> {self.launches}"
            )
            lines.append(f"peak {self.peak_before:,.0f} -> {self.peak:,.0f} bytes")
        else:
            lines.append(f"unchanged: {self.reason}")
        lines += [f"done: {line}" for line in self.done]
        lines += [f"not: {line}" for line in self.missed]
        return "\n".join(lines)


def optimize(
    program: Program,
    *,
    link: Link | None = None,
    links: Mapping[Any, Link] | None = None,
    compute: Compute | Callable[[Node], float] | None = None,
    sizes: Mapping[str, int] | None = None,
    memory_budget: int | None = None,
    bucket_bytes: int | None = None,
    numerics: str = "bitwise",
    overlap: bool = True,
    bucket: bool = True,
    algebra: bool = True,
    chunk: bool = True,
    agree: str = "every",
    spmd: bool = False,
    explain: bool = False,
) -> Program:
    """Reorders, merges and simplifies the collectives of a graph so that it takes less time.

    Starts move up and waits move down as far as memory allows, so that computation runs meanwhile;
    collectives that queue for a link share a launch; collectives that are not needed go. Where the
    cost model sees no gain, or the graph is not understood in full, the program comes back as it
    is, and the reason is logged. An independent checker compares each new graph with the old one.

    Ranks that run one program come to one order: nothing that differs between ranks decides. Where
    they do not run one program after all, running the graph raises ``CollectiveMismatch`` on every
    rank, and names the first collective that differs.

    Args:
        program: a ``GraphModule`` of ATen ops, as make_fx, AOTAutograd and Inductor make them, or
            an ``ExportedProgram``. It is left untouched.
        link: what a collective costs. By default all groups share one wire.
        links: the same for some groups, see :data:`torch_c10d_ext.functional.Group`.
        compute: what everything else costs: rates, or a function of a node in seconds, which must
            return the same on all ranks.
        sizes: values for symbolic sizes by name. Other sizes that are not known count as 1024.
        memory_budget: bytes that results of nodes may take at once; by default a tenth more than
            they take in the graph's own order. Where they take more than the budget there, the
            graph stays as it is.
        bucket_bytes: bytes of a rank's inputs that one launch may take.
        numerics: ``"bitwise"``: the values stay the same to the last bit. ``"rounding"``: sums may
            be made in another order, which backends other than shm need for buckets of sums, and
            products of floats to be made in parts.
        overlap: whether nodes may be moved.
        bucket: whether collectives may share a launch.
        algebra: whether collectives may be replaced by cheaper ones.
        chunk: whether a product of matrices and the collective before or behind it may be made in
            parts that overlap. Integers alone are, but for ``numerics="rounding"``.
        agree: when the ranks compare their orders, before the graph's first collective.
            ``"every"``: at every run, which costs a collective of 40 bytes per group, and also
            finds a rank that was recompiled by itself; groups without CPU tensors compare at the
            first run. ``"first"``: at the first run alone. ``"never"``.
        spmd: promises that ranks run one program: what their graphs hold as a constant is the same
            on all, and where a graph takes rows at its rank's place, each rank takes its own. Some
            rules need that; ranks that break the promise raise ``CollectiveMismatch``, unless
            ``agree`` is ``"never"``.
        explain: prints what was done, what not, and why.

    Returns:
        A program of the same type; ``program`` itself where nothing was gained, or, on groups that
        take one collective for another (gloo, nccl), a copy that compares as all others do.

    Raises:
        ValueError: a setting out of its range, unknown group in ``links``.
        TypeError: ``program`` is of another type.

    Example, on every rank::

        graph = make_fx(step)(*inputs)
        step = torch_c10d_ext.optimize(graph, link=Link(20e-6, 10e9), explain=True)
        # step 915.4 -> 640.2 us, hidden 0% -> 97%, launches 48 -> 6 ...

    The model of memory: a result lives from its node to the last node that uses it or a view of
    it; what a collective reads and writes lives to its wait. The scheduler is list scheduling with
    a banker's test for memory (Graham 1969; Dijkstra 1965).
    """
    settings = Settings.of(
        links,
        sizes,
        link=link,
        compute=compute,
        memory_budget=memory_budget,
        bucket_bytes=bucket_bytes,
        numerics=numerics,
        overlap=overlap,
        bucket=bucket,
        algebra=algebra,
        chunk=chunk,
        agree=agree,
        spmd=spmd,
    )
    result, about = optimize_and_report(program, settings)
    if explain:
        print(about)
    return result


def optimize_and_report(program: Program, settings: Settings) -> tuple[Program, Optimization]:
    """:func:`optimize`, with a record of what was done."""
    if not isinstance(program, GraphModule | ExportedProgram):
        raise TypeError(
            "optimize: program must be a torch.fx.GraphModule or ExportedProgram, got "
            f"{type(program).__name__}"
        )
    for name, _ in settings.links:
        process_group(name)  # its error says which groups there are
    module = program if isinstance(program, GraphModule) else program.graph_module
    graph, about = optimized_graph(module.graph, settings)
    if graph is None:
        return program, about
    new = GraphModule(module, graph)
    new.meta.update(module.meta)
    if isinstance(program, GraphModule):
        new.train(program.training)
        return new, about
    exported = ExportedProgram(
        root=new,
        graph=new.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
    )
    return exported, about


def optimized_graph(
    graph: Graph, settings: Settings, in_place: bool = False
) -> tuple[Graph | None, Optimization]:
    """A better graph, or None; and what was done.

    Args:
        graph: what to improve.
        settings: see :func:`optimize`.
        in_place: whether ``graph`` itself is changed, once a changed copy has passed the checker.
            For compilers, which move calls without results: there the ranks' comparison is bound
            to the first collective's input.
    """
    with _without_collector():
        return _optimized_graph(graph, settings, in_place)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Pauses Python's garbage collector.

    Terms, nodes and numbers of a large graph make it search the whole heap again and again, for
    a third of the pass's time, and there is nothing to find: none of them is in a cycle.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _optimized_graph(
    graph: Graph, settings: Settings, in_place: bool
) -> tuple[Graph | None, Optimization]:
    about = Optimization()
    try:
        decided, about, settings = _followed(graph, settings)
    except _Unchanged as unchanged:
        about = unchanged.about
        about.reason = str(unchanged)
        _log.info("optimize: the graph stays as it is, as %s", about.reason)
        return _comparing(graph, settings, about, in_place), about
    except CheckFailed as error:
        # Not the user's mistake: the old graph is right, and somebody should hear of it.
        reason = f"the checker found the new graph to differ: {error}"
        about = Optimization(reason=reason)
        _log.warning("optimize: the graph stays as it is, as %s", reason)
        return _comparing(graph, settings, about, in_place), about
    about.changed = True
    new = decided.graph
    if in_place:
        # The same steps once more: names of nodes stay, which a copy's would not.
        p = _problem(graph, settings.costs())
        if settings.algebra and _simplified(graph, p, settings).done:
            p = _problem(graph, settings.costs())
        if decided.parts:
            _write_parts(graph, p, settings, decided.parts)
            p = _problem(graph, settings.costs())
        apply_schedule(graph, p, decided.order)
        new = graph
    if settings.agree != "never" and about.plan:
        _add_agreement(new, about.plan, settings.agree == "every", in_place)
    new.lint()
    return new, about


class _Unchanged(Exception):
    """Why a graph stays as it is, and what is known of it."""

    def __init__(self, about: Optimization, error: Unsupported) -> None:
        super().__init__(str(error))
        self.about = about


@dataclass(frozen=True)
class _Decision:
    """A graph that has passed the checker, and how it came to be.

    Attributes:
        graph: the new graph.
        order: of its nodes, as a problem numbers them.
        parts: by the number of a site's start, in how many parts it is made.
    """

    graph: Graph
    order: tuple[Step, ...]
    parts: tuple[tuple[int, int], ...]


# Some pairs of steps are right, and more than the checker can follow: then without these.
_LEFT_OUT = (((), ""), (("algebra",), "the rules"), (("chunk",), "parts"))


def _followed(graph: Graph, settings: Settings) -> tuple[_Decision, Optimization, Settings]:
    """What :func:`_decided` decides, without what the checker cannot follow."""
    why = ""
    for names, what in (*_LEFT_OUT, (("algebra", "chunk"), "the rules and parts")):
        off: dict[str, Any] = dict.fromkeys(names, False)
        used = replace(settings, **off)
        try:
            decided, about = _decided(graph, used)
        except CheckFailed as error:
            failed = error
            why = why or str(error)
            _log.info("optimize: something is left out, as the checker found %s", error)
            continue
        if what:
            about.missed.append(f"{what}, as the checker could not follow them: {why}")
        return decided, about, used
    raise failed


def _decided(graph: Graph, settings: Settings) -> tuple[_Decision, Optimization]:
    """What :func:`_decide` decides, without packed launches where these take too much memory."""
    for pack in (True, False):
        about = Optimization()
        try:
            return _decide(graph, settings, about, pack), about
        except _TooMuch:
            continue
        except Unsupported as error:
            raise _Unchanged(about, error) from error
    raise AssertionError("what is not packed cannot take too much")


def _comparing(
    given: Graph, settings: Settings, about: Optimization, in_place: bool
) -> Graph | None:
    """A graph in its own order that compares plans, where its ranks would not notice otherwise.

    Another rank, whose graph became another one, compares: this one must not start something else
    meanwhile, nor leave the other one to wait for it.
    """
    if settings.agree == "never":
        return None
    written = about.plan or _plan_as_written(given)
    plan = {group: lines for group, lines in written.items() if _tells_nothing_apart(group)}
    if not plan:
        return None
    graph = given if in_place else _copy_of(given)
    _add_agreement(graph, plan, settings.agree == "every", in_place)
    graph.lint()
    return graph


def _plan_as_written(graph: Graph) -> dict[str, list[str]]:
    """By group, the kinds of the collectives of a graph that could not be read."""
    plan: dict[str, list[str]] = {}
    for node in graph.nodes:
        op = op_of(node)
        form = op_info(op) if op is not None else None
        if form is None or form.kind == "wait_tensor":
            continue
        group = form.named(node.args, node.kwargs).get("group_name")
        if isinstance(group, str):
            plan.setdefault(group, []).append(f"{form.kind} of a graph that was left as it is")
    return plan


class _TooMuch(Exception):
    """What the copies of packed launches hold does not fit into memory."""


def _decide(given: Graph, settings: Settings, about: Optimization, pack: bool = True) -> _Decision:
    """A copy of a graph that is faster and has passed the checker, and the order of its nodes."""
    if not _has_collectives(given):
        raise Unsupported("it has no collectives")
    costs = settings.costs()
    graph = _copy_of(given)
    p = _problem(graph, costs)
    own = choose_plan(p, {}, {}, cap=1, memory=None, overlap=False)
    _describe(p, own, about)
    about.seconds_before, about.peak_before = own.before.total, own.peak_before
    about.launches_before = own.before.launches
    may_share = _bucket_keys(p, settings, costs, Optimization(), pack)[0] if settings.bucket else {}
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
    rules = _simplified(graph, p, settings) if settings.algebra else Simplified()
    simplified = rules.done
    about.missed += rules.missed
    if simplified:
        p = _problem(graph, costs)
    keys: dict[int, Hashable] = {}
    sizes: dict[int, float] = {}
    if settings.bucket:
        keys, sizes = _bucket_keys(p, settings, costs, about, pack)
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
            price += costs.link_of(group).seconds("all_gather_into_tensor", ranks, 40 * ranks)
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
            raise _TooMuch
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
    return _Decision(graph, plan.order, parts)


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
        graph = _copy_of(given)
        _write_parts(graph, _problem(graph, costs), settings, chosen)
        q = _problem(graph, costs)
        keys: dict[int, Hashable] = {}
        sizes: dict[int, float] = {}
        if settings.bucket:
            keys, sizes = _bucket_keys(q, settings, costs, Optimization(), pack)
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


def _write_parts(
    graph: Graph, p: Problem, settings: Settings, chosen: tuple[tuple[int, int], ...]
) -> None:
    by_start = {site.start: site for site in _sites(graph, p, settings).found}
    write_parts(graph, [(by_start[start], parts) for start, parts in chosen])


def _place_in(group: str) -> tuple[int, int]:
    return group_rank(group), group_size(group)


def _simplified(graph: Graph, p: Problem, settings: Settings) -> Simplified:
    return simplify(
        graph,
        p,
        settings.numerics,
        _same_bits(settings),
        group_rank,
        settings.spmd,
    )


def _copy_of(given: Graph) -> Graph:
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


def _problem(graph: Graph, costs: Costs) -> Problem:
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


def _bucket_keys(
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


def _add_agreement(
    graph: Graph, launches: _agreement.Launches, every: bool, in_place: bool
) -> None:
    """Has the ranks compare their plans before the first collective."""
    plan = _agreement.pack_plan(launches)
    # Which graph it is counts where groups compare by their store; else one text for one graph.
    by_group = every and all(has_cpu(group) for group in launches)
    number = "" if by_group else uuid.uuid4().hex[:16]
    first = next(n for n in graph.nodes if _is_collective(n))
    with graph.inserting_before(first):
        if in_place:
            tensor = first.all_input_nodes[0]
            op = torch.ops.c10d_ext_optimizer.agree_before_.default
            node = graph.call_function(op, (tensor, plan, every, number))
        else:
            op = torch.ops.c10d_ext_optimizer.agree.default
            node = graph.call_function(op, (plan, every, number))
    node.meta["val"] = None


def _tells_nothing_apart(group: str) -> bool:
    """Whether a group takes one collective for another, instead of raising."""
    try:
        return not is_fake(group) and not sums_in_rank_order(group) and group_size(group) > 1
    except ValueError:
        return False  # an unknown group, which its first collective will say


def _is_collective(node: Node) -> bool:
    op = op_of(node)
    form = op_info(op) if op is not None else None
    return form is not None and form.kind != "wait_tensor"
