"""The shuffle is a permutation, looks random, needs no memory, and never changes its mind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.train.data.samples import permute, shuffle_key


@settings(deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-5, 1 << 70), epoch=st.integers(0, 1000))
def test_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n, shuffle_key(seed, epoch))
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


@settings(deadline=None)
@given(n=st.integers(1, 1 << 62), index=st.integers(0, (1 << 62) - 1))
def test_serves_ranges_that_no_array_could_hold(n: int, index: int) -> None:
    index %= n
    (place,) = permute(np.array([index]), n, shuffle_key(0, 0))
    assert 0 <= place < n


def test_one_index_gives_what_the_array_gives() -> None:
    key = shuffle_key(3, 1)
    order = permute(np.arange(101), 101, key)
    assert [int(permute(np.array(i), 101, key)) for i in range(101)] == order.tolist()


def test_the_order_is_pinned() -> None:
    """These numbers are part of the checkpoint's contract: with others, a resumed run reads other samples."""
    assert permute(np.arange(12), 12, shuffle_key(0, 0)).tolist() == [10, 1, 0, 11, 9, 7, 5, 4, 8, 6, 3, 2]
    assert permute(np.arange(3), 10**9, shuffle_key(7, 2)).tolist() == [556703005, 964463174, 714235075]


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    n = 20_000
    orders = [permute(np.arange(n), n, shuffle_key(seed, epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    orders.append(np.arange(n))
    for first in range(4):
        for second in range(first):
            # Independent orders agree in one place on average; 1 / sqrt(n) is the spread of the correlation.
            assert (orders[first] == orders[second]).sum() < 12
            assert abs(np.corrcoef(orders[first], orders[second])[0, 1]) < 5 / np.sqrt(n)


def test_neighbours_are_torn_apart() -> None:
    """Steps between neighbours are spread like those of a random order: every tenth has its share."""
    n = 50_000
    order = permute(np.arange(n), n, shuffle_key(0, 0))
    steps = np.diff(order) % n
    share, _ = np.histogram(steps, bins=10, range=(0, n))
    assert np.abs(share / steps.size - 0.1).max() < 0.01


def test_every_order_of_four_occurs() -> None:
    orders = {tuple(permute(np.arange(4), 4, shuffle_key(seed, 0)).tolist()) for seed in range(600)}
    assert len(orders) == 24


@pytest.mark.parametrize("index", [-1, 5])
def test_refuses_what_is_outside(index: int) -> None:
    with pytest.raises(IndexError, match="at least 0 and below 5"):
        permute(np.array([0, index]), 5, shuffle_key(0, 0))
