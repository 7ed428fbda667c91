"""Persistent worker processes: `run` calls a function on every rank of a process group."""

from tests.harness.memory import needs_memory
from tests.harness.pool import WorkersFailed, run, shutdown

__all__ = ["WorkersFailed", "needs_memory", "run", "shutdown"]
