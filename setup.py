"""Builds the extension ``torch_c10d_ext._C`` out of every ``csrc/**/*.cpp``.

One source tree serves torch builds with and without CUDA: no device code is compiled, so the plain
host compiler is enough for both. ``C10D_EXT_WITH_CUDA`` is defined where torch was built with CUDA
and the CUDA runtime headers are at hand (a toolkit, or the headers in nvidia's pip packages).

Environment:
    MAX_JOBS: compile jobs at a time (ninja's default otherwise).
    CXX: the C++ compiler; when unset, ``c++`` is used, through ccache where that is installed.
    TORCH_C10D_EXT_CUDA: 0 builds without CUDA, 1 makes missing CUDA headers an error.
    TORCH_C10D_EXT_LAZY: 0 builds without lazy tensors, 1 makes it an error that torch has none.
    TORCH_C10D_EXT_DEBUG: 1 builds with ``-O0 -g`` and without ``NDEBUG``.
    TORCH_C10D_EXT_LTO: 0 builds without link-time optimization, 1 makes it an error that the
        compiler has none. It takes some percent off small calls, and half a minute to link.
    TORCH_C10D_EXT_PCH: 0 builds without a precompiled header (of 390 MB, under build/), 1 with one
        also where ccache is installed, whose usual settings keep nothing then, or with warnings as
        errors, some of which it hides. With it compiling takes half as long.
    TORCH_C10D_EXT_WERROR: 1 turns compiler warnings into errors.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import find_packages, setup

VERSION = "0.1.0"
TORCH_REQUIREMENT = "torch>=2.11,<2.14"
# `import torch` calls these; tools/develop.py installs the same.
ENTRY_POINTS = {"torch.backends": ["torch_c10d_ext = torch_c10d_ext_autoload:register"]}
# What the tests of clients drive; tools/requirements-clients.txt pins them.
CLIENTS = [
    "accelerate>=1.15",
    "deepspeed>=0.19",
    "lightning>=2.6",
    "torchmetrics>=1.9",
    "transformers>=5.23",
]

# What most files of csrc include and what takes long to read. With more of torch large files take
# less and ops more: the inline functions of all that is precompiled are compiled in every file.
PRECOMPILED = (
    "ATen/core/LegacyTypeDispatch.h",
    "ATen/core/Tensor.h",
    "torch/csrc/distributed/c10d/Work.hpp",
)

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        f"torch_c10d_ext compiles against the installed torch ({TORCH_REQUIREMENT}): install that "
        "first, then build with `pip install --no-build-isolation .` (or run `make build`)"
    ) from error


def flag(name: str) -> bool | None:
    """The environment variable as a boolean, None when it is unset or empty."""
    value = os.environ.get(name, "")
    return value.lower() not in ("0", "off", "false", "no") if value else None


def put_ninja_on_path() -> None:
    """Uses the ninja installed beside this Python, also when its environment is not activated.

    Always the same one: ninja starts over when it meets the log of another version.
    """
    bin_dir = Path(sys.executable).parent
    if (bin_dir / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join([str(bin_dir), os.environ.get("PATH", "")])


def use_ccache() -> None:
    """Compiles through ccache where it is installed and nobody chose a compiler.

    torch 2.13 does so by itself. The ones before want CXX to be one program, not ``ccache c++``, so
    this uses ccache's own convention: a link named after the compiler, under ``build/``.
    """
    ccache = shutil.which("ccache")
    wraps = hasattr(torch.utils.cpp_extension, "_wrap_compiler")
    if "CXX" in os.environ or wraps or not ccache or not shutil.which("c++"):
        return
    link = ROOT / "build" / "ccache" / "c++"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or os.readlink(link) != ccache:
        link.unlink(missing_ok=True)
        link.symlink_to(ccache)
    os.environ["CXX"] = str(link)


def package_dirs(name: str) -> list[Path]:
    """Where the (possibly namespace) package `name` is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(p) for p in spec.submodule_search_locations or ()] if spec else []


def cuda_include_dirs() -> list[Path]:
    """Directories with the CUDA runtime's host headers, of the major version torch was built with.

    Looked for in the toolkit, then in nvidia's pip packages, which torch's own CUDA wheels bring.
    """
    candidates = []
    if CUDA_HOME:
        toolkit = Path(CUDA_HOME)
        candidates += [toolkit / "include", *sorted(toolkit.glob("targets/*/include"))]
    for package in package_dirs("nvidia"):
        # nvidia/cu13/include since CUDA 13, nvidia/cuda_runtime/include before.
        candidates += sorted(package.glob("*/include"))
    # CUDA 13 moved crt/ into a pip package that torch does not require; triton brings a copy.
    crt = [p / "backends" / "nvidia" / "include" for p in package_dirs("triton")]

    major = torch.version.cuda.split(".")[0]
    for candidate in candidates:
        header = candidate / "cuda_runtime_api.h"
        if not header.is_file():
            continue
        found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)\d{3}\b", header.read_text("latin-1"))
        if not found or found[1] != major:
            print(f"skipping the CUDA headers in {candidate}: torch uses CUDA {torch.version.cuda}")
            continue
        for extra in [None, *candidates, *crt]:
            if ((extra or candidate) / "crt" / "host_defines.h").is_file():
                return [candidate] if extra is None else [candidate, extra]
        print(f"skipping the CUDA headers in {candidate}: no crt/host_defines.h")
    return []


def has_lazy() -> bool:
    """Whether torch was built with its lazy tensors' TorchScript backend: headers and library."""
    package = Path(torch.__file__).parent
    if not (package / "include/torch/csrc/lazy/ts_backend/ts_node.h").is_file():
        return False
    try:
        library = ctypes.CDLL(str(package / "lib" / "libtorch_cpu.so"))
        ctypes.c_char.in_dll(library, "_ZTIN5torch4lazy6TsNodeE")  # typeinfo of TsNode
    except (OSError, ValueError):
        return False
    return True


def try_library(text: str, *flags: str) -> tuple[bytes, str]:
    """What the compiler makes of a source, or what it says."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "try.cpp", Path(folder) / "try.so"
        source.write_text(text)
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = [*compiler, "-shared", "-fPIC", str(source), "-o", str(library), *flags]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:  # no compiler: sdist needs none
            return b"", str(error)
        return (b"", done.stderr or "an error") if done.returncode else (library.read_bytes(), "")


def standard_library_flags() -> list[str]:
    """What has the linker find the libstdc++.so that torch has loaded, where it would not.

    A compiler that finds libstdc++.a alone, as in slim images, links a copy of it and says nothing.
    Beside torch's such a copy was seen to read numbers as 0, and to crash where some are written.
    """
    text = "#include <sstream>\nvoid write(std::ostringstream& out) { out << 1; }\n"
    given = shlex.split(os.environ.get("LDFLAGS", ""))

    def links_a_copy(*flags: str) -> bool:
        made, _ = try_library(text, *given, *flags)
        return bool(made) and b"libstdc++.so." not in made and b"libc++.so." not in made

    if not links_a_copy():
        return []
    found = re.search(r"/\S*/libstdc\+\+\.so\.\S*$", Path("/proc/self/maps").read_text(), re.M)
    folder = ROOT / "build" / "standard_library"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "libstdc++.so"
    link.unlink(missing_ok=True)
    if found:
        link.symlink_to(found[0])
    if not found or links_a_copy(f"-L{folder}"):
        raise SystemExit(
            "the compiler must link libstdc++.so, as torch does, got a copy of libstdc++.a: "
            "install its libstdc++.so, and take -static-libstdc++ out of LDFLAGS"
        )
    print(f"the compiler would link a copy of libstdc++: linking {os.readlink(link)}")
    return [f"-L{folder}"]


def link_time_flags() -> list[str]:
    """What has the compiler optimize the library as a whole; nothing where it cannot."""
    wanted = flag("TORCH_C10D_EXT_LTO")
    if wanted is False:
        return []
    flags = ["-flto=auto", "-fno-plt"]
    _, said = try_library("int number() { return 1; }\n", *flags, "-Werror", "-O2")
    if not said:
        return flags
    if wanted:
        raise SystemExit(f"TORCH_C10D_EXT_LTO=1, but the compiler cannot do it:\n{said}")
    print("the compiler cannot optimize at link time: building without")
    return []


def newest_of(depfile):
    """When the last of the files that a compiler noted was written."""
    names = re.split(r"\\\n|(?<!\\)\s", depfile.read_text().partition(":")[2])
    paths = [Path(name.replace("\\ ", " ")) for name in names if name]
    return max(path.stat().st_mtime if path.exists() else math.inf for path in paths)


def precompiled_headers(command, folder):
    """Has a compiler's command read `PRECOMPILED` once for all files: the flags for that.

    None of them where the compiler cannot, where ccache would keep nothing then, and where warnings
    are errors: some are lost.
    """
    wanted = flag("TORCH_C10D_EXT_PCH")
    unwanted = shutil.which("ccache") or flag("TORCH_C10D_EXT_WERROR")
    if wanted is False or (wanted is None and unwanted):
        return []
    header, made, noted = (folder / name for name in ("torch.h", "torch.h.gch", "torch.d"))
    # torch silences a warning by a pragma, which gcc forgets when it precompiles.
    use = ["-include", str(header), "-fpch-deps", "-Wno-sign-compare"]

    def run(*more):
        try:
            return subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        except OSError as error:
            raise SystemExit(f"the compiler must be there to be called: {error}") from error

    # What another compiler or other flags made is made anew, and what was compiled with it.
    made_of = repr((command, run("--version").stdout, torch.__version__))
    lines = [f"// {hashlib.sha256(made_of.encode()).hexdigest()}"]
    text = "\n".join([*lines, *(f"#include <{name}>" for name in PRECOMPILED), ""])
    checked = folder / "checked"  # written last
    if (
        checked.exists()
        and header.read_text() == text
        and newest_of(noted) < checked.stat().st_mtime
    ):
        return use

    print("precompiling headers of torch", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    checked.unlink(missing_ok=True)
    made.unlink(missing_ok=True)
    header.write_text(text)
    part = folder / f"part{os.getpid()}"
    only = ["-fsyntax-only", "-x", "c++", os.devnull]
    try:
        done = run("-fpch-deps", *only)
        if done.returncode == 0:
            # Without a list of its own gcc tells nobody of the headers (-fpch-deps).
            into = ["-MMD", "-MF", str(noted), "-MT", header.name, "-o", str(part)]
            done = run("-x", "c++-header", str(header), *into)
        if done.returncode == 0:
            part.rename(made)
            # As ninja has it called: gcc crashes where it is to tell of headers and has no list.
            done = run(*use, "-Werror=invalid-pch", "-MMD", "-MF", str(folder / "none.d"), *only)
    finally:
        part.unlink(missing_ok=True)
    if done.returncode == 0:
        checked.touch()
        return use
    made.unlink(missing_ok=True)
    if wanted:
        raise SystemExit(f"TORCH_C10D_EXT_PCH=1, but the compiler cannot do it:\n{done.stderr}")
    print("the compiler cannot use a precompiled header: building without")
    return []


class Build(BuildExtension):
    """Also precompiles headers, and records what it was built with.

    Python reads that record before it loads the extension.
    """

    def build_extension(self, ext):
        flags = ext.extra_compile_args["cxx"]
        command = [
            *shlex.split(os.environ.get("CXX", "c++")),
            *self.compiler.compiler_so[1:],
            *(f"-D{name}={value}" for name, value in ext.define_macros),
            *(f"-I{path}" for path in [*ext.include_dirs, *self.compiler.include_dirs]),
            *flags,
        ]
        if self.use_ninja:
            flags += precompiled_headers(command, Path(self.build_temp).resolve() / "precompiled")
        super().build_extension(ext)

    def run(self):
        super().run()
        directories = [Path(self.build_lib) / "torch_c10d_ext"]
        if self.inplace:
            directories.append(ROOT / "torch_c10d_ext")
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "_built_with.py").write_text(
                '"""Written by setup.py."""\n\n'
                f'TORCH_VERSION = "{torch.__version__}"\n'
                f'SOURCES = "{digest_of_sources()}"\n'
            )


def digest_of_sources():
    """Hashes csrc: ranks of different sources may not understand each other."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def extension():
    define_macros = [
        ("C10D_EXT_VERSION", f'"{VERSION}"'),
        ("C10D_EXT_TORCH_VERSION", f'"{torch.__version__}"'),
    ]
    include_dirs = [str(ROOT / "csrc")]
    libraries = []

    wanted = flag("TORCH_C10D_EXT_CUDA")
    if torch.version.cuda is not None and wanted is not False:
        cuda_dirs = [str(p) for p in cuda_include_dirs()]
        if cuda_dirs:
            print(f"building with CUDA {torch.version.cuda}, headers in {', '.join(cuda_dirs)}")
            define_macros.append(("C10D_EXT_WITH_CUDA", "1"))
            include_dirs += cuda_dirs
            libraries += ["c10_cuda", "torch_cuda"]
        elif wanted:
            raise SystemExit("TORCH_C10D_EXT_CUDA=1, but no CUDA runtime headers: set CUDA_HOME")
        else:
            print("no CUDA runtime headers found: building without CUDA stream support")
    elif wanted:
        raise SystemExit(f"TORCH_C10D_EXT_CUDA=1, but torch {torch.__version__} has no CUDA")

    wanted = flag("TORCH_C10D_EXT_LAZY")
    if wanted is False or not has_lazy():
        if wanted:
            raise SystemExit(
                f"TORCH_C10D_EXT_LAZY=1, but torch {torch.__version__} has no lazy TorchScript "
                "backend"
            )
        print("building without lazy tensors")
        define_macros.append(("C10D_EXT_WITHOUT_LAZY", "1"))

    # 2.12 and newer headers need C++20, and 2.11's accept it. -g0 comes after the -g that
    # distutils takes over from Python's own build.
    flags = ["-std=c++20", "-fvisibility=hidden", "-Wall"]
    link_flags = standard_library_flags()
    if flag("TORCH_C10D_EXT_DEBUG"):
        flags += ["-O0", "-g", "-UNDEBUG"]
    else:
        link_time = link_time_flags()
        flags += ["-O2", "-g0", *link_time]
        link_flags += ["-O2", *link_time]
        if link_time and os.environ.get("MAX_JOBS"):
            link_flags.append(f"-flto={os.environ['MAX_JOBS']}")
    if flag("TORCH_C10D_EXT_WERROR"):
        flags.append("-Werror")

    return CppExtension(
        name="torch_c10d_ext._C",
        sources=[str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("csrc/**/*.cpp"))],
        depends=[str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("csrc/**/*.h"))],
        include_dirs=include_dirs,
        define_macros=define_macros,
        libraries=libraries,
        extra_compile_args={"cxx": flags},
        extra_link_args=link_flags,
    )


put_ninja_on_path()
use_ccache()
setup(
    name="torch_c10d_ext",
    version=VERSION,
    description="Every torch.distributed collective as a traceable, differentiable op",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    install_requires=[TORCH_REQUIREMENT],
    extras_require={"clients": CLIENTS},
    packages=find_packages(include=["torch_c10d_ext", "torch_c10d_ext.*"]),
    py_modules=["torch_c10d_ext_autoload"],
    entry_points=ENTRY_POINTS,
    package_data={"torch_c10d_ext": ["py.typed", "*.pyi"]},
    ext_modules=[extension()],
    cmdclass={"build_ext": Build},
    zip_safe=False,
)
