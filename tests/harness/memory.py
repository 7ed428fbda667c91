"""Tests that take much memory."""

from pathlib import Path

import pytest


def needs_memory(amount: float) -> None:
    """Skips the test where its ranks together cannot have so many bytes: they would be killed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0]) << 10
    if free < amount:
        gib = 1 << 30
        pytest.skip(f"takes {amount / gib:.1f} GiB of memory, {free / gib:.1f} GiB are free")
