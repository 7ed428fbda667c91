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
_elem_of = _C.elem_of
_plain_of = _C.plain_of
_finished_elem = _C.finished_elem
_deliver_complete = _C.deliver_complete
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_make_wrapper = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
# A byte each, which torch does not copy.
LESS_THAN_A_BYTE = frozenset(
    getattr(torch, f"{name}{bits}") for name in ("int", "uint") for bits in range(1, 8)
)


def deliver(result: torch.Tensor) -> torch.Tensor:
    """The result of a start op as users get it.

    Eager: an :class:`AsyncCollectiveTensor`, complete or not. Under a trace or a ``torch.func``
    transform: waited for, as a node of the graph.
    """
    if _is_dynamo_compiling():
        return _wait_op(result)
    return _C.deliver(result)


def deliver_complete(result: torch.Tensor) -> torch.Tensor:
    """What a function that computed with a result returns: in eager of the same class as others."""
    if _is_dynamo_compiling() or type(result) is AsyncCollectiveTensor:
        return result
    return _deliver_complete(result)


def entry(op: Any) -> Callable[..., Any]:
    """``op`` for eager calls: the same arguments, at a fifth of what ``torch.ops`` costs."""
    return _C.ops[_name_of(op)]


def starter(op: Any) -> Callable[..., Any]:
    """``op``, started, with its result (or each of a list) as :func:`deliver` gives it."""
    enter = _C.starts[_name_of(op)]

    def start(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_dynamo_compiling():
            return _wait_op(op(*args, **kwargs))
        return enter(*args, **kwargs)

    def start_list(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if _is_dynamo_compiling():
            return [_wait_op(out) for out in op(*args, **kwargs)]
        return enter(*args, **kwargs)

    returns = op._schema.returns[0].type
    return start if returns.isSubtypeOf(torch._C.TensorType.get()) else start_list


def _name_of(op: Any) -> str:
    return op._schema.name.removeprefix("c10d_ext::")


def writer(op: Any) -> Callable[..., bool]:
    """``op``, in place or into ``out``, to its end, where :func:`writes_directly` says so."""
    return functools.partial(_C.writes[_name_of(op)], False)


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
    """The collective behind a tensor, or None.

    Of a result that nobody has waited for: always its work, complete or not. Of one that has been
    waited for: None. Of any other tensor: the collective in flight that writes it, or None.

    The work has ``is_completed()``, ``wait(timeout)``, ``get_future()``, ``exception()``, and a
    sequence number where the backend counts.
    """
    if isinstance(tensor, AsyncCollectiveTensor) and not tensor.completed:
        return _C.work_behind(tensor.elem)
    return _C.work_of(tensor.elem if isinstance(tensor, _TorchAsyncCollectiveTensor) else tensor)


def pending_count() -> int:
    """How many storages still have a collective of this process in flight."""
    return _C.pending_count()


# Where torch's class keeps what a wrapper of ours has in C++; those around fake tensors keep it
# there, too.
_elem_slot: Any = _TorchAsyncCollectiveTensor.elem
_completed_slot: Any = _TorchAsyncCollectiveTensor.completed


class AsyncCollectiveTensor(_TorchAsyncCollectiveTensor):
    """A collective's result that waits the first time its values are needed.

    Shape, dtype, strides and views do not wait; anything else does, once. It differentiates, and
    is written, as any tensor. The values live in ``elem``, which has no history; ``wait()`` gives
    them with it, as a plain tensor. It is an instance of torch's class of that name, so DTensor and
    friends recognise it.
    """

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> AsyncCollectiveTensor:  # noqa: PYI034
        if type(elem) is torch.Tensor:
            wrapped = _C.wrap_async(elem)
            if wrapped is not None:
                return wrapped
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
        _elem_slot.__set__(wrapper, elem)
        _completed_slot.__set__(wrapper, False)
        return wrapper

    @property
    def elem(self) -> torch.Tensor:  # type: ignore[override]
        """The values, unwaited for and without history."""
        elem = _elem_of(self)
        return _elem_slot.__get__(self) if elem is None else elem

    @property
    def completed(self) -> bool:  # type: ignore[override]
        """Whether somebody has waited: its own completion changes nothing that is seen."""
        return _completed_slot.__get__(self) if _elem_of(self) is None else _C.is_waited(self)

    def trigger_wait(self) -> torch.Tensor:
        """Waits, and returns the values as a plain tensor, with their history."""
        if _is_dynamo_compiling():
            return _wait_op(self)
        plain = _plain_of(self)
        if plain is not None:
            return plain
        # Around a fake or traced tensor: as an op, for the tracer to see.
        with torch.enable_grad():
            return _wait_op(self)

    def wait(self) -> torch.Tensor:
        """Waits, and returns the values as a plain tensor, with their history."""
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
        kind = _kinds.get(func)
        if kind is None:
            kind = _kinds[func] = _kind_of(func)
        if kind is _VIEWS:
            args, kwargs = _map(_peek, args), _map(_peek, kwargs)
            with torch.no_grad():
                return _map(_rewrap, func(*args, **kwargs))
        if kind is _WRITES:
            return _write(func, args, kwargs)
        return func(*_map(_finish, args), **_map(_finish, kwargs))

    # What Python reaches without the dispatcher works on the finished values.

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AsyncCollectiveTensor({self.trigger_wait()!r})"

    def __format__(self, spec: str) -> str:
        return format(self.trigger_wait(), spec) if spec else str(self)

    def tolist(self) -> Any:
        return self.trigger_wait().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.trigger_wait().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        plain = self.trigger_wait()
        return plain.__array__() if dtype is None else plain.__array__(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.trigger_wait().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.elem.__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self.requires_grad and not self.is_leaf:
            return super().__deepcopy__(memo)
        copy = _finish(self).__deepcopy__(memo)
        memo[id(self)] = copy
        return copy.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _finish(self).detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def new(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _finish(self).new(*args, **kwargs)

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:
        return _finish(self).new_tensor(data, **kwargs)

    def data_ptr(self) -> int:
        return _finish(self).data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return _finish(self).untyped_storage()

    def storage(self) -> Any:
        return _finish(self).storage()

    def share_memory_(self) -> AsyncCollectiveTensor:
        _finish(self).share_memory_()
        return self

    def is_shared(self) -> bool:
        return _finish(self).is_shared()

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return _data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if _elem_of(self) is None:
            _data.__set__(self, value)
        else:
            _C.set_elem(self, _finish(value).detach())

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _elem_of(self) is None:
            # Tracers give a fake copy its original's storage; the values, and so the storage that
            # counts, are elem's.
            return self
        return super().set_(*args, **kwargs)


_data: Any = torch.Tensor.data
_C.set_async_tensor_type(AsyncCollectiveTensor, _wait_op)


# What __torch_dispatch__ does with an op.
_VIEWS, _WRITES, _READS = "views", "writes", "reads"
_kinds: dict[Any, str] = {}
_below_versions = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _kind_of(func: Any) -> str:
    if func._schema.is_mutable:
        return _WRITES
    first = func._schema.arguments[:1]
    is_view = (
        first
        and first[0].alias_info is not None
        and not torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        )
        and func.namespace == "aten"
    )
    return _VIEWS if is_view else _READS


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op that writes some of its arguments."""
    wrappers: list[AsyncCollectiveTensor] = []

    def collect(tensor: torch.Tensor) -> None:
        if isinstance(tensor, AsyncCollectiveTensor) and _elem_of(tensor) is not None:
            wrappers.append(tensor)

    _map(collect, args)
    _map(collect, kwargs)
    if torch.Tag.inplace_view in func.tags:
        # elem may be what wait() has given out, whose shape stays as it is.
        for wrapper in wrappers[:1]:
            _C.set_elem(wrapper, _finish(wrapper))
    # The wrapper's version counter is elem's, and has been advanced by the time this returns.
    with torch._C._ExcludeDispatchKeyGuard(_below_versions):
        result = func(*_map(_finish, args), **_map(_finish, kwargs))
    for wrapper in wrappers:
        _C.follow_elem(wrapper)
    return _map(lambda t: next((w for w in wrappers if w.elem is t), t), result)


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
    """The finished values, without a history where the wrapper is ours."""
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor.trigger_wait() if isinstance(tensor, _TorchAsyncCollectiveTensor) else tensor
    elem = _finished_elem(tensor)
    if elem is not None:
        return elem
    elem = _elem_slot.__get__(tensor)
    if not _completed_slot.__get__(tensor):
        _wait_op(elem)  # around a fake or traced tensor: as an op, for the tracer to see
        _completed_slot.__set__(tensor, True)
    return elem


def _rewrap(view: torch.Tensor) -> torch.Tensor:
    # A wrapper has no conj or neg bit of its own to show: such a view is made of finished values.
    if view.is_conj() or view.is_neg():
        return _wait_op(view)
    return AsyncCollectiveTensor(view)
