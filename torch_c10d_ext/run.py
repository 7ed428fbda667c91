"""torchrun with shm in gloo's place.

``python -m torch_c10d_ext.run --nproc-per-node 4 script.py`` takes torchrun's arguments, sets
``TORCH_C10D_EXT_SHM_FOR_GLOO=1`` for the script, and says at its end, in one line on stderr, what
each backend did: collectives and messages, bytes of a rank's inputs, the time that the program's
threads were held by them, and the time in which at least one was in flight. The processes of this
machine that end by themselves are counted.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from torch_c10d_ext import _tally
from torch_c10d_ext_autoload import SWITCH


def main(args: Sequence[str] | None = None) -> None:
    """Runs torchrun with ``args``, by default the command line's.

    Raises:
        SystemExit: the environment says that shm shall not serve gloo's groups, or the package's
            entry point is not installed, without which the script would not find it.
    """
    problem = _problem()
    if problem:
        raise SystemExit(f"torch_c10d_ext.run: {problem}")
    from torch.distributed.run import main as torchrun

    folder = Path(tempfile.mkdtemp(prefix="torch_c10d_ext-"))
    os.environ.update({SWITCH: "1", _tally.VARIABLE: str(folder)})
    try:
        torchrun(None if args is None else list(args))
    finally:
        line = _tally.summary(*_tally.read(folder))
        shutil.rmtree(folder, ignore_errors=True)
        print(f"torch_c10d_ext: {line}", file=sys.stderr, flush=True)


def is_entry_point_installed() -> bool:
    """Whether ``import torch`` finds this package."""
    return any(
        entry.value.startswith("torch_c10d_ext_autoload:")
        for entry in entry_points(group="torch.backends")
    )


def _problem() -> str | None:
    for name, wanted in ((SWITCH, "1"), ("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")):
        text = os.environ.get(name)
        if text not in (None, wanted) and not (name == SWITCH and text == ""):
            return f"{name}: must be {wanted} or not set, got {text!r}"
    if not is_entry_point_installed():
        return (
            "the package must be installed with its entry point, got none in the group "
            "torch.backends: run `make build` or `pip install --no-build-isolation .`"
        )
    return None


if __name__ == "__main__":
    main()
