"""Fixtures of the tests of backends."""

from collections.abc import Iterator

import pytest

from tests.harness import pool
from tests.harness.worker import FALLBACK


@pytest.fixture(scope="module", autouse=True)
def _fallback_pools() -> Iterator[None]:
    yield
    pool.stop(FALLBACK)
