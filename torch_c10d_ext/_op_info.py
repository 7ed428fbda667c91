"""What every op is: one table for reports, compilers, the optimizer and tests.

An op's forms, tensors and group are read from its schema; what it sends is a row that its module in
``ops/`` declares.

A collective has up to five forms, which the name tells: functional, in place, into ``out``, and of
a list, functional and in place.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# The namespaces whose ops communicate: ours, and those of torch's functional collectives.
NAMESPACES = ("c10d_ext", "_c10d_functional", "_c10d_functional_autograd")

FUNCTIONAL, IN_PLACE, OUT, COALESCED, COALESCED_IN_PLACE = (
    "",
    "_",
    "_out",
    "_coalesced",
    "_coalesced_",
)
FORMS = (FUNCTIONAL, IN_PLACE, OUT, COALESCED, COALESCED_IN_PLACE)

# Ops that end a collective or a message.
WAITS = frozenset({"wait_tensor", "wait_message"})
# Ops with a group that send nothing.
SILENT = frozenset({"copy_to_group"})


class Pattern(enum.Enum):
    """Who sends to whom, in MPI's terms: what costs and traces are told by."""

    ALL_REDUCE = enum.auto()
    REDUCE = enum.auto()
    ALL_GATHER = enum.auto()
    GATHER = enum.auto()
    SCATTER = enum.auto()
    BROADCAST = enum.auto()
    ALL_TO_ALL = enum.auto()
    REDUCE_SCATTER = enum.auto()
    BARRIER = enum.auto()
    MESSAGE = enum.auto()

    @property
    def passes(self) -> int:
        """How often data goes through all ranks, as a ring or a tree; 0: to one other rank."""
        return {Pattern.ALL_REDUCE: 2, Pattern.BARRIER: 2, Pattern.MESSAGE: 0}.get(self, 1)

    def buffers(self, ranks: int, larger: float) -> tuple[float, float]:
        """The bytes of a rank's input and result where parts are equal, given the larger one."""
        if self in (Pattern.ALL_GATHER, Pattern.GATHER):
            return larger / ranks, larger
        if self in (Pattern.REDUCE_SCATTER, Pattern.SCATTER):
            return larger, larger / ranks
        return larger, larger


@dataclass(frozen=True)
class Traffic:
    """What a collective sends: a row of the table, which its module in ``ops/`` declares.

    Attributes:
        pattern: who sends to whom.
        wire: bytes over the busiest rank's link in one direction, given the size of a group of two
            and more, the bytes of this rank's input and those of its result (Thakur, Rabenseifner
            and Gropp 2005; rings). Numbers may be symbolic. Where the call's arguments say who
            gets how much, that of equal parts.
        movable: whether the optimizer, and its checker, know it; nothing passes what they do not.
        even: whether its sizes are the same on all ranks.
        moves: whether every rank gets what ranks gave, of sizes alike on all ranks: what is done
            with elements may be done before, and elements may travel as bytes.
    """

    pattern: Pattern
    wire: Callable[[int, Any, Any], Any]
    movable: bool = False
    even: bool = True
    moves: bool = False

    def wire_of_larger(self, ranks: int, larger: float) -> float:
        """``wire`` where parts are equal, given the bytes of a rank's larger buffer."""
        return float(self.wire(ranks, *self.pattern.buffers(ranks, larger))) if ranks > 1 else 0.0


# By kind, those of torch included. The modules of ``ops/``, which the package imports, fill it.
TRAFFIC: dict[str, Traffic] = {}

# A kind without a row.
_UNKNOWN = Traffic(Pattern.BROADCAST, lambda n, given, _: given)


def declare(
    *kinds: str,
    pattern: Pattern,
    wire: Callable[[int, Any, Any], Any],
    movable: bool = False,
    even: bool = True,
    moves: bool = False,
) -> None:
    """Adds the row of a collective, and of what else sends alike.

    Args:
        kinds: of the functional form on one tensor, ``"all_reduce"``.
        pattern, wire, movable, even, moves: as of :class:`Traffic`.
    """
    TRAFFIC.update(dict.fromkeys(kinds, Traffic(pattern, wire, movable, even, moves)))


def traffic_of(kind: str) -> Traffic:
    """What a collective sends; one that is unknown what a broadcast sends."""
    return TRAFFIC.get(kind, _UNKNOWN)


@dataclass(frozen=True)
class OpInfo:
    """An op of the communicating namespaces.

    Attributes:
        name: without the namespace, ``"all_reduce_coalesced_"``.
        kind: of its functional form on one tensor, ``"all_reduce"``.
        form: the rest of the name, one of :data:`FORMS`.
        namespace: where it is defined.
        arguments: the names of all arguments.
        tensors: those of them that are tensors or lists of tensors, the input first.
        written: those of them that it writes.
        group: the argument that names the group; None where there is none, or nothing is sent.
    """

    name: str
    kind: str
    form: str
    namespace: str
    arguments: tuple[str, ...]
    tensors: tuple[str, ...]
    written: tuple[str, ...]
    group: str | None

    @property
    def coalesced(self) -> bool:
        """Whether it takes a list and returns one."""
        return self.form in (COALESCED, COALESCED_IN_PLACE)

    @property
    def in_place(self) -> bool:
        """Whether it writes its input."""
        return self.form in (IN_PLACE, COALESCED_IN_PLACE)

    @property
    def is_wait(self) -> bool:
        """Whether it ends what another op has started."""
        return self.kind in WAITS

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, defaults left out."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


def kind_of(name: str) -> str:
    """``all_reduce`` for ``all_reduce_coalesced_``."""
    return name.removesuffix(_form_of(name))


def _form_of(name: str) -> str:
    return next(suffix for suffix in sorted(FORMS, key=len, reverse=True) if name.endswith(suffix))


@functools.cache
def op_info(op: Any) -> OpInfo | None:
    """What an op overload is; None for one of another namespace."""
    if op.namespace not in NAMESPACES:
        return None
    schema = op._schema
    name = schema.name.split("::")[1]
    arguments = tuple(argument.name for argument in schema.arguments)
    tensors = [a for a in schema.arguments if "Tensor" in str(a.type)]
    kind = kind_of(name)
    return OpInfo(
        name=name,
        kind=kind,
        form=_form_of(name),
        namespace=op.namespace,
        arguments=arguments,
        tensors=tuple(a.name for a in tensors),
        written=tuple(a.name for a in tensors if a.alias_info and a.alias_info.is_write),
        group="group_name" if "group_name" in arguments and kind not in SILENT else None,
    )


@functools.cache
def forms_of(kind: str) -> dict[str, Any]:
    """The forms that there are of a collective of ours, as op overloads."""
    ops = torch.ops.c10d_ext
    named = {form: getattr(ops, kind + form, None) for form in FORMS}
    return {form: packet.default for form, packet in named.items() if packet is not None}
