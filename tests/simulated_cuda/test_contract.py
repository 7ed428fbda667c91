"""Every collective on CUDA tensors: values, gradients, compile and export, against the contract's
references, over simulated nccl with the delays that SIMULATED_CUDA_DELAYS chooses.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.contract import COALESCED, COALESCED_INPLACE, FUNCTIONAL, INPLACE, OUT, Collective
from tests.simulated_cuda.on_cuda import verify

pytestmark = pytest.mark.cuda

SHM, GLOO = "cpu:shm,cuda:nccl", "cpu:gloo,cuda:nccl"
worlds = pytest.mark.parametrize(("size", "backend"), [(2, SHM), (1, SHM), (4, SHM), (2, GLOO)])
OPS = Path(__file__).resolve().parent.parent / "ops"


def collectives() -> list[tuple[str, Collective]]:
    found = []
    for path in sorted(OPS.glob("test_*.py")):
        name = f"tests.ops.{path.stem}"
        c = getattr(importlib.import_module(name), "COLLECTIVE", None)
        if isinstance(c, Collective):
            found.append((name, c))
    return found


def forms(*without: str) -> Any:
    pairs = [(m, form) for m, c in collectives() for form in c.forms if form not in without]
    ids = [f"{c.stem}{f}" for m, c in collectives() for f in c.forms if f not in without]
    return pytest.mark.parametrize(("module", "form"), pairs, ids=ids)


def test_all_collectives_are_here() -> None:
    every = {FUNCTIONAL, INPLACE, OUT, COALESCED, COALESCED_INPLACE}
    assert len(collectives()) >= 14
    assert {form for _, c in collectives() for form in c.forms} == every


@forms()
@worlds
def test_values(module: str, form: str, size: int, backend: str) -> None:
    verify(size, "check_values", module, form, backend=backend)


@forms(OUT)
@worlds
def test_gradients(module: str, form: str, size: int, backend: str) -> None:
    verify(size, "check_gradients", module, form, backend=backend)


@forms()
@worlds
def test_compile(module: str, form: str, size: int, backend: str) -> None:
    verify(size, "check_compiled", module, form, "aot_eager", 1, backend=backend)


@forms()
def test_export(module: str, form: str) -> None:
    verify(2, "check_export", module, form, backend=SHM)
