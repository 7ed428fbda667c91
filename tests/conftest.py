"""Fixtures of the whole suite."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests import harness

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-timeout every wait still has its own deadline; its settings mean nothing."""
    if not (pluginmanager.hasplugin("timeout") or pluginmanager.hasplugin("pytest_timeout")):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout, which is not installed")


_kernels = pytest.StashKey[str]()


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGTERM, _interrupt)  # fixtures put away what they have made
    config.addinivalue_line("markers", "timeout(seconds): a deadline, by pytest-timeout")
    # What several processes of pytest-xdist compile, they compile once between them.
    if config.getoption("numprocesses", None) and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        config.stash[_kernels] = tempfile.mkdtemp(prefix="torch_c10d_ext-kernels-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config.stash[_kernels]


def pytest_unconfigure(config: pytest.Config) -> None:
    if made := config.stash.get(_kernels, None):
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _worker_pools() -> Iterator[None]:
    yield
    harness.shutdown()


# Files that take long begin first: else one of them keeps one process while the other one is done.
FIRST = [
    "backends/test_shm_faults.py",
    "test_distributed.py",
    "backends/test_shm.py",
    "test_transforms.py",
    "test_compile.py",
    "test_result_ways_out.py",
    "optimizer/test_chunks.py",
    "test_messages.py",
    "ops/test_all_reduce.py",
    "test_examples.py",
    "test_result_parity.py",
    "backends/test_shm_fuzz.py",
    "test_new_collective.py",
    "backends/test_rendezvous.py",
    "test_result_memory.py",
    "test_other_devices.py",
    "backends/test_adapter.py",
    "backends/test_shm_bootstrap.py",
    "test_value_semantics.py",
    "optimizer/test_compilers.py",
    "backends/test_shm_algorithms.py",
    "optimizer/test_values.py",
    "ops/test_reduce_scatter_tensor.py",
    "backends/test_shm_clients.py",
    "backends/test_checked_agreement.py",
    "test_export.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` run wherever there is a GPU, and fail without one where it is due."""
    places = {HERE / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    if torch.cuda.is_available() or os.environ.get("C10D_EXT_FAIL_WITHOUT_CUDA") == "1":
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no GPU at hand"))
