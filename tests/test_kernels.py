"""The shared-memory backend's kernels against torch's arithmetic, without any rank or group.

What the C++ says of them in ``csrc/kernels/kernels.h`` is compared bit by bit, on every
instruction set that this machine has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness.values import NUMPY_REDUCTIONS
from tests.native import build

SOURCES = [name for name, path in build.SOURCES.items() if path.parent.name == "kernels"]

COUNTS = [1, 7, 33, 1000]
RANKS = [1, 2, 3, 4, 5, 8]
INTEGER_OPS = ["sum", "product", "min", "max", "band", "bor", "bxor", "premul_sum"]
FLOAT_OPS = ["sum", "avg", "product", "min", "max", "premul_sum"]
COMPLEX_OPS = ["sum", "avg", "product", "premul_sum"]
BOOL_OPS = ["sum", "product", "min", "max", "band", "bor", "bxor"]
INTEGERS = ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOAT8S = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
FLOATS = ["float16", "bfloat16", "float32", "float64", *FLOAT8S]
COMPLEXES = ["complex32", "complex64", "complex128"]
OPS_OF = {
    "bool": BOOL_OPS,
    **dict.fromkeys(INTEGERS, INTEGER_OPS),
    **dict.fromkeys(FLOATS, FLOAT_OPS),
    **dict.fromkeys(COMPLEXES, COMPLEX_OPS),
    "bytes": [],
}
CASES = [(dtype, op) for dtype, ops in OPS_OF.items() for op in ops]
FACTORS = [complex(f) for f in (1 / 3, -2.5, 1e-3, 7, 0.1, -1, 3.25, 0.5)]
COMPLEX_FACTORS = [f + 1j * g for f, g in zip(FACTORS, reversed(FACTORS), strict=True)]
WHOLE_FACTORS = [complex(f) for f in (3, -2, 100, 7, -1, 1 << 33, 0, 5)]


class Factor(ctypes.Structure):
    _fields_ = [("real", ctypes.c_double), ("imaginary", ctypes.c_double)]


class Kernels:
    """``kernels_shim.cpp``, with tensors for pointers."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("kernels_dtype_name", "kernels_reduce_op_name", "kernels_instruction_set"):
            getattr(self._library, name).restype = ctypes.c_char_p
        self._library.kernels_size_of.restype = ctypes.c_size_t
        self.dtypes = self._names("kernels_dtype_name")
        self.ops = self._names("kernels_reduce_op_name")
        self.instruction_sets = self._names("kernels_instruction_set")

    def _names(self, function: str) -> list[str]:
        names = map(getattr(self._library, function), count())
        return [name.decode() for name in iter(lambda: next(names), None)]

    def has_meaning(self, op: str, dtype: str) -> bool:
        return bool(self._library.kernels_has_meaning(self.ops.index(op), self.dtypes.index(dtype)))

    def size_of(self, dtype: str) -> int:
        return self._library.kernels_size_of(self.dtypes.index(dtype))

    def use(self, instruction_set: str) -> None:
        self._library.kernels_use(self.instruction_sets.index(instruction_set))

    def set_float8_e4m3fn_saturates(self, saturates: bool) -> None:
        self._library.kernels_set_float8_e4m3fn_saturates(int(saturates))

    def reduce(
        self,
        dtype: str,
        op: str,
        out: Tensor,
        sources: list[Tensor],
        also: Tensor | None = None,
        factors: list[complex] | None = None,
        streaming: bool = False,
    ) -> Tensor:
        self._library.kernels_reduce(
            self.dtypes.index(dtype),
            self.ops.index(op),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(also.data_ptr() if also is not None else None),
            (ctypes.c_void_p * len(sources))(*[s.data_ptr() for s in sources]),
            len(sources),
            ctypes.c_size_t(out.numel()),
            (Factor * 8)(*[Factor(f.real, f.imag) for f in factors]) if factors else None,
            int(streaming),
        )
        return out


def torch_saturates() -> bool:
    """Whether a number too large for float8_e4m3fn becomes its largest (2.13) or NaN (2.11)."""
    return not torch.tensor(1e6).to(torch.float8_e4m3fn).float().isnan().item()


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    kernels = Kernels(build.build("kernels_shim", SOURCES, library=True))
    kernels.set_float8_e4m3fn_saturates(torch_saturates())
    return kernels


@pytest.fixture
def instruction_sets(kernels: Kernels) -> Iterator[list[str]]:
    yield kernels.instruction_sets
    kernels.use(kernels.instruction_sets[0])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def shifted(elements: int, dtype: torch.dtype, by: int) -> Tensor:
    """An uninitialized tensor `by` elements after an address that is aligned for any vector."""
    base = torch.empty(elements + 64 + by, dtype=dtype)
    start = -base.data_ptr() % 64 // base.element_size() + by
    return base[start : start + elements]


def copy_of(tensor: Tensor) -> Tensor:
    """Also of bools that are neither 0 nor 1."""
    return bits(tensor).clone().view(tensor.dtype)


def any_values(name: str, elements: int, seed: int, by: int = 0) -> Tensor:
    """Half of them any bits at all, among them NaN, infinity, -0 and subnormals."""
    dtype = getattr(torch, name)
    random = np.random.default_rng(seed)
    tensor = shifted(elements, dtype, by)
    size = tensor.element_size()
    raw = random.integers(0, 256, (elements, size), dtype=np.uint8)
    if name == "bool":
        raw[::2] = 0
    tensor.view(torch.uint8).copy_(torch.from_numpy(raw.reshape(-1)))
    if dtype.is_floating_point or dtype.is_complex:
        parts = torch.from_numpy(random.normal(size=(elements, 2)))
        ordinary = torch.view_as_complex(parts) if dtype.is_complex else parts[:, 0]
        tensor[::2] = ordinary[::2].to(dtype)
    return tensor


def parts_of(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of the type that they are computed in."""
    wide = tensor.to(torch.complex128 if tensor.dtype == torch.complex128 else torch.complex64)
    return torch.view_as_real(wide)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """The textbook's complex product: torch's own differs in the last bit where it fuses."""
    real = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    imaginary = a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]
    return torch.stack([real, imaginary], -1)


def fold(function: Callable, values: list) -> Any:
    total = values[0]
    for value in values[1:]:
        total = function(total, value)
    return total


def expected(name: str, op: str, sources: list[Tensor], factors: list[complex]) -> Tensor:
    dtype = sources[0].dtype
    if name == "bool":
        truth = [bits(s).numpy() != 0 for s in sources]
        function: Callable = {
            **dict.fromkeys(("sum", "max", "bor"), np.logical_or),
            **dict.fromkeys(("product", "min", "band"), np.logical_and),
            "bxor": np.logical_xor,
        }[op]
        return torch.from_numpy(fold(function, truth))
    if name in INTEGERS:
        arrays = [s.numpy() for s in sources]
        if op == "premul_sum":
            kind = arrays[0].dtype
            whole = [np.array(int(f.real)).astype(np.int64).astype(kind) for f in factors]
            arrays = [a * f for a, f in zip(arrays, whole[: len(arrays)], strict=True)]
        return torch.from_numpy(fold(NUMPY_REDUCTIONS[op], arrays))
    if name in COMPLEXES:
        wide = [parts_of(s) for s in sources]
        if op == "premul_sum":
            pairs = [torch.tensor([f.real, f.imag], dtype=wide[0].dtype) for f in factors]
            wide = [multiply(w, f) for w, f in zip(wide, pairs[: len(wide)], strict=True)]
        total = fold(multiply if op == "product" else torch.add, wide)
        total = total / len(sources) if op == "avg" else total
        return torch.view_as_complex(total).to(dtype)
    wide = [s if name == "float64" else s.float() for s in sources]
    if op == "premul_sum":
        scalars = [torch.tensor(f.real, dtype=wide[0].dtype) for f in factors]
        wide = [w * f for w, f in zip(wide, scalars[: len(wide)], strict=True)]
    function = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    total = fold(function, wide)
    return (total / len(sources) if op == "avg" else total).to(dtype)


def assert_same(name: str, op: str, got: Tensor, want: Tensor) -> None:
    """The same bits; for any two NaNs, and any two zeros of min and max, being that is enough."""
    if name in COMPLEXES:
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if name in FLOATS + COMPLEXES:
        wide_got, wide_want = got.double(), want.double()
        nan = wide_want.isnan()
        assert torch.equal(wide_got.isnan(), nan)
        free = nan | ((wide_want == 0) & (wide_got == 0) if op in ("min", "max") else nan)
        size = got.element_size()
        same = (bits(got).view(-1, size) == bits(want).view(-1, size)).all(-1)
        same |= free.reshape(-1)
    else:
        same = (bits(got) == bits(want)).view(-1, got.element_size()).all(-1)
    wrong = (~same).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} wrong, the first at {(i := wrong[0].item())}: "
        f"{got.reshape(-1)[i]} instead of {want.reshape(-1)[i]}"
    )


def factors_for(name: str) -> list[complex]:
    if name in INTEGERS:
        return WHOLE_FACTORS
    return COMPLEX_FACTORS if name in COMPLEXES else FACTORS


def test_every_dtype_of_torch_has_its_name_and_size(kernels: Kernels) -> None:
    assert [*kernels.dtypes] == sorted(OPS_OF, key=kernels.dtypes.index)
    for name in kernels.dtypes[:-1]:
        assert kernels.size_of(name) == getattr(torch, name).itemsize


def test_ops_have_a_meaning_for_the_dtypes_they_are_for(kernels: Kernels) -> None:
    for dtype in kernels.dtypes:
        assert {op for op in kernels.ops if kernels.has_meaning(op, dtype)} == set(OPS_OF[dtype])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(("name", "op"), CASES)
def test_reduce_is_torch_arithmetic(
    kernels: Kernels, instruction_sets: list[str], name: str, op: str
) -> None:
    factors = factors_for(name)
    for n in RANKS:
        for elements in COUNTS:
            sources = [any_values(name, elements, 100 * n + p, by=(5 * p) % 9) for p in range(n)]
            before = [copy_of(s) for s in sources]
            want = expected(name, op, sources, factors)
            results = []
            for instruction_set in instruction_sets:
                kernels.use(instruction_set)
                for also in (None, shifted(elements, sources[0].dtype, 1)):
                    out = shifted(elements, sources[0].dtype, 3)
                    kernels.reduce(name, op, out, sources, also, factors, also is not None)
                    assert_same(name, op, out, want)
                    results.append(bits(out))
                    if also is not None:
                        results.append(bits(also))
                for p in range(n):
                    in_place = [copy_of(s) for s in sources]
                    kernels.reduce(name, op, in_place[p], in_place, None, factors)
                    results.append(bits(in_place[p]))
            # NaNs included: the same everywhere, wherever it is written.
            assert all(torch.equal(result, results[0]) for result in results)
            assert all(torch.equal(bits(s), bits(b)) for s, b in zip(sources, before, strict=True))


@pytest.mark.parametrize("saturates", [True, False])
def test_float8_e4m3fn_overflows_as_told(kernels: Kernels, saturates: bool) -> None:
    values = torch.tensor([448.0, -448.0, 16.0, -16.0, 0.0]).to(torch.float8_e4m3fn)
    kernels.set_float8_e4m3fn_saturates(saturates)
    try:
        got = kernels.reduce("float8_e4m3fn", "sum", torch.empty_like(values), [values] * 2)
    finally:
        kernels.set_float8_e4m3fn_saturates(torch_saturates())
    most = 448.0 if saturates else float("nan")
    want = torch.tensor([most, -448.0 if saturates else most, 32.0, -32.0, 0.0])
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)


def test_kernels_in_cpp() -> None:
    assert build.run(build.build("kernels_test", SOURCES)).endswith("ok\n")
