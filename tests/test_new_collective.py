"""A collective is three files and its export: one that nobody has is added to a copy, and tested.

`tests/new_collective/` has the files. The copy's extension is linked from the objects of the build
in the tree and the new one; all that the contract says of every collective is then asked of it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.native import build

ROOT = build.ROOT
GIVEN = Path(__file__).resolve().parent / "new_collective"
TEMPORARY = f"build/temp.*-{sys.implementation.cache_tag}"
OBJECTS = [
    path
    for source in sorted(build.HEADERS.rglob("*.cpp"))
    for path in ROOT.glob(f"{TEMPORARY}/{source.relative_to(ROOT).with_suffix('.o')}")
]
EXTENSION = "torch_c10d_ext/_C" + sysconfig.get_config_var("EXT_SUFFIX")


def _object() -> Path:
    """`shift.cpp`, compiled as setup.py compiles an op."""
    command = [
        *build._compiler(),
        *shlex.split("-std=c++20 -O1 -g0 -fPIC -fvisibility=hidden -Wall -Werror"),
        "-DTORCH_EXTENSION_NAME=_C",
        f"-I{ROOT / 'csrc'}",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        f"-isystem{sysconfig.get_paths()['include']}",
        "-c",
        str(GIVEN / "shift.cpp"),
    ]
    out = ROOT / "build" / "native" / "plain" / "shift.o"
    return build._make(out, command, build._with_headers(GIVEN / "shift.cpp"))


def _tree(at: Path) -> None:
    """A copy of the package and its tests with the three files and the export."""
    ignored = shutil.ignore_patterns("__pycache__", "_C*.so")
    for name in ("torch_c10d_ext", "tests"):
        shutil.copytree(ROOT / name, at / name, ignore=ignored)
    for name in ("pyproject.toml", "torch_c10d_ext_autoload.py"):
        shutil.copy(ROOT / name, at / name)
    shutil.copy(GIVEN / "shift.py", at / "torch_c10d_ext" / "ops" / "shift.py")
    shutil.copy(GIVEN / "checks.py", at / "tests" / "ops" / "test_shift.py")
    functional = at / "torch_c10d_ext" / "functional.py"
    with functional.open("a") as file:
        file.write("\nfrom torch_c10d_ext.ops.shift import shift as shift  # noqa: E402\n")

    libraries = Path(torch.__file__).parent / "lib"
    command = [
        *build._compiler(),
        "-shared",
        *map(str, OBJECTS),
        str(_object()),
        f"-L{libraries}",
        *shlex.split("-lc10 -ltorch -ltorch_cpu -ltorch_python"),
        *([] if torch.version.cuda is None else shlex.split("-lc10_cuda -ltorch_cuda")),
        "-o",
        str(at / EXTENSION),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_collective_that_nobody_has_is_three_files_and_its_export() -> None:
    assert OBJECTS, "the objects of a build in this tree are needed: `make build` leaves them"
    tree = ROOT / "build" / "new_collective"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    try:
        _tree(tree)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "tests/ops/test_shift.py"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=1000,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        last = done.stdout.splitlines()[-1]
        assert "passed" in last
        assert "skipped" not in last
    finally:
        shutil.rmtree(tree, ignore_errors=True)
