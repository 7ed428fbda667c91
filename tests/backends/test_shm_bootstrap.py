"""How ranks find each other, share memory, and notice that one is gone: a program in C++.

`make sanitize` runs it under the sanitizers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import build

SOURCES = [
    *("bootstrap", "bootstrap_client", "bootstrap_messages", "bootstrap_server"),
    *("futex", "liveness", "mapping", "process"),
]


def _may_do_all_it_tries() -> bool:
    """Root alone says little: in a container it has neither namespaces nor, now and then, users."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    capabilities = int(status["CapEff"], 16)
    setuid, sys_admin = 7, 21
    return all(capabilities >> bit & 1 for bit in (setuid, sys_admin))


@pytest.mark.long
def test_bootstrap() -> None:
    output = build.run(build.build("bootstrap_test", SOURCES))
    print(output)
    if _may_do_all_it_tries():
        assert "skipped" not in output
    assert output.endswith("tests passed\n")
