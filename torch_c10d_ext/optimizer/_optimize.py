"""``optimize``: what users call, and what is done with what was decided."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from torch_c10d_ext._groups import (
    group_size,
    has_cpu,
    is_fake,
    process_group,
    sums_in_rank_order,
)
from torch_c10d_ext._op_info import op_info
from torch_c10d_ext.optimizer import _agreement
from torch_c10d_ext.optimizer._checker import CheckFailed
from torch_c10d_ext.optimizer._collectives import op_of
from torch_c10d_ext.optimizer._decide import (
    Decision,
    TooMuch,
    apply_rules,
    copy_of,
    decide,
    problem_of,
    write_sites,
)
from torch_c10d_ext.optimizer._problem import Unsupported
from torch_c10d_ext.optimizer._rewrite import apply_schedule
from torch_c10d_ext.optimizer._settings import Optimization, Settings
from torch_c10d_ext.report import Compute, Link

_log = logging.getLogger("torch_c10d_ext")

Program = TypeVar("Program", GraphModule, ExportedProgram)


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
        p = problem_of(graph, settings.costs())
        if settings.algebra and apply_rules(graph, p, settings).done:
            p = problem_of(graph, settings.costs())
        if decided.parts:
            write_sites(graph, p, settings, decided.parts)
            p = problem_of(graph, settings.costs())
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


# Some pairs of steps are right, and more than the checker can follow: then without these.
_LEFT_OUT = (((), ""), (("algebra",), "the rules"), (("chunk",), "parts"))


def _followed(graph: Graph, settings: Settings) -> tuple[Decision, Optimization, Settings]:
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


def _decided(graph: Graph, settings: Settings) -> tuple[Decision, Optimization]:
    """What :func:`decide` decides, without packed launches where these take too much memory."""
    for pack in (True, False):
        about = Optimization()
        try:
            return decide(graph, settings, about, pack), about
        except TooMuch:
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
    graph = given if in_place else copy_of(given)
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
