"""docs/design.md shows what tools/draw_design.py draws of this tree."""

from __future__ import annotations

from pathlib import Path

from tests.test_layout import LAYERS
from tools import draw_design

ROOT = Path(__file__).resolve().parent.parent


def test_drawings_are_those_of_the_script() -> None:
    assert draw_design.main(["--check"]) == 0, "run tools/draw_design.py"


def test_page_shows_every_drawing() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    assert [name for name in draw_design.DRAWINGS if f"(design-{name}.svg)" not in page] == []


def test_every_layer_has_its_job_told() -> None:
    assert tuple(draw_design.JOBS) == LAYERS[::-1]
    assert draw_design.layers_of_the_tree() == list(LAYERS)
