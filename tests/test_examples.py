"""Every example runs with the command its docstring gives and prints what its docstring promises.

The examples run as a user runs them: in processes of their own, under torchrun.
"""

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    "all_reduce",
    "communication_of_a_big_run",
    "export_and_run",
    "mesh_groups",
    "uneven_all_to_all",
]


def docstring(name: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text()))
    assert text, f"examples/{name}.py has no docstring"
    return text


def documented_command(name: str) -> list[str]:
    """The indented command line of the docstring, run with this interpreter."""
    lines = docstring(name).replace("\\\n", " ").splitlines()
    (command,) = [line for line in lines if line.startswith("    python ")]
    return [sys.executable, *shlex.split(command)[1:]]


def documented_output(name: str) -> list[str]:
    """The indented lines after "Expected output"."""
    _, after = re.split(r"^Expected output.*:\n", docstring(name), maxsplit=1, flags=re.MULTILINE)
    return [line.strip() for line in after.splitlines() if line.startswith("    ")]


def run(command: list[str], seconds: float) -> str:
    """Return stdout; on failure or after the deadline end the whole process group and fail."""
    # A cached graph would hide a broken lowering; C++ kernels are still shared, keyed by content.
    caches = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **caches, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=10)
        pytest.fail(f"still running after {seconds} s:\n{out}\n{err[-4000:]}")
    assert process.returncode == 0, f"exit status {process.returncode}:\n{out}\n{err[-4000:]}"
    return out


@pytest.mark.parametrize("name", SCRIPTS)
def test_prints_what_its_docstring_says(name):
    out = run(documented_command(name), seconds=100)
    assert [line for line in out.splitlines() if line] == documented_output(name)


def test_every_example_is_tested():
    helpers = {"reporting"}
    found = {path.stem for path in (ROOT / "examples").glob("*.py")} - helpers
    assert found == {*SCRIPTS, "train_char_transformer"}


def test_training_on_a_mesh_of_two_by_two():
    """tp and dp together: losses fall and agree with eager and with the 1-rank reference."""
    command = documented_command("train_char_transformer")
    command[command.index("--nproc-per-node") + 1] = "4"
    out = run([*command, "--quick", "--steps", "40"], seconds=200)

    assert out.splitlines()[-1].strip() == "All checks passed"
    assert "4 = 2 dp x 2 tp" in out
    (spread,) = re.findall(r"largest spread (\S+),", out)
    assert float(spread) <= 1e-5
    ((before, after),) = re.findall(r"loss (\S+) -> (\S+),", out)
    assert float(after) < float(before) - 0.5

    # One layer: two gathers and two scatters forward, their adjoints backward, then the gradients.
    table = [line.split() for line in out.splitlines() if re.match(r" +(for|back)ward ", line)]
    assert sorted((row[0], row[1], row[-2]) for row in table) == [
        ("backward", "all_gather_into_tensor", "2"),
        ("backward", "all_reduce_coalesced", "1"),  # replicated weights, summed over tp
        ("backward", "all_reduce_coalesced", "1"),  # all weights, averaged over dp
        ("backward", "reduce_scatter_tensor", "2"),
        ("forward", "all_gather_into_tensor", "2"),
        ("forward", "all_reduce", "1"),  # the loss over tp
        ("forward", "all_reduce", "1"),  # the reported loss over dp
        ("forward", "reduce_scatter_tensor", "2"),
    ]
