"""Clean tables: they fit their tier, few replicas where those are dear, and ranks keep what they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import FREE, asked, check_fits, problems
from strategies import zipf_counts

from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import renamed, wrap_filled
from moeclipse.balance.replicate import plan_greedy, plan_random


@settings(deadline=None, max_examples=50)
@given(problems(), st.integers(0, 9))
def test_starts_fit_their_tier(problem: tuple[np.ndarray, tuple[int, ...]], seed: int) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    wanted = asked(counts_PE, slots_P, current)
    for tier in wanted.tiers:
        greedy = renamed(plan_greedy(wanted.load_E, tier), wanted)
        for placement in (wrap_filled(wanted, tier, spare=False), greedy):
            check_fits(placement, counts_PE.shape[1], tier)


def test_dear_replicas_are_few() -> None:
    counts_PE = zipf_counts(8, 32, 1.2)
    current = Placement.contiguous(32, 8)
    cheap = wrap_filled(asked(counts_PE, (6,) * 8, current), (6,) * 8, spare=False)
    dear = replace(FREE, gradient_bytes=1e5)
    few = wrap_filled(asked(counts_PE, (6,) * 8, current, dear), (6,) * 8, spare=False)
    assert few.num_replicas < cheap.num_replicas <= 32 + 8 - 1


def test_renamed_ranks_keep_their_slots() -> None:
    table = Placement.parse([[0, 1, 2], [3, 4]])
    current = Placement.parse([[3, 4], [0, 1, 2]])
    check_fits(renamed(table, asked(np.ones((2, 5)), (3, 3), current)), 5, (3, 2))
    swapped = Placement.parse([[2, 3], [0, 1]])
    found = renamed(Placement.parse([[0, 1], [2, 3]]), asked(np.ones((2, 4)), (2, 2), swapped))
    assert found.slots == swapped.slots, "nothing has to move"
