"""Terms: what nodes are worth, as numbers, and what is known of a term."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.fx import Node

from torch_c10d_ext.optimizer._checker._nodes import SPACES, value_of

ANY_ORDER = ("min", "max", "band", "bor", "bxor")

# This rank's number in a group, and how many ranks that has.
Place = Callable[[str], tuple[int, int]]

# Whether a group gives a reduced element the same bits wherever in a message it stands.
InRankOrder = Callable[[str], bool]

# A shape and a dtype.
Type = tuple[tuple[int, ...], torch.dtype]

# Columns from and to, and the term whose bytes they hold.
Part = tuple[int, int, int]


class Terms:
    """Numbers for terms: equal terms are one number."""

    def __init__(
        self, rounding: bool, in_rank_order: InRankOrder, place: Place | None, spmd: bool
    ) -> None:
        self.place, self.spmd = place, spmd
        self.constants: dict[int, int | float] = {}
        self.numbers: dict[Hashable, int] = {}
        self.names: list[str] = []
        self.keys: list[Any] = []
        self.rounding, self.in_rank_order = rounding, in_rank_order
        self.types = Types()
        self.roots: dict[int, int] = {}  # what has the same bytes in the same order, first made
        self.parts: dict[int, tuple[Part, ...]] = {}  # of a message for all ranks
        self.part: dict[int, int] = {}  # by a message's columns: the term whose bytes they are
        self.products: set[int] = set()  # reductions of products that were made in parts

    def number(self, key: Hashable, name: str) -> int:
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers[key] = len(self.names)
            self.names.append(name)
            self.keys.append(key)
        return found

    def collective(self, value: Any, *kinds: str) -> Any:
        """Space, kind, arguments and input of the collective that a term is, if it is one."""
        key = self.keys[value] if isinstance(value, int) and 0 <= value < len(self.keys) else ()
        is_one = isinstance(key, tuple) and len(key) == 4 and key[0] in SPACES and key[1] in kinds
        return key if is_one else None

    def keeps_bits(self, key: Any) -> bool:
        """Whether a reduction gives an element the same bits wherever it stands."""
        rest, value = dict(key[2]), key[3]
        operation = rest.get("reduce_op", ("", ""))[1][1:-1].lower()
        dtype = self.types[value][1] if value in self.types else None
        whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
        if self.rounding or operation in ANY_ORDER or (operation == "sum" and whole):
            return True
        return self.in_rank_order(rest["group_name"][1][1:-1])

    def product(self, term: Any) -> tuple[str, int | None, int, int] | None:
        """Op, bias and factors of the product of matrices that a term is, if it is one."""
        key: Any = self.keys[term] if type(term) is int else ()
        if not isinstance(key, tuple) or len(key) != 3 or key[2]:
            return None
        values, count = key[1], {"aten.mm.default": 2, "aten.addmm.default": 3}.get(key[0])
        if count is None or not isinstance(values, tuple) or len(values) != count:
            return None
        if not all(type(value) is int for value in values):
            return None
        return (key[0], values[0] if count == 3 else None, values[-2], values[-1])

    def whole(self, parts: Iterable[int | None], dim: int) -> int | None:
        """What parts are all slices of, in order and without gaps."""
        base, end = None, 0
        for part in parts:
            key: Any = self.keys[part] if type(part) is int else ()
            if not (isinstance(key, tuple) and len(key) == 3 and key[0] == "aten.slice.Tensor"):
                return None
            values = key[1]
            if key[2] or len(values) != 4 or type(values[0]) is not int:
                return None
            numbers = [int(v[1]) for v in values[1:] if type(v) is tuple and v[0] == "int"]
            if len(numbers) != 3 or numbers[:2] != [dim, end] or numbers[2] <= end:
                return None
            if base not in (None, values[0]):
                return None
            base, end = values[0], numbers[2]
        shape = self.shape(base) if base is not None else None
        return base if shape is not None and len(shape) > dim and shape[dim] == end else None

    def shape(self, term: int) -> tuple[int, ...] | None:
        """The shape of a term in numbers, whatever its strides."""
        if term in self.types:
            return self.types[term][0]
        node = self.types.noted.get(term)
        value = value_of(node) if node is not None else None
        if not isinstance(value, torch.Tensor) or not all(type(s) is int for s in value.shape):
            return None
        return tuple(value.shape)

    def as_root(self, root: int, key: Any, name: str, type_: Type) -> int:
        """The term of bytes of ``root`` of a type: ``root`` itself, if it is of that type."""
        if self.types[root] == type_:
            return root
        term = self.number(("bytes", root, type_), name)
        self.types.setdefault(term, type_)
        self.roots[term] = root
        return term

    def show(self, value: Any) -> str:
        if isinstance(value, int) and 0 <= value < len(self.names):
            return self.names[value]
        if isinstance(value, tuple):
            return f"({', '.join(self.show(v) for v in value)})"
        return str(value)


class Types:
    """The types of terms that are dense, worked out for the few that a rule asks for."""

    def __init__(self) -> None:
        self.known: dict[int, Type | None] = {}
        self.noted: dict[int, Node] = {}

    def note(self, term: int, node: Node) -> None:
        self.noted.setdefault(term, node)

    def __contains__(self, term: int) -> bool:
        return self._find(term) is not None

    def __getitem__(self, term: int) -> Type:
        found = self._find(term)
        assert found is not None
        return found

    def setdefault(self, term: int, type_: Type) -> None:
        if self._find(term) is None:
            self.known[term] = type_

    def _find(self, term: int) -> Type | None:
        if term not in self.known:
            node = self.noted.get(term)
            if node is None:
                return None
            self.known[term] = type_of(value_of(node))
        return self.known[term]


def type_of(value: Any) -> Type | None:
    """Shape and dtype of a dense tensor whose sizes are numbers."""
    if not isinstance(value, torch.Tensor) or not all(type(s) is int for s in value.shape):
        return None
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        return None
    return tuple(value.shape), value.dtype


def plain_value(argument: Any) -> tuple[str, str]:
    # By text, which tells -0.0 from 0.0 and 1 from 1.0 and True.
    return (type(argument).__name__, repr(argument))


def fits_shape(asked: Any, shape: tuple[int, ...]) -> bool:
    """Whether a result of a shape is what a view was asked for, where one size may be -1."""
    return len(asked) == len(shape) and all(
        each in (("int", str(size)), ("int", "-1")) for each, size in zip(asked, shape, strict=True)
    )


def size_of(type_: Type) -> int:
    return math.prod(type_[0]) * type_[1].itemsize
