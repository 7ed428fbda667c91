"""`make test-cuda`: builds the simulated libraries and the package, and runs the tests over them.

    .venv-cuda/bin/python -m tests.simulated_cuda.run [--full] [--seed N] [pytest arguments]

Each pass runs tests under one setting of SIMULATED_CUDA_DELAYS, PYTEST_JOBS files at once; a
skipped test is a failure. `--full` adds passes to what CI runs, `--seed` is added to the seeds of
all. With pytest arguments one pass runs, of what they choose, under the delays of DELAYS.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.simulated_cuda import compiler

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "cuda"
LIBRARIES = BUILD / "simulated"
HERE = "tests/simulated_cuda"

# Inductor's code for CUDA tensors is device code, which takes triton and a GPU.
NEED_DEVICE_CODE = ["tests/test_cuda.py::test_gradients_and_compile"]

RULES = [
    f"{HERE}/test_{name}.py" for name in ("streams", "synchronous", "graphs", "users", "lowering")
]
# Every test marked `cuda` that is not among the rules, wherever it is.
OTHERS = ["-m", "cuda", "tests", *(f"--ignore={file}" for file in RULES)]


@dataclass(frozen=True)
class Pass:
    """Tests under one kind of delays. `late` finds a missing order at once, `random` others."""

    kind: str
    seed: int
    chosen: Sequence[str]

    def delays(self, more: int) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}:{self.seed + more}"


SHORT = (
    Pass("late", 1, RULES),
    Pass("random", 2, RULES),
    Pass("random", 3, OTHERS),
)
FULL = (
    *SHORT,
    Pass("late", 4, RULES),
    Pass("random", 5, RULES),
    Pass("none", 0, OTHERS),
    Pass("late", 6, OTHERS),
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
    """The libraries, and the package with CUDA: what CUDA changes nothing of is `make build`'s."""
    subprocess.run([python, "-m", "tests.simulated_cuda.build", LIBRARIES], cwd=ROOT, check=True)
    log = package.parent / f"{package.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    print("building the package with CUDA", flush=True)
    temp = package.parent / f"{package.name}.temp"
    plain = compiler.plain_build(ROOT, str(Path(sys.executable).parent / "ninja"))
    settings = compiler.launcher(package.parent / f"{package.name}.compiler", plain)
    with open(log, "w") as out:
        done = subprocess.run(
            [python, "setup.py", "build", "--build-lib", package, "--build-temp", temp],
            cwd=source, stdout=out, stderr=subprocess.STDOUT, check=False,
            env={
                **environment("none", package), **settings,
                "TORCH_C10D_EXT_CUDA": "1", "TORCH_C10D_EXT_PCH": "0",
            },
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the build failed\n{log.read_text()[-6000:]}")
    origins = compiler.origins(temp)
    compiled = {name: why for name, why in origins.items() if why}
    print(f"{len(origins) - len(compiled)} objects are those of make build, of {len(origins)}")
    for name, why in compiled.items():
        print(f"  compiled csrc/{name}: {why}")
    print(f"built after {time.monotonic() - began:.0f} s", flush=True)


def run(
    delays: str, arguments: Sequence[str], full: bool, package: Path = BUILD / "lib"
) -> Outcome:
    """One pass of pytest. The package under test is the built one, not the source tree's."""
    report = BUILD / f"report-{delays.replace(':', '-')}.xml"
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
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options, chosen = parser.parse_known_args(arguments)
    build()
    if chosen:
        outcomes = [run(os.environ.get("DELAYS", "late:1"), chosen, options.full)]
    else:
        several = ["-n", os.environ.get("PYTEST_JOBS", "2"), "--dist", "loadfile"]
        outcomes = [
            run(each.delays(options.seed), [*several, *each.chosen], options.full)
            for each in (FULL if options.full else SHORT)
        ]
    print(f"\n{'delays':<10} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}")
    for o in outcomes:
        print(f"{o.delays:<10} {o.passed:>7} {o.failed:>7} {o.skipped:>7} {o.seconds:>8.0f}")
    return 0 if all(o.is_good for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
