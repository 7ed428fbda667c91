"""Calls of a block as one call of the backend."""

from __future__ import annotations

import datetime as dt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_c10d_ext import _C
from torch_c10d_ext._groups import Group, group_name, group_size
from torch_c10d_ext.distributed import _delivery
from torch_c10d_ext.errors import InvalidArgument

_ops = torch.ops.c10d_ext


class Call(NamedTuple):
    """A call that waits for the end of its block."""

    verb: str  # all_reduce, all_gather or reduce_scatter
    input: Tensor
    output: Tensor
    reduction: str = ""
    factor: complex | None = None

    def goes_with(self, other: Call) -> bool:
        """Whether both fit into one message."""
        return (
            (self.verb, self.reduction, self.factor) == (other.verb, other.reduction, other.factor)
            and self.input.dtype == other.input.dtype
            and self.input.device == other.input.device
        )


class HeldMessage:
    """The work of a message that starts at the end of its block."""

    def __init__(self, message: _delivery.Message) -> None:
        self.message = message
        self.started: Any = None

    def _work(self) -> Any:
        if self.started is None:
            raise RuntimeError(
                "coalescing_manager: the block must end before its messages are waited for, got a "
                "wait inside of it"
            )
        return self.started

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Waits for the message, after the block."""
        return self._work().wait(timeout) if timeout else self._work().wait()

    def is_completed(self) -> bool:
        """Whether the message has started and is complete."""
        return self.started is not None and self.started.is_completed()

    def is_success(self) -> bool:
        """Whether it is complete without an error."""
        return self.started is not None and self.started.is_success()

    def exception(self) -> Any:
        """Its error, or None."""
        return None if self.started is None else self.started.exception()

    def result(self) -> list[Tensor]:
        """The message's tensor."""
        return [self.message.tensor]

    def get_future(self) -> Any:
        """The future of the message, after the block."""
        return self._work().get_future()

    def source_rank(self) -> int:
        """The sender within the group, after :meth:`wait`."""
        return self._work()._source_rank()

    _source_rank = source_rank
    synchronize = wait


# The open blocks by the name of their group.
_open: dict[str, CoalescingManager] = {}


class CoalescingManager:
    """Fires the calls of a ``with`` block as one.

    ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` on the group of the
    block start at its end; neighbours of one kind, reduce op, dtype and device travel together. So
    do ``isend`` and ``irecv``, neighbours as one batch, whose works can be waited for after the
    block. Other calls start at once.

    Args:
        group: the group whose calls are held back, see :data:`torch_c10d_ext.functional.Group`.
        device: as torch has it; every device is served.
        async_ops: True leaves the block with the calls in flight, to be ended by :meth:`wait`.

    Raises:
        ValueError: the group has an open block already.

    Gradient:
        None: see :mod:`torch_c10d_ext.distributed`.

    Example, 2 ranks::

        with coalescing_manager() as block:
            for x in xs:
                all_reduce(x)
        # one message, however many xs
    """

    def __init__(
        self,
        group: Group = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> None:
        self._name = group_name(group)
        self._async_ops = async_ops
        self._calls: list[Call | HeldMessage] = []
        self._works: list[Any] = []

    def __enter__(self) -> CoalescingManager:  # noqa: PYI034
        if self._name in _open:
            raise InvalidArgument(
                "coalescing_manager: the group must have no open block, got one inside another "
                f"for group '{self._name}'"
            )
        _open[self._name] = self
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        del _open[self._name]
        if kind is None:
            with torch.no_grad():
                self._fire()

    def append(self, work: Any) -> None:
        """Makes :meth:`wait` wait for one more work."""
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        """Waits for the calls of a block with ``async_ops=True``."""
        for work in self._works:
            work.wait()
        self._works = []

    def _fire(self) -> None:
        self._start(self._async_ops)
        if not self._async_ops:
            self.wait()

    def _start(self, async_ops: bool = True) -> None:
        runs: list[list[Any]] = []
        for call in self._calls:
            if runs and _go_together(runs[-1][0], call):
                runs[-1].append(call)
            else:
                runs.append([call])
        self._calls = []
        for calls in runs:
            if isinstance(calls[0], HeldMessage):
                works = _delivery.start_messages([held.message for held in calls], self._name)
                for held, work in zip(calls, works, strict=True):
                    held.started = work
                self._works += works
            else:
                self.append(_start(self._name, calls, async_ops or len(runs) > 1))


def _go_together(first: Call | HeldMessage, call: Call | HeldMessage) -> bool:
    if isinstance(first, HeldMessage) or isinstance(call, HeldMessage):
        return isinstance(first, HeldMessage) and isinstance(call, HeldMessage)
    return first.goes_with(call)


def hold_messages(name: str, messages: list[_delivery.Message]) -> list[HeldMessage] | None:
    """Keeps messages for the end of the group's block, and gives their works; None: none open."""
    if name not in _open:
        return None
    held = [HeldMessage(message) for message in messages]
    _open[name]._calls += held
    return held


def release(name: str) -> None:
    """Starts what the group's block holds back, for a message that cannot be held to follow."""
    if name in _open:
        _open[name]._start()


def hold(name: str, call: Call) -> bool:
    """Keeps ``call`` for the end of the group's block; False where none is open."""
    if name not in _open:
        return False
    _open[name]._calls.append(call)
    return True


def _start(name: str, calls: list[Call], async_op: bool) -> Any:
    verb, reduction, factor = calls[0].verb, calls[0].reduction, calls[0].factor
    inputs, outputs = [call.input for call in calls], [call.output for call in calls]
    touched = outputs if verb == "all_reduce" else inputs + outputs
    if all(_delivery.in_place(x) for x in touched):
        if verb == "all_reduce":
            _C.ops["all_reduce_coalesced_"](outputs, reduction, name, factor=factor)
        elif verb == "all_gather":
            _C.start_all_gather_block(inputs, outputs, name)
        else:
            _C.start_reduce_scatter_block(inputs, outputs, reduction, factor, name)
        return _delivery.written(outputs, async_op)
    if verb == "all_reduce":
        started = _ops.all_reduce_coalesced(inputs, reduction, name, factor=factor)
    elif verb == "all_gather":
        started = _ops.all_gather_into_tensor_coalesced(inputs, group_size(name), name)
    else:
        started = _ops.reduce_scatter_tensor_coalesced(
            inputs, reduction, group_size(name), name, factor=factor
        )
    return _delivery.spread(list(started), [[out] for out in outputs], async_op)
