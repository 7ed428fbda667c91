"""Builds and runs the C++ tests under sanitizers: address and undefined behaviour, then threads.

The programs are ``tests/native/*_test.cpp``, each linked with all of ``csrc`` that needs no torch.
Every one is run, whatever the others find.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.native import build

# A sanitizer makes a program up to 20 times slower.
DEADLINE = 900.0

# What CI runs: of each sanitizer the programs that it has most to say about. Ranks are threads in
# engine_test, which is where races would be; descriptors and memory are handled by the others.
SHORT = {
    "address": ("agreement_test", "bootstrap_test", "fuzz_lines_test", "landing_test"),
    "thread": ("engine_test", "death_sockets_test"),
}


def main() -> int:
    programs = sorted(path.stem for path in build.PROGRAMS.glob("*_test.cpp"))
    sanitizers = [name for name in build.SANITIZERS if name]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(programs)} (default: all)")
    parser.add_argument("--sanitizer", choices=sanitizers, action="append")
    parser.add_argument("--short", action="store_true", help="some programs of each sanitizer")
    arguments = parser.parse_args()
    if arguments.short and arguments.programs:
        parser.error("--short chooses the programs itself")

    failed = False
    for sanitizer in arguments.sanitizer or sanitizers:
        for program in SHORT[sanitizer] if arguments.short else arguments.programs or programs:
            start = time.monotonic()
            try:
                build.run(build.build(program, build.SOURCES, sanitizer), timeout=DEADLINE)
                verdict = "ok"
            except AssertionError as error:
                failed = True
                verdict = f"FAILED\n{error}"
            seconds = time.monotonic() - start
            print(f"{sanitizer:8} {program:16} {seconds:4.0f} s  {verdict}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
