"""Takes the stream rules out of csrc, one by one, and shows that a test fails without each.

    make mutate-cuda
    .venv-cuda/bin/python -m tests.simulated_cuda.mutate [numbers of mutants]

Every wait for a stream, event, use of memory that is told to the allocator, device guard,
question about captures and keep-alive is found by how it is written, and put under a switch: one
build serves all. The tests of streams, graphs and of what users do then run, on two ranks, with
one switch thrown. A mutant is killed when a test fails, or does not come to an end. Survivors are
listed, and the exit status is 1 when more than one in twenty survives. The fates are kept in
build/cuda/mutants/fates.json, and those that are known are not sought again.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.simulated_cuda import run as simulated

ROOT = simulated.ROOT
TREE = ROOT / "build" / "cuda" / "mutants"
# As deep below its sources as the package itself is: so ccache knows what has no rules.
PACKAGE = TREE / "build" / "cuda" / "lib"
HERE = simulated.HERE
# Of csrc. Backends of our own are the CPU's.
DIRECTORIES = ("base", "work", "backends/adapter", "collectives", "frontend", "ops")
LIMIT = 60.0  # seconds a test may take
MODULES = ("test_streams", "test_synchronous", "test_graphs", "test_users", "test_lowering")
DELAYS = ("late:1", "random:2")

# Statements that are left out. They begin their line.
STATEMENTS = (
    r"used_here\([^;{}]*\);",
    r"DeviceCompletions::get\(\)\.(?:add|add_written_here|follow)\([^;]*\);",
    r"(?:completion|found)->follow\(\);",
    r"event_\.(?:record|block)\([^;]*\);",
    r"keep_to_capture\(\);",
    r"order_\.(?:note_completion|follow_completion)\([^;]*\);",
    r"device_guard\.reset_device\([^;]*\);",
    r"own_stream\.emplace\([^;]*\);",
    r"complete_on_device\(\);",
    r"complete\(DeviceOrder::lost_capture\(\)\);",
    r"mode\.emplace\([^;]*\);",
    r"without_gil\(\[&\] \{ inner->wait\(timeout\); \}\);",
    r"work->(?:wait|complete_here)\(kNoTimeout\);",
)
# Expressions, and what stands in for them.
EXPRESSIONS = (
    (r"FunctionalCall::is_on\(\)(?= && !is_copied)", "false"),
    (r"(?<=has_device_work\(\) && )may_query_device\(\)", "true"),
    (r"(?<=!can_\.barrier_blocks_host \|\| )may_query_device\(\)", "true"),
    (r"(?<=is_cpu\(\) \|\| !)may_query_device\(\)", "true"),
    (r"(?<=are_many && )may_query_device\(\)", "true"),
    (r"DeviceCompletions::get\(\)\.contains\(storage\)", "false"),
    (r"DeviceCompletions::get\(\)\.contains_any\(outputs\)", "false"),
    (r"(?<=SyncScope::is_on\(\) && )!contains_any\(tensors\)", "true"),
    (r"(?<=if \()is_waited_for_at_once\(\)(?= && )", "false"),
    (r"(?<=!)is_read(?= \|\| source\.is_same)", "true"),
    (r"!work->is_lost_capture\(\)", "true"),
    (r"capture_on\(device_\) == capture_", "true"),
    (r"(?<=capture_ != 0 && )capture_on\(device_\) != capture_", "false"),
    (r"(?<=if \()capture_on\(device_\) != capture_", "false"),
    (r"(?<= )adapter\.keep\((?:[^()]|\(\))*\)", "Finish()"),
    (r"(?<=then\()adapter\.keep\((?:[^()]|\(\))*\)", "Finish()"),
    (r"adapter\.keep\(\w+\[i\]\[0\]\)", "Finish()"),
)
SWITCH = """#pragma once
#include <atomic>
// Written by tests/simulated_cuda/mutate.py.
inline std::atomic<int> chosen_mutant{-1};
inline bool is_mutant(int number) {
  return chosen_mutant == number;
}
extern "C" __attribute__((used, visibility("default"))) inline void c10d_ext_choose_mutant(int n) {
  chosen_mutant = n;
}
"""


@dataclass
class Mutant:
    number: int
    file: str
    line: int
    text: str


def mutated(source: str, file: str, mutants: list[Mutant]) -> str:
    """The source with all its rules under switches; adds them to the list."""

    def note(match: re.Match[str]) -> int:
        text = " ".join(match[0].split())
        mutants.append(Mutant(len(mutants), file, source.count("\n", 0, match.start()) + 1, text))
        return len(mutants) - 1

    statement = re.compile(rf"(?m)(?<=[ ])(?:{'|'.join(STATEMENTS)})")
    expressions = [(re.compile(pattern), instead) for pattern, instead in EXPRESSIONS]
    pieces = [(m, None) for m in statement.finditer(source) if _begins(source, m)]
    pieces += [(m, instead) for p, instead in expressions for m in p.finditer(source)]
    out, end = "", 0
    for match, instead in sorted(pieces, key=lambda piece: piece[0].start()):
        if match.start() < end or _in_comment(source, match):
            continue
        number = note(match)
        out += source[end : match.start()]
        if instead is None:
            out += f"if (!is_mutant({number})) {{ {match[0]} }}"
        else:
            out += f"(is_mutant({number}) ? ({instead}) : ({match[0]}))"
        end = match.end()
    return out + source[end:]


def _line_before(source: str, match: re.Match[str]) -> str:
    return source[source.rfind("\n", 0, match.start()) + 1 : match.start()]


def _begins(source: str, match: re.Match[str]) -> bool:
    before = _line_before(source, match)
    return before.strip() == "" or before.rstrip().endswith("{")


def _in_comment(source: str, match: re.Match[str]) -> bool:
    return "//" in _line_before(source, match)


def make_tree() -> list[Mutant]:
    """A copy of the source in which every rule has its switch."""
    mutants: list[Mutant] = []
    shutil.rmtree(TREE / "csrc", ignore_errors=True)
    TREE.mkdir(parents=True, exist_ok=True)
    for name in ("setup.py", "README.md", "pyproject.toml"):
        shutil.copy2(ROOT / name, TREE / name)
    shutil.copytree(
        ROOT / "torch_c10d_ext",
        TREE / "torch_c10d_ext",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "_built_with.py"),
    )
    shutil.copytree(ROOT / "csrc", TREE / "csrc")
    for path in sorted(p for d in DIRECTORIES for p in (TREE / "csrc" / d).rglob("*.[ch]*")):
        source = path.read_text()
        before = len(mutants)
        text = mutated(source, str(path.relative_to(TREE)), mutants)
        if len(mutants) > before:
            path.write_text('#include "mutant.h"\n' + text)
    (TREE / "csrc" / "mutant.h").write_text(SWITCH)
    return mutants


def _python_in_tree() -> Path:
    """This interpreter by a path that looks the same from the copy as from the source.

    So ccache finds that what has no rules is compiled already.
    """
    environment = Path(sys.prefix)
    link = TREE / environment.name
    if not link.exists():
        link.symlink_to(environment)
    return link / "bin" / Path(sys.executable).name


# --- the tests, in a process that runs over the simulation ---------------------------------------


def _tests() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every test of the modules with every set of its arguments, of plain sizes only two ranks."""
    for stem in MODULES:
        module = importlib.import_module(f"tests.simulated_cuda.{stem}")
        for name, test in vars(module).items():
            if not name.startswith("test_") or test.__module__ != module.__name__:
                continue
            marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
            for chosen in itertools.product(*(_choices(*mark.args) for mark in marks)):
                arguments = {name: value for choice in chosen for name, value in choice.items()}
                yield f"{stem}::{name}{arguments or ''}", _call(test, arguments)


def _choices(names: str | tuple[str, ...], values: Iterable[Any]) -> list[dict[str, Any]]:
    """What a parametrization gives a test."""
    several = isinstance(names, tuple)
    names = names if isinstance(names, tuple) else (names,)
    rows = [dict(zip(names, value if several else (value,), strict=True)) for value in values]
    return [{"size": 2}] if names == ("size",) else rows


def _call(test: Callable[..., None], arguments: dict[str, Any]) -> Callable[[], None]:
    return lambda: test(**arguments)


def choose_and_call(number: int, module: str, name: str, args: tuple[Any, ...]) -> Any:
    """On a worker."""
    from torch_c10d_ext import _C

    ctypes.CDLL(_C.__file__).c10d_ext_choose_mutant(number)
    return getattr(importlib.import_module(module), name)(*args)


def _with_mutant(number: int) -> None:
    """The tests' calls on workers throw the mutant's switch first."""
    from tests.harness import run
    from tests.simulated_cuda import on_cuda

    def run_mutated(size: int, fn: Any, *args: Any, deadline: float = LIMIT, **kwargs: Any) -> Any:
        call = (number, fn.__module__, fn.__qualname__, args)
        return run(size, choose_and_call, *call, deadline=min(deadline, LIMIT), **kwargs)

    vars(on_cuda)["run"] = run_mutated


def _killer(tests: list[tuple[str, Callable[[], None]]]) -> str:
    """The test that fails; it comes first from then on. Empty: none does."""
    from tests.harness import pool

    for position, (name, test) in enumerate(tests):
        try:
            test()
        except Exception as error:
            print(f"    {name}: {str(error)[-300:]}", file=sys.stderr, flush=True)
            tests.insert(0, tests.pop(position))
            pool.shutdown()  # whatever state they are in
            return name
    return ""


def inner(numbers: list[int], fates: Path) -> int:
    from tests.harness import pool

    tests = list(_tests())
    results: dict[str, dict[str, Any]] = json.loads(fates.read_text()) if fates.exists() else {}
    try:
        for number in [-1, *numbers]:
            if number == -1 and "-1" in results:
                continue  # without a mutant they passed
            began, killer = time.monotonic(), ""
            _with_mutant(number)
            for delays in DELAYS[:1] if number == -1 else DELAYS:
                if os.environ["SIMULATED_CUDA_DELAYS"] != delays:
                    pool.shutdown()
                    os.environ["SIMULATED_CUDA_DELAYS"] = delays
                killer = _killer(tests)
                if killer:
                    break
            seconds = time.monotonic() - began
            print(f"{number} {killer or 'survives'} ({seconds:.0f} s)", flush=True)
            if number == -1 and killer:
                raise SystemExit(f"{killer} fails without a mutant")
            results[str(number)] = {"killer": killer, "seconds": seconds}
            fates.write_text(json.dumps(results))
    finally:
        pool.shutdown()
    return 0


def main(arguments: list[str]) -> int:
    fates = TREE / "fates.json"
    if arguments[:1] == ["--inner"]:
        return inner([int(n) for n in arguments[1:]], fates)
    mutants = make_tree()
    simulated.build(TREE, PACKAGE, _python_in_tree())
    marked = json.dumps([asdict(m) for m in mutants])
    listing = TREE / "mutants.json"
    if not listing.exists() or listing.read_text() != marked:
        fates.unlink(missing_ok=True)
        listing.write_text(marked)
    known = json.loads(fates.read_text()) if fates.exists() else {}
    chosen = [int(n) for n in arguments] or [
        m.number for m in mutants if str(m.number) not in known
    ]
    if chosen:
        # The package under test is the built one, not the source tree's.
        launch = (
            f"import sys; sys.path.remove(''); sys.path.append({str(ROOT)!r})\n"
            "from tests.simulated_cuda import mutate; sys.exit(mutate.main(sys.argv[1:]))"
        )
        subprocess.run(
            [sys.executable, "-c", launch, "--inner", *map(str, chosen)],
            cwd=ROOT, env=simulated.environment(DELAYS[0], PACKAGE), check=True,
        )  # fmt: skip
    known = json.loads(fates.read_text())
    tried = [m for m in mutants if str(m.number) in known]
    survivors = [m for m in tried if not known[str(m.number)]["killer"]]
    for m in tried:
        killer = known[str(m.number)]["killer"] or "survived"
        print(f"{m.number:>3} {m.file}:{m.line}  {m.text}  <- {killer}")
    print(f"\n{len(tried) - len(survivors)} of {len(tried)} killed, of {len(mutants)}")
    for m in survivors:
        print(f"survived: {m.file}:{m.line}  {m.text}")
    return 1 if len(survivors) * 20 > len(tried) or len(tried) < len(mutants) else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
