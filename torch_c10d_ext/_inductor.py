"""The ops as Inductor sees them: collectives whose buffers stay untouched until their wait.

An op left to Inductor's generic fallback is a data race: its input's memory is reused before the
wait. Lowered to Inductor's own collective kernels, the ops take part in its memory planning and in
its communication scheduling (``sink_waits``, ``raise_comms``, reordering) like torch's collectives.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import operator
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_c10d_ext._groups import places
from torch_c10d_ext._meeting import digest_of
from torch_c10d_ext._op_info import COALESCED, FUNCTIONAL, IN_PLACE, forms_of

_LOWERING_MODULE = "torch._inductor.lowering"

# op overload -> lowering, waiting for Inductor to be imported.
_lowerings: dict[Any, Callable[..., Any]] = {}

# The ops whose calls keep their order in a graph.
_ordered: set[Any] = set()


def lowering(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the decorated function Inductor's lowering of ``op``.

    A collective also stays in a graph where nobody uses its result: other ranks may count on it.
    """
    torch.fx.node.has_side_effect(op)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _lowerings[op] = function
        return function

    return register


def start(op: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """A node that starts ``op`` and returns fresh buffers: one, or a list for a list of inputs.

    Keyword arguments that are None are left to the schema.
    """
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    from torch._inductor import ir

    node = ir._CollectiveKernel.create_out_of_place(op, inputs, *args, **kwargs)
    outputs = node if isinstance(node, list) else [node]
    _keep_unless_waited_for(*(inputs if isinstance(inputs, (list, tuple)) else [inputs]), *outputs)
    if isinstance(node, list):
        return [ir.TensorBox.create(output) for output in node]
    return ir.TensorBox.create(node)


def start_reusing(op: Any, in_place: Any, inputs: Any, *args: Any) -> Any:
    """Starts ``op`` as ``in_place`` on a copy of ``inputs``.

    Inductor elides the copy where nobody needs its source any more, so the functional op costs no
    more than the in-place one.
    """
    from torch._inductor import config, ir
    from torch._inductor.lowering import clone
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper:
        # There, a custom op is called through its schema, which cannot express the in-place form.
        return start(op, inputs, *args)
    copy = clone(inputs)
    copy.realize()
    if config.reorder_for_compute_comm_overlap:
        # Fused with later work, the copy would hold the collective back.
        V.graph.no_fuse_buffer_names.add(copy.get_name())
    copy = ir.ExternKernel.require_contiguous(copy)
    ir._CollectiveKernel.create_inplace(in_place, copy, *args)
    _keep_unless_waited_for(copy)
    return copy


def lower(kind: str, *, in_place: bool = False) -> None:
    """Lowers the functional forms of a collective, as far as there are some.

    Args:
        kind: of the functional form on one tensor, ``"all_reduce"``.
        in_place: the op in place gives the same values, and so can be started on a copy.
    """
    forms = forms_of(kind)
    op, reusing = forms[FUNCTIONAL], forms[IN_PLACE] if in_place else None

    @lowering(op)
    def one(input: Any, *args: Any, **kwargs: Any) -> Any:
        if reusing is None or any(value is not None for value in kwargs.values()):
            return start(op, input, *args, **kwargs)
        return start_reusing(op, reusing, input, *args)

    if COALESCED in forms:
        lowering(forms[COALESCED])(functools.partial(start, forms[COALESCED]))


def ordered(op: Any) -> None:
    """Keeps the calls of ``op``, and of all ops said to be ordered, in a graph and in their order.

    By an effect token from each call to the next, which neither AOTAutograd nor Inductor sees
    through. Inductor's collectives keep their place among them, see :func:`start_in_order`.
    """
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _ordered.add(op)
    _register_effectful_op(op, _EffectType.ORDERED)
    torch.fx.node.has_side_effect(op)


def start_in_order(op: Any, tensors: Any, *args: Any) -> list[Any]:
    """A node of an :func:`ordered` ``op`` that returns a list of fresh buffers.

    It starts after every collective that the graph starts before it, and none of these is waited
    for earlier than the graph says: a peer may need this node before it starts its own collective.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    in_flight = _in_flight(V.graph.operations)
    outputs = ir._CollectiveKernel.create_out_of_place(op, tensors, *args)
    node = outputs[0].inputs[0]
    for name in in_flight:
        # A wait reads what it waits for, and so comes after whatever may have written there.
        buffer = V.graph.get_buffer(name)
        layout = ir.NoneLayout(device=buffer.get_device())
        node.mutation_outputs.append(ir.MutationOutput(layout, buffer, node))
    return [ir.TensorBox.create(output) for output in outputs]


def _in_flight(operations: list[Any]) -> list[str]:
    """The buffers that collectives among ``operations`` write and that no wait has ended."""
    from torch._inductor import ir

    names: dict[str, None] = {}
    for operation in operations:
        written = [
            name for m in getattr(operation, "mutation_outputs", ()) for name in m.mutation_names
        ]
        if isinstance(operation, ir._WaitKernel):
            for name in written:
                names.pop(name, None)
        elif isinstance(operation, ir._CollectiveKernel) and operation.op_overload not in _ordered:
            outputs = getattr(operation, "outputs", ())
            names.update(dict.fromkeys([*written, *(output.get_name() for output in outputs)]))
    return list(names)


def _keep_unless_waited_for(*buffers: Any) -> None:
    """Keeps the memory of a collective that the graph never waits for from being reused.

    A wait extends the life of what the collective reads and writes until then. Without one Inductor
    would give the memory to the next kernel at once, and the collective would write on it.
    """
    from torch._inductor.virtualized import V

    users = list(V.graph.current_node.users)
    users += [each for user in users for each in user.users if user.target is operator.getitem]
    if not any("wait_tensor" in str(user.target) for user in users):
        V.graph.never_reuse_buffers.update(buffer.get_name() for buffer in buffers)


def enable() -> None:
    """Registers the lowerings, now or as soon as Inductor is imported, and keys its caches."""
    _key_caches()
    if _LOWERING_MODULE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _RegisterAfterImport())


def _register() -> None:
    from torch._inductor.lowering import register_lowering

    for op, function in _lowerings.items():
        register_lowering(op, type_promotion_kind=None)(function)


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Registers when Inductor's lowerings are imported: importing them here would cost seconds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _LOWERING_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_then_register  # type: ignore[method-assign]
        return spec


def _key_caches() -> None:
    """Puts this build, and the rank, into the key of the caches of compiled code.

    The key does not cover lowerings like ours: code of another build is then never served. Nor does
    it tell ranks apart, whose graphs look the same until shapes and derivatives are worked out.
    """
    import torch.compiler.config as config

    mark = f"c10d_ext={_fingerprint()}"
    parts = [part for part in config.cache_key_tag.split(";") if part]
    if not isinstance(config.cache_key_tag, _CacheTag):
        config.cache_key_tag = _CacheTag(";".join([*(p for p in parts if p != mark), mark]))


class _CacheTag(str):
    """A tag that says, where a cache pickles it into a key, what this rank is in its groups."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (f"{self};{places()}",)

    def __copy__(self) -> _CacheTag:
        return self

    def __deepcopy__(self, memo: object) -> _CacheTag:
        return self


@functools.cache
def _fingerprint() -> str:
    root = Path(__file__).parent
    return digest_of(root, "", *root.glob("_C*.so"))


@lowering(torch.ops.c10d_ext.wait_tensor.default)
def _lower_wait(tensor: Any) -> Any:
    from torch._inductor import ir

    # AOTInductor knows torch's wait op by name; either op waits for our works.
    ir._WaitKernel.create_wait(torch.ops._c10d_functional.wait_tensor.default, tensor)
    return tensor
