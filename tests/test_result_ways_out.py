"""Every way out of a functional collective's result: values, gradients and types.

One table of ways (`WAYS`), of what users, torch's compiler and torch's wrappers do with a result.
Each is applied to the results of the collectives, complete and in flight, with and without a
gradient, and must give what it gives on a plain tensor: the collective's result as one process
computes it from all ranks' inputs. torch's own class is held to the same table, where it is right.

One file, for the table is most of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import math
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import torch_c10d_ext.functional as F
from tests.harness import run, values
from tests.harness.flight import in_flight, quick_store
from torch_c10d_ext._async import AsyncCollectiveTensor

# How long rank 0's result stays in flight once the way out is taken.
FLIGHT = 0.002
SHAPE = (2, 3)
TORCH_IS_CHECKED = torch.__version__ >= "2.13"


# --- collectives ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """A call whose result has `SHAPE`, and the same in one process."""

    call: Callable[[Any, Tensor], Tensor]  # of a module, ours or torch's, and this rank's input
    whole: Callable[[list[Tensor]], list[Tensor]]  # of all ranks' inputs
    shape: tuple[int, ...] = SHAPE  # the input's
    in_torch: bool = False  # torch has it, and its gradient is right


def _total(xs: list[Tensor]) -> Tensor:
    return sum(xs[1:], xs[0])


def _everywhere(x: Tensor) -> list[Tensor]:
    return [x for _ in range(dist.get_world_size())]


def _only(x: Tensor, rank: int) -> list[Tensor]:
    return [x if r == rank else x * 0 for r in range(dist.get_world_size())]


def _parts(x: Tensor) -> list[Tensor]:
    return [part.clone() for part in x.chunk(dist.get_world_size())]


def _group() -> Any:
    return dist.group.WORLD


COLLECTIVES: dict[str, Collective] = {
    "all_reduce sum": Collective(
        lambda m, x: m.all_reduce(x, "sum", _group()),
        lambda xs: _everywhere(_total(xs)),
        in_torch=True,
    ),
    "all_reduce avg": Collective(
        lambda m, x: m.all_reduce(x, "avg", _group()),
        lambda xs: _everywhere(_total(xs) / len(xs)),
    ),
    "all_reduce max": Collective(
        lambda m, x: m.all_reduce(x, "max", _group()),
        lambda xs: _everywhere(torch.stack(xs).amax(0)),
    ),
    "all_gather_single": Collective(
        lambda m, x: m.all_gather_single(x, 0, _group()),
        lambda xs: _everywhere(torch.cat(xs)),
        shape=(1, 3),
        in_torch=True,
    ),
    "reduce_scatter_single": Collective(
        lambda m, x: m.reduce_scatter_single(x, "sum", 0, _group()),
        lambda xs: _parts(_total(xs)),
        shape=(4, 3),
        in_torch=True,
    ),
    "all_to_all_single": Collective(
        lambda m, x: m.all_to_all_single(x, None, None, _group()),
        lambda xs: [torch.cat([x.chunk(len(xs))[r] for x in xs]) for r in range(len(xs))],
        in_torch=True,
    ),
    "broadcast": Collective(
        lambda m, x: m.broadcast(x, 1, _group()),
        lambda xs: _everywhere(_total([x * (r == 1) for r, x in enumerate(xs)])),
    ),
    "reduce": Collective(
        lambda m, x: m.reduce(x, "sum", 1, _group()), lambda xs: _only(_total(xs), 1)
    ),
    "permute_tensor": Collective(
        lambda m, x: m.permute_tensor(x, [1, 0], _group()), lambda xs: [x * 1 for x in xs[::-1]]
    ),
    "all_reduce_coalesced": Collective(
        lambda m, x: m.all_reduce_coalesced([x * 2, x], "sum", _group())[1],
        lambda xs: _everywhere(_total(xs)),
        in_torch=True,
    ),
    "all_gather_single_coalesced": Collective(
        lambda m, x: m.all_gather_single_coalesced([x, x * 3], _group())[1],
        lambda xs: _everywhere(3 * torch.cat(xs)),
        shape=(1, 3),
        in_torch=True,
    ),
    "reduce_scatter_single_coalesced": Collective(
        lambda m, x: m.reduce_scatter_single_coalesced([x, x * 3], "sum", [0, 0], _group())[1],
        lambda xs: _parts(3 * _total(xs)),
        shape=(4, 3),
        in_torch=True,
    ),
}
# All ways out of the first, and those that do not compile of the second.
FEW = ("all_reduce sum", "all_gather_single")


# --- ways out ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Env:
    """What a way out may use beside the result."""

    x: Tensor  # the collective's input, a leaf
    v: Tensor  # of the result's shape, a leaf that requires a gradient
    w: Tensor  # of the result's shape, a constant
    collect: Callable[[Tensor], Tensor]  # the collective


PLAIN, ASYNC = "plain", "async"


@dataclass(frozen=True)
class Way:
    """What somebody does with a result `y`.

    It returns a tensor or some, or what can be made one. `plain` does the same to a plain tensor,
    where that is written otherwise. In a result that needs no gradient, `v` may bring one.
    """

    take: Callable[[Any, Env], Any]
    plain: Callable[[Any, Env], Any] | None = None
    kind: str = PLAIN  # of what it returns
    smooth: bool = True  # may be differentiated a second time
    costly: bool = False
    only: bool | None = None  # with a gradient, or without
    torch: str = ""  # what torch's own class does wrong


# Ways to wait: what is waited for is the tensor itself, history and all.
WAITS: dict[str, Callable[[Any], Any]] = {
    "wait()": lambda y: y.wait(),
    "trigger_wait()": lambda y: y.trigger_wait(),
    "F.wait_tensor": F.wait_tensor,
    "torch's wait_tensor": torch_functional.wait_tensor,
    "op wait_tensor": torch.ops.c10d_ext.wait_tensor,
    "torch's op wait_tensor": torch.ops._c10d_functional.wait_tensor,
}

# What comes before the wait: a function that gives what is waited for.
BEFORE_A_WAIT: dict[str, Callable[[Tensor, Env], Tensor]] = {
    "": lambda y, e: y,
    " of a view": lambda y, e: y.t(),
    " of a view of a view": lambda y, e: y[:, 1:].unsqueeze(0).transpose(0, 2),
    " after mul_": lambda y, e: y.mul_(3),
    " after mul_ by what needs a gradient": lambda y, e: y.mul_(e.v),
    " after a write into a view": lambda y, e: (y[0].copy_(e.v[1]), y)[1],
    " of a view of what was written": lambda y, e: y.mul_(e.v)[1],
    " of a view taken before mul_": lambda y, e: (y.t(), y.mul_(e.v))[0],
}


# What ours does with torch's results, and torch's methods with theirs.
_ON_TORCHS = dict.fromkeys(("F.wait_tensor", "op wait_tensor"), "gives them back, complete")
_METHODS = "they wait for elem, and lose what happened to the wrapper"


def _waits() -> dict[str, Way]:
    found: dict[str, Way] = {}
    for name, wait in WAITS.items():
        for what, prepare in BEFORE_A_WAIT.items():
            found[name + what] = Way(
                lambda y, e, wait=wait, prepare=prepare: wait(prepare(y, e)),
                prepare,
                torch=_ON_TORCHS.get(name, "") or _METHODS * (name.endswith("()") and bool(what)),
            )
        found[f"{name} twice"] = Way(
            lambda y, e, wait=wait: [wait(y), wait(y) * 2],
            lambda y, e: [y, y * 2],
            torch=_ON_TORCHS.get(name, ""),
        )
        found[f"{name}, then mul_"] = Way(
            lambda y, e, wait=wait: (wait(y), y.mul_(e.v))[1], lambda y, e: y.mul_(e.v), kind=ASYNC
        )
        found[f"{name} under no_grad"] = Way(
            lambda y, e, wait=wait: torch.no_grad()(wait)(y),
            lambda y, e: y,
            torch=_ON_TORCHS.get(name, ""),
        )
    return found


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda y: y.view(-1),
    "reshape": lambda y: y.reshape(3, 2),
    "t": lambda y: y.t(),
    "T": lambda y: y.T,
    "mT": lambda y: y.mT,
    "index": lambda y: y[1],
    "index of an index": lambda y: y[1][2],
    "slice": lambda y: y[:, 1:],
    "None": lambda y: y[..., None],
    "unsqueeze": lambda y: y.unsqueeze(0),
    "squeeze": lambda y: y[:1].squeeze(0),
    "expand": lambda y: y.expand(4, 2, 3),
    "narrow": lambda y: y.narrow(1, 1, 2),
    "permute": lambda y: y.permute(1, 0),
    "movedim": lambda y: y.movedim(0, 1),
    "flatten": lambda y: y.flatten(),
    "unflatten": lambda y: y.unflatten(1, (3, 1)),
    "view_as": lambda y: y.view_as(y),
    "alias": lambda y: torch.ops.aten.alias(y),
    "chunk": lambda y: y.chunk(2),
    "split": lambda y: y.split([1, 2], 1),
    "tensor_split": lambda y: y.tensor_split(2),
    "unbind": lambda y: y.unbind(),
    "iteration": lambda y: list(y),
    "diagonal": lambda y: y.diagonal(),
    "unfold": lambda y: y.unfold(1, 2, 1),
    "select": lambda y: torch.select(y, 0, 1),
    "as_strided": lambda y: y.as_strided((3,), (2,), 1),
    "contiguous": lambda y: y.contiguous(),
    "to itself": lambda y: y.to(torch.float64),
    "cpu": lambda y: y.cpu(),
    "of a view": lambda y: y.t()[1:].unsqueeze(2),
}


@torch.library.custom_op("test_result_ways_out::times", mutates_args=())
def times(x: Tensor, y: Tensor) -> Tensor:
    return x * y


@times.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


times.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0]), setup_context=_save
)

_LINEAR = torch.nn.Linear(3, 2, dtype=torch.float64)

# Ops by every kind of argument a result can be.
OPS: dict[str, Callable[[Tensor, Env], Any]] = {
    "mul": lambda y, e: y * e.w,
    "second argument": lambda y, e: e.w * y,
    "both arguments": lambda y, e: y * y,
    "with what needs a gradient": lambda y, e: y * e.v,
    "sin": lambda y, e: y.sin(),
    "sum": lambda y, e: y.sum(),
    "matmul": lambda y, e: y @ e.w.t(),
    "linear": lambda y, e: torch.nn.functional.linear(e.w, y),
    "softmax": lambda y, e: y.softmax(1),
    "einsum": lambda y, e: torch.einsum("ij,ik->jk", y, e.v),
    "cat": lambda y, e: torch.cat([e.w, y, y]),
    "stack": lambda y, e: torch.stack([y, e.v]),
    "where": lambda y, e: torch.where(e.w > 0, y, e.v),
    "unbound max": lambda y, e: y.max(1).values,
    "clone": lambda y, e: y.clone(),
    "float": lambda y, e: y.float(),
    "to a copy": lambda y, e: y.to(torch.float64, copy=True),
    "contiguous of a view": lambda y, e: y.t().contiguous(),
    "index by a list": lambda y, e: y[[1, 0]],
    "mask": lambda y, e: y[torch.ones(SHAPE, dtype=torch.bool)],
    "index_select": lambda y, e: y.index_select(1, torch.tensor([2, 0])),
    "gather": lambda y, e: y.gather(1, torch.tensor([[2], [0]])),
    "of a view": lambda y, e: y.t()[1:] * e.w.t()[1:],
    "of a view and its base": lambda y, e: y.view(-1)[1:3] @ y[:, :2],
    "assigned into a plain tensor": lambda y, e: e.w.clone().copy_(y),
    "assigned into a part": lambda y, e: e.w.new_zeros(4, 3).index_put((torch.tensor([1, 3]),), y),
    "setitem": lambda y, e: _with_rows(e.w.new_zeros(4, 3), y),
    "added in place to a plain tensor": lambda y, e: e.w.clone().add_(y),
    "foreach": lambda y, e: torch._foreach_mul([y, e.w], [e.v, y]),
    "under enable_grad": lambda y, e: torch.enable_grad()(lambda: y * e.w)(),
    "checkpoint": lambda y, e: checkpoint(_curve, y, e.v, use_reentrant=False),
    "reentrant checkpoint": lambda y, e: checkpoint(_curve, y, e.v, use_reentrant=True),
    "autograd.Function": lambda y, e: Square.apply(y),
    "autograd.Function of two": lambda y, e: Times.apply(e.v, y),
    "custom op": lambda y, e: times(y, e.v),
    "saved tensors, packed": lambda y, e: _packed(lambda: y * y * e.v),
    "saved tensors, on the CPU": lambda y, e: _saved_on_cpu(lambda: y.sin() * y),
    "jvp of it": lambda y, e: jvp(torch.sin, (y,), (e.w,))[1],
    "grad of it": lambda y, e: grad(lambda t: (t * t * t).sum())(y),
    "vjp of it": lambda y, e: vjp(lambda t: t * t, y)[1](e.w)[0],
    "vmap of it": lambda y, e: vmap(lambda t: t * t)(y),
    "vmap of its columns": lambda y, e: vmap(lambda t, s: t * s, in_dims=(1, None))(y, e.v[:, 0]),
    "functional_call": lambda y, e: functional_call(_LINEAR, {"weight": y, "bias": y[:, 0]}, e.w),
}

# In place: the result's own values and history change, its views' and its base's with it.
IN_PLACE: dict[str, Callable[[Tensor, Env], Any]] = {
    "mul_": lambda y, e: y.mul_(3),
    "add_ of what needs a gradient": lambda y, e: y.add_(e.v),
    "mul_ by what needs a gradient": lambda y, e: y.mul_(e.v),
    "mul_, used as a name of it": lambda y, e: (y.mul_(e.v), y)[1],
    "operator *=": lambda y, e: y.__imul__(e.v),
    "copy_": lambda y, e: y.copy_(e.v),
    "zero_": lambda y, e: y.zero_(),
    "setitem of a row": lambda y, e: _with_row(y, e.v[1]),
    "setitem by a mask": lambda y, e: _with_masked(y, e.w > 0, e.v[0, 0]),
    "written through a view": lambda y, e: (y.view(-1)[1:4].mul_(2), y)[1],
    "written through a view, by what needs a gradient": lambda y, e: (y.t().mul_(e.v.t()), y)[1],
    "view taken before, read after": lambda y, e: (y.t(), y.mul_(e.v))[0],
    "view of what was written": lambda y, e: y.mul_(e.v).t(),
    "detached view written": lambda y, e: (y.detach()[0].fill_(2), y)[1],
    "index_put_": lambda y, e: y.index_put_((torch.tensor([1]),), e.v[:1]),
    "masked_fill_": lambda y, e: y.masked_fill_(e.w > 0, 0.5),
    "clamp_": lambda y, e: y.clamp_(-1, 1),
    "requires_grad_": lambda y, e: y.requires_grad_(),
    "under no_grad": lambda y, e: _under_no_grad(y),
}

WRITTEN_AND_USED: dict[str, Callable[[Tensor, Env], Any]] = {
    "mul_, then used": lambda y, e: y.mul_(e.v) * e.w,
    "mul_, then a view used": lambda y, e: y.mul_(e.v).t() * 2,
    "mul_ of a view, then the base used": lambda y, e: (y[0].mul_(e.v[0]), y * e.w)[1],
    "relu_, then used": lambda y, e: y.relu_() * 3,
    "mul_ twice": lambda y, e: y.mul_(e.v).mul_(e.w).sin(),
}


def _with_rows(z: Tensor, y: Tensor) -> Tensor:
    z[1:3] = y
    return z


def _with_row(y: Tensor, row: Tensor) -> Tensor:
    y[0] = row
    return y


def _with_masked(y: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    y[mask] = value
    return y


def _under_no_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2)
    return y


def _curve(y: Tensor, v: Tensor) -> Tensor:
    return y.sin() * v * y


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 2 * y * grad


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class ThreeTimesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y.mul_(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class Turned(torch.autograd.Function):
    """Gives a view of its argument."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.t()


def _packed(compute: Callable[[], Tensor]) -> Tensor:
    """What is saved for backward is packed into bytes."""

    def pack(t: Tensor) -> bytes:
        file = io.BytesIO()
        torch.save(t.detach().clone(), file)
        return file.getvalue()

    with saved_tensors_hooks(pack, lambda data: torch.load(io.BytesIO(data))):
        return compute()


def _saved_on_cpu(compute: Callable[[], Tensor]) -> Tensor:
    with save_on_cpu():
        return compute()


# --- ways out by autograd itself -----------------------------------------------------------------


def _retained(y: Tensor, e: Env) -> Tensor:
    y.retain_grad()
    (y * e.w).sin().sum().backward()
    assert y.grad is not None
    return y.grad


def _hooked(y: Tensor, e: Env) -> Tensor:
    y.register_hook(lambda g: g * 3)
    return y * e.w


def _backward(y: Tensor, e: Env) -> Tensor:
    y.backward(e.w.clone())
    return e.w


def _grad_of_it(y: Tensor, e: Env) -> Tensor:
    (g,) = torch.autograd.grad((y.sin() * e.w).sum(), y, create_graph=True)
    return g


def _grad_of_a_view(y: Tensor, e: Env) -> Tensor:
    z = y.t()
    (g,) = torch.autograd.grad((z.sin() * e.w.t()).sum(), z, create_graph=True)
    return g


AUTOGRAD: dict[str, Way] = {
    "retain_grad": Way(_retained, only=True),
    "register_hook": Way(_hooked, only=True),
    "backward()": Way(_backward, only=True),
    "autograd.grad with it as the input": Way(_grad_of_it, only=True),
    "autograd.grad with a view as the input": Way(_grad_of_a_view, only=True),
    "autograd.grad with it as grad_outputs": Way(
        lambda y, e: torch.autograd.grad(e.v.sin(), e.v, y, create_graph=True)[0]
    ),
    "a leaf made of it": Way(lambda y, e: _grad_of_it(y.detach().requires_grad_(), e)),
    "autograd.Function in place": Way(lambda y, e: ThreeTimesInPlace.apply(y), kind=ASYNC),
    "autograd.Function that gives a view": Way(lambda y, e: Turned.apply(y), kind=ASYNC),
    "checkpoint around the collective": Way(
        lambda y, e: checkpoint(
            lambda x: e.collect(x).t().sin() * e.v.t(), e.x, use_reentrant=False
        ),
        lambda y, e: y.t().sin() * e.v.t(),
    ),
    "reentrant checkpoint around the collective": Way(
        lambda y, e: checkpoint(lambda x: e.collect(x).wait().sin(), e.x, use_reentrant=True),
        lambda y, e: y.sin(),
        smooth=False,
        only=True,
    ),
    "checkpoint that returns the result": Way(
        lambda y, e: checkpoint(e.collect, e.x, use_reentrant=False),
        lambda y, e: y,
        kind=ASYNC,
    ),
}


# --- ways out that end history -------------------------------------------------------------------


def _saved(y: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"y": y.detach()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["y"]


def _in_inference_mode(y: Tensor, e: Env) -> Any:
    with torch.inference_mode():
        z = e.collect(e.x.detach())
        return [(z.t() + 0).t().numpy(), z.wait().numpy(), (y * 2).numpy()]


ENDS: dict[str, Way] = {
    "detach": Way(lambda y, e: y.detach(), kind=ASYNC),
    "data": Way(lambda y, e: y.data, kind=ASYNC),
    "numpy": Way(lambda y, e: y.detach().numpy().copy()),
    "numpy of a view": Way(lambda y, e: y.detach()[0].t().numpy().copy()),
    "numpy.asarray": Way(lambda y, e: np.asarray(y.detach()).copy()),
    "tolist": Way(lambda y, e: y.tolist()),
    "item": Way(lambda y, e: y[1, 2].item()),
    "float": Way(lambda y, e: [float(each) for row in y.detach() for each in row]),
    "pickle": Way(
        lambda y, e: pickle.loads(pickle.dumps(y.detach())), torch="pickles what has not arrived"
    ),
    "torch.save": Way(lambda y, e: _saved(y), torch="weights_only does not know its class"),
    "deepcopy": Way(lambda y, e: copy.deepcopy(y.detach()), torch="raises"),
    "op under no_grad": Way(lambda y, e: torch.no_grad()(lambda: y * 2)()),
    "view under no_grad": Way(
        lambda y, e: torch.no_grad()(lambda: y.t())(), kind=ASYNC, smooth=False
    ),
    "collective under no_grad": Way(
        lambda y, e: torch.no_grad()(e.collect)(e.x), lambda y, e: y.detach(), kind=ASYNC
    ),
    "inference mode": Way(
        _in_inference_mode,
        lambda y, e: [y.detach().numpy(), y.detach().numpy(), y.detach().numpy() * 2],
    ),
    "equal": Way(lambda y, e: float(torch.equal(y, y.detach().clone()))),
    "allclose": Way(lambda y, e: float(torch.allclose(y, y.detach().clone()))),
}


# --- ways out through torch's compiler and wrappers ----------------------------------------------


def _arithmetic(y: Tensor, w: Tensor) -> Tensor:
    return (y * w).sin() + y.t().reshape(2, 3)


def _write(y: Tensor, w: Tensor) -> Tensor:
    y.mul_(w)
    return y + 1


def _view(y: Tensor, w: Tensor) -> Tensor:
    return y.t()


def _same(y: Tensor, w: Tensor) -> Tensor:
    return y


@functools.cache
def _after(wait: Callable[[Any], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda y, w: wait(y) * w


# Made once: each compiles when it meets a result, and must not compile again for the next.
@functools.cache
def _compiled(f: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(f, backend=backend, fullgraph=True)


def _run(f: Callable[..., Any], backend: str, *args: Any) -> Any:
    with _compiling():
        return _compiled(f, backend)(*args)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Tracers look for `.grad` of what is no leaf, and hide the warning, but not from an error."""
    # What requires a gradient and what does not, a view and none, are compiled one by one.
    limit = torch._dynamo.config.patch(recompile_limit=64)
    with limit, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        yield


_captured: Any = None


def _of_global(w: Tensor) -> Tensor:
    return _captured * w + 1


def _global_of(y: Tensor, backend: str, w: Tensor) -> Tensor:
    global _captured
    _captured = y
    try:
        return _run(_of_global, backend, w)
    finally:
        _captured = None


def _closure_of(y: Tensor, backend: str, w: Tensor) -> Tensor:
    def of_closure(w: Tensor) -> Tensor:
        return y * w + 1

    with _compiling():
        return torch.compile(of_closure, backend=backend, fullgraph=True)(w)


IN_ONE_GRAPH: dict[str, Callable[[Tensor, Env], Tensor]] = {
    "view": lambda y, e: y.t(),
    "result": lambda y, e: y,
    "mul_": lambda y, e: y.mul_(e.w),
    "view written": lambda y, e: (y[0].mul_(e.w[0]), y * 2)[1],
}
WAITED_IN_ONE_GRAPH: dict[str, Callable[[Any, Env], Tensor]] = {
    name: lambda y, e, wait=wait: wait(y) * e.w
    for name, wait in WAITS.items()
    if name != "trigger_wait()"
}


def _in_one_graph(f: Callable[[Any, Env], Tensor], backend: str, e: Env) -> Tensor:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return f(e.collect(x), replace(e, w=w))

    with _compiling():
        return torch.compile(step, backend=backend, fullgraph=True)(e.x, e.w)


def _traced(y: Tensor, mode: str, w: Tensor) -> Tensor:
    with _compiling():
        return make_fx(_arithmetic, tracing_mode=mode)(y, w)(y, w)


class _Module(torch.nn.Module):
    def forward(self, y: Tensor, w: Tensor) -> Tensor:
        return _arithmetic(y, w)


def _exported(y: Tensor, strict: bool, w: Tensor) -> Tensor:
    with _compiling():
        return torch.export.export(_Module(), (y, w), strict=strict).module()(y, w)


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _dtensor(y: Tensor, placement: Any) -> DTensor:
    return DTensor.from_local(y, _mesh(), [placement], run_check=False)


def _compilers() -> dict[str, Way]:
    found: dict[str, Way] = {}
    for backend in ("eager", "aot_eager", "inductor"):
        lost = (
            "" if backend != "aot_eager" else "AOTAutograd takes a view for a leaf without history"
        )
        inputs: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
            "argument": (lambda y: y, ""),
            "view as an argument": (lambda y: y.view(3, 2).view(2, 3), lost),
            "detached argument": (lambda y: y.detach(), ""),
        }
        for what, (take, wrong) in inputs.items():
            found[f"{backend}: {what}"] = Way(
                lambda y, e, take=take, b=backend: _run(_arithmetic, b, take(y), e.w),
                lambda y, e, take=take: _arithmetic(take(y), e.w),
                torch=wrong,
            )
        found |= {
            f"{backend}: argument beside what needs a gradient": Way(
                lambda y, e, b=backend: _run(_arithmetic, b, y, e.v),
                lambda y, e: _arithmetic(y, e.v),
            ),
            f"{backend}: closure": Way(
                lambda y, e, b=backend: _closure_of(y, b, e.w), lambda y, e: y * e.w + 1
            ),
            f"{backend}: global": Way(
                lambda y, e, b=backend: _global_of(y, b, e.w), lambda y, e: y * e.w + 1
            ),
            f"{backend}: written": Way(
                lambda y, e, b=backend: [_run(_write, b, y, e.w), y * 2],
                lambda y, e: [_write(y, e.w), y * 2],
            ),
            f"{backend}: view": Way(
                lambda y, e, b=backend: _run(_view, b, y, e.w), lambda y, e: y.t(), kind=ASYNC
            ),
            f"{backend}: returned as it is": Way(
                lambda y, e, b=backend: _run(_same, b, y, e.w), lambda y, e: y, kind=ASYNC
            ),
        }
        for name, wait in WAITS.items():
            if name == "trigger_wait()" and backend != "eager":
                continue  # torch's FunctionalTensor has no such method, nor do fake tensors
            if backend == "inductor" and "op" in name:
                continue
            found[f"{backend}: {name} inside"] = Way(
                lambda y, e, b=backend, wait=wait: _run(_after(wait), b, y, e.w),
                lambda y, e: y * e.w,
                only=True,
            )
        # The collective in the graph, too: its result is a plain tensor there.
        for name, f in (IN_ONE_GRAPH | WAITED_IN_ONE_GRAPH).items():
            if backend == "inductor" and name not in ("wait()", "view", "view written"):
                continue
            found[f"{backend}: collective and {name}"] = Way(
                lambda y, e, b=backend, f=f: _in_one_graph(f, b, e),
                f if name in IN_ONE_GRAPH else lambda y, e: y * e.w,
                only=True,
                torch="refuses it"
                if backend == "eager" and name in ("mul_", "view written")
                else "",
            )
    for mode in ("real", "fake", "symbolic"):
        found[f"make_fx, {mode}"] = Way(
            lambda y, e, mode=mode: _traced(y, mode, e.w), lambda y, e: _arithmetic(y, e.w)
        )
    for strict in (False, True):
        found[f"export, {strict=}"] = Way(
            lambda y, e, strict=strict: _exported(y, strict, e.w),
            lambda y, e: _arithmetic(y, e.w),
        )
    return {name: replace(way, costly=True, smooth=False) for name, way in found.items()}


WRAPPERS: dict[str, Way] = {
    "DTensor, replicated": Way(
        lambda y, e: (_dtensor(y, Replicate()) * 2).to_local(), lambda y, e: y * 2
    ),
    "DTensor, sharded": Way(
        lambda y, e: (_dtensor(y, Shard(0)).sin()).to_local(), lambda y, e: y.sin()
    ),
    "DTensor, and back": Way(
        lambda y, e: _dtensor(y, Replicate()).to_local(), lambda y, e: y, kind=ASYNC
    ),
    "DTensor of a view": Way(
        lambda y, e: (_dtensor(y.t(), Shard(0)) * 2).to_local(), lambda y, e: y.t() * 2
    ),
}


def _ways() -> dict[str, Way]:
    found = _waits()
    found |= {f"view {name}": Way(lambda y, e, f=f: f(y), kind=ASYNC) for name, f in VIEWS.items()}
    found |= {f"op {name}": Way(f, smooth="reentrant" not in name) for name, f in OPS.items()}
    found |= {f"in place: {name}": Way(f, kind=ASYNC) for name, f in IN_PLACE.items()}
    found |= {f"written: {name}": Way(f) for name, f in WRITTEN_AND_USED.items()}
    found |= AUTOGRAD | ENDS | WRAPPERS | _compilers()
    return found


WAYS = _ways()


# --- applying them -------------------------------------------------------------------------------


def _tensors(taken: Any) -> list[Tensor]:
    """What a way out gave, as tensors."""
    if isinstance(taken, Tensor):
        return [taken]
    if isinstance(taken, np.ndarray):
        return [torch.from_numpy(taken)]
    if isinstance(taken, (tuple, list)) and isinstance(taken[0], (Tensor, np.ndarray)):
        return [t for each in taken for t in _tensors(each)]
    return [torch.tensor(taken, dtype=torch.float64)]


def _inputs(c: Collective, requires_grad: bool) -> list[Tensor]:
    """All ranks' inputs: distinct for every rank and element, and of either sign."""
    n, count = dist.get_world_size(), math.prod(c.shape)
    every = torch.linspace(-1.7, 1.9, n * count, dtype=torch.float64).reshape(count, n)
    return [every[:, r].reshape(c.shape).clone().requires_grad_(requires_grad) for r in range(n)]


def _operands(rank: int) -> tuple[Tensor, Tensor]:
    """v and w of a rank."""
    grid = torch.arange(6, dtype=torch.float64).reshape(SHAPE)
    return (0.7 + rank / 3 + grid / 10).requires_grad_(), (grid - 2.4) / (2 + rank)


def _weights(t: Tensor, rank: int, position: int) -> Tensor:
    flat = torch.arange(t.numel(), dtype=torch.float64) + 1 + 0.3 * rank + 0.7 * position
    return flat.cos().reshape(t.shape).to(t.dtype)


def _loss(outs: Sequence[Tensor], rank: int, curved: bool = False) -> Tensor | None:
    """A number of what has history."""
    terms = [
        ((out.sin() if curved else out) * _weights(out, rank, i)).sum().double()
        for i, out in enumerate(outs)
        if out.requires_grad
    ]
    return torch.stack(terms).sum() if terms else None


@dataclass(frozen=True)
class Outcome:
    """What a way out gave."""

    outs: list[Tensor]  # without history
    have_history: list[bool]
    x_grad: Tensor | None
    v_grad: Tensor | None
    refusal: str  # the backward's


@functools.cache
def _wanted(collective: str, name: str, requires_grad: bool) -> Outcome:
    """The same way out of plain tensors, in one process: each rank's in turn."""
    c, way, rank = COLLECTIVES[collective], WAYS[name], dist.get_rank()
    take = way.plain or way.take
    xs = _inputs(c, requires_grad)
    mine: list[Tensor] = []
    grads: list[Tensor | None] = []
    refusal = ""
    for r in range(dist.get_world_size()):
        y = c.whole(xs)[r]
        v, w = _operands(r)
        outs = _tensors(take(y, Env(xs[r], v, w, lambda x: x)))
        loss = _loss(outs, r)
        if r == rank:
            mine = outs
        if loss is not None:
            try:
                loss.backward()
            except RuntimeError as error:
                refusal = _kind_of(error)
        grads.append(v.grad)
    return Outcome(
        [out.detach().clone() for out in mine],
        [out.requires_grad for out in mine],
        xs[rank].grad,
        grads[rank],
        refusal,
    )


def _kind_of(error: RuntimeError) -> str:
    """What autograd refuses, or everything that it says."""
    known = "modified by an inplace operation"
    return known if known in str(error) else str(error)


class Turns:
    """Ranks agree before they go on to communicate: a failure of one must not hang the other."""

    def __init__(self) -> None:
        self._store, self._turns = quick_store(), itertools.count()
        self._session = self._store.add(f"tests/sessions/{dist.get_rank()}", 1)

    def all_good(self, good: bool) -> bool:
        key = f"tests/turns/{self._session}/{next(self._turns)}"
        self._store.set(f"{key}/{dist.get_rank()}", str(int(good)))
        answers = [self._store.get(f"{key}/{r}") for r in range(dist.get_world_size())]
        return all(answer == b"1" for answer in answers)


def _until_complete(y: Tensor) -> None:
    """Returns when the collective is done, having asked nothing of its result."""
    ends = time.monotonic() + 10
    while (work := F.work_of(y)) is not None and not work.is_completed():
        assert time.monotonic() < ends, "the collective takes longer than 10 s"
        time.sleep(0.0001)


def _difference(got: Tensor | None, want: Tensor | None) -> str:
    if got is None or want is None:
        return "" if got is want else f"got {got}, expected {want}"
    return values.close(got.detach() + 0, want.detach() + 0)


class Trial:
    """One worker's ways out of a module's results, ours or torch's."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.type = AsyncCollectiveTensor if module is F else torch_functional.AsyncCollectiveTensor
        self.failed: dict[str, list[str]] = {}
        self.turns = Turns()
        self.rank = dist.get_rank()

    def expect(self, name: str, what: str, failure: str | bool) -> bool:
        """Whether all is well."""
        if failure:
            self.failed.setdefault(name, []).append(f"{what}: {failure}")
        return not failure

    def summary(self) -> str:
        """The ways that failed, each with what was wrong first."""
        lines = [f"{len(self.failed)} of {len(WAYS)} ways fail"]
        for name, texts in self.failed.items():
            lines.append(f"{name}: {len(texts)} times, first {texts[0].removeprefix(name)[:300]}")
        return "\n".join(lines)

    def apply(self, name: str, collective: str, requires_grad: bool, flies: bool) -> None:
        c, way = COLLECTIVES[collective], WAYS[name]
        state = "in flight" if flies else "complete"
        what = f"{name} of {collective}, {state}, requires_grad={requires_grad}"
        want = _wanted(collective, name, requires_grad)
        x = _inputs(c, requires_grad)[self.rank]
        v, w = _operands(self.rank)
        outs: list[Tensor] = []
        loss, good = None, False
        try:
            with in_flight(self.turns._store) if flies else contextlib.nullcontext() as gate:
                y = c.call(self.module, x)
                if not flies:
                    _until_complete(y)
                elif self.rank == 0 and self.module is F:
                    work = F.work_of(y)
                    assert work is not None and not work.is_completed(), "not in flight"
                if gate is not None:
                    gate.open_after(FLIGHT)
                outs = _tensors(way.take(y, Env(x, v, w, functools.partial(c.call, self.module))))
            loss = _loss(outs, self.rank)
            good = self._has_kinds(name, what, way, outs, want)
            if loss is not None and not loss.requires_grad:
                good = self.expect(name, f"{what}, loss", "has no history, and its terms have one")
        except Exception as error:
            text = str(error).strip()[:600]
            self.expect(name, what, f"raised {type(error).__name__}: {text}")
        if not self.turns.all_good(good):
            return
        refusal = ""
        try:
            if loss is not None:
                loss.backward()
        except RuntimeError as error:
            refusal = _kind_of(error)
        if refusal != want.refusal:
            self.expect(name, f"{what}, backward refused", f"{refusal!r}, not {want.refusal!r}")
            raise AssertionError(f"from here on the ranks may be apart\n{self.summary()}")
        if not refusal:
            for i, (out, each) in enumerate(zip(outs, want.outs, strict=True)):
                self.expect(name, f"{what}, value {i}", _difference(out, each))
            self.expect(name, f"{what}, gradient", _difference(x.grad, want.x_grad))
            self.expect(name, f"{what}, operand's gradient", _difference(v.grad, want.v_grad))
            kinds = {type(g).__name__ for g in (x.grad, v.grad) if g is not None}
            self.expect(name, f"{what}, gradient's type", ", ".join(kinds - {"Tensor"}))
        self.turns.all_good(True)

    def _has_kinds(self, name: str, what: str, way: Way, outs: list[Tensor], want: Outcome) -> bool:
        number = "" if len(outs) == len(want.outs) else f"got {len(outs)}"
        kind = self.type if way.kind == ASYNC else Tensor
        others = {type(out).__module__ for out in outs if type(out) is not kind}
        history = [out.requires_grad for out in outs]
        good = [
            self.expect(name, f"{what}, number of tensors", number),
            self.expect(name, f"{what}, type {way.kind}", f"got one of {others}" if others else ""),
            self.expect(
                name,
                f"{what}, requires_grad",
                "" if history == want.have_history else f"{history}, not {want.have_history}",
            ),
        ]
        # A gradient that one rank alone wants is no program.
        return good[0] and good[2]


def _combinations(part: int) -> Iterator[tuple[str, str, bool]]:
    """Every way out of `FEW` collectives, and of the others a part: one in `PARTS`."""
    for i, (name, way) in enumerate(WAYS.items()):
        for j, collective in enumerate(COLLECTIVES):
            wanted = collective in FEW or (i + j) % PARTS == part
            for requires_grad in (False, True) if wanted and not way.costly else ():
                if way.only in (None, requires_grad):
                    yield name, collective, requires_grad


def _compiled_combinations() -> Iterator[tuple[str, str, bool]]:
    """Every way out that takes a compiler, of one collective."""
    for name, way in WAYS.items():
        for requires_grad in (False, True) if way.costly else ():
            if way.only in (None, requires_grad):
                yield name, FEW[0], requires_grad


PARTS = 4


def expect_none(summaries: list[str]) -> None:
    """Fails with what the ranks said, once where they say the same."""
    said = {line: None for text in summaries for line in text.splitlines()}
    assert not said, "\n".join(said)


def _ways_out(flies: bool, part: int | None) -> str:
    trial = Trial(F)
    combinations = _compiled_combinations() if part is None else _combinations(part)
    for name, collective, requires_grad in combinations:
        trial.apply(name, collective, requires_grad, flies)
    return trial.summary() if trial.failed else ""


@pytest.mark.parametrize("flies", [False, True], ids=["complete", "in flight"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_ways_out(backend: str, flies: bool) -> None:
    part = ["gloo", "shm"].index(backend) + 2 * flies
    expect_none(run(2, _ways_out, flies, part, backend=backend, deadline=250))


@pytest.mark.long
@pytest.mark.parametrize(("backend", "flies"), [("gloo", False), ("shm", True)])
def test_ways_out_into_compiled_code(backend: str, flies: bool) -> None:
    expect_none(run(2, _ways_out, flies, None, backend=backend, deadline=250))


def _torchs_ways_out() -> dict[str, list[str]]:
    """The ways of torch's own results that do not give what the table says."""
    trial = Trial(torch_functional)
    for name, collective, requires_grad in itertools.chain(
        _combinations(0), _compiled_combinations()
    ):
        if COLLECTIVES[collective].in_torch and not name.startswith("inductor"):
            trial.apply(name, collective, requires_grad, False)
    return trial.failed


@pytest.mark.long
@pytest.mark.skipif(not TORCH_IS_CHECKED, reason="torch's results have no gradients before 2.13")
def test_torchs_results_are_held_to_the_same_table() -> None:
    failed = {k: v for each in run(2, _torchs_ways_out, deadline=250) for k, v in each.items()}
    known = {name for name, way in WAYS.items() if way.torch}
    unknown = [f"{name}: {texts[0]}" for name, texts in failed.items() if name not in known]
    assert not unknown, "\n".join(unknown)
    assert sorted(known - set(failed)) == [], "torch does these right by now"


# --- second derivatives --------------------------------------------------------------------------


def _wanted_twice(collective: str, name: str) -> Tensor | None:
    """The gradient of a gradient, of all ranks' numbers together; None where history ends."""
    c, way, rank = COLLECTIVES[collective], WAYS[name], dist.get_rank()
    take = way.plain or way.take
    xs = _inputs(c, True)
    total = torch.zeros((), dtype=torch.float64)
    for r in range(dist.get_world_size()):
        v, w = _operands(r)
        loss = _loss(_tensors(take(c.whole(xs)[r], Env(xs[r], v, w, lambda x: x))), r, curved=True)
        total = total if loss is None else total + loss
    if not total.requires_grad:
        return None
    grads = torch.autograd.grad(
        total, xs, create_graph=True, allow_unused=True, materialize_grads=True
    )
    again = torch.stack([(g * _weights(g, r, 5)).sum() for r, g in enumerate(grads)]).sum()
    if not again.requires_grad:
        return torch.zeros_like(xs[rank])
    return torch.autograd.grad(again, xs, allow_unused=True, materialize_grads=True)[rank]


def _twice(collective: str) -> Any:
    trial, rank = Trial(F), dist.get_rank()
    c = COLLECTIVES[collective]
    for name, way in WAYS.items():
        want = _wanted_twice(collective, name) if way.smooth else None
        if want is None:
            continue
        x = _inputs(c, True)[rank]
        v, w = _operands(rank)
        loss = None
        try:
            env = Env(x, v, w, functools.partial(c.call, F))
            loss = _loss(_tensors(way.take(c.call(F, x), env)), rank, curved=True)
            trial.expect(name, f"{name}: no history", loss is None)
        except Exception as error:
            trial.expect(name, f"{name}: raised {type(error).__name__}", str(error)[:300])
        if trial.turns.all_good(loss is not None):
            (g,) = torch.autograd.grad(
                loss, x, create_graph=True, allow_unused=True, materialize_grads=True
            )
            again, got = (g * _weights(g, rank, 5)).sum(), torch.zeros_like(x)
            if again.requires_grad:
                (got,) = torch.autograd.grad(again, x, allow_unused=True, materialize_grads=True)
            trial.expect(name, f"{name} of {collective}", _difference(got, want))
    return trial.summary() if trial.failed else ""


@pytest.mark.parametrize("collective", ["all_reduce sum", "all_to_all_single"])
def test_second_derivatives(collective: str) -> None:
    expect_none(run(2, _twice, collective, backend="shm"))


# --- within transforms and traces ----------------------------------------------------------------

# What a function that calls a collective may do with the result, where a transform or a tracer
# gave it what it passes around.
_NOT_IN_TRANSFORMS = (
    "checkpoint",
    "reentrant checkpoint",
    "autograd.Function",
    "autograd.Function of two",
    "custom op",
    "saved tensors, packed",
    "saved tensors, on the CPU",
    "mask",
)
# vmap does not write batches into what is none, knows no rule for the ops, or has other strides.
_NOT_IN_BATCHES = (
    "op assigned into a plain tensor",
    "op added in place to a plain tensor",
    "op setitem",
    "op foreach",
    "op of a view and its base",
    "view view",
    "view as_strided",
)
WITHIN: dict[str, Callable[[Tensor, Env], Any]] = (
    {f"view {name}": lambda y, e, f=f: f(y) for name, f in VIEWS.items()}
    | {f"op {name}": f for name, f in OPS.items() if name not in _NOT_IN_TRANSFORMS}
    | {f"written: {name}": f for name, f in WRITTEN_AND_USED.items()}
    | {
        name + what: lambda y, e, wait=wait, prepare=prepare: wait(prepare(y, e))
        for name, wait in WAITS.items()
        for what, prepare in BEFORE_A_WAIT.items()
        if "()" not in name
    }
)


def _functions(c: Collective, take: Callable[[Tensor, Env], Any]) -> tuple[Any, Any, Any]:
    """What is transformed: of this rank's input, of all ranks', and of a rank's result."""
    rank = dist.get_rank()
    envs = [
        Env(x, v.detach(), w, lambda x: x)
        for r, x in enumerate(_inputs(c, False))
        for v, w in [_operands(r)]
    ]

    def outs_of(y: Tensor, r: int) -> tuple[Tensor, ...]:
        return tuple(_tensors(take(y, envs[r])))

    def local(x: Tensor) -> tuple[Tensor, ...]:
        return outs_of(c.call(F, x), rank)

    def whole(*xs: Tensor) -> tuple[Tensor, ...]:
        return outs_of(c.whole(list(xs))[rank], rank)

    return local, whole, outs_of


def _within(transform: str, collectives: Sequence[str]) -> Any:
    """Functions of this rank's input under a transform, against the same in one process."""
    trial, rank, n = Trial(F), dist.get_rank(), dist.get_world_size()
    for name, collective in itertools.product(WITHIN, collectives):
        if transform in ("grad", "vjp") and name.startswith("torch's"):
            continue  # torch's op is an autograd.Function that torch.func refuses
        if transform == "vmap" and name in _NOT_IN_BATCHES:
            continue
        c, take = COLLECTIVES[collective], WITHIN[name]
        what = f"{transform}: {name} of {collective}"
        xs = _inputs(c, False)
        ts = [_weights(x, r, 3) for r, x in enumerate(xs)]

        local, whole, outs_of = _functions(c, take)

        def loss(outs: Sequence[Tensor], r: int) -> Tensor:
            return torch.stack(
                [(out * _weights(out, r, i)).sum().double() for i, out in enumerate(outs)]
            ).sum()

        try:
            if transform in ("grad", "vjp"):
                leaves = [x.requires_grad_() for x in _inputs(c, True)]
                total = sum(loss(outs_of(c.whole(leaves)[r], r), r) for r in range(n))
                wants = [torch.autograd.grad(total, leaves)[rank]]
                if transform == "grad":
                    gots = [grad(lambda x, local=local: loss(local(x), rank))(xs[rank])]
                else:
                    outs, pull = vjp(local, xs[rank])
                    gots = list(pull(tuple(_weights(out, rank, i) for i, out in enumerate(outs))))
            elif transform == "jvp":
                gots = [t for pair in jvp(local, (xs[rank],), (ts[rank],)) for t in pair]
                wants = [t for pair in jvp(whole, tuple(xs), tuple(ts)) for t in pair]
            elif transform == "vmap":
                batches = [torch.stack([x, x * 0.5 + 0.1]) for x in xs]
                gots = list(vmap(local)(batches[rank]))
                wants = [
                    torch.stack(each)
                    for each in zip(
                        *(whole(*(b[i] for b in batches)) for i in range(2)), strict=True
                    )
                ]
            else:
                gots = list(make_fx(local)(xs[rank])(xs[rank]))
                wants = list(whole(*xs))
            for i, (got, want) in enumerate(zip(gots, wants, strict=True)):
                trial.expect(name, f"{what}, {i}", _difference(got, want))
        except Exception as error:
            trial.expect(name, what, f"raised {type(error).__name__}: {str(error)[:300]}")
    return trial.summary() if trial.failed else ""


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "make_fx"])
def test_within_transforms(transform: str) -> None:
    backend = {"grad": "gloo", "vmap": "gloo"}.get(transform, "shm")
    few = ("all_reduce sum", "all_to_all_single")
    expect_none(run(2, _within, transform, few, backend=backend))


# --- hooks ---------------------------------------------------------------------------------------


def _sum_of(t: Tensor) -> Tensor:
    return F.all_reduce(t, "sum", _group())


def _hooks(flies: bool) -> None:
    """Hooks of autograd, of parameters and of DDP that hand out results, in flight or complete."""
    n, rank, store = dist.get_world_size(), dist.get_rank(), quick_store()
    ws = [torch.arange(3, dtype=torch.float64) + 1 + r for r in range(n)]
    total = sum(ws[1:], ws[0])

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        with in_flight(store) if flies else contextlib.nullcontext() as gate:
            if gate is not None:
                gate.open_after(FLIGHT)
            yield

    # A gradient on its way is replaced by a result.
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    z = x * 2
    z.register_hook(_sum_of)
    with held():
        (z * ws[rank]).sum().backward()
    assert type(x.grad) is Tensor
    assert torch.equal(x.grad, 2 * total), x.grad

    # A leaf's gradient is a result, is added to, and read by an optimizer.
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x.register_hook(_sum_of)
    for count in (1, 2):
        with held():
            (x * ws[rank]).sum().backward()
            assert type(x.grad) is AsyncCollectiveTensor, type(x.grad)
        assert torch.equal(x.grad, count * total), x.grad
    torch.optim.SGD([x], lr=0.5).step()
    assert torch.equal(x.detach(), 1 - total), x

    # A parameter's gradient is replaced once it is there, as FSDP's users do.
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def reduce_gradient(p: Tensor) -> None:
        p.grad = _sum_of(p.grad)

    p.register_post_accumulate_grad_hook(reduce_gradient)
    for optimizer in (torch.optim.SGD([p], lr=1.0), torch.optim.Adam([p], lr=0.5)):
        p.grad = None
        with held():
            (p * ws[rank]).sum().backward()
            assert type(p.grad) is AsyncCollectiveTensor, type(p.grad)
            before = p.detach().clone()
            optimizer.step()
        assert torch.equal(p.grad, total), p.grad
        if isinstance(optimizer, torch.optim.SGD):
            assert torch.equal(p.detach(), before - total)
        else:
            assert torch.allclose(p.detach(), before - 0.5)
    torch.nn.utils.clip_grad_norm_([p], 1e-3)
    assert torch.allclose(p.grad.norm(), torch.tensor(1e-3, dtype=torch.float64))

    # What retain_grad keeps of a result.
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with held():
        y = _sum_of(x)
        y.retain_grad()
        (y * ws[rank]).sum().backward()
    assert type(y.grad) is Tensor
    assert torch.equal(y.grad, ws[rank])
    assert torch.equal(x.grad, total)

    # A hook that sees gradients of several leaves.
    x, z = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with held():
        y = _sum_of(x) * z
        seen: list[Any] = []
        torch.autograd.graph.register_multi_grad_hook((x, z), seen.extend)
        (y * ws[rank]).sum().backward()
    assert torch.equal(seen[0], total)
    assert torch.equal(seen[1], n * ws[rank])

    # DDP's communication hook answers with a result.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1, dtype=torch.float64))

    # Without annotations: DDP compares them with types, and here they are texts.
    def communicate(state, bucket):  # type: ignore[no-untyped-def]
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(_sum_of(bucket.buffer()))
        return future

    model.register_comm_hook(None, communicate)
    with held():
        model(ws[rank][None]).sum().backward()
    assert torch.equal(model.module.weight.grad[0], total), model.module.weight.grad
    assert model.module.bias.grad.item() == n


@pytest.mark.parametrize("flies", [False, True], ids=["complete", "in flight"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_hooks(backend: str, flies: bool) -> None:
    run(2, _hooks, flies, backend=backend)
