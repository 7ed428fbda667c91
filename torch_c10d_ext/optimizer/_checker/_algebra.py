"""The checker's rules of algebra: a collective of something that is another collective of it.

``repeated``, ``elementwise``, ``own part``, ``gathered``, ``part of sum``, ``constant`` and
``sums`` of the table in :mod:`torch_c10d_ext.optimizer._checker`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Node

from torch_c10d_ext.optimizer._checker._nodes import text_of, value_of
from torch_c10d_ext.optimizer._checker._terms import Terms, Type, type_of

_SUM = ("str", repr("sum"))
_REPEATABLE = tuple(("str", repr(op)) for op in ("min", "max", "band", "bor"))
_CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
_EXACT = tuple(
    f"aten.{name}"
    for name in (
        *("neg.default", "abs.default", "relu.default", "sign.default"),
        *("mul.Tensor", "add.Tensor", "sub.Tensor", "div.Tensor"),
    )
)
FILLS = {
    "aten.zeros.default": 0,
    "aten.zeros_like.default": 0,
    "aten.ones.default": 1,
    "aten.ones_like.default": 1,
    "aten.full.default": None,
    "aten.full_like.default": None,
}


class Algebra:
    """The rules, and which collectives of one graph they have replaced.

    Each gives the term of a node, or None where it does not hold.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.replaced: dict[int, set[int]] = {}  # by which collectives

    def rewritten(self, node: Node, op: Any, key: Any) -> int:
        """The term of a computation, its collectives moved outwards by the rules."""
        terms = self.terms
        values, named = key[1], key[2]
        moved = (
            terms.collective(values[0], "all_gather_into_tensor", "broadcast") if values else None
        )
        is_cast = text_of(op) in _CASTS and all(k == "dtype" for k, _ in named)
        is_exact = text_of(op) in _EXACT and not named and all(type(v) is tuple for v in values[1:])
        is_exact = is_exact and all(v[0] in ("int", "float") for v in values[1:])
        if moved is not None and (is_cast or is_exact):
            inner = terms.number((key[0], (moved[3], *values[1:]), named), node.name)
            return self._replace([values[0]], (*moved[:3], inner), f"{moved[1]} of {node.name}")
        if terms.rounding and text_of(op) == "aten.add.Tensor" and not named and len(values) == 2:
            pair = [terms.collective(v, "all_reduce") for v in values]
            a, b = pair
            if a is not None and b is not None and a[:3] == b[:3] and ("reduce_op", _SUM) in a[2]:
                inner = terms.number((key[0], (a[3], b[3]), named), node.name)
                return self._replace(list(values), (*a[:3], inner), f"all_reduce of {node.name}")
        return terms.number(key, node.name)

    def rows(self, node: Node, op: Any, key: Any) -> int | None:
        """The term of the rows at this rank's place of what a collective gives."""
        terms, values = self.terms, key[1]
        if key[2] or len(values) != 4 or terms.place is None or not terms.spmd:
            return None
        whole = terms.collective(values[0], "all_gather_into_tensor", "all_reduce")
        if whole is None or type(whole[3]) is not int or whole[3] not in terms.types:
            return None
        rank, size = terms.place(dict(whole[2])["group_name"][1][1:-1])
        shape, dtype = terms.types[whole[3]]
        is_sum = whole[1] == "all_reduce"
        if not shape or (is_sum and shape[0] % size) or not shape[0]:
            return None
        rows = shape[0] // size if is_sum else shape[0]
        if values[1:3] != (("int", "0"), ("int", str(rank * rows))) or values[3][0] != "int":
            return None
        end = min(int(values[3][1]), rows * size)
        if end != (rank + 1) * rows:
            return None
        if not is_sum:
            return int(whole[3])
        if not terms.keeps_bits(whole):
            return None
        rest = tuple(sorted((*whole[2], ("group_size", ("int", str(size))))))
        made = self._replace(
            [values[0]], (whole[0], "reduce_scatter_tensor", rest, whole[3]), node.name
        )
        terms.types.setdefault(made, ((rows, *shape[1:]), dtype))
        return made

    def filled(self, node: Node, op: Any, key: Any) -> int | None:
        """The term of a constant: its type, its device, and the number."""
        name, type_, values = text_of(op), type_of(value_of(node)), key[1]
        if type_ is None or type_[1].is_complex or type_[1] == torch.bool:
            return None
        number: Any = FILLS[name]
        if number is None:
            if len(values) != 2 or values[1][0] not in ("int", "float"):
                return None
            number = float(values[1][1]) if values[1][0] == "float" else int(values[1][1])
        try:
            number = torch.tensor(number, dtype=type_[1]).item()
        except (OverflowError, RuntimeError, ValueError):
            return None
        return self._constant(type_, str(value_of(node).device), number, node.name)

    def _constant(self, type_: Type, device: str, number: float, name: str) -> int:
        term = self.terms.number(("constant", type_, device, repr(number)), name)
        self.terms.types.setdefault(term, type_)
        self.terms.constants[term] = number
        return term

    def folded(self, key: Any, name: str) -> int | None:
        """The term of a reduction of a constant."""
        terms, rest = self.terms, dict(key[2])
        number = terms.constants.get(key[3]) if type(key[3]) is int else None
        if number is None or key[1] != "all_reduce" or not terms.spmd or terms.place is None:
            return None
        operation = rest["reduce_op"][1][1:-1].lower()
        if set(rest) - {"reduce_op", "group_name"} or number != number:
            return None
        (shape, dtype), device = terms.types[key[3]], terms.keys[key[3]][2]
        if operation == "sum":
            _, size = terms.place(rest["group_name"][1][1:-1])
            # All partial sums, whatever the order, are multiples, and none is rounded.
            given = torch.tensor([number], dtype=dtype)
            total = given.clone()
            for count in range(2, size + 1):
                total = total + given
                held = total.item()
                if held in (math.inf, -math.inf) or Fraction(held) != count * Fraction(number):
                    return None
            number = total.item()
        elif operation not in ("min", "max"):
            return None
        return self._constant((shape, dtype), device, number, name)

    def reduced_twice(self, key: Any, name: str) -> int | None:
        """The term of a collective of a collective, where a rule makes one of them."""
        space, kind, rest, value = key
        operation = next((v for k, v in rest if k == "reduce_op"), "")
        inner = self.terms.collective(value, kind) if kind == "all_reduce" else None
        if inner is not None and inner[:3] == key[:3] and operation in _REPEATABLE:
            return int(value)
        inner = self.terms.collective(value, "reduce_scatter_tensor")
        if kind == "all_gather_into_tensor" and inner is not None and inner[0] == space:
            group = [v for k, v in rest if k == "group_name"]
            same = group == [v for k, v in inner[2] if k == "group_name"]
            if same and self.terms.keeps_bits(inner):
                arguments = tuple(x for x in inner[2] if x[0] != "group_size")
                return self._replace([value], (space, "all_reduce", arguments, inner[3]), name)
        return None

    def _replace(self, old: list[int], key: Any, name: str) -> int:
        new = self.terms.number(key, name)
        for each in old:
            self.replaced.setdefault(each, set()).add(new)
        return new
