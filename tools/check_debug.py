"""Links a debug build so that the linker compares types, and runs it under AddressSanitizer.

Two types of one name in files that never meet compile without a warning, and what templates make of
them becomes one at link time. With ``-flto`` gcc's linker compares all definitions. Collectives
then run on two ranks. The build is of its own, under ``build/debug``: without optimization, with
asserts, those of libstdc++ included. Fails when a type is defined twice, differently, when a rank
fails, when a value is wrong, and on anything that the sanitizer reports.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.build_inplace import ROOT, build

OUT = ROOT / "build" / "debug"
LIBRARY = OUT / "lib"
PROGRAM = ROOT / "tools" / "check_debug_rank.py"

# With the sanitizer gcc does not see that a switch has every case, and warns.
FLAGS = "-fsanitize=address -D_GLIBCXX_ASSERTIONS -Wno-return-type -flto -fno-fat-lto-objects"
LINK = "-fsanitize=address -flto=auto -Werror=odr -Werror=lto-type-mismatch"

# In seconds. It takes about 5.
DEADLINE = 180.0


def main() -> int:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    macros = subprocess.run(
        [*compiler, "-dM", "-E", "-x", "c++", os.devnull],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "#define __GNUC__ " not in macros.stdout or "#define __clang__ " in macros.stdout:
        print(f"only gcc compares types when it links, and {shlex.join(compiler)} is not gcc")
        return 1
    # An exception that is thrown before libstdc++ is there would end the process.
    preload = [found(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    if None in preload:
        print(f"{shlex.join(compiler)} has no libasan.so, the sanitizer of gcc (apt install g++)")
        return 1
    # Modules that are gone must not be found here.
    shutil.rmtree(LIBRARY, ignore_errors=True)
    where = ["--build-base", str(OUT), "--build-temp", str(OUT / "temp")]
    code = build(
        ["build", *where, "--build-lib", str(LIBRARY)],
        {
            "TORCH_C10D_EXT_DEBUG": "1",
            "TORCH_C10D_EXT_PCH": "0",  # each file defines its types anew, which are compared
            "CFLAGS": FLAGS,
            "CXXFLAGS": FLAGS,
            "LDFLAGS": LINK,
        },
    )
    return code or run(":".join(map(str, preload)))


def found(compiler: list[str], library: str) -> str | None:
    """Where the compiler has a library."""
    command = [*compiler, f"-print-file-name={library}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    path = done.stdout.strip()
    return path if os.path.isabs(path) else None


def run(preload: str) -> int:
    start = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": str(LIBRARY),
        "LD_PRELOAD": preload,
        # Python and torch keep what they have until the end.
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99:detect_stack_use_after_return=1",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = [folder / f"rank{rank}" for rank in range(2)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, str(PROGRAM), str(rank), str(folder / "store")]
                with log.open("wb") as out:
                    processes.append(
                        subprocess.Popen(command, env=environment, stdout=out, stderr=out)
                    )
            # Where one fails, the others hear of it.
            while time.monotonic() - start < DEADLINE and None in [p.poll() for p in processes]:
                time.sleep(0.1)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
        said = [log.read_text(errors="replace") for log in logs]
    bad = any(codes) or None in codes or any("AddressSanitizer" in text for text in said)
    if bad:
        for rank, (code, text) in enumerate(zip(codes, said, strict=True)):
            ended = "does not end" if code is None else f"exited with {code}"
            print(f"rank {rank} {ended}\n{text}")
    seconds = time.monotonic() - start
    print(f"collectives {'failed' if bad else 'done'} after {seconds:.0f} s", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
