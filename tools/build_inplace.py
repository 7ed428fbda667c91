"""`setup.py build_ext --inplace` with one line per compiled file instead of its command.

Compiler diagnostics are passed through; `--verbose` passes everything through.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# ninja -v: "[3/17] c++ -MMD ... -c -c /where/csrc/ops/x.cpp -o ..."
STEP = re.compile(r"^\[(\d+)/(\d+)\] .* -c (\S+\.cpp)\b")
# What setuptools says about its own doings, and the command of a failed step.
NOISE = re.compile(
    r"^(running|creating|copying|building '|ninja: (no work|Entering|build stopped))"
    r"|^W\d{4} .*No CUDA runtime"
    r"|^\S+ .*-MMD |^\S+ .*-shared "
)


def build(
    arguments: Sequence[str], settings: Mapping[str, str] | None = None, *, verbose: bool = False
) -> int:
    """The exit status of `setup.py` with these arguments and environment variables."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "setup.py", *arguments], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(settings or {})},
    )  # fmt: skip
    assert process.stdout is not None
    failed = False
    traceback: list[str] = []
    for line in process.stdout:
        if verbose:
            print(line, end="", flush=True)
        elif traceback or line.startswith("Traceback "):
            traceback.append(line)
        elif step := STEP.match(line):
            print(f"[{step[1]}/{step[2]}] {os.path.relpath(step[3], ROOT)}", flush=True)
        elif line.startswith("FAILED: "):
            failed = True
        elif not NOISE.match(line) and line.strip():
            print(line, end="", flush=True)
    code = process.wait()
    # torch's traceback adds nothing to the compiler's message, but says it all when there is none.
    if code and not failed:
        print("".join(traceback), end="")
    seconds = time.monotonic() - start
    print(f"build {'failed' if code else 'done'} after {seconds:.0f} s", flush=True)
    return code


def main() -> int:
    return build(["build_ext", "--inplace"], verbose="--verbose" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
