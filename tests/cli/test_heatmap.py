"""The heat map of a terminal: shades follow the load, lines fit, and nothing depends on colour."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.cli.heatmap import ASCII_SHADES, MAX_LINES, SHADES, heat_lines


def test_shades_say_how_a_load_compares_with_the_mean() -> None:
    """Mean 1: below 1/4, below 3/4, around it, up to 4, above; each expert has three cells here."""
    loads = 7 * np.array([[0.0, 0.5, 1.0, 2.0, 6.0] + [0.1] * 5])
    (line,) = heat_lines(loads, 80, unicode=False)
    assert str(line) == "layer 0   " + "".join(shade * 3 for shade in ASCII_SHADES + " " * 5) + " max 6.0 x"
    (line,) = heat_lines(loads, 80, unicode=True)
    assert str(line)[10:25] == "".join(shade * 3 for shade in SHADES)


def test_where_experts_are_many_the_busiest_of_neighbours_counts() -> None:
    loads = np.ones((1, 512))
    loads[0, 300] = 30.0
    (line,) = heat_lines(loads, 60, unicode=False, layers=[7])
    drawn = str(line)[10:49]
    assert str(line).startswith("layer 7 ")
    assert drawn.count("@") == 1
    assert drawn.index("@") == 300 * 39 // 512


def test_of_many_layers_the_first_are_shown() -> None:
    lines = heat_lines(np.ones((MAX_LINES + 3, 4)), 80, unicode=True)
    assert len(lines) == MAX_LINES + 1
    assert str(lines[-1]) == "... and 3 more layers"


@given(st.integers(30, 200), st.integers(1, 400), st.booleans())
def test_lines_fit(room: int, experts: int, unicode: bool) -> None:
    loads = np.arange(experts, dtype=float)[None] * 7 % 11
    (line,) = heat_lines(loads, room, unicode)
    assert len(line) <= room


@pytest.mark.parametrize("unicode", [False, True])
def test_a_layer_that_nobody_visits(unicode: bool) -> None:
    (line,) = heat_lines(np.zeros((1, 4)), 40, unicode)
    assert str(line).strip() == "layer 0" + " " * 15 + " max 0.0 x"
