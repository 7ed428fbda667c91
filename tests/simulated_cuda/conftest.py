"""These tests run over the simulated CUDA runtime alone: `make test-cuda`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import pool
from tests.simulated_cuda.on_cuda import ALONE

SIMULATED = "SIMULATED_CUDA_DELAYS" in os.environ
if not SIMULATED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _needs_the_simulation() -> None:
    assert "/cuda/simulated/libcudart" in Path("/proc/self/maps").read_text()


@pytest.fixture
def own_processes() -> Iterator[None]:
    """The ranks of `ALONE` start for this test, with its environment, and end with it."""
    pool.stop(ALONE)
    yield
    pool.stop(ALONE)
