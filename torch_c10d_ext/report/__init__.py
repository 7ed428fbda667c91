"""What a traced graph communicates, and what of it computation hides: a table and a timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node

from torch_c10d_ext._groups import group_name, process_group
from torch_c10d_ext.report._costs import Compute, Link
from torch_c10d_ext.report._graph import Sizes
from torch_c10d_ext.report._schedule import Schedule
from torch_c10d_ext.report._timeline import CollectiveCall, CommunicationReport, Step
from torch_c10d_ext.report._topology import Topology

__all__ = [
    "CollectiveCall",
    "CommunicationReport",
    "Compute",
    "Link",
    "Step",
    "Topology",
    "communication_report",
]


def communication_report(
    graph: Any,
    *,
    link: Link | Topology = Link(),
    links: Mapping[Any, Link | Topology] | None = None,
    compute: Compute | Callable[[Node], float] = Compute(),
    sizes: Mapping[str, int] | None = None,
) -> CommunicationReport:
    """Lists the collectives of a traced graph: what each moves, what it costs, what hides it.

    Collectives are the ops of this package and of ``torch.distributed._functional_collectives``.
    Nothing runs where fake or meta tensors were traced, so a world of 1,000 ranks needs one
    process, with torch's fake process group, and no memory.

    Wire bytes are those that cross one rank's link in one direction, at the busiest rank; B are an
    input's bytes on a group of n ranks (Thakur, Rabenseifner and Gropp 2005; rings):

    ====================================  ======================================================
    ``all_reduce``                        2 (n - 1) / n B
    ``all_gather_into_tensor``            (n - 1) B
    ``all_gather``                        the result without this rank's rows
    ``reduce_scatter_tensor``             (n - 1) / n B
    ``reduce_scatter``                    B without this rank's result
    ``all_to_all_single``                 what goes to, or comes from, other ranks: the larger
    ``broadcast``, ``reduce``             B
    ``gather``                            (n - 1) B
    ``scatter``                           n - 1 times the result
    ``permute_tensor``                    B, or 0 where every rank keeps its own
    ``barrier``                           0: its latency alone
    ``isend``, ``irecv``                  B
    a batch of them                       what is sent, or received: the larger
    in place, ``out``, lists              as the op, summed over the list
    ====================================  ======================================================

    Times come from a model: nodes run in the graph's order on one stream; a collective starts when
    it is called, which keeps the rank for :attr:`Link.overhead`, and the link's earlier ones are
    done (each group has a link of its own, but where :attr:`Link.shared` says otherwise); a wait
    lasts until its collective is done. Views and allocations are free.

    Args:
        graph: a ``torch.fx.GraphModule``, a ``torch.fx.Graph`` or an ``ExportedProgram``, as
            make_fx, torch.export, Dynamo and AOTAutograd make them. The groups it names must
            exist. A nested graph (a loop's body, each branch, a checkpointed region) counts once
            per call.
        link: the cost of a collective; a :class:`Topology`: that on several hosts.
        links: the same for some groups, see :data:`torch_c10d_ext.functional.Group`.
        compute: the cost of everything else: rates, or a function of the node in seconds.
        sizes: values for symbolic sizes by name (``{"s77": 4096}``), where they shall not be those
            that were traced; sizes that depend on data (``u0``) have no others.

    Returns:
        A :class:`CommunicationReport`: one :class:`CollectiveCall` for each collective.

    Raises:
        ValueError: the graph's nodes do not say which tensors they stand for, as under plain
            ``torch.fx.symbolic_trace``; a size has no value, or ``sizes`` one that is not in the
            graph; unknown group or collective.
        TypeError: ``graph`` is none of the types above.

    Example, rank 0 of 1,000::

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1000)
        step = lambda x: fc.all_reduce(x, "sum") + 1
        graph = make_fx(step)(torch.empty(500, device="meta"))
        report = communication_report(graph, link=Link(latency=5e-6, bandwidth=1e9))
        report.calls[0].wire_bytes  # 2 * 999 / 1000 * 2000 bytes = 3996
        report.calls[0].seconds  # 5e-6 + 3996 / 1e9 = 8.996e-6
        report.save("step.svg")

    ``FakeStore`` is in ``torch.testing._internal.distributed.fake_pg``.
    """
    inner = getattr(graph, "graph", graph)
    if not isinstance(inner, Graph):
        raise TypeError(
            "communication_report: graph must be a torch.fx.GraphModule, torch.fx.Graph or "
            f"ExportedProgram, got {type(graph).__name__}"
        )
    if not any("val" in node.meta or "example_value" in node.meta for node in inner.nodes):
        raise ValueError(
            'communication_report: nodes must carry tensors in meta["val"] or '
            f'meta["example_value"], got {len(inner.nodes)} nodes without; trace with make_fx, '
            "torch.export or torch.compile"
        )
    by_name = {group_name(group): cost for group, cost in (links or {}).items()}
    for name in by_name:
        process_group(name)  # a misspelt name would leave its link unused
    known = Sizes(sizes or {})
    report = Schedule(link, by_name, compute, known).run(inner)
    unknown = sorted(set(known.given) - known.seen)
    if unknown:
        raise ValueError(
            "communication_report: sizes must name symbolic sizes that its times depend on, got "
            f"{', '.join(unknown)}; there is {', '.join(sorted(known.seen)) or 'none'}"
        )
    return report
