"""Test data: dtypes, values that every rank can rebuild, memory layouts, reductions, comparison.

Values are chosen so that a right answer is exact in the accumulation type of the contract
(float32 for narrower floats, the dtype itself otherwise) in any order of summation, while
accumulating in the narrow dtype gives something else. So results are compared bit for bit, except
where a division or an inexact factor rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *FLOAT8)
COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (*SIGNED, *UNSIGNED)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")

# What the reduce ops do to integers.
NUMPY_REDUCTIONS = {
    "sum": np.add,
    "premul_sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}

# Bits of mantissa given to the values: all that the dtype has, or as many as stay exact in sums.
_MANTISSA_BITS = {
    torch.float64: 40,
    torch.float32: 11,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 3,
    torch.float8_e5m2: 2,
    torch.float8_e5m2fnuz: 2,
    torch.float8_e8m0fnu: 0,
}


def meanings(dtype: torch.dtype) -> tuple[str, ...]:
    """The reduce ops that mean something on `dtype`."""
    if dtype in COMPLEX:
        return ("sum", "avg", "product", "premul_sum")
    if dtype in FLOATS:
        return ("sum", "avg", "product", "min", "max", "premul_sum")
    if dtype == torch.bool:
        return ("sum", "product", "min", "max", "band", "bor", "bxor")
    return ("sum", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


def factors(dtype: torch.dtype) -> tuple[Any, ...]:
    """Factors for premul_sum on `dtype`: exact ones, and complex ones where they mean something."""
    if dtype == torch.float8_e8m0fnu:  # no sign, powers of two only
        return (2.0,)
    if dtype in COMPLEX:
        return (-1.5, 0.5 - 2j)
    return (-1.5, 2) if dtype in FLOATS else (3,)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.empty(0, dtype=dtype).real.dtype


def values(
    shape: Sequence[int], dtype: torch.dtype, rank: int, *, salt: int = 0, product: bool = False
) -> Tensor:
    """Values of one rank's input: the same wherever they are built, different on every rank.

    With `product`, values whose product over four ranks is exact in float32.
    """
    build = _values_again if math.prod(shape) <= _FEW else _values
    return build(tuple(shape), dtype, rank, salt, product).clone()


def _values(
    shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int, product: bool
) -> Tensor:
    if dtype in COMPLEX:
        real = values(shape, _real(dtype), rank, salt=2 * salt, product=product)
        imaginary = values(shape, _real(dtype), rank + 100, salt=2 * salt + 1, product=product)
        pair = torch.stack((real, imaginary), -1)
        return torch.view_as_complex(pair)
    random = np.random.default_rng((salt, rank, 20))
    if dtype == torch.bool:
        return torch.from_numpy(random.integers(0, 2, tuple(shape)).astype(bool))
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        name = str(dtype).removeprefix("torch.")
        array = random.integers(info.min, info.max, tuple(shape), dtype=name, endpoint=True)
        return torch.from_numpy(np.asarray(array)).clone()
    bits = _MANTISSA_BITS[dtype]
    spread = 3
    if product:
        bits, spread = min(bits, 10 if dtype == torch.float64 else 2), 1
    mantissa = 1 + random.integers(0, 2**bits, tuple(shape)) / 2**bits
    exponent = random.integers(-spread, spread, tuple(shape), endpoint=True)
    sign = 1 if dtype == torch.float8_e8m0fnu else random.choice((-1, 1), tuple(shape))
    wide = torch.from_numpy(np.asarray(sign * mantissa * 2.0**exponent))
    # numpy gives empty arrays strides that torch would not.
    return _narrow(wide, dtype).clone(memory_format=torch.contiguous_format)


# Of what a table of dtypes and ops asks for over and over.
_FEW = 1000
_values_again = functools.lru_cache(maxsize=1000)(_values)


def bits(shape: Sequence[int], dtype: torch.dtype, rank: int, *, salt: int = 0) -> Tensor:
    """Any bit patterns, NaNs with payloads and denormals among them, for ops that only move."""
    random = np.random.default_rng((salt, rank, 8))
    if dtype == torch.bool or 0 in shape:
        return values(shape, dtype, rank, salt=salt)
    width = dtype.itemsize
    raw = random.integers(0, 256, (int(np.prod(shape)) * width,), dtype="uint8")
    return torch.from_numpy(raw).view(dtype).reshape(tuple(shape))


def _narrow(wide: Tensor, dtype: torch.dtype) -> Tensor:
    # Casts to the narrow types go by way of float32, as accumulators do.
    if dtype in (torch.float64, torch.complex128):
        return wide.to(dtype)
    if dtype in COMPLEX:
        return wide.to(torch.complex64).to(dtype)
    return wide.to(torch.float32).to(dtype)


def reduce_reference(xs: Sequence[Tensor], reduce_op: str, factor: complex | None = None) -> Tensor:
    """What a reduction over ranks means: elementwise, low precision accumulated wide.

    Differentiable by autograd for floats and complex.
    """
    dtype, op = xs[0].dtype, reduce_op.lower()
    if not (dtype in FLOATS or dtype in COMPLEX):
        return torch.from_numpy(np.asarray(_reduce_integers(xs, op, factor)))
    wide = torch.complex128 if dtype in COMPLEX else torch.float64
    via = torch.complex64 if dtype == torch.complex32 else torch.float32
    direct = dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128)
    stacked = torch.stack([x.to(wide) if direct else x.to(via).to(wide) for x in xs])
    if op == "sum":
        result = stacked.sum(0)
    elif op == "avg":
        result = stacked.sum(0) / len(xs)
    elif op == "product":
        result = stacked.prod(0)
    elif op == "min":
        result = stacked.amin(0)
    elif op == "max":
        result = stacked.amax(0)
    else:
        assert op == "premul_sum"
        assert factor is not None
        result = (stacked * factor).sum(0)
    return _narrow(result, dtype)


def _reduce_integers(xs: Sequence[Tensor], op: str, factor: complex | None) -> Any:
    stacked = np.stack([x.numpy() for x in xs])
    if op == "premul_sum":
        stacked = stacked * stacked.dtype.type(factor)
    if stacked.dtype == bool:
        op = {"sum": "bor", "product": "band", "min": "band", "max": "bor"}.get(op, op)
    return NUMPY_REDUCTIONS[op].reduce(stacked, axis=0, dtype=stacked.dtype)


def exact(dtype: torch.dtype, reduce_op: str | None, world_size: int) -> bool:
    """Whether the reduction of `values` has one right answer to the last bit."""
    if reduce_op == "product" and world_size > 4:
        return dtype not in COMPLEX and dtype != torch.float64
    return reduce_op != "avg" or world_size in (1, 2, 4) or dtype not in (*FLOATS, *COMPLEX)


def ulps(dtype: torch.dtype, reduce_op: str | None, world_size: int) -> float:
    """How much of its last bit a result that is not exact may be off."""
    if reduce_op != "product":
        return 2
    # Each factor rounds by half a unit at most, and a complex one by sqrt(5) times as much of the
    # absolute value (Brent, Percival, Zimmermann 2007). Then the result is rounded once.
    factor = math.sqrt(5) if dtype in COMPLEX else 1
    return factor * (world_size - 1) / 2 + 1


# --- layouts: the same values in different memory ------------------------------------------------

LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded", "conj", "neg")


def layouts(dtype: torch.dtype, shape: Sequence[int]) -> list[str]:
    """The layouts that differ for a tensor of this dtype and shape."""
    names = ["contiguous", "offset"]
    if len(shape) >= 1:
        names += ["strided", "expanded"]
    if len(shape) >= 2:
        names += ["transposed"]
    if dtype in (torch.complex64, torch.complex128):
        names += ["conj"]
    if dtype in (torch.float32, torch.float64):
        names += ["neg"]
    return names


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A tensor of x's shape in another layout; x's values, except that `expanded` repeats row 0."""
    if layout == "contiguous":
        return x.clone(memory_format=torch.contiguous_format)
    if layout == "expanded":
        return x[:1].clone().expand_as(x) if x.size(0) else x.clone()
    if layout == "conj":
        return x.conj().resolve_conj().conj()
    if layout == "neg":
        return torch._neg_view(torch._neg_view(x).resolve_neg())
    out = empty_like(x.shape, x.dtype, layout)
    out.copy_(x)
    return out


def empty_like(shape: Sequence[int], dtype: torch.dtype, layout: str) -> Tensor:
    """An unwritten tensor (its memory holds a pattern) of this shape in this layout."""
    shape = tuple(shape)
    if layout == "contiguous":
        return _pattern(shape, dtype)
    if layout == "transposed":
        return _pattern(shape[::-1], dtype).permute(*range(len(shape))[::-1])
    if layout == "strided":
        return _pattern((*shape[:-1], 2 * shape[-1] + 1), dtype)[..., 1::2]
    assert layout == "offset", layout
    count = int(np.prod(shape))
    return _pattern((count + 5,), dtype)[3 : 3 + count].view(shape)


def _pattern(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    fill = torch.arange(count) % (2 if dtype == torch.bool else 13)
    return fill.to(torch.uint8).view(dtype).reshape(tuple(shape))


# --- comparison ----------------------------------------------------------------------------------


def memory(x: Tensor) -> bytes:
    """Every byte of the storage behind x, those between its elements included."""
    storage = x.untyped_storage()
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes())


def raw(x: Tensor) -> bytes:
    """The bytes of x's elements in row-major order."""
    if x.numel() == 0:
        return b""
    # A fresh tensor: `contiguous` keeps odd strides of one-element tensors, which cannot be viewed.
    flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def mismatch(actual: Tensor, expected: Tensor, *, bitwise: bool = True, ulps: float = 0) -> str:
    """Say how `actual` differs from `expected`; the empty string when it does not.

    `bitwise` compares bytes (0.0 differs from -0.0, NaNs by payload), else values within `ulps`.
    """
    for what in ("shape", "dtype", "device"):
        ours, theirs = getattr(actual, what), getattr(expected, what)
        if ours != theirs:
            return f"{what} {ours}, expected {theirs}"
    if bitwise:
        if raw(actual) == raw(expected):
            return ""
    else:
        a, e = _widen(actual), _widen(expected)
        margin = ulps * torch.finfo(_real_of(expected)).eps * e.abs() if ulps else 0.0
        if bool(((a == e) | ((a - e).abs() <= margin) | (a.isnan() & e.isnan())).all()):
            return ""
    return f"got {_show(actual)}, expected {_show(expected)}"


def close(actual: Tensor, expected: Tensor, *, tolerance: float = 1e-9) -> str:
    """Like `mismatch` for results of a longer computation, relative to the largest element."""
    for what in ("shape", "dtype"):
        ours, theirs = getattr(actual, what), getattr(expected, what)
        if ours != theirs:
            return f"{what} {ours}, expected {theirs}"
    if expected.numel() == 0:
        return ""
    a, e = _widen(actual), _widen(expected)
    if bool((a - e).abs().max() <= tolerance * (1 + e.abs().max())):
        return ""
    return f"got {_show(actual)}, expected {_show(expected)}"


def _real_of(x: Tensor) -> torch.dtype:
    return _real(x.dtype) if x.dtype in COMPLEX else x.dtype


def _widen(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype in COMPLEX:
        return (
            x.to(torch.complex64).to(torch.complex128)
            if x.dtype.itemsize < 8
            else x.to(torch.complex128)
        )
    if x.dtype in FLOATS:
        return (
            x.to(torch.float32).to(torch.float64) if x.dtype.itemsize < 4 else x.to(torch.float64)
        )
    return torch.from_numpy(x.contiguous().numpy().astype("float64"))


def _show(x: Tensor) -> str:
    flat = _widen(x).reshape(-1)
    return f"{flat[:8].tolist()}{'...' if flat.numel() > 8 else ''}"
