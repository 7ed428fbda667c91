"""The shared-memory engine with threads for ranks: a program in C++.

`make sanitize` runs it under the sanitizers.
"""

from __future__ import annotations

import pytest

from tests.native import build


@pytest.mark.long
def test_engine() -> None:
    assert build.run(build.build("engine_test", build.SOURCES)) == "ok\n"
