"""What a node of a graph communicates: one record per collective, from the node alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

OpOverload: Any = type(torch.ops.aten.add.Tensor)
OpOverloadPacket: Any = type(torch.ops.aten.add)

NAMESPACES = ("c10d_ext", "_c10d_functional", "_c10d_functional_autograd")

# Ops that end a collective, and ops of the namespaces that send nothing.
WAITS = frozenset({"wait_tensor"})
SILENT = frozenset({"copy_to_group"})

# Kinds whose size is the same on every rank, whatever the rank.
SYMMETRIC = frozenset(
    {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce"}
    | {"permute_tensor"}
)
# Kinds that may be moved, though their sizes may differ between ranks.
UNEVEN = frozenset({"all_to_all_single", "all_gather", "reduce_scatter", "gather", "scatter"})


@dataclass(frozen=True)
class Form:
    """How an op is called: ``all_reduce_coalesced_`` is of kind ``all_reduce``."""

    kind: str
    coalesced: bool  # takes and returns lists
    writes: bool  # in place, or into ``out``
    space: str


@dataclass(frozen=True, eq=False)
class Collective:
    """One call of a collective.

    Attributes:
        node: the call.
        form: the op.
        group: the group's registered name.
        role: the number of the group among the graph's groups, by first use. Ranks that run one
            program agree on it, where they do not on the name.
        ranks: the size of the group.
        inputs: the tensors that it reads.
        arguments: all other arguments, by name, the group left out.
        symmetric: whether what is known of its size here is known alike on every rank.
        even: whether an ``all_to_all_single`` sends equal parts, by numbers in the graph.
    """

    node: Node
    form: Form
    group: str
    role: int
    ranks: int
    inputs: tuple[Node, ...]
    arguments: tuple[tuple[str, Any], ...]
    symmetric: bool
    even: bool

    @property
    def kind(self) -> str:
        return self.form.kind

    def argument(self, name: str) -> Any:
        return dict(self.arguments).get(name)

    def describe(self) -> str:
        """Kind, group role, arguments and shapes: equal on all ranks that run one program."""
        shapes = "+".join(shape_text(n) for n in self.inputs)
        plain = ",".join(
            f"{k}={v}"
            for k, v in self.arguments
            if v is not None and k not in ("input_split_sizes", "output_split_sizes", "sizes")
        )
        size = shapes if self.symmetric else ",".join(dtype_text(n) for n in self.inputs)
        return f"{self.kind}({plain}) {size} on group #{self.role} of {self.ranks}"


def op_of(node: Node) -> Any:
    """The OpOverload that a node calls, or None."""
    if node.op != "call_function":
        return None
    target = node.target
    if isinstance(target, OpOverload):
        return target
    if isinstance(target, OpOverloadPacket):
        return getattr(target, "default", None)
    return None


@functools.cache
def form_of(op: Any) -> Form | None:
    """The form of an op of the communicating namespaces; None for any other op."""
    if op.namespace not in NAMESPACES:
        return None
    name = op._schema.name.split("::")[1]
    writes = False
    if name.endswith("_"):
        writes, name = True, name[:-1]
    elif name.endswith("_out"):
        writes, name = True, name[:-4]
    coalesced = name.endswith("_coalesced")
    return Form(name.removesuffix("_coalesced"), coalesced, writes, op.namespace)


@functools.cache
def _argument_names(op: Any) -> tuple[tuple[str, bool], ...]:
    return tuple((a.name, "Tensor" in str(a.type)) for a in op._schema.arguments)


def arguments_of(node: Node, op: Any) -> dict[str, Any]:
    """A call's arguments by name, defaults left out."""
    names = [name for name, _ in _argument_names(op)]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def read_collective(
    node: Node, op: Any, form: Form, roles: dict[str, int], size_of: Any
) -> Collective:
    """The record of a node that calls ``op``.

    Raises:
        ValueError: the group is not a name, or unknown.
    """
    arguments = arguments_of(node, op)
    group = arguments.get("group_name")
    if not isinstance(group, str):
        raise ValueError(f"the group of {node.name} must be a name, got {group!r}")
    ranks = size_of(group)
    tensors = [name for name, is_tensor in _argument_names(op) if is_tensor]
    inputs: list[Node] = []
    for name in tensors:
        value = arguments.get(name)
        inputs.extend(v for v in (value if isinstance(value, list | tuple) else [value]) if v)
    rest = tuple(
        (name, value if not isinstance(value, list) else tuple(value))
        for name, value in sorted(arguments.items())
        if name not in tensors and name != "group_name"
    )
    even = False
    if form.kind == "all_to_all_single":
        names = ("output_split_sizes", "input_split_sizes")
        splits = {s for name in names for s in _list(arguments.get(name))}
        known = {s for s in splits if isinstance(s, int)}
        even = len(splits) <= 1 and splits == known
        symmetric = even or not known
    else:
        symmetric = form.kind in SYMMETRIC
    role = roles.setdefault(group, len(roles))
    return Collective(node, form, group, role, ranks, tuple(inputs), rest, symmetric, even)


def wire_bytes(kind: str, ranks: int, given: float, result: float) -> float:
    """Bytes over one rank's link in one direction; the same number on every rank.

    Args:
        kind: of the collective.
        ranks: of the group.
        given: bytes of one rank's input.
        result: bytes of one rank's result.

    As :func:`torch_c10d_ext.communication_report` counts, where all ranks move the same. Where they
    do not, what a rank in the middle moves: a decision must not depend on the rank that takes it.
    """
    if ranks == 1:
        return 0.0
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks * given
    if kind == "all_gather_into_tensor":
        return (ranks - 1) * given
    if kind == "all_gather":
        return (ranks - 1) / ranks * result
    if kind in ("reduce_scatter_tensor", "reduce_scatter", "all_to_all_single"):
        return (ranks - 1) / ranks * given
    if kind == "gather":
        return (ranks - 1) * given
    if kind == "scatter":
        return (ranks - 1) * result
    return given


def shape_text(node: Node) -> str:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return "?"
    sizes = ",".join(str(s) if isinstance(s, int) else "s" for s in value.shape)
    return f"{dtype_text(node)}[{sizes}]"


def dtype_text(node: Node) -> str:
    value = value_of(node)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "?"


def value_of(node: Node) -> Any:
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return []


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
