"""The independent checker: whether a graph computes what another one does, within a budget.

It shares no code with the passes that it checks, nor, on purpose, the table of ops that they read
(``_op_info``): what is wrong there would be wrong here. Both graphs are evaluated symbolically: a
node is worth a term, equal terms are one number, and memory that is written has a version. Then

- the outputs, the inputs' memory, and all ordered effects must be worth the same in both graphs;
- every collective must be started in both graphs, but for those a rule below replaces;
- nothing may read what is still in flight, nor write what a collective in flight reads;
- a launch of several reductions needs a backend that gives each element the same bits anywhere;
- what is live at once must stay within the budget.

The rules by which different terms are equal (each is bitwise, or asks for ``in_rank_order``):

===========  =====================================================================================
landed       ``wait(x) = x``
coalesced    the k-th result of a launch of several is the collective of the k-th input
repeated     ``min(min(x)) = min(x)`` over one group; ``max``, ``band`` and ``bor`` alike
elementwise  ``f(move(x)) = move(f(x))`` for all_gather and broadcast; f a cast, or an exact op of
             one tensor and numbers
own part     the rows of ``all_gather(x)`` at this rank's place are x; only where all ranks do
             alike is promised: graphs must not be refused on some ranks alone
gathered     ``all_gather(reduce_scatter(x)) = all_reduce(x)`` over one group; asks
part of sum  the rows of ``all_reduce(x)`` at this rank's place are ``reduce_scatter(x)``; only
             where all ranks do alike is promised; asks
constant     ``all_reduce(c) = n c``, where all multiples of c up to n are exact; only where all
             ranks' constants are promised to be the same
bytes        a view of a view of the same shape, dtype and memory is the first;
             ``move(bytes of x) = bytes of move(x)`` for all_gather and broadcast
packed       columns of ``all_to_all(cat([rows of x, rows of y], 1))``, copied, are the bytes of
             ``all_to_all(x)`` and of ``all_to_all(y)``, where all parts are even
sums         ``all_reduce(a) + all_reduce(b) = all_reduce(a + b)``; only where rounding is allowed
in parts     rows of ``all_gather(x)``, and of ``all_gather(x) @ b``, from those of all rows of x;
             rows of ``all_reduce(a @ b)`` from those of a; columns of ``reduce_scatter(a @ b)``
             from those of b. Products of floats only where rounding is allowed; sums ask
===========  =====================================================================================
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterable
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Graph, Node

_SPACES = ("c10d_ext", "_c10d_functional")
_KINDS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_to_all_single",
    "all_gather",
    "reduce_scatter",
    "reduce",
    "gather",
    "scatter",
    "permute_tensor",
)
_SUM = ("str", repr("sum"))
_REPEATABLE = tuple(("str", repr(op)) for op in ("min", "max", "band", "bor"))
_CASTS = ("aten._to_copy.default", "prims.convert_element_type.default")
_RESHAPES = (
    "aten.view.default",
    "aten.view.dtype",
    "aten.reshape.default",
    "aten._unsafe_view.default",
)
_OF_BYTES = frozenset({*_RESHAPES, "aten.slice.Tensor", "aten.clone.default"})
_EXACT = tuple(
    f"aten.{name}"
    for name in (
        *("neg.default", "abs.default", "relu.default", "sign.default"),
        *("mul.Tensor", "add.Tensor", "sub.Tensor", "div.Tensor"),
    )
)
_FILLS = {
    "aten.zeros.default": 0,
    "aten.zeros_like.default": 0,
    "aten.ones.default": 1,
    "aten.ones_like.default": 1,
    "aten.full.default": None,
    "aten.full_like.default": None,
}
_ANY_ORDER = ("min", "max", "band", "bor", "bxor")

# This rank's number in a group, and how many ranks that has.
Place = Callable[[str], tuple[int, int]]

# Whether a group gives a reduced element the same bits wherever in a message it stands.
InRankOrder = Callable[[str], bool]


class CheckFailed(Exception):
    """The graphs differ; the text says where."""


def check_rewrite(
    before: Graph,
    after: Graph,
    budget: float,
    in_rank_order: InRankOrder,
    bytes_of: Callable[[torch.Tensor], int] | None = None,
    rounding: bool = False,
    place: Place | None = None,
    spmd: bool = False,
) -> None:
    """Raises CheckFailed unless ``after`` may take the place of ``before``.

    Args:
        before: the graph as it was.
        after: the graph as it is.
        budget: bytes that ``after`` may hold at once.
        in_rank_order: asked with the group of each new bucket of reductions.
        rounding: whether sums may be made in another order.
        place: this rank's number in a group, and the group's size; for rules that ask for it.
        spmd: whether constants, and what is at a rank's place, are promised to be so on all ranks.
        bytes_of: the size of a fake tensor's storage; by default what the tensor says.
    """
    terms = _Terms(rounding, in_rank_order, place, spmd)
    old = _Evaluation(before, terms).run()
    new = _Evaluation(after, terms).run()
    _same("the outputs", old.outputs, new.outputs, terms)
    _same("what inputs hold at the end", old.final, new.final, terms)
    _same("the number of effects", len(old.effects), len(new.effects), terms)
    for k, (a, b) in enumerate(zip(old.effects, new.effects, strict=True)):
        _same(f"effect {k}", a, b, terms)
    _same("which outputs share memory", old.shared, new.shared, terms)
    lost = set(old.collectives) - set(new.collectives)
    extra = set(new.collectives) - set(old.collectives)
    # A collective that another one replaces by a rule is none that somebody lost.
    instead: set[int] = set()

    def is_kept(term: int) -> bool:
        if term in new.collectives:
            return True
        parts = new.in_parts.get(term)
        if parts and all(part in new.collectives for part in parts):
            instead.update(parts)
            return True
        made = old.replaced.get(term, set())
        instead.update(made)
        return bool(made) and all(is_kept(each) for each in made)

    lost = {term for term in lost if not is_kept(term)}
    extra -= instead
    for term in sorted(lost | extra):
        name = old.collectives.get(term) or new.collectives.get(term)
        where = "the old graph" if term in lost else "the new graph"
        raise CheckFailed(f"{name} is in {where} alone")
    for bucket, (node, op, group, dtypes, space) in new.buckets.items():
        if bucket in old.buckets:
            continue
        if len(dtypes) != 1:
            raise CheckFailed(f"{node} holds dtypes {sorted(map(str, dtypes))}")
        dtype = next(iter(dtypes))
        exact = op in (None, *_ANY_ORDER) or (
            op == "sum" and not dtype.is_floating_point and not dtype.is_complex
        )
        if not exact and not in_rank_order(group):
            raise CheckFailed(
                f"{node} merges {space} {op} of {dtype} in group '{group}', whose sums depend on "
                "an element's place in a message"
            )
    peak = peak_bytes(after, bytes_of or (lambda t: int(t.untyped_storage().nbytes())))
    if peak > budget * (1 + 1e-9):
        raise CheckFailed(f"it holds {peak:,.0f} bytes, more than the budget of {budget:,.0f}")


def _same(what: str, a: Any, b: Any, terms: _Terms) -> None:
    if a != b:
        raise CheckFailed(f"{what} differ: {terms.show(a)} and {terms.show(b)}")


class _Terms:
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
        self.types = _Types()
        self.roots: dict[int, int] = {}  # what has the same bytes in the same order, first made
        self.parts: dict[int, tuple[_Part, ...]] = {}  # of a message for all ranks
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
        is_one = isinstance(key, tuple) and len(key) == 4 and key[0] in _SPACES and key[1] in kinds
        return key if is_one else None

    def keeps_bits(self, key: Any) -> bool:
        """Whether a reduction gives an element the same bits wherever it stands."""
        rest, value = dict(key[2]), key[3]
        operation = rest.get("reduce_op", ("", ""))[1][1:-1].lower()
        dtype = self.types[value][1] if value in self.types else None
        whole = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
        if self.rounding or operation in _ANY_ORDER or (operation == "sum" and whole):
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
        value = _val(node) if node is not None else None
        if not isinstance(value, torch.Tensor) or not all(type(s) is int for s in value.shape):
            return None
        return tuple(value.shape)

    def show(self, value: Any) -> str:
        if isinstance(value, int) and 0 <= value < len(self.names):
            return self.names[value]
        if isinstance(value, tuple):
            return f"({', '.join(self.show(v) for v in value)})"
        return str(value)


_Type = tuple[tuple[int, ...], torch.dtype]  # a shape and a dtype
_Part = tuple[int, int, int]  # columns from and to, and the term whose bytes they hold


def _type_of(value: Any) -> _Type | None:
    """Shape and dtype of a dense tensor whose sizes are numbers."""
    if not isinstance(value, torch.Tensor) or not all(type(s) is int for s in value.shape):
        return None
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        return None
    return tuple(value.shape), value.dtype


class _Types:
    """The types of terms that are dense, worked out for the few that a rule asks for."""

    def __init__(self) -> None:
        self.known: dict[int, _Type | None] = {}
        self.noted: dict[int, Node] = {}

    def note(self, term: int, node: Node) -> None:
        self.noted.setdefault(term, node)

    def __contains__(self, term: int) -> bool:
        return self._find(term) is not None

    def __getitem__(self, term: int) -> _Type:
        found = self._find(term)
        assert found is not None
        return found

    def setdefault(self, term: int, type_: _Type) -> None:
        if self._find(term) is None:
            self.known[term] = type_

    def _find(self, term: int) -> _Type | None:
        if term not in self.known:
            node = self.noted.get(term)
            if node is None:
                return None
            self.known[term] = _type_of(_val(node))
        return self.known[term]


def _plain_value(argument: Any) -> tuple[str, str]:
    # By text, which tells -0.0 from 0.0 and 1 from 1.0 and True.
    return (type(argument).__name__, repr(argument))


def _fits_shape(asked: Any, shape: tuple[int, ...]) -> bool:
    """Whether a result of a shape is what a view was asked for, where one size may be -1."""
    return len(asked) == len(shape) and all(
        each in (("int", str(size)), ("int", "-1")) for each, size in zip(asked, shape, strict=True)
    )


def _bytes(type_: _Type) -> int:
    return math.prod(type_[0]) * type_[1].itemsize


class _Cell:
    """A piece of memory: what it holds, and which collective in flight reads or writes it."""

    __slots__ = ("maker", "readers", "version", "writer")

    def __init__(self, maker: int) -> None:
        self.maker = maker
        self.version: int | None = None  # None: as it was made
        self.writer: tuple[Node, int] | None = None  # the launch, and which of its collectives
        self.readers: set[tuple[Node, int]] = set()


class _Evaluation:
    """A graph's symbolic run."""

    def __init__(self, graph: Graph, terms: _Terms) -> None:
        self.graph, self.terms = graph, terms
        self.term: dict[Node, Any] = {}  # a number, or a tuple of them
        self.cells: dict[Node, tuple[_Cell, ...]] = {}
        self.by_storage: dict[int, _Cell] = {}
        self.inputs: list[tuple[str, _Cell]] = []
        self.outputs: Any = None
        self.final: tuple[Any, ...] = ()
        self.shared: tuple[Any, ...] = ()
        self.effects: list[Any] = []
        self.collectives: dict[int, str] = {}
        self.replaced: dict[int, set[int]] = {}  # by a rule: by which collectives
        self.in_parts: dict[int, set[int]] = {}  # which collectives are parts of one
        self.buckets: dict[Any, tuple[str, str | None, str, set[torch.dtype], str]] = {}
        # By launch and number: what it reads and writes.
        self.flying: dict[tuple[Node, int], tuple[tuple[_Cell, ...], tuple[_Cell, ...]]] = {}

    def run(self) -> _Evaluation:
        count = 0
        for node in self.graph.nodes:
            for given in node.all_input_nodes:
                if given not in self.term:
                    raise CheckFailed(f"{node.name} comes before {given.name}, which it uses")
            if node.op == "placeholder":
                self._make(node, self.terms.number(("input", count), node.name), held=True)
                count += 1
            elif node.op == "get_attr":
                self._make(node, self.terms.number(("attribute", node.target), node.name), True)
            elif node.op == "output":
                self._output(node)
            else:
                self._call(node)
        return self

    # --- nodes ---------------------------------------------------------------------------------

    def _make(self, node: Node, term: Any, held: bool = False, views: Iterable[Node] = ()) -> None:
        self.term[node] = term
        if type(term) is int:
            self.terms.types.note(term, node)
        shared: dict[_Cell, None] = {}
        for tensor in _tensors(_val(node)):
            address = tensor.untyped_storage()._cdata
            cell = self.by_storage.get(address)
            if cell is None:
                bases = [c for base in views for c in self.cells[base]]
                if bases:
                    shared.update(dict.fromkeys(bases))
                    continue
                cell = self.by_storage[address] = _Cell(term if isinstance(term, int) else -1)
                if held:
                    self.inputs.append((node.name, cell))
            shared[cell] = None
        self.cells[node] = tuple(shared)

    def _output(self, node: Node) -> None:
        self.outputs = self._value(node.args[0], in_flight=True)
        self.term[node] = self.outputs
        self.final = tuple(
            (k, cell.version) for k, (_, cell) in enumerate(self.inputs) if cell.version is not None
        )
        # Which outputs share memory, with each other and with inputs.
        seen: dict[_Cell, int] = {cell: k for k, (_, cell) in enumerate(self.inputs)}
        shared = []
        for given in _nodes(node.args[0]):
            for cell in self.cells[given]:
                shared.append(seen.setdefault(cell, len(seen)))
        self.shared = tuple(shared)

    def _call(self, node: Node) -> None:
        target = node.target
        op = getattr(target, "default", target) if _is_packet(target) else target
        if target is operator.getitem:
            source, k = node.args
            whole = self.term[source]  # type: ignore[index]
            if isinstance(whole, tuple) and isinstance(k, int):
                self._make(node, whole[k], views=[source])  # type: ignore[list-item]
            else:
                key = ("item", whole, k if isinstance(k, int) else self._value(k))
                term = self.terms.number(key, node.name)
                self._make(node, term, views=[source])  # type: ignore[list-item]
            return
        if not hasattr(op, "_schema") or not hasattr(op, "namespace"):
            self._opaque(node)
            return
        space, name = op._schema.name.split("::")
        if space == "c10d_ext_optimizer":
            self.term[node], self.cells[node] = -1, ()
        elif space in _SPACES and name == "wait_tensor":
            self._wait(node)
        elif space in _SPACES and name != "copy_to_group":
            self._collective(node, op, space, name)
        else:
            self._plain(node, op)

    def _plain(self, node: Node, op: Any) -> None:
        written, viewed = self._aliases(node, op)
        has_result = bool(op._schema.returns)
        is_view = bool(viewed) and not written and has_result
        # A view is an address: it reads nothing yet.
        key: Any = (
            _text(op),
            self._value(node.args, address=is_view),
            self._value(node.kwargs, address=is_view),
        )
        ordered = torch.Tag.nondeterministic_seeded in op.tags or not (has_result or written)
        if not is_view:
            self._touch(node, written)
        if ordered:
            key = (*key, len(self.effects))
        term = None
        name = _text(op)
        if name in _OF_BYTES:
            term = self._same_bytes(node, op, key)
        if name == "aten.cat.default":
            term = self._joined(node, key)
        elif term is None and name == "aten.slice.Tensor":
            term = self._rows(node, op, key)
        elif name in _FILLS:
            term = self._filled(node, op, key)
        if term is None:
            term = self._rewritten(node, op, key)
        if ordered:
            self.effects.append(term)
        for cell in self._cells(written):
            cell.version = self.terms.number(("write", term, cell.version), node.name)
        if written:
            # The result is what was written.
            self._make(node, self.term[written[0]], views=written)
        else:
            self._make(node, term, views=viewed)

    def _rewritten(self, node: Node, op: Any, key: Any) -> int:
        """The term of a computation, its collectives moved outwards by the rules."""
        terms = self.terms
        values, named = key[1], key[2]
        moved = (
            terms.collective(values[0], "all_gather_into_tensor", "broadcast") if values else None
        )
        is_cast = _text(op) in _CASTS and all(k == "dtype" for k, _ in named)
        is_exact = _text(op) in _EXACT and not named and all(type(v) is tuple for v in values[1:])
        is_exact = is_exact and all(v[0] in ("int", "float") for v in values[1:])
        if moved is not None and (is_cast or is_exact):
            inner = terms.number((key[0], (moved[3], *values[1:]), named), node.name)
            return self._replace([values[0]], (*moved[:3], inner), f"{moved[1]} of {node.name}")
        if terms.rounding and _text(op) == "aten.add.Tensor" and not named and len(values) == 2:
            pair = [terms.collective(v, "all_reduce") for v in values]
            a, b = pair
            if a is not None and b is not None and a[:3] == b[:3] and ("reduce_op", _SUM) in a[2]:
                inner = terms.number((key[0], (a[3], b[3]), named), node.name)
                return self._replace(list(values), (*a[:3], inner), f"all_reduce of {node.name}")
        return terms.number(key, node.name)

    def _same_bytes(self, node: Node, op: Any, key: Any) -> int | None:
        """The term of a view or a copy, where it is the bytes of another term."""
        terms, values = self.terms, key[1]
        if not values or type(values[0]) is not int:
            return None
        source, name, type_ = values[0], _text(op), _type_of(_val(node))
        parts = terms.parts.get(source)
        if name == "aten.slice.Tensor" and parts and len(values) == 4 and not key[2]:
            for begin, end, member in parts:
                if values[1:] == (("int", "1"), ("int", str(begin)), ("int", str(end))):
                    term = terms.number(key, node.name)
                    terms.part[term] = member
                    return term
        if name == "aten.clone.default" and source in terms.part and type_ is not None:
            member = terms.part[source]
            if _bytes(type_) != _bytes(terms.types[member]):
                return None
            return self._as_root(member, key, node.name, type_)
        if name in _RESHAPES and source in terms.products and type_ is not None:
            seen = self._seen_before(node, source, values, type_)
            if seen is not None:
                return seen
        if name in _RESHAPES and type_ is not None and source in terms.types:
            dtype: torch.dtype | None = terms.types[source][1]
            # What the call says, not what is noted of its result.
            if name == "aten.view.dtype":
                dtype = type_[1] if values[1:] == (_plain_value(type_[1]),) else None
            elif len(values) != 2 or not _fits_shape(values[1], type_[0]):
                return None
            if dtype != type_[1] or _bytes(type_) != _bytes(terms.types[source]):
                return None
            return self._as_root(terms.roots.get(source, source), key, node.name, type_)
        return None

    def _rows(self, node: Node, op: Any, key: Any) -> int | None:
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

    def _filled(self, node: Node, op: Any, key: Any) -> int | None:
        """The term of a constant: its type, its device, and the number."""
        name, type_, values = _text(op), _type_of(_val(node)), key[1]
        if type_ is None or type_[1].is_complex or type_[1] == torch.bool:
            return None
        number: Any = _FILLS[name]
        if number is None:
            if len(values) != 2 or values[1][0] not in ("int", "float"):
                return None
            number = float(values[1][1]) if values[1][0] == "float" else int(values[1][1])
        try:
            number = torch.tensor(number, dtype=type_[1]).item()
        except (OverflowError, RuntimeError, ValueError):
            return None
        return self._constant(type_, str(_val(node).device), number, node.name)

    def _constant(self, type_: _Type, device: str, number: float, name: str) -> int:
        term = self.terms.number(("constant", type_, device, repr(number)), name)
        self.terms.types.setdefault(term, type_)
        self.terms.constants[term] = number
        return term

    def _folded(self, key: Any, name: str) -> int | None:
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

    def _joined(self, node: Node, key: Any) -> int | None:
        """The term of parts of one collective, put together."""
        terms, type_ = self.terms, _type_of(_val(node))
        if type_ is None or key[2] or not 1 <= len(key[1]) <= 2 or len(key[1][0]) < 2:
            return None
        dim = int(key[1][1][1]) if len(key[1]) == 2 else 0
        if not all(type(term) is int for term in key[1][0]):
            return None
        parts: list[int] = list(key[1][0])
        if dim == 1 and len(type_[0]) == 3:
            return self._gathered_rows(parts, key, type_, node.name)
        kinds = {0: "all_reduce", 1: "reduce_scatter_tensor"}
        if dim not in kinds or len(type_[0]) != 2:
            return None
        found: list[Any] = [terms.collective(term, kinds[dim]) for term in parts]
        if any(c is None or c[:3] != found[0][:3] for c in found):
            return None
        product = self._product_of_parts([c[3] for c in found], "rows" if dim == 0 else "columns")
        if product is None:
            return None
        rest = dict(found[0][2])
        rows, columns = terms.types[product][0]
        if dim == 1:
            size = int(rest["group_size"][1])
            if rows % size:
                return None
            rows //= size
        whole = (*found[0][:3], product)
        if (rows, columns) != type_[0] or not terms.keeps_bits(whole):
            return None
        term = terms.number(whole, node.name)
        terms.types.setdefault(term, type_)
        terms.products.add(term)
        self.in_parts.setdefault(term, set()).update(parts)
        return term

    def _product_of_parts(self, parts: list[int], cut: str) -> int | None:
        """The product that parts are all rows or columns of, in order."""
        terms = self.terms
        found: list[Any] = [terms.product(term) for term in parts]
        if any(p is None or p[0] != found[0][0] for p in found):
            return None
        names, biases, firsts, seconds = zip(*found, strict=True)
        if cut == "rows":
            first, second = terms.whole(firsts, 0), seconds[0]
            same, bias = {*seconds}, biases[0]
            if len({*biases}) != 1:
                return None
        else:
            first, second = firsts[0], terms.whole(seconds, 1)
            same = {*firsts}
            bias = None if biases[0] is None else terms.whole(biases, 0)
            if biases[0] is not None and bias is None:
                return None
        if first is None or second is None or len(same) != 1:
            return None
        return self._product(names[0], bias, first, second, parts[0])

    def _product(
        self, name: str, bias: int | None, first: int, second: int, like: int
    ) -> int | None:
        terms = self.terms
        a, b = terms.shape(first), terms.shape(second)
        of_bias = (b[1],) if bias is None and b else terms.shape(bias) if bias is not None else None
        if a is None or b is None or len(a) != 2 or len(b) != 2 or a[1] != b[0]:
            return None
        if of_bias != (b[1],) or like not in terms.types:
            return None
        dtype = terms.types[like][1]
        if not terms.rounding and (dtype.is_floating_point or dtype.is_complex):
            return None
        values = (first, second) if bias is None else (bias, first, second)
        term = terms.number((name, values, ()), "product of parts")
        terms.types.setdefault(term, ((a[0], b[1]), dtype))
        return term

    def _gathered_rows(self, parts: list[int], key: Any, type_: _Type, name: str) -> int | None:
        """The term of rows that ranks gave in parts, or of their product with a matrix."""
        terms = self.terms
        roots = [terms.roots.get(term, term) for term in parts]
        products: list[Any] = [terms.product(root) for root in roots]
        given = [root if p is None else p[2] for root, p in zip(roots, products, strict=True)]
        found: list[Any] = [terms.collective(term, "all_gather_into_tensor") for term in given]
        if any(c is None or c[:3] != found[0][:3] for c in found):
            return None
        if any((p is None) != (products[0] is None) for p in products):
            return None
        whole = terms.whole([c[3] for c in found], 0)
        if whole is None or whole not in terms.types:
            return None
        size = int(dict(found[0][2])["group_size"][1])
        shape, dtype = terms.types[whole]
        for term, c in zip(parts, found, strict=True):
            rows = (terms.shape(c[3]) or (0,))[0]
            if term not in terms.types or terms.types[term][0] != (size, rows, type_[0][2]):
                return None
        if len(shape) != 2 or type_[0][:2] != (size, shape[0]):
            return None
        # As a gather of what the rows are a view of.
        root = terms.roots.get(whole, whole)
        collective = terms.number((*found[0][:3], root), name)
        rooted = terms.types[root][0]
        made = ((rooted[0] * size, *rooted[1:]) if rooted else (size,), terms.types[root][1])
        terms.types.setdefault(collective, made)
        gathered = self._as_root(collective, key, name, ((size * shape[0], shape[1]), dtype))
        self.in_parts.setdefault(collective, set()).update(given)
        if products[0] is None:
            return self._as_root(collective, key, name, type_) if type_[1] == dtype else None
        if any(p[:2] != products[0][:2] or p[3] != products[0][3] for p in products):
            return None
        target, bias, _, second = products[0]
        product = self._product(target, bias, gathered, second, roots[0])
        if product is None or terms.types[product][1] != type_[1]:
            return None
        return self._as_root(product, key, name, type_)

    def _seen_before(self, node: Node, source: int, values: Any, type_: _Type) -> int | None:
        """The reduction of a view of a product, for a view of the reduction of a product."""
        terms = self.terms
        space, kind, rest, product = terms.keys[source]
        if len(values) != 2 or not _fits_shape(values[1], type_[0]):
            return None
        shape, dtype = terms.types[source]
        if type_[1] != dtype or math.prod(shape) != math.prod(type_[0]):
            return None
        given = type_[0]
        if kind == "reduce_scatter_tensor":
            given = (given[0] * int(dict(rest)["group_size"][1]), *given[1:])
        view = terms.number(("bytes", product, (given, dtype)), node.name)
        terms.types.setdefault(view, (given, dtype))
        terms.roots[view] = product
        term = terms.number((space, kind, rest, view), node.name)
        terms.types.setdefault(term, type_)
        self.in_parts.setdefault(term, set()).update(self.in_parts[source])
        return term

    def _as_root(self, root: int, key: Any, name: str, type_: _Type) -> int:
        """The term of bytes of ``root`` of a type: ``root`` itself, if it is of that type."""
        terms = self.terms
        if terms.types[root] == type_:
            return root
        term = terms.number(("bytes", root, type_), name)
        terms.types.setdefault(term, type_)
        terms.roots[term] = root
        return term

    def _moved_bytes(self, result: Any, key: Any, name: str) -> list[int] | None:
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
            sent, made = terms.types[value][0], _type_of(result)
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

    def _replace(self, old: list[int], key: Any, name: str) -> int:
        new = self.terms.number(key, name)
        for each in old:
            self.replaced.setdefault(each, set()).add(new)
        return new

    def _reduced_twice(self, key: Any, name: str) -> int | None:
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

    def _opaque(self, node: Node) -> None:
        """A call that may do anything with what it is given."""
        given = node.all_input_nodes
        plain = not _tensors(_val(node)) and not any(self.cells[n] for n in given)
        key: Any = (_target_name(node), self._value(node.args), self._value(node.kwargs))
        if plain and not _is_higher_order(node.target):
            self._make(node, self.terms.number(key, node.name))
            return
        self._touch(node, given)
        term = self.terms.number((*key, len(self.effects)), node.name)
        started = frozenset(self.collectives) if _carries_collective(node) else None
        self.effects.append((term, started, self._in_flight() if started is not None else None))
        for cell in self._cells(given):
            cell.version = self.terms.number(("write", term, cell.version), node.name)
        self._make(node, term)

    def _collective(self, node: Node, op: Any, space: str, name: str) -> None:
        in_place = name.endswith("_")
        into = name.endswith("_out")
        name = name.removesuffix("_").removesuffix("_out")
        if name.removesuffix("_coalesced") == "broadcast":
            space = _SPACES[0]  # it only moves; torch's has no form for several tensors
        several = name.endswith("_coalesced")
        kind = name.removesuffix("_coalesced")
        arguments = dict(zip([a.name for a in op._schema.arguments], node.args, strict=False))
        arguments.update(node.kwargs)
        tensors = [a.name for a in op._schema.arguments if "Tensor" in str(a.type)]
        given = [n for t in tensors for n in _nodes(arguments.get(t))]
        rest = tuple((k, self._value(v)) for k, v in sorted(arguments.items()) if k not in tensors)
        group = str(arguments.get("group_name"))
        if kind not in _KINDS:
            self._touch(node, given)
            term = self.terms.number(
                (space, name, rest, self._value(given), len(self.effects)), node.name
            )
            self.effects.append((term, frozenset(self.collectives), self._in_flight()))
            self._make(node, term)
            return
        self._touch(node, [])
        self._check_landed(node, given)
        values = [self._value(n) for n in given]
        # One term for each: a launch of several is worth what launches of one are worth.
        found: list[int] = []
        results_in = _tensors(_val(node))
        for k, (n, value) in enumerate(
            zip(given, values, strict=True) if several else [(given[0], values)]
        ):
            key = (
                space,
                kind,
                rest,
                value if several else (value[0] if len(value) == 1 else tuple(value)),
            )
            name = f"{kind} of {n.name}"
            moved = self._moved_bytes(results_in[k] if k < len(results_in) else None, key, name)
            if moved is not None:
                self.collectives.update(dict.fromkeys(moved, node.name))
                type_ = _type_of(results_in[k])
                if kind == "all_to_all_single" or type_ is None:
                    found.append(self.terms.number(key, name))
                else:
                    found.append(self._as_root(moved[0], key, name, type_))
                continue
            folded = None if several else self._folded(key, name)
            if folded is not None:
                found.append(folded)
                continue
            made = self._reduced_twice(key, f"{kind} of {n.name}")
            term = self.terms.number(key, f"{kind} of {n.name}") if made is None else made
            self.collectives[term] = node.name
            found.append(term)
        if several:
            reduce_op = arguments.get("reduce_op")
            self.buckets[tuple(found)] = (
                node.name,
                str(reduce_op).lower() if reduce_op is not None else None,
                group,
                {t.dtype for n in given for t in _tensors(_val(n))},
                space,
            )
        if in_place or into:
            targets = [arguments["out"]] if into else (given if several else given[:1])
            for n, term in zip(targets, found, strict=True):
                self._touch(node, [n])
                for cell in self.cells[n]:
                    cell.version = self.terms.number(("write", term, cell.version), node.name)
            self._make(node, self.term[targets[0]], views=targets)
            if several:
                self.term[node] = tuple(self.term[n] for n in targets)
            results = [self.cells[n] for n in targets]
        else:
            self._make(node, tuple(found) if several else found[0])
            results = [(cell,) for cell in self.cells[node]] if several else [self.cells[node]]
        for k, written in enumerate(results):
            read = self._cells([given[k]] if several else given)
            for cell in written:
                cell.writer = (node, k)
            for cell in read:
                cell.readers.add((node, k))
            self.flying[node, k] = (read, written)

    def _wait(self, node: Node) -> None:
        (source,) = node.all_input_nodes
        for cell in self.cells[source]:
            start = cell.writer
            if start is None:
                continue
            read, written = self.flying.pop(start)
            for other in written:
                other.writer = None
            for other in read:
                other.readers.discard(start)
        self._make(node, self.term[source], views=[source])

    # --- values --------------------------------------------------------------------------------

    def _value(self, argument: Any, address: bool = False, in_flight: bool = False) -> Any:
        """What an argument is worth now; a view of memory that was written, with its version."""
        if isinstance(argument, Node):
            term = self.term[argument]
            if address:
                return term
            versions = tuple(c.version for c in self.cells[argument] if c.version is not None)
            return ("read", term, versions) if versions else term
        if isinstance(argument, list | tuple):
            return tuple(self._value(a, address, in_flight) for a in argument)
        if isinstance(argument, dict):
            items = sorted(argument.items())
            return tuple((k, self._value(v, address, in_flight)) for k, v in items)
        if isinstance(argument, slice):
            return (
                "slice",
                *(self._value(v) for v in (argument.start, argument.stop, argument.step)),
            )
        return _plain_value(argument)

    def _cells(self, nodes: Iterable[Node]) -> tuple[_Cell, ...]:
        return tuple(dict.fromkeys(c for n in nodes for c in self.cells[n]))

    def _aliases(self, node: Node, op: Any) -> tuple[list[Node], list[Node]]:
        """The arguments that an op writes, and those that its result may be a view of."""
        writes, views = _alias_names(op)
        if not writes and not views:
            return [], []
        names = [a.name for a in op._schema.arguments]
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        written = [n for name in writes for n in _nodes(arguments.get(name))]
        viewed = [n for name in views for n in _nodes(arguments.get(name))]
        return written, viewed

    def _check_landed(self, node: Node, given: Iterable[Node]) -> None:
        for cell in self._cells(given):
            if cell.writer is not None:
                raise CheckFailed(f"{node.name} uses what {cell.writer[0].name} has in flight")

    def _touch(self, node: Node, written: list[Node]) -> None:
        if not _is_collective_target(node):
            self._check_landed(node, node.all_input_nodes)
        for cell in self._cells(written):
            if cell.writer is not None:
                raise CheckFailed(f"{node.name} writes what {cell.writer[0].name} has in flight")
            if cell.readers:
                reader = next(iter(cell.readers))
                raise CheckFailed(f"{node.name} writes what {reader[0].name} reads in flight")

    def _in_flight(self) -> frozenset[Any]:
        return frozenset(
            self.term[n][k] if isinstance(self.term[n], tuple) else self.term[n]
            for n, k in self.flying
        )


# --- memory --------------------------------------------------------------------------------------


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
        for tensor in _tensors(_val(node)):
            address = tensor.untyped_storage()._cdata
            if node.op in ("placeholder", "get_attr"):
                caller.add(address)
            elif address not in born and address not in caller:
                op = node.target
                alias = getattr(op, "_schema", None) is not None and any(
                    r.alias_info is not None for r in op._schema.returns
                )
                is_wait = "wait_tensor" in _text(op)
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
        if node.op == "call_function" and _text(node.target).startswith(_SPACES):
            if "wait_tensor" in _text(node.target):
                for address in set(used):
                    used |= reads.get(address, set())
            else:
                several = isinstance(_val(node), list | tuple)
                listed = _nodes(node.args[0]) if several else []
                for k, tensor in enumerate(_tensors(_val(node))):
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


# --- small things --------------------------------------------------------------------------------


@functools.cache
def _alias_names(op: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments that an op writes, and those that its result may be a view of."""
    schema = op._schema
    aliases = [(a.name, a.alias_info) for a in schema.arguments if a.alias_info is not None]
    written = tuple(name for name, info in aliases if info.is_write)
    if not any(r.alias_info is not None for r in schema.returns):
        return written, ()
    return written, tuple(name for name, info in aliases if not info.is_write)


@functools.cache
def _text(op: Any) -> str:
    return str(op)


def _val(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


def _nodes(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    if isinstance(value, dict):
        return [n for v in value.values() for n in _nodes(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in _nodes(v)]
    return []


def _is_packet(target: Any) -> bool:
    return hasattr(target, "overloads") and hasattr(target, "_qualified_op_name")


def _is_collective_target(node: Node) -> bool:
    return _text(node.target).startswith(_SPACES)


def _is_higher_order(target: Any) -> bool:
    return hasattr(target, "py_kernels") and not hasattr(target, "_schema")


def _carries_collective(node: Node) -> bool:
    """Whether an op that carries another one, or a graph, may communicate."""
    if any(str(a).startswith(_SPACES) for a in node.args if hasattr(a, "_schema")):
        return True
    return any(n.op == "get_attr" and not _tensors(_val(n)) for n in node.all_input_nodes)


def _target_name(node: Node) -> str:
    target = node.target
    return str(getattr(target, "__module__", "")) + "." + str(getattr(target, "__name__", target))
