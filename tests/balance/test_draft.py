"""Changes of a placement in the making keep the books, and leave the draft before them alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import FREE
from strategies import counts_for, placements

from moeclipse.balance.draft import Change, Draft
from moeclipse.balance.incremental import best_change
from moeclipse.balance.migration import moved
from moeclipse.balance.objective import PlacementCosts, sync_copies
from moeclipse.balance.placement import Placement
from moeclipse.balance.problem import PlanProblem, fitted


def asked(
    placement: Placement, load_E: np.ndarray, more: int = 0, noise: float = 0.0
) -> tuple[Placement, PlanProblem]:
    """A problem with these loads from rank 0, and so many slots more than the placement has."""
    counts_PE = np.zeros((placement.num_ranks, placement.num_experts))
    counts_PE[0] = load_E
    problem = PlanProblem(
        counts_PE=counts_PE,
        slots_P=tuple(len(row) + more for row in placement.slots),
        current=placement,
        costs=replace(FREE, weight_bytes=1e-6, state_bytes=6e-6),
        noise=noise,
    )
    return problem.start, problem


@settings(deadline=None)
@given(st.data())
def test_changes_keep_the_books(data: st.DataObject) -> None:
    """After any change levels are the sum of shares, of futures too, and holders are who holds."""
    placement = data.draw(placements())
    load_E = np.array(
        data.draw(
            st.lists(st.integers(0, 1000), min_size=placement.num_experts, max_size=placement.num_experts)
        )
    )
    load_E[0] += not load_E.any()
    draft = Draft.of(*asked(placement, load_E, more=1, noise=0.1))
    assert len(draft.pools) > 1, "futures are poured, too"
    for _ in range(3):
        step, tries = best_change(draft, max_moves=2)
        assert tries >= (step is not None)
        if step is None:
            break
        draft, moves = step
        assert moves in (0, 1, 2)
        for expert, ranks in enumerate(draft.holders):
            assert list(ranks) == [p for p, row in enumerate(draft.slots) if expert in row]
            assert sum(draft.shares[expert]) == pytest.approx(load_E[expert])
        for pool in draft.pools:
            level = np.zeros(len(draft.slots))
            for load, ranks, mine in zip(pool.loads, draft.holders, pool.shares, strict=True):
                assert sum(mine) == pytest.approx(load)
                for rank, amount in zip(ranks, mine, strict=True):
                    level[rank] += amount
            assert np.allclose(level, pool.level)
    found = draft.placement()
    problem, moves = draft.problem, moved(placement, found)
    gets = [m.weights_in * problem.move_seconds + m.states_in * problem.state_seconds for m in moves]
    gives = [m.weights_out * problem.move_seconds + m.states_out * problem.state_seconds for m in moves]
    assert draft.books.gets == pytest.approx(gets)
    assert draft.books.gives == pytest.approx(gives)
    assert problem.costs.every * max(draft.migration) == pytest.approx(problem.costs.migration_seconds(moves))
    assert draft.copies == pytest.approx(sync_copies(found))
    assert draft.books.copied == pytest.approx(sum(m.weights_in for m in moves))


def test_exchanges_and_displacements_are_changes_too() -> None:
    placement = Placement.parse([[0, 1], [2, 3], [4, 0]])
    draft = Draft.of(*asked(placement, np.array([4.0, 1.0, 2.0, 3.0, 5.0])))
    exchanged = draft.changed(Change(put=1, target=1, slot=0, to_rank=0, to_slot=1))
    assert exchanged.slots == [[0, 2], [1, 3], [4, 0]]
    displaced = draft.changed(Change(put=4, target=1, slot=1, to_rank=2, to_slot=1))
    assert displaced.slots == [[0, 1], [2, 4], [4, 3]]
    assert displaced.holders == [(0,), (0,), (1,), (2,), (1, 2)]
    assert draft.slots == [[0, 1], [2, 3], [4, 0]]


@settings(deadline=None, max_examples=40)
@given(st.data(), st.booleans(), st.integers(1, 2), st.booleans())
def test_a_draft_costs_what_the_judge_says(
    data: st.DataObject, shared_wire: bool, nodes: int, card_per_rank: bool
) -> None:
    """Rows, wires, nodes, gradients and moves: the search goes down the seconds that plans are judged by."""
    placement = data.draw(placements())
    counts_PE = data.draw(counts_for(placement)) + 1000
    costs = PlacementCosts(
        row_seconds=1.0,
        row_bytes=0.5,
        weight_bytes=3000.0,
        gradient_bytes=2000.0,
        state_bytes=9000.0,
        near_bandwidth=2.0,
        far_bandwidth=1.0,
        card_per_rank=card_per_rank,
        shared_wire=shared_wire,
        every=5,
        copy_bandwidth=1.5,
    )
    current = data.draw(placements(placement.num_experts, placement.num_ranks))
    width = max(placement.max_slots, current.max_slots)
    problem = PlanProblem(
        counts_PE=counts_PE,
        slots_P=(width,) * placement.num_ranks,
        current=current,
        costs=costs,
        node_P=tuple(rank % nodes for rank in range(placement.num_ranks)),
    )
    draft = Draft.of(fitted(placement, problem.slots_P), problem)
    judged = problem.judge(draft.placement()).total
    # Loads are poured without a look at where rows come from, and inside nodes they are known by node only:
    # what travels is a guess. What does not is poured in the same way, and cut into whole rows.
    assert draft.seconds == pytest.approx(judged, rel=0.3)
    here = replace(problem, costs=replace(costs, row_bytes=0.0))
    at_rest = here.judge(draft.placement()).total
    assert Draft.of(fitted(placement, here.slots_P), here).seconds == pytest.approx(at_rest, rel=0.15)
    assert problem.bound <= judged * (1 + 1e-9)
    fixed = replace(problem, costs=replace(costs, replicas_seconds=700.0))
    more = 700.0 if any(len(ranks) > 1 for ranks in placement.holders) else 0.0
    assert fixed.judge(draft.placement()).total - judged == pytest.approx(more)
    assert Draft.of(fitted(placement, problem.slots_P), fixed).seconds - draft.seconds == pytest.approx(more)
