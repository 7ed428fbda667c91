"""Tests that take much memory."""

from pathlib import Path

import pytest

_SPARE = 2 << 30


def needs_memory(amount: float) -> None:
    """Skips the test where its ranks together cannot have so many bytes: they would be killed.

    Others take memory meanwhile, so there must be some to spare.
    """
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]) << 10
    if free < amount + _SPARE:
        gib = 1 << 30
        pytest.skip(
            f"takes {amount / gib:.1f} GiB of memory and 2 to spare, {free / gib:.1f} GiB are free"
        )
