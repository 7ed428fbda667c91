"""What can be said of the simulated CUDA's tools without CUDA: `docs/simulated-cuda.md`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.simulated_cuda import compiler, environment, mutate


def _sources() -> list[str]:
    folders = [mutate.ROOT / "csrc" / name for name in mutate.DIRECTORIES]
    assert all(folder.is_dir() for folder in folders)
    return [path.read_text() for folder in folders for path in sorted(folder.rglob("*.[ch]*"))]


@pytest.mark.parametrize(
    "pattern", [*(rf"(?m)(?<=[ ])(?:{p})" for p in mutate.STATEMENTS), *dict(mutate.EXPRESSIONS)]
)
def test_every_kind_of_rule_is_still_written_so(pattern: str) -> None:
    """A rule that is written in another way would be left out of the mutants without a word."""
    assert any(re.search(pattern, source) for source in _sources())


def test_rules_are_put_under_switches() -> None:
    mutants: list[mutate.Mutant] = []
    text = "void f() {\n  used_here(t);\n  // used_here(t);\n  g(adapter.keep(in));\n}\n"
    out = mutate.mutated(text.replace("g(", "g( "), "f.cpp", mutants)
    assert [(m.number, m.line, m.text) for m in mutants] == [
        (0, 2, "used_here(t);"),
        (1, 4, "adapter.keep(in)"),
    ]
    assert "if (!is_mutant(0)) { used_here(t); }" in out
    assert "(is_mutant(1) ? (Finish()) : (adapter.keep(in)))" in out
    assert "// used_here(t);" in out


def test_a_machine_that_cannot_get_the_wheel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    done = subprocess.run(
        [sys.executable, environment.__file__, tmp_path / "venv", tmp_path / "cache"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "make test-cuda: torch's CUDA build must be at hand, got no torch-2.13.0" in done.stderr
    assert f"put the wheel into {tmp_path / 'cache'}" in done.stderr


# --- the compiler that takes objects of the build without CUDA ------------------------------------


class _Builds:
    """A source with a header of torch and one of its own, and what ninja noted of its object."""

    def __init__(self, place: Path) -> None:
        self.root, self.plain, self.cuda = (place / name for name in ("root", "plain", "cuda"))
        self.write(self.root / "csrc/work/a.cpp", '#include "base/b.h"\n#include <c10/c.h>\n')
        self.write(self.root / "csrc/base/b.h", "int b;\n")
        for packages in (self.plain, self.cuda):
            self.write(packages / "torch/include/c10/c.h", "int c;\n")
        self.write(self.cuda / "nvidia/include/cuda.h", "int cuda;\n")
        self.build = compiler.Build(
            root=str(self.root),
            directory=str(place / "objects"),
            ninja=str(self._ninja(place)),
            compiler="ccache c++",
            arguments=[
                "-O2", "-DTORCH=1", f"-I{self.root}/csrc", f"-I{self.plain}/torch/include",
            ],
        )  # fmt: skip
        self.write(place / "objects/csrc/work/a.o", "the object")
        self.out = place / "a.o"

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _ninja(self, place: Path) -> Path:
        """Answers `-t deps`, with paths as ninja gives them."""
        files = [
            "../root/csrc/work/a.cpp",
            "../root/csrc/base/b.h",
            "../plain/torch/include/c10/c.h",
        ]
        program = place / "ninja"
        lines = "\n".join(
            ["echo 'a.o: #deps 3, deps mtime 1 (VALID)'"] + [f"echo '    {f}'" for f in files]
        )
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
        return program

    def arguments(self, *more: str, optimized: str = "-O2") -> list[str]:
        return [
            "-MMD", "-MF", f"{self.out}.d", optimized, "-DTORCH=1", f"-I{self.root}/csrc",
            f"-I{self.cuda}/nvidia/include", f"-I{self.cuda}/torch/include", *more,
            "-c", "-c", f"{self.root}/csrc/work/a.cpp", "-o", str(self.out),
        ]  # fmt: skip

    def why(self, *more: str, optimized: str = "-O2", program: str = "c++") -> str:
        call = compiler.parsed(self.arguments(*more, optimized=optimized))
        return compiler.why_compile(self.build, call, program, str(self.root))[0]


@pytest.fixture
def builds(tmp_path: Path) -> _Builds:
    return _Builds(tmp_path)


def test_an_object_is_taken_where_cuda_changes_nothing(
    builds: _Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert builds.why("-DWITH_CUDA=1") == ""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(dataclasses.asdict(builds.build)))
    monkeypatch.setenv(compiler.FROM, str(plan))
    monkeypatch.setenv(compiler.COMPILER, "false c++")
    assert compiler.main(builds.arguments("-DWITH_CUDA=1")) == 0
    assert builds.out.read_text() == "the object"
    assert Path(f"{builds.out}.origin").read_text() == ""
    noted = Path(f"{builds.out}.d").read_text().replace("\\\n", "").split()
    assert noted[0] == f"{builds.out}:"
    assert noted[1:] == [
        f"{builds.root}/csrc/work/a.cpp",
        f"{builds.root}/csrc/base/b.h",
        f"{builds.cuda}/torch/include/c10/c.h",
    ]
    builds.build.stale.append("work/a.cpp")
    plan.write_text(json.dumps(dataclasses.asdict(builds.build)))
    assert compiler.main(builds.arguments()) == 1  # `false` compiles it


def test_an_object_of_a_precompiled_header_is_taken(builds: _Builds) -> None:
    builds.build.arguments += ["-include", "/headers/torch.h", "-fpch-deps", "-Wno-sign-compare"]
    assert builds.why() == ""
    assert builds.why("-Wno-unused") == "it is compiled in another way"


def test_what_may_differ_is_compiled(builds: _Builds) -> None:
    header = builds.root / "csrc/base/b.h"
    header.write_text("#ifdef WITH_CUDA\n#endif\n")
    assert builds.why("-DWITH_CUDA=1") == "WITH_CUDA in csrc/base/b.h"
    assert builds.why() == ""
    assert builds.why("-DWITH") == ""  # another name
    header.write_text('#if __has_include("cuda.h")\n#endif\n')
    assert builds.why() == "__has_include(<cuda.h>) in csrc/base/b.h"
    header.write_text("int b;\n")
    assert builds.why(optimized="-O0") == "it is compiled in another way"
    assert builds.why(program="clang++") == "it is compiled in another way"
    builds.write(builds.cuda / "nvidia/include/c10/c.h", "int c;\n")
    assert builds.why() == "another <c10/c.h>"
    (builds.cuda / "nvidia/include/c10/c.h").unlink()
    (builds.cuda / "torch/include/c10/c.h").write_text("int other;\n")
    assert builds.why() == "another ../cuda/torch/include/c10/c.h"
    (builds.cuda / "torch/include/c10/c.h").unlink()
    assert builds.why() == "another ../cuda/torch/include/c10/c.h"
    builds.build.ninja = "false"
    assert builds.why() == "make build has no object of it"
    builds.build.stale.append("work/a.cpp")
    assert builds.why() == "make build has no object of it that is up to date"


def test_objects_out_of_date_are_known(tmp_path: Path) -> None:
    """By ninja itself, over a build of one file."""
    ninja = shutil.which(
        "ninja", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    assert ninja
    assert compiler.plain_build(tmp_path, ninja) is None
    tag = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    objects, source = tmp_path / "build" / f"temp.{tag}", tmp_path / "csrc" / "base" / "a.cpp"
    _Builds.write(source, "int a;\n")
    _Builds.write(
        objects / "build.ninja",
        "cxx = c++\ncflags = -O0 -c\npost_cflags = -g0\n"
        "rule compile\n  command = $cxx -MMD -MF $out.d $cflags -c $in -o $out $post_cflags\n"
        "  depfile = $out.d\n  deps = gcc\n"
        f"build {objects}/csrc/base/a.o: compile {source}\n",
    )
    found = compiler.plain_build(tmp_path, ninja)
    assert found and found.stale == ["base/a.cpp"] and found.files("base/a.cpp") == []
    subprocess.run([ninja, "-C", objects], check=True, timeout=60, capture_output=True)
    found = compiler.plain_build(tmp_path, ninja)
    assert found and found.stale == [] and found.files("base/a.cpp") == [str(source)]
    source.write_text("int b;\n")
    found = compiler.plain_build(tmp_path, ninja)
    assert found and found.stale == ["base/a.cpp"]
