"""What a node of a graph communicates: one record per collective, from the node alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from torch_c10d_ext._op_info import OpInfo, Pattern, traffic_of

OpOverload: Any = type(torch.ops.aten.add.Tensor)
OpOverloadPacket: Any = type(torch.ops.aten.add)


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
    form: OpInfo
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


def read_collective(node: Node, form: OpInfo, roles: dict[str, int], size_of: Any) -> Collective:
    """The record of a node that calls an op.

    Raises:
        ValueError: the group is not a name, or unknown.
    """
    arguments = form.named(node.args, node.kwargs)
    group = arguments.get("group_name")
    if not isinstance(group, str):
        raise ValueError(f"the group of {node.name} must be a name, got {group!r}")
    ranks = size_of(group)
    inputs: list[Node] = []
    for name in form.tensors:
        value = arguments.get(name)
        inputs.extend(v for v in (value if isinstance(value, list | tuple) else [value]) if v)
    rest = tuple(
        (name, value if not isinstance(value, list) else tuple(value))
        for name, value in sorted(arguments.items())
        if name not in form.tensors and name != "group_name"
    )
    even = False
    if form.kind == "all_to_all_single":
        names = ("output_split_sizes", "input_split_sizes")
        splits = {s for name in names for s in _list(arguments.get(name))}
        known = {s for s in splits if isinstance(s, int)}
        even = len(splits) <= 1 and splits == known
        symmetric = even or not known
    else:
        symmetric = traffic_of(form.kind).even
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
    traffic = traffic_of(kind)
    if not traffic.even and traffic.pattern not in (Pattern.GATHER, Pattern.SCATTER):
        # All ranks know the larger buffer, and what the others have of it.
        larger = result if traffic.pattern is Pattern.ALL_GATHER else given
        return traffic.wire_of_larger(ranks, larger)
    return float(traffic.wire(ranks, given, result))


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
