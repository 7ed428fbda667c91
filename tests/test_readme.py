"""The README's example runs, and prints what stands beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lists(text: str) -> list[str]:
    return re.findall(r"\[[^]]*\]", text)


@pytest.mark.long
def test_hello_prints_what_the_readme_shows(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (program,) = [text for language, text in blocks if language == "python"]
    (session,) = [text for language, text in blocks if text.startswith("$ ")]
    command, *expected = session.splitlines()
    script = tmp_path / "hello.py"
    script.write_text(program)
    arguments = command.split()[2:-1]
    assert command.split()[1] == ".venv/bin/python"
    done = subprocess.run(
        [sys.executable, *arguments, str(script)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # The ranks share a terminal, so their lines may run into each other; their lists do not.
    assert sorted(lists(done.stdout)) == sorted(lists("\n".join(expected))), done.stderr
