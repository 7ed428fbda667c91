"""Calls of a block as one call of the backend."""

from __future__ import annotations

import datetime as dt
from typing import Any

import torch
from torch import Tensor

from torch_c10d_ext import _C
from torch_c10d_ext._groups import Group, group_name, group_size
from torch_c10d_ext.distributed import _delivery
from torch_c10d_ext.errors import InvalidArgument

_ops = torch.ops.c10d_ext
# Called with the tensors that a tracer has in place of the program's.
_check_apart = torch.compiler.allow_in_graph(_C.check_apart)
_all_reduce_ = _C.writes["all_reduce_coalesced_"]


class Run:
    """Neighbouring calls of a block that fit into one message and wait for its end."""

    def __init__(
        self, function: str, reduction: str, factor: complex | None, dtype: torch.dtype, device: Any
    ) -> None:
        self.function = function  # all_reduce, all_gather_into_tensor or reduce_scatter_tensor
        self.reduction = reduction
        self.factor = factor
        self.dtype = dtype
        self.device = device
        self.outputs: list[Tensor] = []
        self.in_place = function == "all_reduce"
        self.inputs = self.outputs if self.in_place else []

    def start(self, name: str, async_op: bool) -> Any:
        """One call of the backend for all of them; its work where ``async_op`` is set."""
        if not torch.compiler.is_compiling() and self._write(name, async_op):
            return _delivery.work_of(self.outputs) if async_op else None
        with torch.no_grad():
            return self._call_ops(name, async_op)

    def _call_ops(self, name: str, async_op: bool) -> Any:
        function, inputs, outputs = self.function, self.inputs, self.outputs
        if function == "all_reduce":
            started = _ops.all_reduce_coalesced(inputs, self.reduction, name, factor=self.factor)
        elif function == "all_gather_into_tensor":
            started = _ops.all_gather_into_tensor_coalesced(inputs, group_size(name), name)
        else:
            started = _ops.reduce_scatter_tensor_coalesced(
                inputs, self.reduction, group_size(name), name, factor=self.factor
            )
        return _delivery.spread(list(started), [[out] for out in outputs], async_op)

    def _write(self, name: str, async_op: bool) -> bool:
        """As an eager call that writes the outputs themselves; False where none may."""
        if self.function == "all_reduce":
            return _all_reduce_(async_op, self.outputs, self.reduction, name, factor=self.factor)
        if self.function == "all_gather_into_tensor":
            return _C.write_all_gather_block(async_op, self.inputs, self.outputs, name)
        return _C.write_reduce_scatter_block(
            async_op, self.inputs, self.outputs, self.reduction, self.factor, name
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


def _forget() -> None:
    """The next call of a block is to be looked at."""
    if not torch.compiler.is_compiling():
        _C.remember()


# By the name of their group.
open_blocks: dict[str, CoalescingManager] = {}


class CoalescingManager:
    """Fires the calls of a ``with`` block as one.

    ``all_reduce``, ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` on the group of the
    block start at its end; neighbours of one kind, reduce op, dtype and device travel together. So
    do ``isend`` and ``irecv``, as one batch and before the collectives, wherever in the block they
    are called; their works can be waited for after it. Other calls start at once.

    Args:
        group: the group whose calls are held back, see :data:`torch_c10d_ext.functional.Group`.
        device: as torch has it; every device is served.
        async_ops: True leaves the block with the calls in flight, to be ended by :meth:`wait`.

    Raises:
        ValueError: the group has an open block already.
        CollectiveMismatch: the ranks' blocks differ; the group ends where they differ in how many
            tensors travel together, as they do where the dtypes or reduce ops of one call differ.

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
        self._runs: list[Run] = []
        self._messages: list[HeldMessage] = []
        self._works: list[Any] = []

    def __enter__(self) -> CoalescingManager:  # noqa: PYI034
        if self._name in open_blocks:
            raise InvalidArgument(
                "coalescing_manager: the group must have no open block, got one inside another "
                f"for group '{self._name}'"
            )
        open_blocks[self._name] = self
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        del open_blocks[self._name]
        _forget()
        if kind is None:
            self._fire()

    def append(self, work: Any) -> None:
        """Makes :meth:`wait` wait for one more work."""
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        """Waits for the calls of a block with ``async_ops=True``, and raises the first error."""
        works, self._works = self._works, []
        error: Exception | None = None
        for work in works:  # all of them: a failed work is known until somebody has waited for it
            try:
                work.wait()
            except Exception as failed:
                error = error or failed
        if error is not None:
            raise error

    def _fire(self) -> None:
        self._check()
        runs, self._runs = self._runs, []
        together = self._async_ops or len(runs) + len(self._messages) > 1
        # Messages come first: torch's do not wait for the end of a block.
        self._start_messages()
        for run in runs:
            self.append(run.start(self._name, together))
        if not self._async_ops:
            self.wait()

    def _check(self) -> None:
        if sum(len(run.outputs) for run in self._runs) + len(self._messages) < 2:
            return
        touched = [lists for run in self._runs for lists in (run.inputs, run.outputs)]
        sent = [held.message.tensor for held in self._messages if held.message.sends]
        received = [held.message.tensor for held in self._messages if not held.message.sends]
        _check_apart(self._name, *touched, sent, [], [], received)

    def _start_messages(self) -> None:
        held = [one for one in self._messages if one.started is None]
        if held:
            with torch.no_grad():
                works = _delivery.start_messages([one.message for one in held], self._name)
            for one, work in zip(held, works, strict=True):
                one.started = work
            self._works += works

    def hold_messages(self, messages: list[_delivery.Message]) -> list[HeldMessage]:
        """Keeps messages for the end of the block, and gives their works."""
        held = [HeldMessage(message) for message in messages]
        self._messages += held
        return held

    def release_messages(self) -> None:
        """Starts the messages so far, for one that cannot be held to follow."""
        self._check()
        self._start_messages()


def hold(
    name: str,
    function: str,
    op: Any,
    group: Group,
    input: Tensor,
    output: Tensor,
    reduction: str = "",
    factor: complex | None = None,
) -> None:
    """Keeps a call with ``op`` and ``group`` for the end of the group's open block.

    The next one of the same two may go through ``_C.hold_again``.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        _forget()
        _C.check_held(function, name, reduction, factor, input, output)
    runs = open_blocks[name]._runs
    run = runs[-1] if runs else None
    if (
        run is None
        or run.function != function
        or run.reduction != reduction
        or run.factor != factor
        or run.dtype is not input.dtype
        or run.device != input.device
    ):
        run = Run(function, reduction, factor, input.dtype, input.device)
        runs.append(run)
    if not run.in_place:  # `is` of lists is more than Dynamo of torch 2.11 can trace
        run.inputs.append(input)
    run.outputs.append(output)
    # The factor of an op may change, as may the ranks in a list.
    if not compiling and factor is None and not isinstance(group, list):
        _C.remember(function, op, group, group_size(name), run.inputs, run.outputs)
