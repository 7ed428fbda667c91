"""Says in words what a machine lacks for `make`, before anything is downloaded or compiled.

Run with the machine's own python3, which may be old: nothing newer than Python 3.6 in here.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

MIN_PYTHON = (3, 10)
MIN_GCC = 11


def problems():
    if sys.version_info < MIN_PYTHON:
        yield "Python {}.{} or newer, got {}: choose one with `make PYTHON=python3.12`".format(
            *MIN_PYTHON, sys.version.split()[0]
        )
        return
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            yield "Python's module {} (Debian/Ubuntu: apt install python3-venv)".format(module)
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        yield "Python's headers, Python.h (Debian/Ubuntu: apt install python3-dev)"

    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        yield "a C++20 compiler, found no {!r} (Debian/Ubuntu: apt install g++)".format(compiler)
        return
    version = subprocess.check_output([compiler, "--version"], universal_newlines=True, timeout=60)
    gcc = re.search(r"^(?:g\+\+|c\+\+|gcc).*\)\s*(\d+)\.", version)
    if gcc and int(gcc.group(1)) < MIN_GCC:
        yield "g++ {} or newer, got: {}".format(MIN_GCC, version.splitlines()[0])


missing = list(problems())
for problem in missing:
    sys.stderr.write("torch_c10d_ext needs {}\n".format(problem))
sys.exit(1 if missing else 0)
