"""Fixtures of the whole suite."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests import harness


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Without pytest-timeout every wait still has its own deadline; its settings mean nothing."""
    if not (pluginmanager.hasplugin("timeout") or pluginmanager.hasplugin("pytest_timeout")):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout, which is not installed")


_kernels = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` run wherever there is a GPU, and fail without one where it is due."""
    if torch.cuda.is_available() or os.environ.get("C10D_EXT_FAIL_WITHOUT_CUDA") == "1":
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no GPU at hand"))
