"""Changes of a placement in the making keep the books, and leave the draft before them alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import placements

from moeclipse.balance.draft import Change, Draft
from moeclipse.balance.incremental import best_change
from moeclipse.balance.placement import EMPTY, Placement


@settings(deadline=None)
@given(st.data())
def test_changes_keep_the_books(data: st.DataObject) -> None:
    """After any change levels are the sum of shares and reserves, and holders are who holds."""
    placement = data.draw(placements())
    load_E = np.array(
        data.draw(
            st.lists(st.integers(0, 1000), min_size=placement.num_experts, max_size=placement.num_experts)
        )
    )
    slots_P = [len(row) + 1 for row in placement.slots]
    draft = Draft.of(placement, slots_P, load_E, noise=0.1)
    for _ in range(3):
        step = best_change(draft, max_moves=2)
        if step is None:
            break
        draft, moves = step
        assert moves in (1, 2)
        for expert, ranks in enumerate(draft.holders):
            assert list(ranks) == [p for p, row in enumerate(draft.slots) if expert in row]
            assert sum(draft.shares[expert]) == pytest.approx(load_E[expert])
        level = np.array(draft.reserve)
        for ranks, mine in zip(draft.holders, draft.shares, strict=True):
            for rank, amount in zip(ranks, mine, strict=True):
                level[rank] += amount
        assert np.allclose(level, draft.level)
        alone = [[load_E[e] for e in row if e != EMPTY and len(draft.holders[e]) == 1] for row in draft.slots]
        assert np.allclose(draft.reserve, [0.1 * np.sqrt(np.sum(np.square(loads))) for loads in alone])
    draft.placement(placement)


def test_exchanges_and_displacements_are_changes_too() -> None:
    placement = Placement.parse([[0, 1], [2, 3], [4, 0]])
    draft = Draft.of(placement, [2, 2, 2], np.array([4.0, 1.0, 2.0, 3.0, 5.0]), 0.0)
    exchanged = draft.changed(Change(put=1, target=1, slot=0, to_rank=0, to_slot=1))
    assert exchanged.slots == [[0, 2], [1, 3], [4, 0]]
    displaced = draft.changed(Change(put=4, target=1, slot=1, to_rank=2, to_slot=1))
    assert displaced.slots == [[0, 1], [2, 4], [4, 3]]
    assert displaced.holders == [(0,), (0,), (1,), (2,), (1, 2)]
    assert draft.slots == [[0, 1], [2, 3], [4, 0]]
