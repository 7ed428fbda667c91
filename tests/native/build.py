"""Compiles and runs the test programs of this directory, with or without a sanitizer."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "csrc"
PROGRAMS = Path(__file__).resolve().parent

SANITIZERS = {
    "": ["-O2"],
    # The vptr check opens pipes, and takes it for a bad pointer when there are no descriptors left.
    "address": [
        "-O1",
        "-fsanitize=address,undefined",
        "-fno-sanitize=vptr",
        "-fno-sanitize-recover=all",
    ],
    "thread": ["-O1", "-fsanitize=thread"],
}

# An error that a sanitizer finds ends the program with this status, whatever it was about to say.
_OPTIONS = {
    "ASAN_OPTIONS": "exitcode=99:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # A forked child may start threads.
    "TSAN_OPTIONS": "exitcode=99:second_deadlock_stack=1:die_after_fork=0:"
    f"suppressions={PROGRAMS / 'tsan.supp'}",
}

_COMPILE_DEADLINE = 300.0

_INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++"))


_OF_TORCH = re.compile(r"^#include <(?:ATen|c10|torch|pybind11|Python\.h)", re.MULTILINE)


@functools.cache
def _read(source: Path) -> tuple[list[Path], bool]:
    """This project's own headers that a file includes itself, and whether it includes torch's.

    Once per process: every rank of a test that imports this module reads all of csrc.
    """
    text = source.read_text()
    headers = []
    for name in _INCLUDE.findall(text):
        found = [path for path in (HEADERS / name, source.parent / name) if path.exists()]
        headers += found[:1]
    return headers, bool(_OF_TORCH.search(text))


def _with_headers(source: Path) -> set[Path]:
    """The file and this project's own headers that it includes, directly or not."""
    files, unread = {source}, [source]
    while unread:
        new = set(_read(unread.pop())[0]) - files
        files |= new
        unread += new
    return files


def _needs_torch(source: Path) -> bool:
    return any(_read(path)[1] for path in _with_headers(source))


# By their names: everything that needs no torch.
SOURCES = {path.stem: path for path in sorted(HEADERS.rglob("*.cpp")) if not _needs_torch(path)}


def _make(out: Path, command: list[str], inputs: Iterable[Path]) -> Path:
    """Runs the command, which writes what follows `-o`, unless it and its inputs are as before.

    The name of the result is `out` and a digest; what is left of earlier ones is removed.
    """
    digest = hashlib.sha256(repr(command).encode())
    for path in sorted(inputs):
        digest.update(path.read_bytes())
    result = out.with_name(f"{out.stem}-{digest.hexdigest()[:16]}{out.suffix}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        if not result.exists():
            part = result.with_name(f"{result.name}.part")
            command = [*command, "-o", str(part)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_DEADLINE, check=False
            )
            assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
            for old in out.parent.glob(f"{out.stem}-{'?' * 16}{out.suffix}"):
                old.unlink(missing_ok=True)
            part.rename(result)
    return result


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """No other process of the tests makes the same file meanwhile."""
    with open(out.with_name(f"{out.name}.lock"), "w") as lock:
        ends = time.monotonic() + 2 * _COMPILE_DEADLINE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < ends, f"another process still compiles {out.name}"
                time.sleep(0.1)
        yield


def _object_of_the_extension(source: Path) -> Path | None:
    """What the extension in the tree is linked from, unless it is older than the source.

    Nor one made for link-time optimization, which has no code yet, or with a precompiled header of
    torch, which is not linked here.
    """
    name = source.relative_to(ROOT).with_suffix(".o")
    made = max(f.stat().st_mtime for f in _with_headers(source))
    for place in (ROOT / "build").glob("temp.*"):
        path = place / name
        if not path.exists() or (place / "precompiled").exists():
            continue
        if path.stat().st_mtime > made and b".gnu.lto_" not in path.read_bytes():
            return path
    return None


def build(
    program: str, sources: Iterable[str], sanitizer: str = "", *, library: bool = False
) -> Path:
    """`tests/native/<program>.cpp` linked with some of `SOURCES`.

    What is compiled is kept and shared between the programs, and compiled anew when one of the
    files that go into it has changed.
    """
    compiler = _compiler()
    flags = ["-std=c++20", "-g1", "-Wall", "-fPIC", "-pthread", f"-I{HEADERS}"]
    flags += SANITIZERS[sanitizer]
    # In the tree, which is not on /tmp, where a file system may be mounted `noexec`.
    directory = ROOT / "build" / "native" / (sanitizer or "plain")

    def compiled(source: Path) -> Path:
        if not sanitizer and (ready := _object_of_the_extension(source)):
            return ready
        command = [*compiler, *flags, "-c", str(source)]
        return _make(directory / f"{source.stem}.o", command, _with_headers(source))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        files = (PROGRAMS / f"{program}.cpp", *(SOURCES[name] for name in sources))
        objects = list(pool.map(compiled, files))
    link = ["-shared"] if library else []
    command = [*compiler, *flags, *link, *map(str, objects)]
    return _make(directory / f"{program}{'.so' if library else ''}", command, objects)


def run(program: Path, *arguments: str, timeout: float = 120.0) -> str:
    """What the program prints; an AssertionError with all of it when it fails."""
    try:
        done = subprocess.run(
            [str(program), *arguments],
            env={**os.environ, **_OPTIONS},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.output or b"").decode(errors="replace")
        raise AssertionError(f"{program.name} takes longer than {timeout:g} s\n{said}") from None
    assert done.returncode == 0, f"{program.name} exited with {done.returncode}\n{done.stdout}"
    return done.stdout
