"""Compiles the package with CUDA; takes objects of `make build` where CUDA changes nothing.

It is called like c++. An object of the build without CUDA is the right one here, too, if both
compilers read the same text: the flags are equal but for macros that no file names, and each file
that ninja noted for the object, those of a precompiled header included, is found here under the
same name, with the same contents. Every other source is compiled, without such a header, which adds
nothing that a source does not include. No list is kept by hand: a source that starts to see CUDA,
through whatever header, is compiled from then on. `<object>.origin` says why a source was compiled;
it is empty where the object was taken.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

# The settings of the program: the build to take from, and the compiler.
FROM, COMPILER = "SIMULATED_CUDA_OBJECTS", "SIMULATED_CUDA_COMPILER"
VALUED = {"-o", "-MF", "-include"}
# Besides `-include`: of a build with a precompiled header.
PRECOMPILED = {"-fpch-deps", "-Wno-sign-compare"}


@dataclass
class Build:
    """The objects of another build, as far as they are not out of date."""

    root: str  # its sources are in csrc there
    directory: str
    ninja: str
    compiler: str
    arguments: list[str]
    stale: list[str] = field(default_factory=list)  # the sources

    def files(self, source: str) -> list[str]:
        """What the object of `csrc/<source>` was made from; empty: nothing is known of it."""
        made = str(self.object(source))
        done = subprocess.run(
            [self.ninja, "-C", self.directory, "-t", "deps", made],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        head, _, rest = done.stdout.partition("\n")
        if done.returncode or not head.endswith("(VALID)"):
            return []
        lines = (line.strip() for line in rest.splitlines())
        return [os.path.normpath(os.path.join(self.directory, line)) for line in lines if line]

    def object(self, source: str) -> Path:
        return (Path(self.directory) / "csrc" / source).with_suffix(".o")


def plain_build(root: Path, ninja: str) -> Build | None:
    """What `make build` made in this tree. None: nothing, or not by ninja."""
    tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    directory = root / "build" / f"temp.{tag}"
    rules = directory / "build.ninja"
    if not rules.exists():
        return None
    settings = dict(re.findall(r"(?m)^(\w+) = (.*)$", rules.read_text()))
    given = shlex.split(f"{settings['cflags']} {settings['post_cflags']}")
    # What it would compile now is out of date.
    dry = [ninja, "-C", str(directory), "-n", "-v"]
    would = subprocess.run(dry, capture_output=True, text=True, check=False)
    if would.returncode:
        return None
    found = re.findall(r" -c (\S+\.cpp) ", would.stdout)
    stale = [os.path.relpath(path, root / "csrc") for path in found]
    return Build(str(root), str(directory), ninja, settings["cxx"], given, stale)


@dataclass
class Call:
    """A compiler's arguments, sorted."""

    macros: dict[str, str]
    include: list[str]
    others: list[str]
    source: str = ""
    out: str = ""
    depfile: str = ""


def parsed(arguments: Sequence[str]) -> Call:
    call, rest = Call({}, [], []), iter(arguments)
    for argument in rest:
        if argument in VALUED:
            value = next(rest)
            if argument == "-o":
                call.out = value
            elif argument == "-MF":
                call.depfile = value
        elif argument.startswith("-D"):
            name, _, value = argument[2:].partition("=")
            call.macros[name] = value
        elif argument.startswith("-I"):
            call.include.append(os.path.normpath(argument[2:]))
        elif argument.endswith(".cpp"):
            call.source = argument
        elif argument not in {"-c", "-MMD", *PRECOMPILED}:
            call.others.append(argument)
    return call


def same_place(path: str, places: dict[str, str]) -> str:
    """Where this build has what that one has at `path`."""
    for theirs, mine in places.items():
        if path == theirs or path.startswith(theirs + os.sep):
            return mine + path[len(theirs) :]
    return path


def _names(path: str, include: Sequence[str]) -> Iterator[str]:
    """What a file may be called in an #include."""
    for directory in include:
        if path.startswith(directory + os.sep):
            yield path[len(directory) + 1 :]


def _first(name: str, include: Sequence[str]) -> str:
    """The file that an #include of this name finds."""
    return next(
        (f"{d}/{name}" for d in include if os.path.exists(f"{d}/{name}")), "",
    )  # fmt: skip


def _torch(include: Sequence[str]) -> str:
    return next((d for d in include if d.endswith("/torch/include")), "")


def why_compile(build: Build, call: Call, compiler: str, root: str) -> tuple[str, list[str]]:
    """Why the object cannot be taken, and where it can, the files that it depends on here."""
    theirs, source = parsed(build.arguments), os.path.relpath(call.source, f"{root}/csrc")
    if source in build.stale:
        return "make build has no object of it that is up to date", []
    if build.compiler.split()[-1:] != compiler.split()[-1:] or theirs.others != call.others:
        return "it is compiled in another way", []
    if not (files := build.files(source)):
        return "make build has no object of it", []
    changed = {n for n, _ in set(theirs.macros.items()) ^ set(call.macros.items())}
    places = {build.root + "/csrc": root + "/csrc", _torch(theirs.include): _torch(call.include)}
    macros = re.compile(rb"\b(" + "|".join(sorted(changed)).encode() + rb")\b") if changed else None
    here = []
    for path in files:
        mine = same_place(path, places)
        here.append(mine)
        if not os.path.exists(mine) or not filecmp.cmp(path, mine, shallow=False):
            return f"another {os.path.relpath(mine, root)}", []
        for name in _names(path, theirs.include):
            if _first(name, call.include) != same_place(_first(name, theirs.include), places):
                return f"another <{name}>", []
        text = Path(mine).read_bytes()
        if macros and (found := macros.search(text)):
            return f"{found[1].decode()} in {os.path.relpath(mine, root)}", []
        for asked in re.findall(rb"__has_include\(\s*[<\"]([^>\"]+)", text):
            name = asked.decode()
            if bool(_first(name, call.include)) != bool(_first(name, theirs.include)):
                return f"__has_include(<{name}>) in {os.path.relpath(mine, root)}", []
    return "", here


def main(arguments: Sequence[str]) -> int:
    compiler = os.environ.get(COMPILER, "c++")
    command = [*shlex.split(compiler), *arguments]
    plan = os.environ.get(FROM)
    call = parsed(arguments)
    if plan and call.source and call.depfile and "-c" in arguments:
        build = Build(**json.loads(Path(plan).read_text()))
        root = call.source.rpartition("/csrc/")[0]
        why, files = why_compile(build, call, compiler, root)
        Path(f"{call.out}.origin").write_text(why)
        if not why:
            taken = build.object(os.path.relpath(call.source, f"{root}/csrc"))
            shutil.copyfile(taken, call.out)
            escaped = (path.replace(" ", "\\ ") for path in files)
            Path(call.depfile).write_text(f"{call.out}: " + " \\\n  ".join(escaped) + "\n")
            return 0
    return subprocess.run(command, check=False).returncode


def launcher(directory: Path, build: Build | None) -> dict[str, str]:
    """The settings of a build that compiles through this program."""
    directory.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX") or ("ccache c++" if shutil.which("ccache") else "c++")
    program = directory / "c++"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {Path(__file__).resolve()} "$@"\n')
    program.chmod(0o755)
    settings = {"CXX": str(program), COMPILER: compiler, "TORCH_NO_COMPILER_WRAPPER": "1"}
    if build:
        plan = directory / "objects.json"
        plan.write_text(json.dumps(asdict(build)))
        settings[FROM] = str(plan)
    return settings


def origins(objects: Path) -> dict[str, str]:
    """Why each source of a build was compiled, empty where its object was taken."""
    found = sorted(objects.rglob("*.o.origin"))
    return {
        str(path.relative_to(objects / "csrc")).removesuffix(".o.origin") + ".cpp": path.read_text()
        for path in found
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
