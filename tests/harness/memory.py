"""Tests that take much memory."""

import time
from pathlib import Path

import pytest

from tests.harness.pool import shutdown

_SPARE = 2 << 30
# What a test before has for giving its own back.
_PATIENCE = 20.0


def needs_memory(amount: float) -> None:
    """Skips the test where its ranks together cannot have so many bytes: they would be killed.

    Others take memory meanwhile, so there must be some to spare.
    """
    if _free() < amount + _SPARE:
        shutdown()  # what idle workers have; the next test starts others
    ends = time.monotonic() + _PATIENCE
    while (free := _free()) < amount + _SPARE:
        if time.monotonic() > ends:
            gib = 1 << 30
            pytest.skip(
                f"takes {amount / gib:.1f} GiB of memory and 2 to spare, "
                f"{free / gib:.1f} GiB are free"
            )
        time.sleep(0.1)


def _free() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]) << 10
