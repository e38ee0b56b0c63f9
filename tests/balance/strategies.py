"""Random placements and count matrices for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from moeclipse.balance.placement import EMPTY, Placement


@st.composite
def placements(draw: st.DrawFn, num_experts: int | None = None, num_ranks: int | None = None) -> Placement:
    """Any legal placement: idle ranks, empty slots, one expert everywhere, fewer experts than ranks."""
    num_experts = num_experts or draw(st.integers(1, 9))
    num_ranks = num_ranks or draw(st.integers(1, 7))
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    primary = []
    for expert in range(num_experts):
        ranks = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks))
        for rank in ranks:
            rows[rank].append(expert)
        primary.append(draw(st.sampled_from(sorted(ranks))))
    for row in rows:
        for _ in range(draw(st.integers(0, 2))):
            row.insert(draw(st.integers(0, len(row))), EMPTY)
    return Placement(tuple(map(tuple, rows)), tuple(primary))


@st.composite
def counts_for(draw: st.DrawFn, placement: Placement) -> np.ndarray:
    """Rows of each source rank for each expert: zeros, small and huge numbers."""
    size = placement.num_ranks * placement.num_experts
    number = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 10**7))
    flat = draw(st.lists(number, min_size=size, max_size=size))
    return np.array(flat, dtype=np.int64).reshape(placement.num_ranks, placement.num_experts)


def zipf_counts(
    num_ranks: int, num_experts: int, exponent: float, tokens: int = 8192, seed: int = 0
) -> np.ndarray:
    """Counts [P, E] of a gate whose experts are chosen with Zipf frequencies, in random order."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_experts + 1) ** -exponent
    weights = rng.permutation(weights / weights.sum())
    return rng.multinomial(tokens, weights, size=num_ranks)
