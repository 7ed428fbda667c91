"""`make test-cuda`: builds the simulated libraries and the package, and runs the tests over them.

    .venv-cuda/bin/python -m tests.simulated_cuda.run [--full] [pytest arguments]

Each pass runs tests under one setting of SIMULATED_CUDA_DELAYS; a skipped test is a failure.
`--full` adds seeds, numbers of ranks and backends to what CI runs. With pytest arguments one pass
runs, of what they choose.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "cuda"
LIBRARIES = BUILD / "simulated"
HERE = "tests/simulated_cuda"

# Inductor's code for CUDA tensors is device code, which takes triton and a GPU.
NEED_DEVICE_CODE = ["tests/test_cuda.py::test_gradients_and_compile"]

STREAMS = [f"{HERE}/test_streams.py", f"{HERE}/test_graphs.py"]
RULES = [*STREAMS, f"{HERE}/test_users.py"]
CONTRACT = [f"{HERE}/test_contract.py"]
# Every test marked `cuda` that is not among the rules, wherever it is.
OTHERS = ["-m", "cuda", "tests", *(f"--ignore={file}" for file in RULES)]


@dataclass(frozen=True)
class Pass:
    """Tests under one setting of delays. `late` finds a missing order at once, `random` others."""

    delays: str
    chosen: Sequence[str]


QUICK = (
    Pass("late:1", RULES),
    Pass("none", OTHERS),
)
FULL = (
    *QUICK,
    Pass("random:2", RULES),
    Pass("late:3", RULES),
    Pass("random:4", RULES),
    Pass("random:5", CONTRACT),
)


@dataclass
class Outcome:
    delays: str
    passed: int
    failed: int
    skipped: int
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.passed > 0 and self.failed == 0 and self.skipped == 0


def environment(delays: str, package: Path, full: bool = False) -> dict[str, str]:
    """What a program needs to run over the simulation."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(LIBRARIES),
        "PYTHONPATH": str(package),
        "SIMULATED_CUDA_DELAYS": delays,
        "SIMULATED_CUDA_FULL": "1" if full else "0",
        "C10D_EXT_FAIL_WITHOUT_CUDA": "1",
        "OMP_NUM_THREADS": "1",
    }


def build(
    source: Path = ROOT, package: Path = BUILD / "lib", python: str | Path = sys.executable
) -> None:
    """The libraries, and the package with CUDA, beside the build without."""
    subprocess.run([python, "-m", "tests.simulated_cuda.build", LIBRARIES], cwd=ROOT, check=True)
    log = package.parent / f"{package.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    print("building the package with CUDA (minutes at first)", flush=True)
    with open(log, "w") as out:
        done = subprocess.run(
            [python, "setup.py", "build", "--build-lib", package,
             "--build-temp", package.parent / f"{package.name}.temp"],
            cwd=source, stdout=out, stderr=subprocess.STDOUT, check=False,
            env={**environment("none", package), "TORCH_C10D_EXT_CUDA": "1"},
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the build failed\n{log.read_text()[-6000:]}")
    print(f"built after {time.monotonic() - began:.0f} s", flush=True)


def run(
    delays: str, arguments: Sequence[str], full: bool, package: Path = BUILD / "lib"
) -> Outcome:
    """One pass of pytest. The package under test is the built one, not the source tree's."""
    report = BUILD / "report.xml"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    left_out = [part for name in NEED_DEVICE_CODE for part in ("--deselect", name)]
    subprocess.run(
        [Path(sys.executable).parent / "pytest", "-q", "--import-mode=append",
         f"--junitxml={report}", "-p", "no:cacheprovider", *left_out, *arguments],
        cwd=ROOT, env=environment(delays, package, full), check=False,
    )  # fmt: skip
    seconds = time.monotonic() - began
    if not report.exists():
        return Outcome(delays, 0, 1, 0, seconds)
    suites = ET.parse(report).getroot().iter("testsuite")
    tests = failed = skipped = 0
    for suite in suites:
        tests += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return Outcome(delays, tests - failed - skipped, failed, skipped, seconds)


def main(arguments: Sequence[str]) -> int:
    full = "--full" in arguments
    chosen = [argument for argument in arguments if argument != "--full"]
    build()
    passes: Sequence[Pass] = FULL if full else QUICK
    if chosen:
        passes = [Pass(os.environ.get("DELAYS", "late:1"), chosen)]
    outcomes = [run(each.delays, each.chosen, full) for each in passes]
    print(f"\n{'delays':<10} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}")
    for o in outcomes:
        print(f"{o.delays:<10} {o.passed:>7} {o.failed:>7} {o.skipped:>7} {o.seconds:>8.0f}")
    return 0 if all(o.is_good for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
