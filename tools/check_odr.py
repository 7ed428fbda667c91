"""Compiles and links all of the extension so that the linker sees a type that is defined twice.

Two types of one name in files that never meet compile without a word, and what templates make of
them becomes one at link time. With ``-flto`` gcc's linker compares all definitions. What is built
here is not used.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.build_inplace import ROOT, build

OUT = ROOT / "build" / "odr"

COMPILE = "-flto -fno-fat-lto-objects"
LINK = "-flto=auto -Werror=odr -Werror=lto-type-mismatch"


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
    # Not optimized: that is quick, and nothing is taken away before it is compared.
    settings = {
        "TORCH_C10D_EXT_DEBUG": "1",
        "CFLAGS": COMPILE,
        "CXXFLAGS": COMPILE,
        "LDFLAGS": LINK,
    }
    where = ["--build-temp", str(OUT / "temp"), "--build-lib", str(OUT / "lib")]
    # Of a library that is up to date nothing would be said.
    for library in OUT.glob("lib/**/*.so"):
        library.unlink()
    return build(["build_ext", *where], settings)


if __name__ == "__main__":
    sys.exit(main())
