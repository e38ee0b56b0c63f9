"""Even shares: they cover the whole, differ by one at most, and the larger ones come first."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moeclipse.core.shares import bounds_of_all, even_bounds


def test_the_first_shares_are_larger() -> None:
    assert even_bounds(10, 4) == [0, 3, 6, 8, 10]
    assert even_bounds(2, 4) == [0, 1, 2, 2, 2]
    assert even_bounds(0, 3) == [0, 0, 0, 0]
    assert bounds_of_all([10, 7], [4, 1]) == [[0, 3, 6, 8, 10], [0, 7]]


@given(st.integers(0, 10**12), st.integers(1, 300))
def test_shares_cover_the_whole_and_are_even(total: int, parts: int) -> None:
    bounds = even_bounds(total, parts)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, total, parts)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
