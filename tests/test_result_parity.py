"""What torch.Tensor can do, a result does as torch's AsyncCollectiveTensor does it.

The names are read from torch. Each is called with arguments that a plain tensor takes, on our
result (gloo and shm) and on torch's (gloo), with a gradient and without. Types, values, gradients,
what has become of the result, or the refusal must be the same, but for what docs/functional.md
lists.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional
from torch import Tensor

import torch_c10d_ext.functional as F
from tests.harness import run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="torch's results have no gradients before 2.13"
    ),
]

DUNDERS = """
    __abs__ __add__ __and__ __array__ __bool__ __complex__ __contains__ __copy__ __deepcopy__
    __delitem__ __div__ __dlpack__ __dlpack_device__ __eq__ __float__ __floordiv__ __format__
    __ge__ __getitem__ __gt__ __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__
    __imul__ __index__ __int__ __invert__ __ior__ __ipow__ __irshift__ __isub__ __iter__
    __itruediv__ __ixor__ __le__ __len__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__
    __neg__ __nonzero__ __or__ __pos__ __pow__ __radd__ __rand__ __rdiv__ __reduce_ex__ __repr__
    __reversed__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__
    __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __setitem__ __str__ __sub__ __truediv__
    __xor__ __hash__
"""


def _names() -> list[str]:
    public = [name for name in dir(Tensor) if not name.startswith("_")]
    return public + [name for name in DUNDERS.split() if hasattr(Tensor, name)]


# --- arguments -----------------------------------------------------------------------------------


def _subjects() -> dict[str, Tensor]:
    """What the collective gives; the first that takes the arguments is asked."""
    matrix = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]]).double()
    return {
        "matrix": matrix,  # positive definite, and what logarithms and powers take
        "integers": torch.tensor([5, 3, 6]),
        "vector": matrix[0].clone(),
        "one": torch.tensor([2.5]).double(),
        "batch": matrix.repeat(2, 1, 1),
        "count": torch.tensor(5),
        "complex": torch.complex(matrix, matrix.cumsum(0)),
    }


def _other() -> Tensor:
    return torch.arange(1, 10, dtype=torch.float64).reshape(3, 3) / 8


def _vector() -> Tensor:
    return torch.tensor([0.5, 1.5, 2.5]).double()


def _tried() -> list[tuple[Any, ...]]:
    """Arguments to try, of every name until `TAKEN` are taken by a plain tensor."""
    square, mask = torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0]]), _other() > 0.5
    row, batch = torch.tensor([2, 0]), _other().repeat(2, 1, 1)
    return [
        (),
        (_other(),),
        (0,),
        (0, 1),
        (0.5,),
        (2,),
        (square,),
        (mask,),
        (_vector(),),
        (torch.tensor([2, 1, 3]),),
        (0, 1, 2),
        ((3, 3),),
        ((1, 2),),
        (0, (3, 1)),
        ((3, 3), 0.5),
        ((3, 3), (1, 3)),
        ((3, 3), (1, 3), 0),
        (_other(), _other()),
        (_other(), _vector()),
        (_vector(), _vector()),
        (batch, batch),
        (batch,),
        (mask, 0.5),
        (mask, _other()),
        (square, _other()),
        ((row,), _other()[:2]),
        (0, row),
        (0, row, 0.5),
        (0, square),
        (0, square, _other()),
        (0, square, _other(), "sum"),
        (0, row, _other()[:2]),
        (0, row, _other()[:2], "amax"),
        (_vector(), 0, 1),
        (_other(), (3, 3), (1, 3)),
        (0.5, 1.5),
        (2, 0, 1),
        (torch.float32,),
        ("cpu",),
        ("",),
        ({},),
        (torch.Tensor,),
        (lambda grad: None,),
    ]


class Keywords(dict[str, Any]):
    """As the last argument: what is given by name."""


TAKEN = 2
# Beside what is tried.
ARGUMENTS: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "__getitem__": [("matrix", (i,)) for i in (..., None, slice(1, None), ([2, 0],), (0, 1))],
    "__setitem__": [("matrix", (i, 7.0)) for i in (..., slice(1, None), ([2, 0],), (0, 1))],
    "__reduce_ex__": [("matrix", (2,))],
    "apply_": [("matrix", (lambda value: value + 1,))],
    "backward": [("matrix", (torch.ones(3, 3).double(),)), ("one", ())],
    "__index__": [("count", ())],
    "is_nonzero": [("one", ())],
    "istft": [("complex", (4,))],
    "nonzero_static": [("matrix", (Keywords(size=4),))],
    "register_hook": [("matrix", (lambda grad: grad * 2,))],
    "resize": [("matrix", (9,))],
    "sparse_mask": [("matrix", (_other().to_sparse(),))],
    "map_": [("matrix", (_other(), lambda a, b: a + b))],
    "map2_": [("matrix", (_other(), _other(), lambda a, b, c: a + b + c))],
    "requires_grad_": [("matrix", ()), ("matrix", (True,))],
    "lu_solve": [("matrix", tuple(torch.linalg.lu_factor(_subjects()["matrix"])))],
    "ormqr": [("matrix", (_vector(), _other()))],
    "register_post_accumulate_grad_hook": [("matrix", (lambda tensor: None,))],
    "retain_grad": [("matrix", ())],
    "stft": [("vector", (2, 1, 2, None, True, "reflect", False, True, True))],
    "to": [("matrix", (a,)) for a in (torch.float32, torch.float64, "cpu", _other())],
    "type": [("matrix", ()), ("matrix", (torch.float32,)), ("matrix", (torch.float64,))],
    "view": [("matrix", (9,)), ("matrix", (-1, 1)), ("matrix", (torch.int64,))],
}
# What a plain tensor refuses, whatever it is given: called all the same, to compare the refusal.
REFUSED = {
    "another layout": """ccol_indices coalesce col_indices crow_indices indices is_coalesced
        resize_as_sparse_ row_indices smm sparse_resize_ sparse_resize_and_clear_ sspaddmm
        to_padded_tensor values""",
    "another dtype": """int_repr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points
        q_scale q_zero_point qscheme to_mkldnn""",
    "another device": "cuda ipu mtia pin_memory record_stream xpu",
    "no longer there": "eig lstsq reinforce solve symeig",
    "a tensor that requires a gradient": """backward register_hook
        register_post_accumulate_grad_hook retain_grad""",
    "a sequence": "__delitem__",
}


def _candidates(name: str) -> list[tuple[str, tuple[Any, ...]]]:
    return ARGUMENTS.get(name) or list(itertools.product(_subjects(), _tried()))


def _quietly(f: Callable[..., Any]) -> Callable[..., Any]:
    """Half of the names are deprecated, or warn of what they are given."""

    @functools.wraps(f)
    def quiet(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f(*args)

    return quiet


@_quietly
def _planned() -> dict[str, list[int]]:
    """Which of its candidates a plain tensor takes, of every name."""
    plan: dict[str, list[int]] = {}
    for name in _names():
        plan[name] = []
        for i, (subject, arguments) in enumerate(_candidates(name)):
            if name not in ARGUMENTS and (
                len(plan[name]) == TAKEN or (plan[name] and subject != "matrix")
            ):
                break
            with contextlib.suppress(Exception):
                _call(_subjects()[subject], name, arguments)
                plan[name].append(i)
    return plan


def _call(y: Any, name: str, arguments: tuple[Any, ...]) -> Any:
    torch.manual_seed(7)
    arguments = copy.deepcopy(arguments)  # some are written
    value = getattr(y, name)
    if arguments and isinstance(arguments[-1], Keywords):
        return value(*arguments[:-1], **arguments[-1])
    is_node = hasattr(value, "next_functions")
    return value(*arguments) if callable(value) and not is_node else value


# --- what is compared ----------------------------------------------------------------------------

# Memory that nobody has written.
UNDEFINED = {"empty_like", "new", "new_empty", "new_empty_strided", "resize_", "resize_as_"}


def _described(value: Any, undefined: bool = False) -> Any:
    """What is seen of it, without addresses."""
    if isinstance(value, Tensor):
        plain = value.detach()
        plain = plain.to_dense() if plain.layout is not torch.strided else plain.clone()
        return (
            type(value).__name__,
            str(value.layout),
            str(value.dtype),
            tuple(value.shape),
            value.stride() if value.layout is torch.strided else (),
            value.requires_grad,
            value.is_leaf,
            "" if undefined else repr(plain.tolist()),
        )
    if isinstance(value, (list, tuple, Iterator)):
        # Named tuples, lists of tensors, and what iterates over a result.
        return [type(value).__name__, *(_described(each, undefined) for each in value)]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), repr(value.tolist())]
    if type(value) is int and value > 1 << 32:
        return "an address"
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return re.sub(r"grad_fn=<\w+>", "grad_fn=<>", repr(value))
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return repr(value)
    if isinstance(value, type):
        return value.__name__
    return "a node" if hasattr(value, "next_functions") else type(value).__name__


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value for t in _tensors_in(each)] if type(value) in (list, tuple) else []


def _tried_to(f: Callable[[], Any]) -> Any:
    try:
        return f()
    except Exception as error:
        return type(error).__name__


Key = tuple[str, int, bool]  # a name, which of its candidates, and whether with a gradient


OURS, TORCHS, PLAIN = "ours", "torch's", "plain"


def _result(kind: str, x: Tensor) -> Tensor:
    if kind == PLAIN:
        return F.wait_tensor(F.all_reduce(x, "sum", None)).clone()
    return (F if kind == OURS else torch_functional).all_reduce(x, "sum", dist.group.WORLD)


@_quietly
def _told(kind: str, plan: dict[str, list[int]]) -> dict[Key, dict[str, Any]]:
    """What became of every call, and of the result; then the gradients, all ranks together."""
    subjects, told = _subjects(), dict[Key, dict[str, Any]]()
    losses: dict[Key, tuple[Any, Tensor]] = {}
    for name, numbers in plan.items():
        candidates = _candidates(name)
        for number, requires_grad in itertools.product(numbers or [0], (False, True)):
            subject, arguments = candidates[number]
            if requires_grad and subject in ("integers", "count"):
                continue
            x = (subjects[subject] * (dist.get_rank() == 0)).requires_grad_(requires_grad)
            y = _result(kind, x)
            out = _tried_to(lambda y=y, n=name, a=arguments: _call(y, n, a))
            undefined = name in UNDEFINED
            key = name, number, requires_grad
            told[key] = {
                "answer": _tried_to(lambda out=out, u=undefined: _described(out, u)),
                "result": _tried_to(lambda y=y, u=undefined: _described(y, u)),
            }
            if requires_grad and not undefined:
                losses[key] = _tried_to(lambda out=out, y=y: _loss([*_tensors_in(out), y])), x
    good: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(good, {k for k, (loss, _) in losses.items() if type(loss) is Tensor})
    for key, (loss, x) in losses.items():
        if key in set.intersection(*good):
            told[key]["gradient"] = _tried_to(lambda loss=loss, x=x: _described(_grad(loss, x)))
        else:
            told[key]["gradient"] = loss
    return told


def _grad(loss: Tensor, x: Tensor) -> Tensor | None:
    return torch.autograd.grad(loss, x, allow_unused=True)[0]


def _loss(tensors: list[Tensor]) -> Tensor | None:
    terms = [
        (t * torch.arange(1, t.numel() + 1).reshape(t.shape)).sum().abs().double()
        for t in tensors
        if t.requires_grad and t.layout is torch.strided
    ]
    return torch.stack(terms).sum() if terms else None


# --- where it differs ----------------------------------------------------------------------------

# Each is what it is on a plain tensor, and in the docs' list under this name.
_RESHAPES = "others that reshape in place"
DIFFERENT = {
    "resize_": "`resize_`",
    "set_": "`set_`",
    "t_": "`t_`",
    "unsqueeze_": "`unsqueeze_`",
    "as_strided_": _RESHAPES,
    "swapaxes_": _RESHAPES,
    "swapdims_": _RESHAPES,
    "transpose_": _RESHAPES,
    "__deepcopy__": "`deepcopy`",
    "__reduce_ex__": "`pickle`",
    "data_ptr": "`data_ptr`",
    "share_memory_": "`share_memory_`",
}
REFUSED_HERE = {"apply_", "const_data_ptr", "map2_"}  # in words: they read memory past Python
CRASH = {"share_memory_", "apply_", "map2_"}  # on torch's


@functools.cache
def _all_told() -> tuple[dict[str, list[int]], dict[str, dict[Key, dict[str, Any]]]]:
    plan = _planned()
    safe = {name: numbers for name, numbers in plan.items() if name not in CRASH}
    different = {name: plan[name] for name in DIFFERENT}
    return plan, {
        TORCHS: run(2, _told, TORCHS, safe)[0],
        PLAIN: run(2, _told, PLAIN, different)[0],
        **{
            f"{backend}, rank {rank}": told
            for backend in ("gloo", "shm")
            for rank, told in enumerate(run(2, _told, OURS, plan, backend=backend))
        },
    }


def _differences(ours: dict[Key, Any], others: dict[Key, Any]) -> list[str]:
    return [
        f"{key}: {what}: {ours[key][what]}, not {other[what]}"
        for key, other in others.items()
        for what in other
        if ours[key][what] != other[what]
    ]


def test_every_name_is_called() -> None:
    refused = {name for name, numbers in _all_told()[0].items() if not numbers}
    assert refused <= set(" ".join(REFUSED.values()).split()), "find arguments, or give a reason"


@pytest.mark.parametrize("place", ["gloo, rank 0", "gloo, rank 1", "shm, rank 0", "shm, rank 1"])
def test_is_as_on_torchs_class(place: str) -> None:
    told = _all_told()[1]
    same = {key: v for key, v in told[TORCHS].items() if key[0] not in {*DIFFERENT, *REFUSED_HERE}}
    assert len({name for name, _, _ in same}) > 600
    differences = _differences(told[place], same)
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("place", ["gloo, rank 0", "shm, rank 1"])
def test_is_as_on_a_plain_tensor_where_the_docs_say_so(place: str) -> None:
    told = _all_told()[1]
    as_plain = {
        key: ast.literal_eval(repr(v).replace("AsyncCollectiveTensor", "Tensor"))
        for key, v in told[place].items()
        if key[0] in DIFFERENT
    }
    differences = _differences(as_plain, told[PLAIN])
    assert not differences, "\n".join(differences)


def test_is_refused_where_the_docs_say_so() -> None:
    for (name, _, _), of in _all_told()[1]["gloo, rank 0"].items():
        if name in REFUSED_HERE:
            assert of["answer"] == "'RuntimeError'", name


def test_the_docs_list_what_differs() -> None:
    told = _all_told()[1]
    differ = {k for k, v in told[TORCHS].items() if told["gloo, rank 0"][k] != v}
    known = {*DIFFERENT, *REFUSED_HERE}
    assert known - {name for name, _, _ in differ} - CRASH == set(), "is as torch's by now"
    page = (Path(__file__).parents[1] / "docs" / "functional.md").read_text()
    listed = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    cells = [*DIFFERENT.values(), *(f"`{name}`" for name in REFUSED_HERE)]
    assert not [cell for cell in cells if cell not in "".join(listed)]
