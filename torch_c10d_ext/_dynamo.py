"""How ``torch.compile`` reads calls of ``torch.distributed``: as torch has it, or as our functions.

``torch.compiler.substitute_in_graph`` puts a function in place of another where Dynamo traces, and
nowhere else; it comes before Dynamo's own rewriting of some collectives. torch has no way to take a
substitution back: :func:`_take_back` does, and is why this file knows Dynamo's tables.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torch_c10d_ext._groups import refuse_in_a_graph

# Set by install(), and how many installed() blocks are open, in all threads.
_wanted = False
_blocks = 0
_ours: Any = None  # torch_c10d_ext.distributed, once there is something to install
# What is substituted now: torch's function and what Dynamo made of the substitute.
_substituted: list[tuple[Any, Any]] = []


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Inside it new tensors have values, also where a compiler makes every new tensor fake."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def install() -> None:
    """Lets code written against ``torch.distributed`` compile as if written against ours.

    From here on, in all threads, ``torch.compile`` reads a call of a function of
    ``torch.distributed`` as one of the same name in :mod:`torch_c10d_ext.distributed`, in code of
    others as well. Eager calls, and torch's modules, stay as they are. Once more does nothing.

    What was compiled before is dropped (``torch.compiler.reset()``) and compiled again when it is
    called: call this once, before the first compiled function runs.

    Raises:
        RuntimeError: called in compiled code, or something else is substituted for one of the
            functions already.

    Example, on every rank::

        torch_c10d_ext.install()
        step = torch.compile(library.step, fullgraph=True)  # calls torch.distributed.broadcast
    """
    refuse_in_a_graph("install")
    global _wanted
    with _tables():
        was = _wanted
        _wanted = True
        try:
            _apply()
        except BaseException:
            _wanted = was
            raise


def uninstall() -> None:
    """Takes :func:`install` back, also where it was called more than once; else does nothing.

    What was compiled in between is dropped. Open :func:`installed` blocks keep what they have.

    Raises:
        RuntimeError: called in compiled code.

    Example, on every rank::

        torch_c10d_ext.uninstall()
    """
    refuse_in_a_graph("uninstall")
    global _wanted
    if not _wanted:
        return
    with _tables():
        _wanted = False
        _apply()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """:func:`install` for the length of a ``with`` block; blocks nest, and overlap in threads.

    The outermost block drops all compiled code where it begins and where it ends, so what runs
    compiled again and again belongs into one block.

    Raises:
        RuntimeError: as :func:`install`.

    Example, on every rank::

        with torch_c10d_ext.installed():
            y = torch.compile(library.step, fullgraph=True)(x)
    """
    refuse_in_a_graph("installed")
    global _blocks
    with _tables():
        _blocks += 1
        try:
            _apply()
        except BaseException:
            _blocks -= 1
            raise
    try:
        yield
    finally:
        with _tables():
            _blocks -= 1
            _apply()


def substitutes() -> dict[Callable[..., Any], str]:
    """The functions of torch, each with the name of ours."""
    global _ours
    _ours = importlib.import_module("torch_c10d_ext.distributed")
    pairs: dict[Callable[..., Any], str] = {}
    for name, value in vars(_ours).items():
        # Asked by type(): torch's reduce_op warns when anybody looks into it.
        if type(value) in (type, FunctionType) and value.__module__.startswith(__package__):
            for module in (c10d, dist):
                theirs = getattr(module, name, None)
                if type(theirs) is FunctionType:
                    pairs.setdefault(theirs, name)
    return pairs


def _tables() -> Any:
    """Nothing is compiled meanwhile."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


def _apply() -> None:
    wanted = _wanted or _blocks > 0
    if wanted == bool(_substituted):
        return
    if wanted:
        try:
            for theirs, name in substitutes().items():
                substitute = torch.compiler.substitute_in_graph(theirs, skip_signature_check=True)
                _substituted.append((theirs, substitute(_call_of(name))))
        except BaseException as error:
            _take_all_back()
            if not isinstance(error, ValueError):
                raise
            raise RuntimeError(
                f"install: nothing else must be substituted for functions of torch.distributed in "
                f"graphs, got {error}"
            ) from error
    else:
        _take_all_back()
    torch.compiler.reset()


def _call_of(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # By a global: Dynamo must know where it found what it traces.
        return getattr(_ours, name)(*args, **kwargs)

    return call


def _take_all_back() -> None:
    while _substituted:
        _take_back(*_substituted.pop())


def _take_back(*functions: Any) -> None:
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import PolyfilledFunctionVariable
    from torch._dynamo.variables.builder import VariableBuilder

    for function in functions:
        VariableBuilder._id_dispatch().pop(id(function), None)
        trace_rules._polyfilled_function_ids.remove(id(function))
        trace_rules.get_torch_obj_rule_map().pop(function, None)
        PolyfilledFunctionVariable._get_polyfill_handlers().pop(function, None)
