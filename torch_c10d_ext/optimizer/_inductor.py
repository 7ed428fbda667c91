"""The optimizer in Inductor: a pass over each graph, and one over its kernels after fusion.

The graph pass decides which collectives there are, and the order that they start in. Inductor keeps
that order, but moves computations between them when it orders kernels for memory. So the second
pass moves starts up and waits down once more, among fused kernels, and leaves the order of starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from torch_c10d_ext._inductor import _fingerprint
from torch_c10d_ext._op_info import op_info
from torch_c10d_ext.optimizer._collectives import op_of, value_of, wire_bytes
from torch_c10d_ext.optimizer._costs import UNKNOWN_SIZE, Costs
from torch_c10d_ext.optimizer._optimize import optimized_graph
from torch_c10d_ext.optimizer._plan import choose_plan
from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._settings import DEFAULT_MEMORY, Settings
from torch_c10d_ext.report import Compute

_log = logging.getLogger("torch_c10d_ext")


class GraphPass(CustomGraphPass):
    """The optimizer as Inductor's ``post_grad_custom_post_pass``, behind a pass of the user's.

    Args:
        settings: see :func:`torch_c10d_ext.optimize`.
        before: the user's passes, which come first.
        explain: whether each graph's report is printed.
    """

    def __init__(
        self, settings: Settings, before: Sequence[Callable[[Graph], None]], explain: bool
    ) -> None:
        self.settings, self.before, self.explain = settings, tuple(before), explain

    def __call__(self, graph: Graph) -> None:
        from torch._inductor import config
        from torch._inductor.virtualized import V

        for each in self.before:
            each(graph)
        settings = self.settings
        if config.cpp_wrapper or V.aot_compilation:
            # Code without Python cannot call what compares plans.
            settings = settings.without_agreement()
        _, about = optimized_graph(graph, settings, in_place=True)
        if self.explain:
            print(about)

    def uuid(self) -> Any | None:
        key = self.settings.key()
        if key is None:
            return None
        theirs = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.before]
        if not all(theirs):
            return None  # as Inductor has it: what it cannot name it does not cache
        return ("torch_c10d_ext.optimizer", _fingerprint(), key, *theirs)


class KernelPass:
    """The optimizer among ``reorder_for_compute_comm_overlap_passes``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, kernels: list[Any]) -> list[Any]:
        try:
            order = _order_of(kernels, self.settings)
        except Exception as error:
            # Inductor's own structures, which change between versions: the old order is right.
            _log.warning("optimize: the kernels stay in their order, as %r", error)
            return kernels
        return kernels if order is None else [kernels[i] for i in order]


def _order_of(kernels: list[Any], settings: Settings) -> list[int] | None:
    """A better order of kernels, or None."""
    costs = settings.costs()
    p = _problem_of(kernels, costs)
    if not p.collectives:
        return None
    own = choose_plan(p, {}, {}, cap=1, memory=None, overlap=False)
    budget = settings.memory_budget
    memory = own.peak_before * DEFAULT_MEMORY if budget is None else float(budget)
    plan = choose_plan(p, {}, {}, cap=1, memory=memory)
    if not plan.changed:
        return None
    order = [i for i in plan.order if isinstance(i, int)]
    if sorted(order) != list(range(len(kernels))):
        raise ValueError("the order must hold each kernel once")
    place = {i: k for k, i in enumerate(order)}
    for i in order:
        if any(place[j] > place[i] for j in p.follows[i]):
            raise ValueError("the order must keep what kernels depend on")
    return order


def _problem_of(kernels: list[Any], costs: Costs) -> Problem:
    """The kernels as a scheduling problem, in which collectives keep their order."""
    from torch._inductor import ir

    p = Problem(fixed_order=True)
    made_by: dict[str, int] = {}  # by the name of a buffer
    storage: dict[str, int] = {}
    last_start: int | None = None
    flying: dict[str, int] = {}  # by the name of a buffer that is in flight
    for i, kernel in enumerate(kernels):
        p.nodes.append(kernel)
        p.seconds.append(0.0)
        p.made.append([])
        p.used.append([])
        follows = {
            made_by[d.name]
            for d in (*kernel.unmet_dependencies, *kernel.read_writes.reads)
            if d.name in made_by
        }
        kinds = [n.node for n in kernel.get_nodes()]
        wait = next((k for k in kinds if isinstance(k, ir._WaitKernel)), None)
        # Inductor's wait is a collective's kernel, too.
        starts_here = [k for k in kinds if isinstance(k, ir._CollectiveKernel) and k is not wait]
        start = starts_here[0] if starts_here else None
        part = next((k for k in kinds if isinstance(k, ir.MultiOutput)), None)
        buffers = kernel.get_outputs()
        reads = [d.name for d in kernel.read_writes.reads]
        maker = i
        if start is not None:
            if last_start is not None:
                follows.add(last_start)
            last_start = i
            _add_collective(p, i, start, costs)
            names = [b.get_name() for b in buffers]
            names += [m for b in buffers for m in b.get_mutations()]
            flying.update(dict.fromkeys(names, i))
        elif part is not None and any(name in flying for name in reads):
            # One result of a launch of several, which made it.
            maker = next(flying[name] for name in reads if name in flying)
            flying.update((b.get_name(), maker) for b in buffers)
        elif wait is not None:
            starts = [flying[name] for name in reads if name in flying]
            if starts:
                p.started_by[i] = max(starts)
                follows.add(max(starts))
        else:
            p.seconds[i] = _seconds_of(kernel, costs)
        p.idle.append(wait is not None or maker != i)
        for buffer in buffers:
            name = buffer.get_name()
            made_by[name] = i
            mutated = [m for m in buffer.get_mutations() if m in storage]
            if mutated:
                storage[name] = storage[mutated[0]]
                continue
            if buffer.get_mutations() or wait is not None:
                continue
            s = storage[name] = len(p.size)
            p.size.append(_bytes_of(buffer))
            p.maker.append(maker)
            p.users.append([maker])
            p.made[maker].append(s)
            p.used[maker].append(s)
        used = {storage[n] for n in (*reads, *(b.get_name() for b in buffers)) if n in storage}
        if i in p.started_by:
            used |= set(p.used[p.started_by[i]])
        for s in sorted(used - set(p.used[i])):
            p.users[s].append(i)
            p.used[i].append(s)
        follows.discard(i)
        p.follows.append(sorted(follows))
    _end(p, kernels, storage)
    return p


def _end(p: Problem, kernels: list[Any], storage: dict[str, int]) -> None:
    """A last node, which needs what the graph returns."""
    from torch._inductor.virtualized import V

    n = len(kernels)
    p.nodes.append(None)  # type: ignore[arg-type]
    p.made.append([])
    p.used.append([])
    p.idle.append(True)
    p.seconds.append(0.0)
    p.follows.append(list(range(n)))
    returned = {storage[name] for name in V.graph.get_output_names() if name in storage}
    for s in returned:
        p.users[s].append(n)
        p.used[n].append(s)


def _add_collective(p: Problem, i: int, kernel: Any, costs: Costs) -> None:
    from torch_c10d_ext._groups import group_size

    node = _fx_node(kernel)
    op = op_of(node) if node is not None else None
    form = op_info(op) if op is not None else None
    group = next(
        a for a in reversed([*kernel.constant_args, *kernel.kwargs.values()]) if isinstance(a, str)
    )
    ranks = group_size(group)
    if node is not None and form is not None:
        sent = costs.bytes_of([value_of(n) for n in node.all_input_nodes])
        wire = wire_bytes(form.kind, ranks, sent, costs.bytes_of(value_of(node)))
        kind = form.kind
    else:
        kind = str(kernel.op_overload).split(".")[1]
        wire = float(sum(_bytes_of(b) for b in kernel.inputs))
    p.charge(i, costs.link_of(group), kind, ranks, wire, costs.lane_of(group))
    p.collectives[i] = kernel


def _fx_node(kernel: Any) -> Node | None:
    """The node of the graph that a collective's kernel was made of."""
    for node in kernel.origins:
        op = op_of(node)
        form = op_info(op) if op is not None else None
        if form is not None and form.kind != "wait_tensor":
            return node  # type: ignore[no-any-return]
    return None


def _seconds_of(kernel: Any, costs: Costs) -> float:
    """How long a kernel computes: what it reads and writes, and the products it is made of."""
    nodes = {n for each in kernel.get_nodes() if each.node for n in each.node.get_origins()}
    if not isinstance(costs.compute, Compute):
        return sum(float(costs.compute(n)) for n in nodes)
    moved = float(kernel.get_read_write_buffers_sizes())
    flops = sum(costs.flops(n, op_of(n)) for n in nodes if op_of(n) is not None)
    return max(moved / costs.compute.memory_bandwidth, flops / costs.compute.flops)


def _bytes_of(buffer: Any) -> int:
    from torch._inductor import ir

    inner = getattr(buffer, "node", buffer)
    if not isinstance(getattr(inner, "layout", None), ir.Layout):
        return 0  # a kernel whose results have names of their own
    count = 1
    for each in inner.get_size():
        unknown = getattr(each, "free_symbols", ())
        count *= int(each.subs(dict.fromkeys(unknown, UNKNOWN_SIZE)) if unknown else each)
    return count * int(inner.get_dtype().itemsize)


def make_options(given: dict[str, Any], made: Settings, explain: bool) -> dict[str, Any]:
    """Options for ``torch.compile``: the user's, and the optimizer's passes behind theirs."""
    from torch._inductor import config

    own = given.get("post_grad_custom_post_pass", config.post_grad_custom_post_pass)
    before = [] if own is None else list(own) if isinstance(own, list | tuple) else [own]
    # What communication_options made before is not run twice.
    before = [each for each in before if not isinstance(each, GraphPass)]
    passes = given.get(
        "reorder_for_compute_comm_overlap_passes",
        config.reorder_for_compute_comm_overlap_passes
        if config.reorder_for_compute_comm_overlap
        else [],
    )
    passes = [each for each in passes if not isinstance(each, KernelPass)]
    given["post_grad_custom_post_pass"] = GraphPass(made, before, explain)
    if made.overlap:
        given["reorder_for_compute_comm_overlap"] = True
        given["reorder_for_compute_comm_overlap_passes"] = [*passes, KernelPass(made)]
    return given
