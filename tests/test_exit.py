"""The end of a process that has used gloo."""

import os
import subprocess
import sys
from pathlib import Path

from tests.native import build

ROOT = Path(__file__).resolve().parent.parent

_SCRIPT = """
import ctypes, sys
import torch
import torch.distributed as dist
import torch_c10d_ext

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
sys.modules["kept to the end"] = dist.group.WORLD  # as Dynamo does for a compiled function
ctypes.c_int.in_dll(ctypes.CDLL(None), "starve").value = 1
for _ in range(2):
    x = torch.ones(3)
    dist.all_reduce(x)
    del x
dist.destroy_process_group()
print("done", flush=True)
"""


def test_gloo_threads_that_are_late_do_not_abort_the_exit() -> None:
    late = build.build("starved_threads", [], library=True)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(late), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
