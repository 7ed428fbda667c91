"""AsyncCollectiveTensor: the result of a collective that waits on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor as _TorchAsyncCollectiveTensor,
)

from torch_c10d_ext import _C

_wait_op = torch.ops.c10d_ext.wait_tensor.default
_READY: int = _C.READY
_IN_FLIGHT: int = _C.IN_FLIGHT
_delivery = _C.delivery
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_make_wrapper = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
# A byte each, which torch does not copy.
LESS_THAN_A_BYTE = frozenset(
    getattr(torch, f"{name}{bits}") for name in ("int", "uint") for bits in range(1, 8)
)


def deliver(result: torch.Tensor) -> torch.Tensor:
    """The result of a start op as users get it.

    Eager: ``result`` itself where it is complete, else an :class:`AsyncCollectiveTensor`. Under a
    trace, a dispatch mode or a ``torch.func`` transform: waited for, as a node of the graph.
    """
    if _is_dynamo_compiling():
        return _wait_op(result)
    how = _delivery(result)
    if how == _IN_FLIGHT:
        if result.requires_grad:
            return _Wrap.apply(result)
        return _C.make_wrapper(AsyncCollectiveTensor, result)
    if how == _READY:
        return result
    return _wait_op(result)


def entry(op: Any) -> Callable[..., Any]:
    """``op`` for eager calls: the same arguments, at a fifth of what ``torch.ops`` costs."""
    return _C.ops[op._schema.name.removeprefix("c10d_ext::")]


def starter(op: Any) -> Callable[..., Any]:
    """``op``, started, with its result (or each of a list) as :func:`deliver` gives it."""
    enter = entry(op)

    def start(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_dynamo_compiling():
            return _wait_op(op(*args, **kwargs))
        return deliver(enter(*args, **kwargs))

    def start_list(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        outs = op(*args, **kwargs) if _is_dynamo_compiling() else enter(*args, **kwargs)
        return [deliver(out) for out in outs]

    returns = op._schema.returns[0].type
    return start if returns.isSubtypeOf(torch._C.TensorType.get()) else start_list


def writer(op: Any) -> Callable[..., bool]:
    """``op``, in place or into ``out``, to its end, where :func:`writes_directly` says so."""
    return functools.partial(_C.writes[op._schema.name.removeprefix("c10d_ext::")], False)


def writes_directly(output: torch.Tensor, input: torch.Tensor) -> bool:
    """Whether a :func:`writer` may serve a call that replaces ``output``'s values."""
    return not _is_dynamo_compiling() and _C.is_eager(output, input)


def replace(output: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``output.copy_(values)``, which would run a lazy graph at once."""
    if output.dtype in LESS_THAN_A_BYTE:
        output.view(torch.uint8).copy_(values.view(torch.uint8))
        return output
    if output.device.type != "lazy" or output.dtype == torch.bool:
        return output.copy_(values)
    # What is added to minus zero keeps its sign.
    return output.fill_(complex(-0.0, -0.0) if output.is_complex() else -0.0).add_(values)


def captures_numbers() -> bool:
    """Whether Dynamo traces ``Tensor.item()``."""
    return torch._dynamo.config.capture_scalar_outputs


# Dynamo asks once, while it traces.
captures_numbers._dynamo_marked_constant = True  # type: ignore[attr-defined]


def work_of(tensor: torch.Tensor) -> dist.Work | None:
    """The collective in flight that writes ``tensor``, or None.

    The work has ``is_completed()``, ``wait(timeout)``, ``get_future()``, ``exception()``, and a
    sequence number where the backend counts.
    """
    return _C.work_of(tensor.elem if isinstance(tensor, _TorchAsyncCollectiveTensor) else tensor)


def pending_count() -> int:
    """How many storages still have a collective of this process in flight."""
    return _C.pending_count()


class AsyncCollectiveTensor(_TorchAsyncCollectiveTensor):
    """A collective's result that waits the first time its values are needed.

    Shape, dtype, strides and views do not wait; anything else does, once. The values live in
    ``elem``. It is an instance of torch's class of that name, so DTensor and friends recognise it.
    """

    elem: torch.Tensor
    completed: bool

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> AsyncCollectiveTensor:  # noqa: PYI034
        if type(elem) is torch.Tensor and not elem.requires_grad:
            return _C.make_wrapper(cls, elem)
        wrapper = _make_wrapper(
            cls,
            elem.shape,
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=elem.device,
            requires_grad=elem.requires_grad,
        )
        _C.seal(wrapper)
        wrapper.elem = elem
        wrapper.completed = False
        return wrapper

    def trigger_wait(self) -> torch.Tensor:
        """Waits, and returns the values as a plain tensor."""
        elem = self.elem
        if not self.completed:
            if type(elem) is torch.Tensor:
                _C.wait(elem)
            else:
                _wait_op(elem)  # fake or traced: as an op, for the tracer to see
            self.completed = True
        return elem

    def wait(self) -> torch.Tensor:
        """Waits, and returns the values as a plain tensor."""
        return self.trigger_wait()

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], meta: Any, outer_size: Any, outer_stride: Any
    ) -> AsyncCollectiveTensor:
        return AsyncCollectiveTensor(inner_tensors["elem"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            args, kwargs = _map(_peek, args), _map(_peek, kwargs)
            with torch.no_grad():
                return _map(_rewrap, func(*args, **kwargs))
        return func(*_map(_finish, args), **_map(_finish, kwargs))

    # What Python reaches without the dispatcher works on the finished values.

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AsyncCollectiveTensor({self.trigger_wait()!r})"

    def __format__(self, spec: str) -> str:
        return format(self._plain(), spec)

    def tolist(self) -> Any:
        return self._plain().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._plain().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._plain().__array__() if dtype is None else self._plain().__array__(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._plain().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.elem.__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self.requires_grad and not self.is_leaf:
            return super().__deepcopy__(memo)
        copy = self._plain().__deepcopy__(memo)
        memo[id(self)] = copy
        return copy.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        return self.trigger_wait().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.trigger_wait().untyped_storage()

    def storage(self) -> Any:
        return self.trigger_wait().storage()

    def share_memory_(self) -> AsyncCollectiveTensor:
        self._plain().share_memory_()
        return self

    def is_shared(self) -> bool:
        return self._plain().is_shared()

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self._plain()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise RuntimeError(
            "AsyncCollectiveTensor: .data must be assigned on a plain tensor, got the result of a "
            "collective; call .wait() and assign to what it returns"
        )

    def resize_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError(
            "AsyncCollectiveTensor: resize_ needs a plain tensor, got the result of a collective; "
            "call .wait() and resize what it returns"
        )

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _delivery(self.elem) not in (_READY, _IN_FLIGHT):
            # Tracers give a fake copy its original's storage; the values, and so the storage that
            # counts, are elem's.
            return self
        raise RuntimeError(
            "AsyncCollectiveTensor: set_ needs a plain tensor, got the result of a collective; "
            "call .wait() and set what it returns"
        )

    def _plain(self) -> torch.Tensor:
        """The finished values without history."""
        return self.trigger_wait().detach()


class _Wrap(torch.autograd.Function):
    """Joins a result's autograd history to its wrapper."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        return AsyncCollectiveTensor(result.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_views: dict[Any, bool] = {}


def _is_view(func: Any) -> bool:
    """Whether ``func`` returns a view of its first argument, values unread."""
    known = _views.get(func)
    if known is None:
        first = func._schema.arguments[:1]
        known = bool(
            first
            and first[0].alias_info is not None
            and not first[0].alias_info.is_write
            and not torch._C._dispatch_has_kernel_for_dispatch_key(
                func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
            )
            and func.namespace == "aten"
        )
        _views[func] = known
    return known


def _map(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``function`` of every tensor in an op's arguments or results.

    Schemas nest tensors in lists and optionals alone, so this is all of pytree that it takes, at a
    fiftieth of the time.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is tuple:
        return tuple([_map(function, item) for item in value])
    if isinstance(value, (list, tuple)):
        return [_map(function, item) for item in value]
    if type(value) is dict:
        return {key: _map(function, item) for key, item in value.items()}
    return value


def _peek(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.elem if isinstance(tensor, _TorchAsyncCollectiveTensor) else tensor


def _finish(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.trigger_wait() if isinstance(tensor, _TorchAsyncCollectiveTensor) else tensor


def _rewrap(view: torch.Tensor) -> torch.Tensor:
    # A wrapper has no conj or neg bit of its own to show: such a view is made of finished values.
    if view.is_conj() or view.is_neg():
        return _wait_op(view)
    return AsyncCollectiveTensor(view) if _delivery(view) == _IN_FLIGHT else view
