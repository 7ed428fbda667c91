"""What can be said of the simulated CUDA's tools without CUDA: `docs/simulated-cuda.md`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated_cuda import environment, mutate


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
