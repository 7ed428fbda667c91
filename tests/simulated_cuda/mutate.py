"""Takes the stream rules out of csrc, one by one, and shows that a test fails without each.

    make mutate-cuda

Every wait for a stream, event, use of memory that is told to the allocator, device guard, question
about captures and keep-alive is found by how it is written, and put under a switch that the
environment variable C10D_EXT_MUTANT throws: one build serves all. A mutant is killed when a test
fails, or does not come to an end. Survivors are listed, and the exit status is 1 when more than one
in twenty survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.simulated_cuda import run as simulated

ROOT = simulated.ROOT
TREE = ROOT / "build" / "cuda" / "mutants"
PACKAGE = TREE / "lib"
HERE = simulated.HERE
# Of csrc. Backends of our own are the CPU's.
DIRECTORIES = ("base", "work", "backends/adapter", "frontend", "ops")
LIMIT = 240.0  # seconds a run of the tests may take

# Statements that are left out. They begin their line.
STATEMENTS = (
    r"used_here\([^;{}]*\);",
    r"DeviceCompletions::get\(\)\.(?:add|follow)\([^;]*\);",
    r"(?:completion|found)->follow\(\);",
    r"event_\.(?:record|block)\([^;]*\);",
    r"(?:follow_completion|keep_to_capture|note_completion)\(\);",
    r"device_guard_\.reset_device\([^;]*\);",
    r"mode\.emplace\([^;]*\);",
    r"without_gil\(\[&\] \{ inner->wait\(timeout\); \}\);",
    r"work->wait\(kNoTimeout\);",
)
# Expressions, and what stands in for them.
EXPRESSIONS = (
    (r"FunctionalCall::is_on\(\)(?= && !is_copied)", "false"),
    (r"(?<=has_device_work\(\) && )may_query_device\(\)", "true"),
    (r"(?<=!can_\.barrier_blocks_host \|\| )may_query_device\(\)", "true"),
    (r"!work->is_lost_capture\(\)", "true"),
    (r"capture_on\(device_\) == capture_", "true"),
    (r"here == capture_", "true"),
    (r"(?<= )adapter\.keep\((?:[^()]|\(\))*\)", "Finish()"),
    (r"(?<=then\()adapter\.keep\((?:[^()]|\(\))*\)", "Finish()"),
    (r"adapter\.keep\(\w+\[i\]\[0\]\)", "Finish()"),
)
SWITCH = """#pragma once
#include <cstdlib>
// Written by tests/simulated_cuda/mutate.py.
inline bool is_mutant(int number) {
  static const int chosen = [] {
    const char* text = std::getenv("C10D_EXT_MUTANT");
    return text == nullptr ? -1 : std::atoi(text);
  }();
  return chosen == number;
}
"""


@dataclass
class Mutant:
    number: int
    file: str
    line: int
    text: str
    fate: str = ""
    seconds: float = 0.0


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


def run_tests(delays: str, mutant: int, limit: float = LIMIT) -> str:
    """What the stream tests say: "passed", "failed" or "hung"."""
    environment = simulated.environment(delays, PACKAGE) | {"C10D_EXT_MUTANT": str(mutant)}
    selection = ["-k", "not [1] and not [4]", *simulated.STREAMS]
    command = [str(Path(sys.executable).parent / "pytest"), "-x", "-q", "--import-mode=append",
               "-p", "no:cacheprovider", *selection]  # fmt: skip
    log = TREE / f"{mutant}.log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(30)
            return "hung"
    if code > 1:
        raise SystemExit(f"pytest ended with {code}: see {log}")
    return "failed" if code else "passed"


def main() -> int:
    mutants = make_tree()
    simulated.build(TREE, PACKAGE)
    if run_tests("late:1", -1, 2 * LIMIT) != "passed":
        raise SystemExit("the tests fail without a mutant, see build/cuda/mutants/-1.log")
    chosen = {int(n) for n in sys.argv[1:]} or {m.number for m in mutants}
    for mutant in mutants:
        if mutant.number not in chosen:
            continue
        began = time.monotonic()
        fate = run_tests("late:1", mutant.number)
        if fate == "passed":
            fate = run_tests("random:2", mutant.number)
        mutant.fate, mutant.seconds = fate, time.monotonic() - began
        print(f"{mutant.number:>3} {mutant.fate:<7} {mutant.seconds:>4.0f} s  "
              f"{mutant.file}:{mutant.line}  {mutant.text}", flush=True)  # fmt: skip
    tried = [m for m in mutants if m.fate]
    survivors = [m for m in tried if m.fate == "passed"]
    print(f"\n{len(tried) - len(survivors)} of {len(tried)} killed")
    for mutant in survivors:
        print(f"survived: {mutant.file}:{mutant.line}  {mutant.text}")
    return 1 if len(survivors) * 20 > len(tried) else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
