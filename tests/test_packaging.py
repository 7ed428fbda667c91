"""The wheel holds what it should and works where the source tree is out of reach."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import torch_c10d_ext
from torch_c10d_ext._meeting import digest_of, own_build

ROOT = Path(__file__).resolve().parent.parent

USE = """
import torch, torch.distributed as dist
import torch_c10d_ext
from torch_c10d_ext import functional as fc
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
print(torch_c10d_ext.__file__, fc.all_reduce(torch.ones(2), "sum", None).tolist())
dist.destroy_process_group()
"""


def run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made of the objects that the build in place has compiled.

    The compiler finds libstdc++.a first, which is all that some have.
    """
    if not any(ROOT.glob("build/temp.*/csrc")):
        pytest.skip("no build tree beside the tests: nothing was compiled here")
    if not shutil.which("ninja") and not (Path(sys.executable).parent / "ninja").exists():
        pytest.skip("no ninja")
    out = tmp_path_factory.mktemp("wheel")
    (out / "info").mkdir()
    setup = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(out / "info")]
    command = [*setup, "bdist_wheel", "--bdist-dir", str(out / "tree"), "--dist-dir", str(out)]
    archive = run(["c++", "-print-file-name=libstdc++.a"], out).strip()
    (out / "lib").mkdir()
    (out / "lib" / "libstdc++.a").symlink_to(archive)
    run(command, ROOT, LDFLAGS=f"-B{out}/lib")
    (path,) = out.glob("*.whl")
    return path


def test_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
        (entries,) = (n for n in names if n.endswith(".dist-info/entry_points.txt"))
        points = archive.read(entries).decode()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {
        "torch_c10d_ext",
        "torch_c10d_ext_autoload.py",
    }
    assert points.split() == [
        *("[torch.backends]", "torch_c10d_ext", "=", "torch_c10d_ext_autoload:register")
    ]
    for name in ("py.typed", "_built_with.py", "functional.py", "ops/__init__.py"):
        assert f"torch_c10d_ext/{name}" in names
    assert [n for n in names if n.endswith(".so")]
    assert fields["Version"] == torch_c10d_ext.__version__
    assert fields["Requires-Python"] == ">=3.10"
    required = fields.get_all("Requires-Dist") or []
    (requirement,) = (r for r in required if "extra ==" not in r)
    assert len(required) > 1
    assert fields.get_all("Provides-Extra") == ["clients"]
    assert requirement.replace(" ", "") in ("torch<2.14,>=2.11", "torch>=2.11,<2.14")


def test_links_the_standard_library_of_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (library,) = (archive.read(n) for n in archive.namelist() if n.endswith(".so"))
    assert b"libstdc++.so." in library


def test_refuses_to_link_a_copy_of_the_standard_library(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "LDFLAGS": "-static-libstdc++"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "the compiler must link libstdc++.so, as torch does" in done.stderr


def test_works_away_from_the_source(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    where, _, values = run([sys.executable, "-c", USE], tmp_path, PYTHONPATH=str(site)).partition(
        " "
    )
    assert Path(where).is_relative_to(site)
    assert values.strip() == "[1.0, 1.0]"
    ask = "from torch_c10d_ext._meeting import own_build; print(own_build())"
    said = run([sys.executable, "-c", ask], tmp_path, PYTHONPATH=str(site))
    assert said.strip() == own_build()  # of a build in place


def test_a_wheel_says_what_sources_it_is_of(wheel: Path) -> None:
    digest = hashlib.sha256()
    for source in sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".h")):
        digest.update(source.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(source.read_bytes() + b"\0")
    with zipfile.ZipFile(wheel) as archive:
        said = archive.read("torch_c10d_ext/_built_with.py").decode()
    assert f'SOURCES = "{digest.hexdigest()[:12]}"\n' in said


def test_builds_of_other_sources_are_others(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "a.py").write_text("1\n")
    (tmp_path / "ops" / "b.py").write_text("2\n")
    before = digest_of(tmp_path, "c0ffee")
    (tmp_path / "_built_with.py").write_text("3\n")
    (tmp_path / ".#a.py").symlink_to("nobody's")  # an editor's
    (tmp_path / ".checkpoints").mkdir()
    (tmp_path / ".checkpoints" / "a.py").write_text("5\n")
    assert digest_of(tmp_path, "c0ffee") == before
    assert digest_of(tmp_path, "c0ffee", tmp_path / "_built_with.py") == before
    other = tmp_path / "other"
    assert digest_of(tmp_path, "c0ffee", other) != before  # it cannot be read
    assert digest_of(tmp_path, "facade") != before
    (tmp_path / "ops" / "b.py").rename(tmp_path / "ops" / "c.py")
    renamed = digest_of(tmp_path, "c0ffee")
    (tmp_path / "a.py").write_text("4\n")
    assert len({before, renamed, digest_of(tmp_path, "c0ffee")}) == 3


def test_refuses_another_torch(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "torch_c10d_ext" / "_built_with.py").write_text(
        'TORCH_VERSION = "2.0.0"\nSOURCES = "c0ffee"\n'
    )
    use = "import torch_c10d_ext"
    done = subprocess.run(
        [sys.executable, "-c", use],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ImportError: torch_c10d_ext: " in done.stderr
    assert "2.0.0" in done.stderr
