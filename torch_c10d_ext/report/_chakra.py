"""Execution traces as MLCommons Chakra defines them, for ASTRA-sim and other simulators.

A file is a sequence of protocol buffers, each behind its length: the metadata, then one ``Node``
per computation and collective (Chakra's ``et_def.proto``, version 0.0.4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_c10d_ext._op_info import Pattern

VERSION = "0.0.4"

# NodeType.
COMPUTATION, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7

# CollectiveCommType.
KINDS = {
    Pattern.ALL_REDUCE: 0,
    Pattern.REDUCE: 1,
    Pattern.ALL_GATHER: 2,
    Pattern.GATHER: 3,
    Pattern.SCATTER: 4,
    Pattern.BROADCAST: 5,
    Pattern.ALL_TO_ALL: 6,
    # A permutation sends to one rank what an all-to-all sends to all of them.
    Pattern.MESSAGE: 6,
    Pattern.REDUCE_SCATTER: 7,
    Pattern.BARRIER: 9,
}


@dataclass(frozen=True)
class ChakraNode:
    """One node of a trace; times in seconds. ``after`` holds the ids of nodes that must be done."""

    id: int
    name: str
    type: int
    start: float
    seconds: float
    after: Sequence[int] = ()
    attributes: Mapping[str, int | str | bool] = field(default_factory=dict)


def encode(nodes: Iterable[ChakraNode]) -> bytes:
    """The bytes of an ``.et`` file."""
    messages = [_text(1, VERSION), *map(_node, nodes)]
    return b"".join(_varint(len(message)) + message for message in messages)


def _node(node: ChakraNode) -> bytes:
    parts = [
        _number(1, node.id),
        _text(2, node.name),
        _number(3, node.type),
        _bytes(5, b"".join(map(_varint, node.after))) if node.after else b"",
        _number(6, round(node.start * 1e6)),
        # A simulator takes no time as "compute it yourself".
        _number(7, max(1, round(node.seconds * 1e6)) if node.seconds else 0),
        *(_bytes(10, _attribute(name, value)) for name, value in node.attributes.items()),
    ]
    return b"".join(parts)


def _attribute(name: str, value: int | str | bool) -> bytes:
    if isinstance(value, bool):
        return _text(1, name) + _tag(27, 0) + _varint(value)
    if isinstance(value, str):
        return _text(1, name) + _text(29, value)
    return _text(1, name) + _tag(9, 0) + _varint(value & (1 << 64) - 1)  # int64_val


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _number(number: int, value: int) -> bytes:
    return _tag(number, 0) + _varint(value) if value else b""


def _bytes(number: int, value: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode())


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
