"""Stub libraries for what torch's CUDA build links and the simulation does not serve.

Which libraries, symbols and symbol versions are needed is read from the installed wheel. A stub
throws an exception that names the function, so that nothing is silently not simulated.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

# Symbols without a version say their library by their prefix. `cu` comes last: all the others
# start with it, too.
_PREFIXES = (
    ("nccl", "libnccl.so.2"),
    ("nvrtc", "libnvrtc.so.13"),
    ("cusparseLt", "libcusparseLt.so.0"),
    ("cuFile", "libcufile.so.0"),
    ("curand", "libcurand.so.10"),
    ("cu", "libcuda.so.1"),
)
# Libraries of the system, and of torch itself.
_AT_HAND = re.compile(
    r"^(libtorch|libc10|libshm|libgomp|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so|ld-linux)"
)


class Needed:
    """What the libraries of one torch import from others: library -> symbol -> version node."""

    def __init__(self, torch: Path) -> None:
        self.symbols: dict[str, dict[str, str]] = defaultdict(dict)
        files = [*sorted((torch / "lib").glob("*.so")), *torch.glob("_C.*.so")]
        for file in files:
            for name in _imports(file):
                self.symbols[name]  # some are linked for nothing
        for file in files:
            for symbol, version in _undefined(file):
                if library := self._library_of(symbol, version):
                    self.symbols[library][symbol] = version

    def _library_of(self, symbol: str, version: str) -> str | None:
        if version in self.symbols:
            return version
        if version == "NVSHMEM" or symbol.startswith("nvshmem"):
            return next(name for name in self.symbols if name.startswith("libnvshmem"))
        if version:
            return None  # the C library's and the like
        for prefix, library in _PREFIXES:
            if re.match(rf"{prefix}[A-Z]", symbol):
                self.symbols[library]
                return library
        return None


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _imports(file: Path) -> list[str]:
    """The shared libraries that a file needs and that neither torch nor the system has."""
    names = re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", str(file)))
    return [name for name in names if not _AT_HAND.match(name)]


def _undefined(file: Path) -> list[tuple[str, str]]:
    """Undefined symbols, each with its version node or an empty string."""
    lines = _run("nm", "-D", "--undefined-only", str(file)).splitlines()
    names = [line.split()[-1] for line in lines]
    return [(name, version) for name, _, version in (name.partition("@") for name in names)]


def defined_in(file: Path) -> set[str]:
    """The C symbols that an object file defines."""
    lines = _run("nm", "--defined-only", "--extern-only", str(file)).splitlines()
    return {line.split()[-1] for line in lines if line.split()[-2] in "TWDBR"}


def source(library: str, symbols: set[str]) -> str:
    """C++ in which every symbol is a function that throws its name."""
    lines = [
        "#include <stdexcept>",
        '#pragma GCC diagnostic ignored "-Wbuiltin-declaration-mismatch"',
        "namespace {",
        "[[noreturn]] void not_simulated(const char* name) {",
        f'  throw std::runtime_error(std::string("simulated CUDA: {library} has no ") + name +',
        '                           ": it is not simulated");',
        "}",
        "}  // namespace",
    ]
    lines.insert(1, "#include <string>")
    lines += [
        f'extern "C" void {name}() {{ not_simulated("{name}"); }}' for name in sorted(symbols)
    ]
    return "\n".join(lines) + "\n"


def version_script(symbols: dict[str, str], extra: str = "") -> str:
    """A linker script that gives each symbol its version node, and hides the rest."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for symbol, version in symbols.items():
        nodes[version].append(symbol)
    plain = nodes.pop("", [])
    if not nodes:
        names = "".join(f"{name}; " for name in plain)
        return (
            f"{{ global: {names}{extra} local: *; }};\n" if names or extra else "{ local: *; };\n"
        )
    text = ""
    for i, (version, members) in enumerate(sorted(nodes.items())):
        listed = "".join(f"{name}; " for name in [*members, *(plain if i == 0 else ())])
        rest = f"{extra} local: *;" if i == 0 else ""
        text += f"{version} {{ global: {listed}{rest} }};\n"
    return text
