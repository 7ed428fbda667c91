"""Nodes of graphs as the checker reads them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import Node

SPACES = ("c10d_ext", "_c10d_functional")


@functools.cache
def alias_names(op: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments that an op writes, and those that its result may be a view of."""
    schema = op._schema
    aliases = [(a.name, a.alias_info) for a in schema.arguments if a.alias_info is not None]
    written = tuple(name for name, info in aliases if info.is_write)
    if not any(r.alias_info is not None for r in schema.returns):
        return written, ()
    return written, tuple(name for name, info in aliases if not info.is_write)


@functools.cache
def text_of(op: Any) -> str:
    return str(op)


def value_of(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors_in(v)]
    return []


def nodes_in(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    if isinstance(value, dict):
        return [n for v in value.values() for n in nodes_in(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in nodes_in(v)]
    return []


def is_packet(target: Any) -> bool:
    return hasattr(target, "overloads") and hasattr(target, "_qualified_op_name")


def is_collective_target(node: Node) -> bool:
    return text_of(node.target).startswith(SPACES)


def is_higher_order(target: Any) -> bool:
    return hasattr(target, "py_kernels") and not hasattr(target, "_schema")


def carries_collective(node: Node) -> bool:
    """Whether an op that carries another one, or a graph, may communicate."""
    if any(str(a).startswith(SPACES) for a in node.args if hasattr(a, "_schema")):
        return True
    return any(n.op == "get_attr" and not tensors_in(value_of(n)) for n in node.all_input_nodes)


def target_name(node: Node) -> str:
    target = node.target
    return str(getattr(target, "__module__", "")) + "." + str(getattr(target, "__name__", target))
