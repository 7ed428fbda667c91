"""Builds the simulated CUDA libraries for the torch of this interpreter's environment.

    python -m tests.simulated_cuda.build build/cuda/simulated

Written there: libcudart and libnccl as far as they are simulated, a stub of every other library
that torch's CUDA build links, and the kernels. Only what changed is made again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.simulated_cuda import stubs

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Werror", "-fvisibility=hidden"]
RUNTIME, DRIVER, NCCL = "libcudart.so.13", "libcuda.so.1", "libnccl.so.2"
MANAGEMENT = "libnvidia-ml.so.1"
KERNELS = "libsimulated_kernels.so"


def package(name: str) -> Path:
    """Where a package is installed, without importing it: torch does not load without these."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise SystemExit(f"{name} is not installed in the environment of {sys.executable}")
    return Path(places[0])


def cuda_headers() -> Path:
    """The directory of the CUDA runtime's host headers."""
    found = sorted(package("nvidia").glob("*/include/cuda_runtime_api.h"))
    if not found:
        raise SystemExit("no cuda_runtime_api.h: pip install the nvidia-cuda-runtime package")
    return found[0].parent


class Builder:
    """Compiles and links into one directory what is older than its sources."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.objects = out / "objects"
        self.objects.mkdir(parents=True, exist_ok=True)
        self.compiler = [*(["ccache"] if shutil.which("ccache") else []), "c++"]

    def run(self, command: Sequence[str], what: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment())
        if done.returncode:
            raise SystemExit(f"{what} failed\n{done.stdout}{done.stderr}")
        if done.stderr:
            print(done.stderr, end="")

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "CCACHE_SLOPPINESS": "time_macros,include_file_mtime"}

    def compile(self, source: Path, flags: Sequence[str], depends: Sequence[Path] = ()) -> Path:
        """The object of a source, made again when the source, a header or a flag changed."""
        made = self.objects / f"{source.parent.name}_{source.stem}.o"
        stamp = made.with_suffix(".key")
        texts = [p.read_bytes() for p in [source, *depends]]
        key = hashlib.sha256(b"\0".join([*texts, json.dumps(list(flags)).encode()])).hexdigest()
        if not made.exists() or not stamp.exists() or stamp.read_text() != key:
            print(f"compiling {source.name}", flush=True)
            self.run([*self.compiler, *flags, "-c", str(source), "-o", str(made)], source.name)
            stamp.write_text(key)
        return made

    def compile_all(self, directory: str, flags: Sequence[str]) -> list[Path]:
        headers = sorted({*(HERE / directory).glob("*.h"), HERE / "runtime" / "fail.h"})
        sources = sorted((HERE / directory).glob("*.cpp"))
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
            return list(pool.map(lambda s: self.compile(s, flags, headers), sources))

    def link(
        self, library: str, objects: Sequence[Path], script: str, flags: Sequence[str] = ()
    ) -> None:
        made, versions = self.out / library, self.objects / f"{library}.map"
        newest = max(p.stat().st_mtime for p in objects)
        same = versions.exists() and versions.read_text() == script
        if made.exists() and same and made.stat().st_mtime > newest:
            return
        versions.write_text(script)
        whole = ["c++", "-shared", f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"]
        self.run([*whole, *map(str, objects), "-o", str(made), *flags, "-pthread", "-ldl"], library)

    def stub(self, library: str, symbols: set[str]) -> Path:
        """The object that throws for these symbols."""
        source = self.objects / f"{library}.stubs.cpp"
        text = stubs.source(library, symbols)
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
        return self.compile(source, ["-O0", "-fPIC"])


def build(out: Path) -> None:
    """Everything, into `out`."""
    torch, headers = package("torch"), cuda_headers()
    builder = Builder(out)
    needed = stubs.Needed(torch)
    include = [f"-I{HERE}", f"-isystem{headers}"]
    ours = {
        RUNTIME: builder.compile_all("runtime", [*FLAGS, *include]),
        DRIVER: builder.compile_all("driver", [*FLAGS, *include]),
        NCCL: builder.compile_all("nccl", [*FLAGS, *include]),
    }
    for library, symbols in sorted(needed.symbols.items()):
        objects = list(ours.get(library, []))
        served = set().union(*(stubs.defined_in(o) for o in objects))
        objects.append(builder.stub(library, set(symbols) - served))
        extra = "simulated_cuda_*;" if library in ours else ""
        if library == NCCL:
            served_apis = sorted(name for name in served if name.startswith("nccl"))
            symbols = {**dict.fromkeys(served_apis, ""), **symbols}
        needs = [f"-L{out}", f"-l:{RUNTIME}"] if library == NCCL else []
        builder.link(library, objects, stubs.version_script(symbols, extra), needs)
    # Nothing links it: torch opens it by its name.
    objects = builder.compile_all("management", [*FLAGS, *include])
    builder.link(MANAGEMENT, objects, "{ global: nvml*; local: *; };\n")
    torch_include = [
        f"-isystem{torch / 'include'}",
        f"-isystem{torch / 'include/torch/csrc/api/include'}",
    ]
    objects = builder.compile_all("kernels", [*FLAGS, *include, *torch_include])
    libraries = [f"-L{out}", f"-l:{RUNTIME}", f"-L{torch / 'lib'}"]
    libraries += ["-ltorch_cpu", "-lc10", "-lc10_cuda", "-ltorch_cuda"]
    # torch's libraries are loaded by then; the stubs they need are no concern of this link.
    libraries += ["-Wl,--allow-shlib-undefined"]
    builder.link(KERNELS, objects, "{ global: simulated_cuda_*; local: *; };\n", libraries)
    print(f"simulated CUDA libraries in {out}")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
