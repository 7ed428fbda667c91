"""What the build in place has made."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_c10d_ext import _C

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTION = re.compile(r"\s+[0-9a-f]+:\s+v[a-z0-9]+\s")


def test_objects_are_made_anew_where_headers_of_torch_change() -> None:
    """Ninja is told of them, of those that are precompiled, too."""
    rules = list(ROOT.glob("build/temp.*/build.ninja"))
    assert rules, "the extension must be built in this tree"
    ninja = Path(sys.executable).parent / "ninja"
    command = [ninja if ninja.exists() else "ninja", "-t", "deps"]
    for rule in rules:
        build = rule.parent
        is_precompiled = f"-include {build}/precompiled/torch.h " in rule.read_text()
        said = subprocess.run(
            command, cwd=build, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        objects = {name: files for name, _, files in _notes(said) if "/csrc/ops/" in name}
        assert len(objects) > 10
        for name, files in objects.items():
            assert "/torch/include/ATen/core/Tensor.h\n" in files, name
            assert (f"{build}/precompiled/torch.h\n" in files) == is_precompiled, name


def _notes(said: str) -> list[tuple[str, str, str]]:
    """Each object, how many files it was made of, and which."""
    return re.findall(r"^(\S+): #deps (\d+), .*\n((?:    .*\n)*)", said, re.MULTILINE)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no such kernels")
def test_kernels_alone_are_made_of_instructions_that_a_processor_may_lack() -> None:
    """An inline function compiled for them may be the one that the linker keeps for everybody."""
    said = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "-C", _C.__file__],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    made_so = {
        function.partition("\n")[0]
        for function in re.split(r"^[0-9a-f]+ <", said, flags=re.MULTILINE)[1:]
        if INSTRUCTION.search(function)
    }
    assert len(made_so) > 10
    assert not [name for name in made_so if "avx2" not in name and "avx512" not in name]
