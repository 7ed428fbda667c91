"""Launchers that people use, started as people start them: new interpreters, installed packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.launch import ENVIRONMENT, PROGRAMS, WAYS

BIN = Path(sys.executable).parent
DEADLINE = 480


def started(command: list[str], tmp_path: Path, **environment: str) -> str:
    """What the program prints."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "PYTHON"))}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={
            **clean,
            **ENVIRONMENT,
            "PATH": os.pathsep.join([str(BIN), clean.get("PATH", "")]),
            "TMPDIR": str(tmp_path),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def reports(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"')]


# A worker is killed in its first life; in the second all of them meet again.
ELASTIC = """
import json, os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group(sys.argv[1])
rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
path = "checkpoint.pt"
start = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    start = saved["step"]
for step in range(start, 4):
    model(torch.full((2, 4), rank + step + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "step": step + 1}, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
    if step == 1 and life == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
served = dist.group.WORLD._get_backend(torch.device("cpu")).name()
said = {"rank": rank, "life": life, "start": start, "served": served, "named": dist.get_backend(),
        "weight": model.module.weight.flatten().tolist()}
sys.stdout.write(json.dumps(said) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


# Not on gloo's own: torchrun's workers meet again at the same store, where gloo has left the
# addresses of its first life. Whether it reads those, and is refused, depends on who is faster
# (torch 2.13).
@pytest.mark.parametrize("way", ("shm", "switched"))
def test_torchrun_restarts_after_a_killed_worker(way: str, tmp_path: Path) -> None:
    backend, environment = WAYS[way]
    (tmp_path / "train.py").write_text(ELASTIC)
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "train.py", backend]
    said = sorted(reports(started(command, tmp_path, **environment)), key=lambda one: one["rank"])
    assert [(one["rank"], one["life"], one["start"]) for one in said] == [(0, 1, 2), (1, 1, 2)]
    assert [(one["served"], one["named"]) for one in said] == [("shm", backend)] * 2
    # Step k moves each weight by the mean of the ranks' inputs, k + 1.5, times 2 rows and the rate.
    torch.manual_seed(0)
    weight = (torch.nn.Linear(4, 4).weight - 0.1 * 2 * (1.5 + 2.5 + 3.5 + 4.5)).flatten().tolist()
    for one in said:
        assert one["weight"] == pytest.approx(weight, rel=1e-5)


# Not on gloo's own, where nothing of this package but its entry point runs: torch 2.13 may abort
# such a program as it ends, when a thread of gloo releases a call after the interpreter has gone.
@pytest.mark.parametrize("way", ("shm", "switched"))
def test_accelerate_launch(way: str, tmp_path: Path) -> None:
    backend, environment = WAYS[way]
    # Its own launcher of processes on CPUs is mpirun; this one is torchrun, whatever its name.
    command = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--num_cpu_threads_per_process", "1", "--main_process_port", "0"]
    command += [str(PROGRAMS / "with_accelerate.py"), backend]
    said = reports(started(command, tmp_path, **environment))
    assert len(said) == 2
    for one in said:
        assert one["served"] == "shm"
        assert one["named"] == backend
        assert one["objects"] == [{"rank": 0}, {"rank": 1}]


def test_ours_runs_transformers_unmodified(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch_c10d_ext.run", "--standalone", "--nproc-per-node", "2"]
    said = reports(started([*command, str(PROGRAMS / "with_transformers.py"), "gloo"], tmp_path))
    assert [(one["served"], one["named"]) for one in said] == [("shm", "gloo")] * 2
