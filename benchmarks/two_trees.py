"""Small calls of this tree against those of another one, in turns: did a change cost anything?

    python benchmarks/two_trees.py OTHER [--runs 9] [--seconds 4]

OTHER is a folder with a built torch_c10d_ext, an older commit's for instance. Each run starts two
ranks on shm, pinned to a core each, that import the package from one of the trees; runs of the two
take turns. Printed: the median of each, and this tree's time over the other's, run by run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
CALLS = 200  # between two looks at the clock
DEADLINE = 300.0


def _cases(functional: Any) -> dict[str, Callable[[], Any]]:
    import torch

    small, large = torch.ones(2), torch.ones(16384)
    out = torch.ones(4)
    return {
        "all_reduce 8 B, in place": lambda: functional.all_reduce_inplace(small, "max"),
        "all_reduce 8 B": lambda: functional.all_reduce(small, "max").wait(),
        "all_gather_tensor 8 B": lambda: functional.all_gather_tensor(small, 0).wait(),
        "all_to_all_single 16 B": lambda: functional.all_to_all_single(out, None, None).wait(),
        "all_reduce 64 KiB": lambda: functional.all_reduce(large, "max").wait(),
    }


def _rank(rank: int, store: str, seconds: float) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import torch
    import torch.distributed as dist

    import torch_c10d_ext.functional as functional

    torch.set_num_threads(1)
    dist.init_process_group("shm", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    cases = _cases(functional)
    times: dict[str, list[float]] = {name: [] for name in cases}
    count = torch.zeros(1)
    until = time.monotonic() + seconds
    while True:
        for name, call in cases.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - begun) / CALLS * 1e6)
        count.fill_(time.monotonic() < until)
        dist.all_reduce(count, dist.ReduceOp.MIN)  # one decision for both
        if not count.item():
            break
    if rank == 0:
        print(json.dumps({name: statistics.median(found[2:]) for name, found in times.items()}))
    dist.barrier()
    dist.destroy_process_group()


def _run(tree: Path, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--seconds", str(seconds)]
        command += ["--store", f"{folder}/store", "--rank"]
        env = dict(os.environ, PYTHONPATH=str(tree), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        ranks = [
            subprocess.Popen([*command, str(k)], stdout=subprocess.PIPE, env=env, cwd=folder)
            for k in range(2)
        ]
        try:
            texts = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return json.loads(texts[0])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        _rank(options.rank, options.store, options.seconds)
        return
    if options.other is None:
        parser.error("OTHER must be the folder of the other tree")
    found: dict[Path, list[dict[str, float]]] = {HERE: [], options.other.resolve(): []}
    for turn in range(options.runs):
        for tree in found if turn % 2 else reversed(found):
            found[tree].append(_run(tree, options.seconds))
    mine, theirs = found.values()
    for name in mine[0]:
        a, b = [run[name] for run in mine], [run[name] for run in theirs]
        ratios = sorted(x / y for x, y in zip(a, b, strict=True))
        print(
            f"{name:28} {statistics.median(a):8.2f} us, other {statistics.median(b):8.2f} us:"
            f" {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
