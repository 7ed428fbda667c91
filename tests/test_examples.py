"""Every example runs as its docstring says and prints what its docstring promises.

The examples run in processes of their own, with what torchrun gives them.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.harness.script import torchrun

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    "all_reduce",
    "communication_of_a_big_run",
    "export_and_run",
    "mesh_groups",
    "optimize_communication",
    "train_over_two_hosts",
    "uneven_all_to_all",
]
pytestmark = pytest.mark.long


def docstring(name: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / f"examples/{name}.py").read_text()))
    assert text, f"examples/{name}.py has no docstring"
    return text


def documented_command(name: str) -> tuple[int, list[str]]:
    """The number of ranks and the arguments in the indented command line of the docstring."""
    lines = docstring(name).replace("\\\n", " ").splitlines()
    (command,) = [line.split() for line in lines if line.startswith("    python ")]
    place = command.index(f"examples/{name}.py")
    launcher = "python -m torch.distributed.run --standalone --nproc-per-node"
    assert command[:place] in (["python"], [*launcher.split(), command[place - 1]])
    ranks = int(command[place - 1]) if place > 1 else 1
    return ranks, command[place + 1 :]


def documented_output(name: str) -> list[str]:
    """The indented lines after "Expected output"."""
    _, after = re.split(r"^Expected output.*:\n", docstring(name), maxsplit=1, flags=re.MULTILINE)
    return [line.strip() for line in after.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_prints_what_its_docstring_says(name):
    ranks, arguments = documented_command(name)
    out = torchrun(ranks, ROOT / f"examples/{name}.py", arguments, deadline=100)
    assert [line for line in out.splitlines() if line] == documented_output(name)


def test_the_optimizers_timelines_are_those_of_the_docs(tmp_path):
    torchrun(1, ROOT / "examples/optimize_communication.py", [str(tmp_path)], deadline=100)
    for name in ("optimizer-before.svg", "optimizer-after.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), name


def test_every_example_is_tested():
    helpers = {"reporting"}
    found = {path.stem for path in (ROOT / "examples").glob("*.py")} - helpers
    assert found == {*SCRIPTS, "train_char_transformer"}


def test_training_on_a_mesh_of_two_by_two():
    """tp and dp together: losses fall and agree with eager and with the 1-rank reference."""
    _, arguments = documented_command("train_char_transformer")
    script = ROOT / "examples/train_char_transformer.py"
    out = torchrun(4, script, [*arguments, "--quick", "--steps", "40"], deadline=200)

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
