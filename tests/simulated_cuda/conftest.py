"""These tests run over the simulated CUDA runtime alone: `make test-cuda`."""

import os
from pathlib import Path

import pytest

SIMULATED = "SIMULATED_CUDA_DELAYS" in os.environ
if not SIMULATED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _needs_the_simulation() -> None:
    assert "/cuda/simulated/libcudart" in Path("/proc/self/maps").read_text()
