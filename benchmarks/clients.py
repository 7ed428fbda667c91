"""One training step of the libraries that people use: on gloo, on shm, and on gloo served by shm.

Run it in the environment of `make test-clients`:

    .venv-clients/bin/python benchmarks/clients.py --ranks 2 --rounds 5

The three ways take turns, in a process per rank each; a step is the slowest rank's median, and the
table has the median of the rounds. `--out FILE` writes it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.clients import launch  # noqa: E402

CLIENTS = {
    "DDP, MLP of 6 layers": ("with_torch.py", "ddp", "-"),
    "FSDP2, MLP of 6 layers": ("with_torch.py", "fsdp2", "-"),
    "tensor parallel MLP": ("with_torch.py", "tensor_parallel", "-"),
    "pipeline, 1F1B": ("with_torch.py", "pipeline", "1f1b"),
    "accelerate": ("with_accelerate.py",),
    "transformers Trainer, BERT of 2 layers": ("with_transformers.py",),
    "Lightning Trainer": ("with_lightning.py",),
    "Lightning Fabric": ("with_lightning.py", "fabric"),
    "torchmetrics, compute of 6 metrics": ("with_torchmetrics.py",),
    "DeepSpeed, ZeRO 1": ("with_deepspeed.py", "1"),
    "DeepSpeed, ZeRO 3": ("with_deepspeed.py", "3"),
}

ENTRY = """
import time
from importlib.metadata import entry_points
import torch
(entry,) = (e for e in entry_points(group="torch.backends") if "c10d_ext" in e.value)
start = time.thread_time()
entry.load()()
print((time.thread_time() - start) * 1e6)
"""


def entry_point(times: int) -> float:
    """Microseconds of CPU that our entry point takes of an import of torch."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return statistics.median(
        float(subprocess.check_output([sys.executable, "-c", ENTRY], env=environment, timeout=120))
        for _ in range(times)
    )


def measured(ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, by client and way."""
    steps: dict[str, dict[str, list[float]]] = {
        client: {way: [] for way in launch.WAYS} for client in CLIENTS
    }
    for _ in range(rounds):
        for client, (program, *arguments) in CLIENTS.items():
            for way, (backend, environment) in launch.WAYS.items():
                said = launch.launch(program, [backend, *arguments], ranks, environment)
                steps[client][way].append(1e3 * max(one["step"] for one in said))
            print(f"  {client}", file=sys.stderr, flush=True)
    return {
        client: {way: statistics.median(took) for way, took in ways.items()}
        for client, ways in steps.items()
    }


def table(steps: dict[str, dict[str, float]]) -> str:
    lines = [
        "| client | gloo | shm by name | unmodified under the switch | gloo / switch |",
        "|---|---|---|---|---|",
    ]
    for client, took in steps.items():
        cells = [f"{took[way]:.2f}" for way in launch.WAYS]
        ratio = took["gloo"] / took["switched"]
        lines.append(f"| {client} | {' | '.join(cells)} | {ratio:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        text = table(measured(options.ranks, options.rounds))
    finally:
        launch.stop()
    text += f"\n\nThe entry point takes {entry_point(9):.0f} µs of an `import torch`.\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
