"""Makes the environment of `make test-cuda`: torch's CUDA build, the tools, nothing of CUDA itself.

    python3 tests/simulated_cuda/environment.py .venv-cuda .cuda-cache

Only the standard library is used. The wheel is kept in the second directory, so that the download
of half a gigabyte happens once; a machine that cannot get it is told so, and this fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VERSION = "2.13.0"
# The CUDA runtime's host headers, of the version that this torch was built with. The libraries in
# the same packages are taken out: torch would find them before the simulated ones.
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
# What torch itself requires, less CUDA and triton, whose versions pip would insist on.
REQUIRED = (
    "filelock",
    "typing-extensions>=4.10.0",
    "sympy>=1.13.3",
    "networkx>=2.5.1",
    "jinja2",
    "fsspec>=0.8.5",
)


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


def wheel(python: Path, cache: Path) -> Path:
    """torch's CUDA wheel, from the cache or the package index."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"torch-{VERSION}-{tag}-*.whl"
    if not (found := sorted(cache.glob(pattern))):
        print(f"downloading torch {VERSION} with CUDA into {cache} (530 MB, once)", flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        # `===`: pip prefers torch's CPU build, whose version is 2.13.0+cpu, for `==`.
        done = subprocess.run(
            [python, "-m", "pip", "download", "-q", "--no-deps", "-d", cache, f"torch==={VERSION}"],
            check=False,
        )
        found = sorted(cache.glob(pattern))
        if done.returncode or not found:
            raise SystemExit(
                f"make test-cuda: torch's CUDA build must be at hand, got no torch-{VERSION} for "
                f"{tag} from the package index; put the wheel into {cache}"
            )
    return found[0]


def make(environment: Path, cache: Path) -> None:
    python = environment / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", environment)
    given = wheel(python, cache)
    tools = (ROOT / "tools" / "requirements.txt").read_text()
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run(*pip, "--no-deps", given, *HEADERS)
    run(*pip, *REQUIRED, *_requirements(tools))
    packages = next((environment / "lib").glob("python*/site-packages"))
    for libraries in packages.glob("nvidia/*/lib"):
        shutil.rmtree(libraries)


def _requirements(text: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return [re.sub(r"\s*;\s*", ";", line) for line in lines if line]


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    make(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
