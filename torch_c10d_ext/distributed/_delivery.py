"""From a started call to what the caller gets: the data in his tensors, or a Work."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_c10d_ext import _C
from torch_c10d_ext._async import replace, writes_directly

_wait = torch.ops.c10d_ext.wait_tensor.default
_start_messages = torch.ops.c10d_ext.batch_isend_irecv.default
_wait_message = torch.ops.c10d_ext.wait_message.default

# The tensors that the values of one started tensor go to, one after the other.
Targets = Sequence[Tensor]


class TracedWork:
    """What a traced call with ``async_op=True`` returns: its wait is a node of the graph.

    The targets have their values after :meth:`wait`, here or after the graph has run.
    """

    def __init__(self, started: list[Tensor], targets: Sequence[Targets]) -> None:
        self._started = started
        self._targets = targets
        self._waited = False

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Puts the values into the targets; the backend's own timeout ends a traced wait."""
        if not self._waited:
            self._waited = True
            with torch.no_grad():
                _settle(self._started, self._targets)
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for: a graph does not branch on what a backend has done."""
        return self._waited

    def is_success(self) -> bool:
        """As :meth:`is_completed`: a graph ends where a collective fails."""
        return self._waited

    def exception(self) -> None:
        """None: a graph ends where a collective fails."""

    def result(self) -> list[Tensor]:
        """The targets."""
        return [t for targets in self._targets for t in targets]

    def get_future(self) -> TracedFuture:
        """Ends with the targets, and with the work."""
        return TracedFuture(self, None)

    synchronize = wait


class TracedFuture:
    """The future of a traced call: what it waits for, and its callbacks, are nodes of the graph.

    A callback runs when somebody waits for, or asks for the value of, what ``then`` returned.
    """

    def __init__(self, before: Any, callback: Any) -> None:
        self._before = before  # a TracedWork, or the future that the callback is called with
        self._callback = callback
        self._value: Any = None
        self._done = False

    def wait(self) -> Any:
        """What the call, or the callback, gives."""
        if not self._done:
            self._before.wait()
            self._value = (
                self._before.result() if self._callback is None else self._callback(self._before)
            )
            self._done = True
        return self._value

    def value(self) -> Any:
        """As :meth:`wait`."""
        return self.wait()

    def done(self) -> bool:
        """Whether somebody has waited: a graph does not branch on what a backend has done."""
        return self._done

    def then(self, callback: Any) -> TracedFuture:
        """The future of what ``callback`` gives, called with this one."""
        return TracedFuture(self, callback)


class SpreadingWork(dist.Work):
    """Works, none where all is complete, whose data may take one more step on this rank.

    From where it arrived to the targets, when somebody waits or asks.
    """

    def __init__(
        self,
        started: list[Tensor],
        targets: Sequence[Targets],
        works: list[dist.Work] | None = None,
    ) -> None:
        super().__init__()
        if works is None:
            works = [work for t in started if (work := _C.started_work_of(t))]
        self._works: list[Any] = works
        self._started = started
        self._targets = targets
        self._future: _C.Future[list[Tensor]] | None = None
        self._waited = False
        self._spread: torch.Event | None = None  # by a future's callback, on a stream of its own
        self._error: Exception | None = None
        self._settling = threading.Lock()

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        try:
            for work in self._works:
                work.wait(timeout) if timeout else work.wait()
        except Exception as error:
            self._error = error
            raise
        # A future's callback settles on another thread: who comes second returns only after it has.
        with self._settling, torch.no_grad():
            if not self._waited:
                _settle(self._started, self._targets)
                self._error = None  # of a wait that ran out of patience
                self._waited = True
        if self._spread is not None:
            self._spread.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        over = self._waited or all(work.is_completed() for work in self._works)
        if over and not self._waited and self._error is None:
            with contextlib.suppress(Exception):  # exception() has it
                self.wait()
        return over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return [t for targets in self._targets for t in targets]

    def _calls(self) -> Iterable[tuple[Tensor, Targets]]:
        return zip(self._started, self._targets, strict=True)

    def _first(self, asked: str) -> Any:
        if not self._works:
            raise RuntimeError(f"{asked}: a backend must have done the call, got one without")
        return self._works[0]

    def _get_duration(self) -> float:
        return self._first("_get_duration")._get_duration()

    def _get_op_type(self) -> Any:
        return self._first("_get_op_type")._get_op_type()

    def _get_sequence_number(self) -> int:
        return self._first("_get_sequence_number")._get_sequence_number()

    def get_future(self) -> _C.Future[list[Tensor]]:
        if self._future is None:
            futures = [work.get_future() for work in self._works]
            on_device = any(t.device.type not in ("cpu", "lazy") for t in self._started)
            # A collected future knows no devices: what follows it runs on the stream of this call,
            # which then waits for the collective.
            one = on_device and len(futures) == 1
            arrived = futures[0] if one else torch.futures.collect_all(futures)

            def spread() -> list[Tensor]:
                in_place = all(is_in_place(t, p) for t, p in self._calls())
                # A wait for what lies where it is to lie waits for later calls on it, too.
                if not (in_place and all(t.is_cpu for t in self._started)):
                    self.wait()
                if on_device and not in_place:
                    self._spread = torch.Event(self._started[0].device)
                    self._spread.record()
                return self.result()

            self._future = _C.followed(arrived, spread)
        return self._future


def in_place(tensor: Tensor) -> bool:
    """Whether the backend may write ``tensor`` itself: not in a graph, nor a tensor subclass."""
    return not torch.compiler.is_compiling() and writes_directly(tensor, tensor)


def work_of(tensors: list[Tensor], works: list[dist.Work] | None = None) -> SpreadingWork:
    """The work of the call, started just now or as ``works``, that writes ``tensors`` itself."""
    return SpreadingWork(tensors, [[t] for t in tensors], works)


def spread(started: list[Tensor], targets: Sequence[Targets], async_op: bool) -> Any:
    """The end of a call whose collective writes fresh tensors, each for one or more targets."""
    if not async_op:
        return _settle(started, targets)
    eager = not torch.compiler.is_compiling() and all(writes_directly(t, t) for t in started)
    return SpreadingWork(started, targets) if eager else TracedWork(started, targets)


def is_in_place(started: Tensor, targets: Targets) -> bool:
    return len(targets) == 1 and targets[0] is started


def _settle(started: list[Tensor], targets: Sequence[Targets]) -> None:
    for tensor, parts in zip(started, targets, strict=True):
        values = _wait(tensor)
        if is_in_place(tensor, parts):
            continue
        if len(parts) == 1:
            replace(parts[0], values.view(parts[0].shape))
        elif parts:
            pieces = _split(values.view(-1), [part.numel() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                replace(part, piece.view(part.shape))


def _split(flat: Tensor, counts: list[int]) -> Sequence[Tensor]:
    if flat.device.type != "lazy":
        return flat.split(counts)
    # torch's lazy split is not lazy.
    ends = itertools.accumulate(counts)
    return [flat.narrow(0, end - count, count) for end, count in zip(ends, counts, strict=True)]


class Message(NamedTuple):
    """A message of this rank."""

    tensor: Tensor
    sends: bool
    peer: int  # in the group; -1: any source
    tag: int


class TracedMessage:
    """What a traced message returns: its wait is a node of the graph, as :class:`TracedWork`'s."""

    def __init__(self, ticket: Tensor, message: Message) -> None:
        self._ticket = ticket
        self._message = message
        self._source: Tensor | None = None

    def wait(self, timeout: dt.timedelta | None = None) -> bool:
        """Puts what is received into its tensor; the group's timeout ends a traced wait."""
        if self._source is None:
            target = self._message.tensor
            sizes = [0] if self._message.sends else target.shape
            values, self._source = _wait_message(self._ticket, sizes, target.dtype)
            if not self._message.sends:
                with torch.no_grad():
                    target.copy_(values)
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for: a graph does not branch on what a backend has done."""
        return self._source is not None

    def is_success(self) -> bool:
        """As :meth:`is_completed`: a graph ends where a message fails."""
        return self._source is not None

    def exception(self) -> None:
        """None: a graph ends where a message fails."""

    def result(self) -> list[Tensor]:
        """The message's tensor."""
        return [self._message.tensor]

    def source(self) -> Tensor:
        """The sender within the group, an int64 scalar, after :meth:`wait`."""
        if self._source is None:
            raise RuntimeError("source_rank: the message must be waited for, got a call before")
        return self._source

    def source_rank(self) -> int:
        """The sender within the group, after :meth:`wait`."""
        peer = self._message.peer
        return self.source().item() if peer < 0 else peer  # type: ignore[return-value]

    _source_rank = source_rank
    synchronize = wait


def start_messages(messages: list[Message], name: str) -> list[Any]:
    """The works of messages that start together."""
    tensors = [message.tensor for message in messages]
    args = (
        tensors,
        [message.peer for message in messages],
        [message.sends for message in messages],
        [message.tag for message in messages],
        name,
    )
    if all(in_place(tensor) for tensor in tensors):
        return _C.start_messages(*args)
    tickets = _start_messages(*args)
    return [TracedMessage(t, m) for t, m in zip(tickets, messages, strict=True)]
