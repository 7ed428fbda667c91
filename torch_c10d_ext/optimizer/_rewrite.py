"""Writes a schedule into a graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph

from torch_c10d_ext.optimizer._buckets import write_bucket
from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Step


def apply_schedule(graph: Graph, p: Problem, order: Sequence[Step]) -> None:
    """Puts the nodes of a graph into an order, a bucket in place of its members.

    Placeholders and the output stay first and last.
    """
    output = p.nodes[-1]
    for step in order:
        if isinstance(step, tuple):
            members = [p.collectives[i] for i in step]
            with graph.inserting_before(output):
                results = write_bucket(graph, members)
            for collective, result in zip(members, results, strict=True):
                node = collective.node
                node.replace_all_uses_with(result, propagate_meta=False)
                result.meta.setdefault("from", node.name)
        elif p.nodes[step].op != "placeholder":
            output.prepend(p.nodes[step])
    for step in order:
        if isinstance(step, tuple):
            for i in step:
                graph.erase_node(p.nodes[i])
