"""What collectives have moved in this process, for the summary of ``torch_c10d_ext.run``."""

from __future__ import annotations

import atexit
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from torch_c10d_ext import _C

# A directory: every process that has used the package leaves its numbers there when it ends.
VARIABLE = "TORCH_C10D_EXT_TALLY"


@dataclass(frozen=True)
class Row:
    """What one backend did, in one process or in the mean of several."""

    calls: float
    bytes: float
    seconds: float


def register() -> None:
    """Counts from now on, where the environment asks for it."""
    folder = os.environ.get(VARIABLE)
    if folder:
        _C.start_tally(dist.Backend.backend_list)
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
        columns = zip(*(one.get(backend, (0, 0, 0.0)) for one in found), strict=True)
        rows[backend] = Row(*(sum(column) / len(found) for column in columns))
    return len(found), rows


def summary(processes: int, rows: dict[str, Row]) -> str:
    """One line: ``shm 120 collectives, 3.1 MB, 0.02 s in flight (mean of 4 processes)``."""
    if not processes:
        return "no process has ended by itself after making a group"
    parts = [
        f"{backend} {row.calls:,.0f} collectives, {_size(row.bytes)}, {row.seconds:.3g} s in flight"
        for backend, row in rows.items()
    ]
    many = f"mean of {processes} processes" if processes > 1 else "1 process"
    return f"{'; '.join(parts) or 'no collectives'} ({many})"


def _size(amount: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        del units[0]
    return f"{amount:.3g} {units[0]}"
