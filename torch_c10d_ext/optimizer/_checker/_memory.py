"""What a graph holds at once: counted anew, and not as the scheduler counts it."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from torch_c10d_ext.optimizer._checker._nodes import SPACES, nodes_in, tensors_in, text_of, value_of


def peak_bytes(graph: Graph, bytes_of: Callable[[torch.Tensor], int]) -> float:
    """The most bytes that results of nodes hold at once, run in the graph's order.

    A storage lives from the node that makes it to the last one that uses it or a view of it, or
    that waits for a collective which reads it.
    """
    storage_of: dict[Node, set[int]] = {}
    size: dict[int, int] = {}
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    caller: set[int] = set()
    reads: dict[int, set[int]] = {}  # what a collective in flight reads, by what it writes
    nodes = list(graph.nodes)
    for at, node in enumerate(nodes):
        mine: set[int] = set()
        given = node.all_input_nodes
        for tensor in tensors_in(value_of(node)):
            address = tensor.untyped_storage()._cdata
            if node.op in ("placeholder", "get_attr"):
                caller.add(address)
            elif address not in born and address not in caller:
                op = node.target
                alias = getattr(op, "_schema", None) is not None and any(
                    r.alias_info is not None for r in op._schema.returns
                )
                is_wait = "wait_tensor" in text_of(op)
                if (alias or is_wait or op is operator.getitem) and any(
                    storage_of[n] for n in given
                ):
                    for n in given:
                        mine |= storage_of[n]
                    continue
                born[address] = at
                size[address] = bytes_of(tensor)
            mine.add(address)
        storage_of[node] = mine
        used = set(mine)
        for n in given:
            used |= storage_of[n]
        if node.op == "call_function" and text_of(node.target).startswith(SPACES):
            if "wait_tensor" in text_of(node.target):
                for address in set(used):
                    used |= reads.get(address, set())
            else:
                several = isinstance(value_of(node), list | tuple)
                listed = nodes_in(node.args[0]) if several else []
                for k, tensor in enumerate(tensors_in(value_of(node))):
                    # A wait for one result of a launch of several ends what that one read.
                    sources = [listed[k]] if k < len(listed) else given
                    held = set().union(*(storage_of[n] for n in sources)) if sources else set()
                    reads[tensor.untyped_storage()._cdata] = held
        for address in used:
            dies[address] = at
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}
    for address, at in born.items():
        starts[at] = starts.get(at, 0) + size[address]
        ends[dies[address]] = ends.get(dies[address], 0) + size[address]
    live = peak = 0
    for at in range(len(nodes)):
        live += starts.get(at, 0)
        peak = max(peak, live)
        live -= ends.get(at, 0)
    return peak
