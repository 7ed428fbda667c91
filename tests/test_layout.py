"""The tree keeps the shape CONTRIBUTING.md describes: a collective is three files of one stem."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import torch_c10d_ext
from torch_c10d_ext import functional
from torch_c10d_ext._op_info import FORMS, SILENT, TRAFFIC, WAITS

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

STEMS = sorted(p.stem for p in ROOT.glob("csrc/ops/*.cpp"))
SCHEMA = re.compile(r'\.def\(\s*"(\w+)\(')

# Where torch-private names may be used: adapting to another torch version touches these alone.
TOUCH_TORCH_PRIVATE = {"_async.py", "_dynamo.py", "_for_gloo.py", "_groups.py", "_inductor.py"}
# What `functional` is a superset of.
MIRRORED = "torch.distributed._functional_collectives"

# What each folder of csrc may include: itself and those before it.
LAYERS = (
    "base",
    "kernels",
    "control",
    "work",
    "backends",
    "collectives",
    "frontend",
    "ops",
    "python",
)
# The same of the folders inside backends/, after the files beside them, which include none.
BACKENDS = ("process_group", "adapter", "checked", "hierarchical", "mpi", "shm")
# These know nothing of torch.distributed: neither its headers nor its types.
WITHOUT_DISTRIBUTED = ("base", "kernels")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# A longer file says in its first comment, or its docstring, why it is one.
LONG = 600
REASON = re.compile(r"\bOne\s+file,\s+(//\s+)?for\b")
# A longer class says in the comment before it why it is one. Lines of its definition, as
# clang-format leaves them: it ends at the first brace below its own first line; and those of its
# members that are defined elsewhere.
LONG_CLASS = 320
CLASS = re.compile(r"^( *)(?:class|struct) ([\w:]+)\b[^;{}]*\{\n", re.MULTILINE)
NAMESPACE = re.compile(r"^namespace ([\w:]*) ?\{$", re.MULTILINE)
# A definition at the margin, up to its body, and the name of a member in it.
DEFINITION = re.compile(r"^(?=[\w\[~])(?!namespace\b)[^;{}]*?(?:\{[^\n]*\}|\{|;)$", re.MULTILINE)
MEMBER = re.compile(r"\b(?!std::)((?:\w+(?:<[\w, ]*>)?::)+)~?(?:operator\W+|operator [\w:]+|\w+)\(")

WITHOUT_GIT = {"build", "dist", "__pycache__"}


def repository_files() -> list[Path]:
    """Tracked and new files, or, where this is no checkout, everything that was not generated."""
    git = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if git.returncode == 0:
        files = [ROOT / os.fsdecode(name) for name in git.stdout.split(b"\0") if name]
    else:
        files = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in WITHOUT_GIT or (part.startswith(".") and part != ".ci")
                for part in path.relative_to(ROOT).parts[:-1]
            )
            and path.name != "_built_with.py"
        ]
    return sorted(p for p in files if p.is_file() and p.suffix not in (".so", ".pyc", ".png"))


def none(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def schemas(path: Path) -> list[str]:
    return SCHEMA.findall(path.read_text())


def names_of(files: list[str], pattern: str) -> list[str]:
    return sorted(m[1] for f in files if (m := re.fullmatch(pattern, f)))


def tree_in_contributing() -> tuple[set[str], str]:
    """The folders that CONTRIBUTING.md's tree names, as paths, and its text."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (tree,) = re.findall(r"^## Where things are\n+```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    folders, parents = set(), [""]
    for indent, name in re.findall(r"^((?:  ){0,3})([\w.]+)/ ", tree, re.MULTILINE):
        parents[len(indent) // 2 + 1 :] = [f"{parents[len(indent) // 2]}{name}/"]
        folders.add(parents[-1])
    return folders, tree


def test_the_tree_in_contributing_is_whole() -> None:
    named, tree = tree_in_contributing()
    files = [path.relative_to(ROOT) for path in repository_files()]
    real = {f"{parent}/" for path in files for parent in path.parents if parent != Path()}
    assert named == real
    modules = [path.name for path in files if path.match("torch_c10d_ext/*.py")]
    words = {"__init__.py", *re.findall(r"[\w.]+\.py\b", tree)}
    none([name for name in modules if name not in words])


def test_a_collective_is_three_files_of_one_stem() -> None:
    files = [str(p.relative_to(ROOT)) for p in repository_files()]
    assert len(STEMS) > 1
    assert names_of(files, r"csrc/ops/(\w+)\.cpp") == STEMS
    assert names_of(files, r"torch_c10d_ext/ops/((?!__init__)\w+)\.py") == STEMS
    assert names_of(files, r"tests/ops/test_(\w+)\.py") == STEMS


def test_a_backend_is_a_folder_with_a_test_file() -> None:
    files = [str(p.relative_to(ROOT)) for p in repository_files()]
    backends = names_of(files, r"csrc/backends/(\w+)/backend\.cpp")
    tests = names_of(files, r"tests/(?:backends|hosts)/test_(\w+)\.py")
    assert backends
    assert set(backends) <= set(tests)
    # The interface is all that lies beside the folders.
    assert names_of(files, r"csrc/backends/(\w+)\.cpp") == ["backend", "request"]
    # test_shm_faults.py and such; backends of others; and how the groups of all of them meet
    assert {name.split("_")[0] for name in tests} == {*backends, "adapter", "rendezvous"}


def sources_of(folder: str) -> list[Path]:
    return [path for path in sorted((CSRC / folder).rglob("*")) if path.suffix in (".cpp", ".h")]


def test_csrc_is_layers_and_includes_run_downward() -> None:
    assert sorted(path.name for path in CSRC.iterdir()) == sorted(LAYERS)
    found, seen = [], 0
    for level, folder in enumerate(LAYERS):
        for path in sources_of(folder):
            for name in INCLUDE.findall(path.read_text()):
                seen += 1
                top = name.split("/")[0]
                if not (CSRC / name).exists():
                    found.append(f"{path.relative_to(CSRC)}: {name} is not a path below csrc")
                elif LAYERS.index(top) > level:
                    found.append(f"{path.relative_to(CSRC)} is {folder} and includes {name}")
    assert seen > 100
    none(found)


def test_folders_of_backends_include_downward() -> None:
    backends = CSRC / "backends"
    assert sorted(path.name for path in backends.iterdir() if path.is_dir()) == sorted(BACKENDS)

    def level(path: Path) -> int:
        inside = path.relative_to(backends).parts
        return BACKENDS.index(inside[0]) if len(inside) > 1 else -1

    found, seen = [], 0
    for path in sources_of("backends"):
        for name in INCLUDE.findall(path.read_text()):
            if name.startswith("backends/"):
                seen += 1
                if level(CSRC / name) > level(path):
                    found.append(f"{path.relative_to(CSRC)} includes {name}")
    assert seen > 100
    none(found)


def test_the_tree_in_contributing_has_the_layers_in_order() -> None:
    _, tree = tree_in_contributing()
    csrc = tree.split("torch_c10d_ext/")[0]
    assert tuple(re.findall(r"^  (\w+)/ ", csrc, re.MULTILINE)) == LAYERS
    inside = tree.split("  backends/")[1].split("\n  collectives/")[0]
    assert tuple(re.findall(r"^    (\w+)/ ", inside, re.MULTILINE)) == BACKENDS


def test_base_knows_nothing_of_torch_distributed() -> None:
    found = [
        f"{path.relative_to(CSRC)}:{number}: {line.strip()}"
        for folder in WITHOUT_DISTRIBUTED
        for path in sources_of(folder)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"distributed/c10d|c10d::", line.split("//")[0])
    ]
    none(found)


def test_no_backend_is_known_by_its_name_or_type_outside_the_table() -> None:
    """Capabilities are data: backends/adapter/capabilities.cpp is where names are."""
    named = re.compile(r'"(?:gloo|nccl|mpi|ucc|fake)"|typeid\(|getBackendName\(\)\s*[=!]=')
    found = [
        f"{path.relative_to(CSRC)}:{number}: {line.strip()}"
        for path in CSRC.rglob("*.cpp")
        # Of tensors: whether one is an AsyncCollectiveTensor.
        if path.name not in ("capabilities.cpp", "async_tensor.cpp")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line.split("//")[0])
    ]
    none(found)


def test_python_knows_no_backend_by_its_name() -> None:
    named = re.compile(r"""(?:\.name\(\)|get_backend\([^)]*\))\s*[!=]=\s*["']""")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in ROOT.glob("torch_c10d_ext/**/*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line)
    ]
    none(found)


def test_the_name_of_shm_is_given_where_the_backend_is() -> None:
    """C++ has it in the backend's folder, Python in the module that `import torch` runs."""
    found = [
        f"{path.relative_to(CSRC)}:{number}: {line.strip()}"
        for folder in LAYERS
        for path in sources_of(folder)
        if "backends/shm" not in path.as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if '"shm"' in line.split("//")[0]
    ]
    for path in ROOT.glob("torch_c10d_ext/**/*.py*"):
        if path.suffix in (".py", ".pyi"):
            found += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant) and node.value == "shm"
            ]
    none(found)


def test_what_is_derived_of_an_op_is_not_written_in_it() -> None:
    """frontend/forms.h registers all kernels of an op that lists its forms."""
    texts = {path.name: path.read_text() for path in CSRC.glob("ops/*.cpp")}
    derived = {name for name, text in texts.items() if "C10D_EXT_COLLECTIVE(Op)" in text}
    assert len(derived) > 10
    none([name for name in derived if "TORCH_LIBRARY_IMPL" in texts[name]])


def introduction_of(path: Path) -> str:
    """The docstring of a module of Python, the beginning of another file."""
    text = path.read_text()
    return (ast.get_docstring(ast.parse(text)) or "") if path.suffix == ".py" else text[:1000]


def test_long_files_have_a_reason() -> None:
    long, seen = [], set()
    for path in repository_files():
        name = path.relative_to(ROOT)
        if path.suffix not in (".py", ".cpp", ".h"):
            continue
        seen.add(name.parts[0])
        lines = len(path.read_text().splitlines())
        if lines > LONG and not REASON.search(introduction_of(path)):
            long.append(f"{name} has {lines} lines")
    assert {"csrc", "torch_c10d_ext", "tests", "benchmarks"} <= seen
    none(long)


@dataclass
class CppClass:
    """A class of csrc: where it is defined, its lines, and the comment before it."""

    path: Path
    lines: int
    comment: str


def namespaces_of(path: Path, text: str) -> list[tuple[int, int, tuple[str, ...]]]:
    """The namespaces of a file, outermost first: where they begin, where they end, their names."""
    found = []
    for match in NAMESPACE.finditer(text):
        end = text.find(f"\n}}  // namespace {match[1]}".rstrip() + "\n", match.end())
        # One without a name is another one in each file.
        found.append((match.end(), end, tuple(match[1].split("::") if match[1] else [str(path)])))
    return found


def names_around(places: list[tuple[int, int, tuple[str, ...]]], at: int) -> tuple[str, ...]:
    return tuple(name for start, end, names in places if start <= at < end for name in names)


def classes_of(path: Path) -> Iterator[tuple[tuple[str, ...], CppClass]]:
    """The classes defined in a file, by their full names, with the lines of their definitions."""
    text = path.read_text()
    places = namespaces_of(path, text)
    around: list[tuple[int, str]] = []  # where the classes that may be around this one end
    for match in CLASS.finditer(text):
        end = re.compile(rf"^{match[1]}\}}", re.MULTILINE).search(text, match.end())
        assert end, f"{match[2]} has no end"
        comment: list[str] = []
        for line in reversed(text[: match.start()].splitlines()):
            if not line.strip().startswith(("//", "template")):
                break
            comment.append(line.strip())
        around = [(until, name) for until, name in around if until > match.start()]
        outer = tuple(name for _, name in around)
        around.append((end.start(), match[2]))
        lines = text.count("\n", match.start(), end.start()) + 1
        name = (*names_around(places, match.start()), *outer, *match[2].split("::"))
        yield name, CppClass(path, lines, " ".join(reversed(comment)))


def members_of(path: Path) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], int]]:
    """What is defined outside of its class: the namespace, the class as named there, the lines."""
    text = path.read_text()
    places = namespaces_of(path, text)
    for match in DEFINITION.finditer(text):
        member = MEMBER.search(match[0])
        if member is None:
            continue
        before = match[0][: member.start()]
        if before.count("(") != before.count(")") or "=" in before:
            continue  # an argument, or a value
        end = match.end()
        if match[0].endswith("{"):
            close = re.compile(r"^\}", re.MULTILINE).search(text, end)
            assert close, f"{member[0]} has no end"
            end = close.start()
        elif not match[0].endswith(("}", "= default;")):
            continue  # declared
        named = re.sub("<.*?>", "", member[1]).split("::")[:-1]
        yield (
            names_around(places, match.start()),
            tuple(named),
            text.count("\n", match.start(), end) + 1,
        )


def cpp_classes() -> dict[tuple[str, ...], CppClass]:
    """The classes of csrc, by their full names, with the lines of all their members.

    A class inside another counts for both; its own members that are defined outside, for itself.
    """
    files = [path for folder in LAYERS for path in sources_of(folder)]
    classes = {name: found for path in files for name, found in classes_of(path)}
    for path in files:
        for namespace, named, lines in members_of(path):
            # As C++ looks names up: from the namespace around it outwards.
            for depth in range(len(namespace), -1, -1):
                if found := classes.get((*namespace[:depth], *named)):
                    found.lines += lines
                    break
    return classes


def test_members_count_for_their_class(tmp_path: Path) -> None:
    path = tmp_path / "a.cpp"
    path.write_text(
        "namespace n::m {\n\nnamespace {\n\n"
        "class Outer {\n  struct Inner {\n    int f() const;\n  };\n  Outer();\n};\n\n"
        "std::function<void(int)> Outer::one(int a,\n    int b = Other::two()) {\n  {\n  }\n}\n\n"
        "Outer::Outer() : a_(b::c()) {}\n\n"
        "int Outer::Inner::f() const {\n  return 1;\n}\n\n"
        "Outer::~Outer() = default;\n\n"
        "int free(int a = Outer::two()) {\n}\n\n"
        "const int four = Outer::three();\n\n"
        "}  // namespace\n\nint Outer::five();\n\n}  // namespace n::m\n"
    )
    hidden = ("n", "m", str(path))
    assert [(name, found.lines) for name, found in classes_of(path)] == [
        ((*hidden, "Outer"), 6),
        ((*hidden, "Outer", "Inner"), 3),
    ]
    assert list(members_of(path)) == [
        (hidden, ("Outer",), 5),
        (hidden, ("Outer",), 1),
        (hidden, ("Outer", "Inner"), 3),
        (hidden, ("Outer",), 1),
    ]


def test_long_classes_have_a_reason() -> None:
    classes = cpp_classes()
    assert len(classes) > 200
    none(
        [
            f"{found.path.relative_to(CSRC)}: {name[-1]} has {found.lines} lines"
            for name, found in classes.items()
            if found.lines > LONG_CLASS and "One class, for" not in found.comment
        ]
    )


def test_long_classes_of_python_have_a_reason() -> None:
    found, seen = [], 0
    for top in ("torch_c10d_ext", "benchmarks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ClassDef):
                    continue
                seen += 1
                lines = (node.end_lineno or 0) - node.lineno + 1
                reason = "One class, for" in (ast.get_docstring(node) or "")
                if lines > LONG_CLASS and not reason:
                    found.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert seen > 50
    none(found)


def test_the_checker_shares_no_code_with_what_it_checks() -> None:
    folder = ROOT / "torch_c10d_ext" / "optimizer" / "_checker"
    inside = "torch_c10d_ext.optimizer._checker"
    names = [
        name
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    ]
    assert any(name.startswith(inside) for name in names)
    none([n for n in names if n.startswith(("torch_c10d_ext", ".")) and not n.startswith(inside)])


def who_derives_from(base: str) -> list[str]:
    """The files of csrc with a class that does so directly."""
    derives = re.compile(rf"^class \S+(?: final)? : public {base}\b", re.MULTILINE)
    return [
        str(path.relative_to(CSRC))
        for folder in LAYERS
        for path in sources_of(folder)
        if derives.search(path.read_text())
    ]


def test_works_of_ours_are_request_works() -> None:
    """State, error, future, timing and the wait are written once, in work/request_work.h."""
    assert who_derives_from("c10d::Work") == ["work/request_work.h"]


def test_methods_of_c10d_are_overridden_in_one_folder() -> None:
    """For what users call in request_backend.h, for what moves its data in inner_backend.h."""
    assert who_derives_from("c10d::Backend") == [
        "backends/process_group/inner_backend.h",
        "backends/process_group/splittable_backend.h",
    ]


@pytest.mark.parametrize("stem", STEMS)
def test_schemas_are_variants_of_the_stem(stem: str) -> None:
    declared = schemas(ROOT / "csrc" / "ops" / f"{stem}.cpp")
    assert stem in declared
    assert set(declared) <= {stem + form for form in FORMS}
    assert len(declared) == len(set(declared))


def test_schemas_are_declared_in_ops_alone() -> None:
    elsewhere = [p for p in ROOT.glob("csrc/**/*.cpp") if p.parent.name != "ops" and schemas(p)]
    assert elsewhere == []


@pytest.mark.parametrize("stem", STEMS)
def test_every_op_has_every_kernel(stem: str) -> None:
    # CUDA too, in a build without CUDA: the kernels are host code.
    has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    for name in schemas(ROOT / "csrc" / "ops" / f"{stem}.cpp"):
        for key in ("CPU", "CUDA", "Meta", "AutogradCPU", "AutogradCUDA"):
            assert has_kernel(f"c10d_ext::{name}", key), f"{name} has no {key} kernel"


@pytest.mark.parametrize("stem", STEMS)
def test_functional_exports_the_collective(stem: str) -> None:
    module = importlib.import_module(f"torch_c10d_ext.ops.{stem}")
    public = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and value.__module__ == module.__name__
    }
    assert public, f"{module.__name__} has no user function"
    for name, function in public.items():
        assert getattr(functional, name, None) is function, f"functional does not export {name}"
        assert function.__doc__, f"{name} has no docstring"


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Dotted names under torch that a module imports or reaches for, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def test_torch_private_names_stay_in_their_files() -> None:
    private = re.compile(r"torch\.(?!ops\.)([\w.]+\.)?_[a-z]\w*(\.\w+)*|torch\._[A-Z]\w*(\.\w+)*")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in ROOT.glob("torch_c10d_ext/**/*.py")
        if path.name not in TOUCH_TORCH_PRIVATE
        for line, name in torch_names(ast.parse(path.read_text()))
        if private.fullmatch(name) and not name.startswith(MIRRORED)
    ]
    none(found)


def test_environment_variables_share_a_prefix() -> None:
    read = re.compile(r"""(?:getenv|environ\.get|get_env|environ\[)\W{0,2}["'](\w+)["']""")
    names = {
        name
        for top in ("csrc", "torch_c10d_ext")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".cpp", ".h", ".py")
        for name in read.findall(path.read_text())
    }
    assert {n for n in names if not n.startswith("TORCH_C10D_EXT_")} == set()


def test_files_hold_nothing_of_the_machine_they_were_written_on() -> None:
    place = re.compile(r"(?<![\w.])/(?:root|home|work|Users|mnt|opt)/\w+")
    found = []
    for path in repository_files():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if place.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    none(found)


def prose_of(markdown: str) -> Iterator[tuple[int, str]]:
    """The numbered lines that can be wrapped: no code, tables, generated blocks or lone links."""
    fenced = generated = False
    for number, line in enumerate(markdown.splitlines(), 1):
        text = line.strip()
        if text.startswith("<!--"):
            generated = "<!-- end" not in text
        elif text.startswith("```"):
            fenced = not fenced
        elif not (fenced or generated or text.startswith("|") or re.fullmatch(r"\S*\]\(.*", text)):
            yield number, line


def test_prose_leaves_out_what_cannot_be_wrapped() -> None:
    page = "a\n```\nb\n```\n| c |\n<!-- x -->\nd\n<!-- end of x -->\n[e](f)\ng"
    assert list(prose_of(page)) == [(1, "a"), (10, "g")]


def test_files_are_small_clean_text() -> None:
    wide = {".py", ".cpp", ".h", ".sh", ".toml", ".yaml"}
    found = []
    for path in repository_files():
        name = path.relative_to(ROOT)
        text = path.read_text(encoding="utf-8")
        if len(text) > 400_000:
            found.append(f"{name}: {len(text)} characters")
        if text and not text.endswith("\n"):
            found.append(f"{name}: no newline at the end")
        lines = list(enumerate(text.splitlines(), 1))
        prose = list(prose_of(text)) if path.suffix == ".md" else []
        for number, line in lines if path.suffix in wide else prose:
            if len(line) > 100:
                found.append(f"{name}:{number}: {len(line)} columns")
        for number, line in lines:
            if line != line.rstrip():
                found.append(f"{name}:{number}: space at the end")
            if "\t" in line and path.name != "Makefile":
                found.append(f"{name}:{number}: tab")
    none(found)


def test_version_is_the_same_everywhere() -> None:
    version = re.search(r'^VERSION = "(.*)"', (ROOT / "setup.py").read_text(), re.MULTILINE)
    assert version
    assert torch_c10d_ext.__version__ == version[1]
    releases = re.findall(r"^## \[(\d\S*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == version[1]


@pytest.mark.parametrize("stem", STEMS)
def test_changelog_names_every_collective(stem: str) -> None:
    assert f"`{stem}`" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("stem", STEMS)
def test_reports_know_the_bytes_of_every_collective(stem: str) -> None:
    assert stem in {*TRAFFIC, *SILENT, *WAITS}, f"torch_c10d_ext/ops/{stem}.py declares no row"
