"""What the nodes of a traced graph are, and how many bytes and operations they take."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_c10d_ext._groups import group_name, process_group
from torch_c10d_ext._op_info import NAMESPACES, TRAFFIC, OpInfo, op_info
from torch_c10d_ext.report._flops import flops

# --- the graph -----------------------------------------------------------------------------------


def flat_nodes(graph: Graph, base: dict[Node, Node]) -> Iterator[Node]:
    """The graph's nodes in order, with the nodes of a nested graph in place of its call.

    What goes into one nested graph, and comes out of it, is put into ``base``.
    """
    for node in graph.nodes:
        inside = [] if node.op in ("get_attr", "output") else _graphs_called(node)
        if not inside:
            yield node
        if len(inside) == 1:
            placeholders = inside[0].find_nodes(op="placeholder")
            inputs = [n for n in node.args if isinstance(n, Node) and n.op != "get_attr"]
            base.update((p, base.get(n, n)) for p, n in zip(placeholders, inputs, strict=False))
        for nested in inside:
            yield from flat_nodes(nested, base)
        if len(inside) == 1:
            results = as_list(inside[0].output_node().args[0])
            for user in node.users:
                if user.target is operator.getitem:
                    result = results[user.args[1]]
                    base[user] = base.get(result, result)


def _graphs_called(node: Node) -> list[Graph]:
    root = node.graph.owning_module
    names = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    names += [node.target] if node.op == "call_module" else []
    found = [_attribute(root, str(name)) for name in names]
    return [module.graph for module in found if isinstance(module, GraphModule)]


def _attribute(root: Any, path: str) -> Any:
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), root)


def value_of(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def op_name(target: Any) -> str:
    """``mm`` for aten.mm.default, torch.mm and the method mm."""
    return target if isinstance(target, str) else getattr(target, "__name__", "").split(".")[0]


def schema_of(target: Any) -> Any:
    """The schema of an op, which Dynamo may call without naming the overload."""
    return getattr(getattr(target, "default", target), "_schema", None)


@dataclass
class Call:
    """A call of an op of this package or of torch's functional collectives."""

    info: OpInfo
    arguments: dict[str, Any]
    inputs: list[Node]
    written: list[Node]  # the arguments that it writes

    @property
    def op(self) -> str:
        return self.info.name

    @staticmethod
    def of(node: Node) -> Call | None:
        target, args = node.target, node.args
        if op_name(target) == "with_effects":  # token, op, its arguments
            _, target, *args = args
        if not str(target).startswith(tuple(f"{name}." for name in NAMESPACES)):
            return None
        info = op_info(getattr(target, "default", target))  # Dynamo may name no overload
        assert info is not None
        named = info.named(tuple(args), node.kwargs)
        return Call(
            info,
            named,
            as_list(named[info.tensors[0]]),
            [node for name in info.written for node in as_list(named[name])],
        )

    @property
    def group(self) -> str | None:
        """The group's name; None where the op does not communicate."""
        name = self.arguments.get(self.info.group) if self.info.group else None
        if name is None:
            return None
        name = value_of(name) if isinstance(name, Node) else name
        return name if isinstance(name, str) else group_name(name)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# Not computations, though they have results and their schemas name no alias.
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")


def is_view(node: Node) -> bool:
    """Whether the node's result is another view of its first input's memory."""
    inputs = node.all_input_nodes
    if not inputs:
        return False
    if node.target is operator.getitem and isinstance(value_of(inputs[0]), list | tuple):
        return True
    schema = schema_of(node.target)
    if schema is not None:
        first = schema.arguments[0].alias_info if schema.arguments else None
        return first is not None and not first.is_write
    # Dynamo's functions and methods have no schema, but views share their fake storage. So do
    # add_ and operator.iadd.
    if op_name(node.target).endswith("_") or op_name(node.target).startswith("i"):
        return False
    return _shares_storage(node, inputs[0])


def is_in_place(node: Node) -> bool:
    """Whether the node's result is its first input, written."""
    schema = schema_of(node.target)
    if schema is not None:
        first = schema.arguments[0].alias_info if schema.arguments else None
        return first is not None and first.is_write
    inputs = node.all_input_nodes
    return bool(inputs) and _shares_storage(node, inputs[0])


def _shares_storage(a: Node, b: Node) -> bool:
    first, second = ({t.untyped_storage()._cdata for t in tensors_in(value_of(n))} for n in (a, b))
    return bool(first & second)


# --- bytes ---------------------------------------------------------------------------------------


class NoValue(ValueError):
    """A size that depends on data, and is not given."""


@dataclass
class Sizes:
    """Numbers for symbolic sizes: those given by name, else those that were traced."""

    given: Mapping[str, int]
    seen: set[str] = field(default_factory=set)
    traced: dict[Any, Any] = field(default_factory=dict)

    def expression(self, size: Any) -> Any:
        import sympy  # type: ignore[import-untyped]  # slow, and by now imported by the tracer

        if isinstance(size, Node):
            size = value_of(size)
        if not isinstance(size, torch.SymInt):
            return sympy.Integer(size)
        env = size.node.shape_env
        # Named differently by the versions of torch.
        backed = getattr(env, "backed_var_to_val", None)
        self.traced = env.var_to_val if backed is None else backed
        return size.node.expr

    def number(self, expression: Any) -> float:
        if expression.is_number:
            return float(expression)
        self.seen.update(symbol.name for symbol in expression.free_symbols)
        values = {
            symbol: self.given.get(symbol.name, self.traced.get(symbol))
            for symbol in expression.free_symbols
        }
        missing = sorted(symbol.name for symbol, value in values.items() if value is None)
        if missing:
            raise NoValue(
                "communication_report: sizes must hold a value for every size that depends on "
                f"data, got none for {', '.join(missing)}; pass sizes={{{missing[0]!r}: ...}}"
            )
        return float(expression.subs(values))

    def bytes_of(self, value: Any) -> Any:
        tensors = tensors_in(value)
        return sum(self.expression(t.numel()) * t.dtype.itemsize for t in tensors)

    def count(self, size: Any) -> float:
        return float(size) if isinstance(size, int) else self.number(self.expression(size))

    def amount(self, value: Any) -> float:
        """The bytes of a value's tensors; NaN where a size that depends on data has no value."""
        with contextlib.suppress(NoValue):
            return sum(self.count(t.numel()) * t.dtype.itemsize for t in tensors_in(value))
        return math.nan


def wire_of(call: Call, sizes: Sizes, result: Any, group: str) -> Any:
    """The bytes over the busiest rank's link, as an expression; the table of the docstring."""
    import sympy

    pg = process_group(group)
    n = pg.size()
    if n == 1:
        return sympy.Integer(0)
    values = [value_of(node) for node in call.inputs]
    b, out = (sympy.sympify(sizes.bytes_of(value)) for value in (values, result))
    op = call.info.kind
    # Of these the arguments tell who gets how much: the table's row is that of equal parts.
    if op == "all_to_all_single":
        rank = pg.rank()
        sent, received = (
            [sizes.expression(size) for size in call.arguments[name]]
            for name in ("input_split_sizes", "output_split_sizes")
        )
        row = values[0].dtype.itemsize
        for size in values[0].shape[1:]:
            row = row * sizes.expression(size)
        own = sent[rank]
        return row * sympy.Max(sum(sent) - own, sum(received) - own)
    if op in ("batch_isend_irecv", "batch_p2p_ops"):
        sends = call.arguments.get("sends") or [o == "isend" for o in call.arguments["op_list"]]
        outgoing = sum(
            (sizes.bytes_of(value) for value, sent in zip(values, sends, strict=True) if sent),
            sympy.Integer(0),
        )
        return sympy.Max(outgoing, b - outgoing)
    if op == "permute_tensor" and list(call.arguments["src_dst"]) == list(range(n)):
        return sympy.Integer(0)
    if op in TRAFFIC:
        return TRAFFIC[op].wire(n, b, out)
    raise ValueError(
        f"communication_report: a collective must have a row of torch_c10d_ext._op_info.TRAFFIC, "
        f"got {call.op}"
    )


# The operand whose last dimension is contracted.
_PRODUCTS = dict(mm=0, bmm=0, matmul=0, linear=0, dot=0, mv=0, addmm=1, baddbmm=1)


def bytes_moved(sizes: Sizes, node: Node) -> float:
    """The bytes that a computation reads and writes."""
    values = [node, *node.all_input_nodes]
    tensors = [tensor for n in values for tensor in tensors_in(value_of(n))]
    return sum(sizes.count(t.numel()) * t.dtype.itemsize for t in tensors)


def operations_of(sizes: Sizes, node: Node) -> float:
    """The floating-point operations of a computation."""
    counted = flops(node, node.target, value_of, sizes.count)
    if counted:
        return counted
    # Dynamo's functions and methods, which are no ops.
    operand = _PRODUCTS.get(op_name(node.target))
    if operand is not None and operand < len(node.args) and isinstance(node.args[operand], Node):
        contracted = value_of(node.args[operand]).shape[-1]
        result = sum(sizes.count(t.numel()) for t in tensors_in(value_of(node)))
        return 2 * result * sizes.count(contracted)
    return 0.0
