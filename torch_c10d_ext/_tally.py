"""What collectives have moved in this process, for the summary of ``torch_c10d_ext.run``."""

from __future__ import annotations

import atexit
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from torch_c10d_ext import _C, _mpi

# A directory: every process that has used the package leaves its numbers there when it ends.
VARIABLE = "TORCH_C10D_EXT_TALLY"


@dataclass(frozen=True)
class Row:
    """What one backend did, in one process or in the mean of several."""

    calls: float
    bytes: float
    busy: float
    """Seconds in which at least one call was in flight."""
    waited: float | None
    """Seconds for which threads were held in waits; None where nobody counts these."""


def register() -> None:
    """Counts from now on, where the environment asks for it."""
    folder = os.environ.get(VARIABLE)
    if folder:
        # Of groups on several hosts the parts count, too: inside as shm, between as the engine.
        names = [*dist.Backend.backend_list, _mpi.NAME]
        _C.start_tally([*names, *(f"shm+{name}" for name in names)])
        atexit.register(_write, Path(folder), os.getpid())


def _write(folder: Path, pid: int) -> None:
    # A forked child that runs its parent's atexit has done nothing of what was counted.
    if pid == os.getpid() and folder.is_dir():
        temporary = folder / f"{pid}.tmp"
        temporary.write_text(json.dumps(_C.tally()))
        temporary.replace(folder / f"{pid}.json")


def read(folder: Path) -> tuple[int, dict[str, Row]]:
    """How many processes have left their numbers, and the means of these by backend."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = {}
    for backend in sorted({name for one in found for name in one}):
        shares = [one[backend] for one in found if backend in one]
        calls, amount, busy = (sum(share[i] for share in shares) / len(found) for i in range(3))
        counted = [share[3] for share in shares if share[3] is not None]
        waited = sum(counted) / len(found) if len(counted) == len(shares) else None
        rows[backend] = Row(calls, amount, busy, waited)
    return len(found), rows


def summary(processes: int, rows: dict[str, Row]) -> str:
    """One line: ``shm 9 collectives, 3.1 MB, waited 0.02 of 0.5 s in flight (1 process)``."""
    if not processes:
        return "no process has ended by itself after making a group"
    parts = [
        f"{backend} {row.calls:,.0f} collectives, {_size(row.bytes)}, {_times(row)}"
        for backend, row in rows.items()
    ]
    many = f"mean of {processes} processes" if processes > 1 else "1 process"
    return f"{'; '.join(parts) or 'no collectives'} ({many})"


def _times(row: Row) -> str:
    waited = "" if row.waited is None else f"waited {row.waited:.3g} of "
    return f"{waited}{row.busy:.3g} s in flight"


def _size(amount: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        del units[0]
    return f"{amount:.3g} {units[0]}"
