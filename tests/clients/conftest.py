"""Tests of the libraries that people use: `make test-clients`, in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients import launch

# What tools/requirements-clients.txt installs; `make test` does without.
LIBRARIES = ("accelerate", "transformers", "lightning", "torchmetrics", "deepspeed")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.name.startswith("test_") and not all(map(find_spec, LIBRARIES)):
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each has deadlines of its own; several programs of many processes take turns in one test."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session", autouse=True)
def _server() -> Iterator[None]:
    yield
    launch.stop()
