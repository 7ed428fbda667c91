"""A collective is three files and its export: one that nobody has is added to a copy, and tested.

`tests/new_collective/` has the files. The copy's extension is linked from the objects of the build
in the tree and the new one; all that the contract says of every collective is then asked of it, and
all that the layout says of the tree, once nothing was added but what CONTRIBUTING.md lists.
"""

from __future__ import annotations

import os
import re
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
from tests.test_layout import repository_files

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


def _copy(at: Path) -> None:
    """A copy of the tree, without what is built in it."""
    for path in repository_files():
        to = at / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)


def _add(at: Path) -> set[str]:
    """Adds the collective to a copy; says which files that took."""
    files = {
        "csrc/ops/shift.cpp": "shift.cpp",
        "torch_c10d_ext/ops/shift.py": "shift.py",
        "tests/ops/test_shift.py": "checks.py",
    }
    # The line, and the one that it follows.
    lines = {
        "torch_c10d_ext/functional.py": (
            "from torch_c10d_ext.ops.shift import shift as shift",
            "from torch_c10d_ext.ops.scatter import scatter as scatter",
        ),
        "CHANGELOG.md": ("- `shift` passes tensors on around the group.", "### Added\n"),
    }
    for name, given in files.items():
        assert not (at / name).exists()
        shutil.copy(GIVEN / given, at / name)
    for name, (line, before) in lines.items():
        old = (at / name).read_text()
        assert f"{before}\n" in old
        (at / name).write_text(old.replace(f"{before}\n", f"{before}\n{line}\n", 1))
    return {*files, *lines}


def _link(at: Path) -> None:
    """The copy's extension."""
    shutil.copy(ROOT / "torch_c10d_ext" / "_built_with.py", at / "torch_c10d_ext")
    libraries = Path(torch.__file__).parent / "lib"
    command = [
        *build._compiler(),
        "-shared",
        "-flto=auto",  # the objects may have been made for it
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


def _passes(tree: Path, tests: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", tests],
        cwd=tree,
        # Not the files that git knows of the tree around it.
        env={
            **os.environ,
            "PYTHONPATH": str(tree),
            "GIT_CEILING_DIRECTORIES": str(tree.parent),
        },
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    last = done.stdout.splitlines()[-1]
    assert "passed" in last
    assert "skipped" not in last


def test_what_is_added_is_what_contributing_lists(tmp_path: Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("## Add a collective")[1].split("\n## ")[0]
    listed = re.findall(r"^\d\. \*\*`([^`]+)`\*\*", section, re.MULTILINE)
    _copy(tmp_path)
    assert sorted(name.replace("<stem>", "shift") for name in listed) == sorted(_add(tmp_path))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_collective_that_nobody_has_is_three_files_and_its_export() -> None:
    assert OBJECTS, "the objects of a build in this tree are needed: `make build` leaves them"
    tree = ROOT / "build" / "new_collective"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    try:
        _copy(tree)
        _add(tree)
        _link(tree)
        _passes(tree, "tests/test_layout.py")
        _passes(tree, "tests/ops/test_shift.py")
    finally:
        shutil.rmtree(tree, ignore_errors=True)
