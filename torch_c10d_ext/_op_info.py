"""What every op is, by its schema: one table for reports, compilers, the optimizer and tests.

A collective has up to five forms, which the name tells: functional, in place, into ``out``, and of
a list, functional and in place.
"""

from __future__ import annotations

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

# Bytes over the busiest rank's link in one direction, given the size of a group of two and more,
# the bytes of this rank's input and those of its result (Thakur, Rabenseifner and Gropp 2005;
# rings). Numbers may be symbolic. Ops that also look at their arguments have no row here.
WIRE: dict[str, Callable[[int, Any, Any], Any]] = {
    "all_reduce": lambda n, given, _: 2 * (n - 1) * given / n,
    "reduce_from_group": lambda n, given, _: 2 * (n - 1) * given / n,
    "all_gather_into_tensor": lambda n, given, _: (n - 1) * given,
    "all_gather": lambda n, given, result: result - given,
    "reduce_scatter_tensor": lambda n, given, _: (n - 1) * given / n,
    "reduce_scatter": lambda n, given, result: given - result,
    "broadcast": lambda n, given, _: given,
    "reduce": lambda n, given, _: given,
    "gather": lambda n, given, _: (n - 1) * given,
    "scatter": lambda n, _, result: (n - 1) * result,
    "permute_tensor": lambda n, given, _: given,
    "barrier": lambda n, given, _: 0 * given,
    "isend": lambda n, given, _: given,
    "irecv": lambda n, given, _: given,
}


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


def forms_of(kind: str) -> dict[str, Any]:
    """The forms that there are of a collective of ours, as op overloads."""
    ops = torch.ops.c10d_ext
    named = {form: getattr(ops, kind + form, None) for form in FORMS}
    return {form: packet.default for form, packet in named.items() if packet is not None}
