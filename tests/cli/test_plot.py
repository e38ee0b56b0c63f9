"""A course of numbers in a few lines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.cli.plot import average_to, plot_lines, spread_to


def test_a_falling_line_in_stars() -> None:
    assert plot_lines([3.0, 2.0, 1.0], 12, 3, unicode=False) == [
        "  3.000 |** ",
        "        | **",
        "  1.000 |  *",
    ]
    assert plot_lines([3e9, 0.0], 11, 2, unicode=False) == ["  3e+09 |**", "  0.000 | *"]


def test_it_fills_its_width_as_values_come() -> None:
    half = plot_lines([4.0, 3.0, 2.0, 1.0], 49, 4, unicode=True, total=8)
    whole = plot_lines([4.0, 3.0, 2.0, 1.0] * 2, 49, 4, unicode=True, total=8)
    assert {len(line) for line in half} == {9 + 20}
    assert {len(line) for line in whole} == {49}
    assert plot_lines([2.0], 40, 4, unicode=True, total=1)[-1].startswith("  2.000 │")


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    (line,) = plot_lines([1.0, math.nan, 1.0], 12, 1, unicode=False)
    assert line == "  1.000 |* *"
    assert plot_lines([math.inf, math.nan], 12, 3, unicode=False) == []
    assert plot_lines([], 12, 3, unicode=True) == []


@given(
    st.lists(st.floats(allow_infinity=False) | st.just(math.nan), min_size=1, max_size=300),
    st.integers(10, 90),
    st.integers(1, 7),
    st.booleans(),
)
def test_it_never_leaves_its_room(values: list[float], width: int, height: int, unicode: bool) -> None:
    lines = plot_lines(values, width, height, unicode)
    if any(map(math.isfinite, average_to(values, width * 2))):
        assert len(lines) in (0, height)
    assert all(len(line) <= max(width, 10) for line in lines)
    assert unicode or all(line.isascii() for line in lines)


def test_points_lie_on_the_line_between() -> None:
    assert spread_to([1.0, 3.0], 5) == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert spread_to([1.0, 3.0], 2) == [1.0, 3.0]
    assert spread_to([1.0, 2.0, 3.0, 5.0], 2) == [1.5, 4.0]
    assert spread_to([7.0], 3) == [7.0]
    assert average_to([1.0], 3) == [1.0]
    assert spread_to([0.0, 1.0, 0.0], 5) == pytest.approx([0, 0.5, 1, 0.5, 0])


def test_no_line_goes_over_a_gap() -> None:
    top, middle, bottom = plot_lines([3.0, math.nan, 1.0], 12, 3, unicode=False)
    assert (top, middle, bottom) == ("  3.000 |*  ", "        |   ", "  1.000 |  *")
