"""Random numbers as a function of a key and a place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.ops.random import fill_normal, key_of, normal, uniform


def mix(x: int) -> int:
    """splitmix64's finaliser in plain integers."""
    mask = (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=5))
def test_uniform_equals_plain_integers(key: int, index: list[int]) -> None:
    expected = [((mix((i * 0x9E3779B97F4A7C15 + key) % 2**64) >> 11) + 0.5) * 2.0**-53 for i in index]
    assert uniform(key, torch.tensor(index)).tolist() == expected


def test_normal_numbers_are_normal() -> None:
    x = normal(key_of("test"), torch.arange(200_000))
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert abs((x < 1).double().mean() - 0.8413) < 0.005
    assert abs((x[:-1] * x[1:]).mean()) < 0.01, "neighbours are independent"


def test_filling_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fill_normal(torch.empty(30, 10), 7, 2.0)
    monkeypatch.setattr("moeclipse.ops.random.CHUNK", 37)
    assert torch.equal(fill_normal(torch.empty(30, 10), 7, 2.0), whole)
    assert key_of(1, "1") != key_of("1", 1)
