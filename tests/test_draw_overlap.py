"""The picture of the README is what its script draws, and what it says is what the simulator found."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "draw_overlap.py"))


def test_the_picture_is_what_the_script_draws(script: dict[str, Any]) -> None:
    drawn = script["draw"]()
    assert drawn == (DOCS / "overlap.svg").read_text(), "run docs/draw_overlap.py"
    assert len(drawn.encode()) < 40_000


def test_it_stands_alone(script: dict[str, Any]) -> None:
    """GitHub shows no picture that loads something, and dark pages need colours of their own."""
    text = script["draw"]()
    ElementTree.fromstring(text)
    assert "href" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_rows_arrive_before_they_are_computed_and_return_afterwards(script: dict[str, Any]) -> None:
    for shape in (script["exchange_shape"](4, blocking=True), script["exchange_shape"](4)):
        result = script["times"](shape)
        blocks = {(block.what, block.step): block for block in script["blocks_of"](result)}
        for step in (1, 2, 3):
            came, here, goes = (blocks[what, step] for what in "SCR")
            assert came.finish <= here.start < here.finish <= goes.start
