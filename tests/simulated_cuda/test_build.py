"""Which objects of the build without CUDA the package under test was made of."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torch_c10d_ext
from tests.simulated_cuda import compiler
from tests.simulated_cuda.run import ROOT

pytestmark = pytest.mark.cuda

PACKAGE = Path(torch_c10d_ext.__file__).parent.parent
OBJECTS = PACKAGE.parent / f"{PACKAGE.name}.temp"
CSRC = ROOT / "csrc"
FULL = os.environ.get("SIMULATED_CUDA_FULL") == "1"
# Of those that read little, and those that read all of torch.
SOME = ("backends/shm/engine.cpp", "ops/all_reduce.cpp", "work/pending_work.cpp")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)', re.MULTILINE)
SEES_CUDA = re.compile(r"C10D_EXT_WITH_CUDA|#\s*include\s*[<\"](c10/cuda|ATen/cuda|cuda|nccl)")


def _sees_cuda(path: Path, seen: set[Path]) -> bool:
    """Whether a file of csrc, or one of csrc that it includes, names CUDA."""
    if path in seen:
        return False
    seen.add(path)
    text = path.read_text()
    near = [d / name for name in INCLUDE.findall(text) for d in (path.parent, CSRC)]
    return bool(SEES_CUDA.search(text)) or any(_sees_cuda(p, seen) for p in near if p.exists())


def test_what_sees_cuda_is_compiled_with_it() -> None:
    origins = compiler.origins(OBJECTS)
    sources = {str(p.relative_to(CSRC)): p for p in CSRC.rglob("*.cpp")}
    assert set(sources) <= set(origins)
    see = {name for name, path in sources.items() if _sees_cuda(path, set())}
    assert {"work/pending.cpp", "work/device_completion.cpp"} <= see
    taken = {name for name in sources if not origins[name]}
    assert not see & taken


def _flags(ninja: Path) -> list[str]:
    settings = dict(re.findall(r"(?m)^(\w+) = (.*)$", ninja.read_text()))
    flags = shlex.split(f"{settings['cflags']} {settings['post_cflags']}")
    return [flag for flag in flags if flag != "-c"]


def _read_by(flags: list[str], source: Path) -> list[bytes]:
    """The lines that the compiler gets to read, without the places of the environments.

    Each of them once: gcc's `#pragma once` takes two files of the same size, contents and time for
    one, so that the second time of a header that torch has twice depends on when it was installed.
    """
    command = ["c++", "-E", "-P", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    include = next(d for d in compiler.parsed(flags).include if d.endswith("/torch/include"))
    return list(dict.fromkeys(done.stdout.replace(include.encode(), b"TORCH").splitlines()))


def test_the_texts_of_taken_objects_are_the_same() -> None:
    origins = compiler.origins(OBJECTS)
    plain = compiler.plain_build(ROOT, str(Path(sys.executable).parent / "ninja"))
    assert plain is not None
    theirs = _flags(Path(plain.directory) / "build.ninja")
    # A precompiled header is text here, of each environment's own torch.
    at = theirs.index("-include") if "-include" in theirs else len(theirs)
    ours = [*_flags(OBJECTS / "build.ninja"), *theirs[at : at + 2]]

    def differ(name: str) -> bool:
        return _read_by(ours, CSRC / name) != _read_by(theirs, CSRC / name)

    assert differ("work/pending.cpp")
    taken = [name for name in (sorted(origins) if FULL else SOME) if not origins[name]]
    with ThreadPoolExecutor(2) as pool:
        wrong = [name for name, bad in zip(taken, pool.map(differ, taken), strict=True) if bad]
    assert not wrong
