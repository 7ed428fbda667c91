"""The checker's rules of bytes: views of memory, and messages that hold the bytes of others.

``bytes`` and ``packed`` of the table in :mod:`torch_c10d_ext.optimizer._checker`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from torch_c10d_ext.optimizer._checker._nodes import text_of, value_of
from torch_c10d_ext.optimizer._checker._parts import Parts
from torch_c10d_ext.optimizer._checker._terms import (
    Terms,
    fits_shape,
    plain_value,
    size_of,
    type_of,
)

_RESHAPES = (
    "aten.view.default",
    "aten.view.dtype",
    "aten.reshape.default",
    "aten._unsafe_view.default",
)
OF_BYTES = frozenset({*_RESHAPES, "aten.slice.Tensor", "aten.clone.default"})


class Bytes:
    """The rules. Each gives the term of a node, or None where it does not hold."""

    def __init__(self, terms: Terms, parts: Parts) -> None:
        self.terms, self.parts = terms, parts

    def same_bytes(self, node: Node, op: Any, key: Any) -> int | None:
        """The term of a view or a copy, where it is the bytes of another term."""
        terms, values = self.terms, key[1]
        if not values or type(values[0]) is not int:
            return None
        source, name, type_ = values[0], text_of(op), type_of(value_of(node))
        parts = terms.parts.get(source)
        if name == "aten.slice.Tensor" and parts and len(values) == 4 and not key[2]:
            for begin, end, member in parts:
                if values[1:] == (("int", "1"), ("int", str(begin)), ("int", str(end))):
                    term = terms.number(key, node.name)
                    terms.part[term] = member
                    return term
        if name == "aten.clone.default" and source in terms.part and type_ is not None:
            member = terms.part[source]
            if size_of(type_) != size_of(terms.types[member]):
                return None
            return terms.as_root(member, key, node.name, type_)
        if name in _RESHAPES and source in terms.products and type_ is not None:
            seen = self.parts.seen_before(node, source, values, type_)
            if seen is not None:
                return seen
        if name in _RESHAPES and type_ is not None and source in terms.types:
            dtype: torch.dtype | None = terms.types[source][1]
            # What the call says, not what is noted of its result.
            if name == "aten.view.dtype":
                dtype = type_[1] if values[1:] == (plain_value(type_[1]),) else None
            elif len(values) != 2 or not fits_shape(values[1], type_[0]):
                return None
            if dtype != type_[1] or size_of(type_) != size_of(terms.types[source]):
                return None
            return terms.as_root(terms.roots.get(source, source), key, node.name, type_)
        return None

    def moved_bytes(self, result: Any, key: Any, name: str) -> list[int] | None:
        """What is sent where bytes are, that other terms have: collectives of those."""
        terms = self.terms
        space, kind, rest, value = key
        if type(value) is not int or value not in terms.types:
            return None
        if kind == "all_to_all_single":
            return self._packed(key, name)
        root = terms.roots.get(value)
        if root is None or kind not in ("all_gather_into_tensor", "broadcast"):
            return None
        shape, dtype = terms.types[root]
        if kind == "all_gather_into_tensor":
            sent, made = terms.types[value][0], type_of(result)
            ranks = next((int(v[1]) for k, v in rest if k == "group_size"), 0)
            if made is None or not sent or made[0] != (sent[0] * ranks, *sent[1:]):
                return None
            shape = (shape[0] * ranks, *shape[1:]) if shape else (ranks,)
        term = terms.number((space, kind, rest, root), name)
        terms.types.setdefault(term, (shape, dtype))
        return [term]

    def _packed(self, key: Any, name: str) -> list[int] | None:
        """The collectives that an all_to_all of columns of rows stands for."""
        terms = self.terms
        space, kind, rest, value = key
        cat = terms.keys[value]
        if not (isinstance(cat, tuple) and cat and cat[0] == "aten.cat.default"):
            return None
        if cat[2] or len(cat[1]) != 2 or cat[1][1] != ("int", "1"):
            return None
        (ranks, _), dtype = terms.types[value][0], terms.types[value][1]
        one = (("int", "1"),) * ranks
        if any(v != one for k, v in rest if k != "group_name"):
            return None
        found, parts, end = [], [], 0
        for row in cat[1][0]:
            if type(row) is not int or row not in terms.types or terms.types[row][1] != dtype:
                return None
            root = terms.roots.get(row, row)
            shape, kept = terms.types[root]
            if not shape or shape[0] % ranks or len(terms.types[row][0]) != 2:
                return None
            even = (("int", str(shape[0] // ranks)),) * ranks
            arguments = tuple((k, v if k == "group_name" else even) for k, v in rest)
            term = terms.number((space, kind, arguments, root), name)
            terms.types.setdefault(term, (shape, kept))
            begin, end = end, end + terms.types[row][0][1]
            parts.append((begin, end, term))
            found.append(term)
        if end != terms.types[value][0][1]:
            return None
        message = terms.number(key, name)
        terms.parts[message] = tuple(parts)
        return found
