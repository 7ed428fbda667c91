"""Writes a schedule into a graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph

from torch_c10d_ext.optimizer._buckets import Landing, write_bucket
from torch_c10d_ext.optimizer._problem import Problem
from torch_c10d_ext.optimizer._schedule import Step


def apply_schedule(graph: Graph, p: Problem, order: Sequence[Step]) -> None:
    """Puts the nodes of a graph into an order, a bucket in place of its members.

    Placeholders and the output stay first and last.
    """
    output = p.nodes[-1]
    landings: dict[int, Landing] = {}
    for step in order:
        if isinstance(step, tuple):
            members = [p.collectives[i] for i in step]
            with graph.inserting_before(output):
                made = write_bucket(graph, members)
            for i, landing in zip(step, made, strict=True):
                landings[i] = landing
                landing.replace_start()
            continue
        node = p.nodes[step]
        if node.op != "placeholder":
            output.prepend(node)
        start = p.started_by.get(step)
        if start in landings:
            with graph.inserting_before(output):
                landings[start].replace_wait(node)
    for i in landings:
        graph.erase_node(p.nodes[i])
