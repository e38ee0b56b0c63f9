"""Every expert has one place, shares are even, and primaries even out over layers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moeclipse.balance.placement import Placement, even_bounds, primary_bounds


@given(st.integers(0, 40), st.integers(1, 12))
def test_even_bounds(total: int, parts: int) -> None:
    bounds = even_bounds(total, parts)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, total, parts)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_expert_has_one_place(num_experts: int, num_ranks: int) -> None:
    placement = Placement.contiguous(num_experts, num_ranks)
    assert sorted(e for experts in placement.slots for e in experts) == list(range(num_experts))
    flat = [e for experts in placement.slots for e in experts]
    for expert in range(num_experts):
        assert expert in placement.slots[placement.rank_of[expert]]
        assert flat[placement.slot_of[expert]] == expert


@given(st.integers(0, 9), st.integers(1, 5))
def test_primaries_even_out_over_layers(num_experts: int, num_replicas: int) -> None:
    owned = [0] * num_replicas
    for layer in range(num_replicas):
        bounds = primary_bounds(num_experts, num_replicas, layer)
        assert (bounds[0], bounds[-1]) == (0, num_experts)
        for replica in range(num_replicas):
            owned[replica] += bounds[replica + 1] - bounds[replica]
    assert set(owned) == {num_experts}
