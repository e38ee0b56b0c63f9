"""Planners lose no expert and respect slots; they balance what can be balanced and move only what pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import placements, zipf_counts

from moeclipse.balance.draft import Change, Draft
from moeclipse.balance.incremental import best_change, plan_incremental, search
from moeclipse.balance.nodes import plan_two_level
from moeclipse.balance.objective import PlacementCosts, nodes_of, score, sync_copies
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.planner import PlanConfig, expected_balance, plan
from moeclipse.balance.replicate import plan_greedy, plan_random, plan_wrap_fill, relabelled, slots_for
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.core.errors import ConfigError

COSTS = PlacementCosts.from_shapes(d_model=2048, d_ff=1408)
FREE = PlacementCosts(
    row_seconds=1.0,
    row_bytes=0,
    weight_bytes=0,
    gradient_bytes=0,
    state_bytes=0,
    near_bandwidth=1.0,
    far_bandwidth=1.0,
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, ...]]:
    """Counts [P, E] and slots that fit them; ranks without slots and idle experts included."""
    num_ranks, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    slots = draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks))
    while sum(min(count, num_experts) for count in slots) < num_experts:
        slots[slots.index(min(slots))] += 1
    numbers = st.integers(0, 10**6) | st.just(0)
    flat = draw(st.lists(numbers, min_size=num_ranks * num_experts, max_size=num_ranks * num_experts))
    return np.array(flat, dtype=np.int64).reshape(num_ranks, num_experts), tuple(slots)


def check_fits(placement: Placement, num_experts: int, slots_P: tuple[int, ...]) -> None:
    assert placement.num_experts == num_experts  # the record itself refuses lost experts and duplicates
    assert [len(row) for row in placement.slots] == list(slots_P)


@settings(deadline=None)
@given(problems(), st.integers(0, 99))
def test_clean_tables_fit(problem: tuple[np.ndarray, tuple[int, ...]], seed: int) -> None:
    counts_PE, slots_P = problem
    load_E = counts_PE.sum(0)
    for placement in (
        plan_random(len(load_E), slots_P, seed),
        plan_greedy(load_E, slots_P),
        plan_wrap_fill(load_E, slots_P),
    ):
        check_fits(placement, len(load_E), slots_P)
    nodes = [rank % 2 for rank in range(len(slots_P))]
    check_fits(plan_two_level(counts_PE, slots_P, nodes, noise=0.03), len(load_E), slots_P)


@settings(deadline=None, max_examples=50)
@given(problems(), st.sampled_from(["random", "greedy", "incremental", "wrap_fill"]), st.integers(0, 9))
def test_every_planner_goes_on_from_any_placement(
    problem: tuple[np.ndarray, tuple[int, ...]], planner: str, seed: int
) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    config = PlanConfig(planner=planner, seed=seed + 1)
    new = plan(
        config, counts_PE.astype(float), slots_P, current, COSTS, [r // 2 for r in range(len(slots_P))]
    )
    check_fits(new, counts_PE.shape[1], slots_P)
    assert new == plan(
        config, counts_PE.astype(float), slots_P, current, COSTS, [r // 2 for r in range(len(slots_P))]
    )
    wanted = {(e, p) for e, ranks in enumerate(new.holders) for p in ranks}
    held = {(e, p) for e, ranks in enumerate(current.holders) for p in ranks}
    moved = [move for move in current.moves(new) if move.weights]
    assert len(moved) == len(wanted - held)


@settings(deadline=None)
@given(problems(), st.integers(0, 8), st.integers(0, 9))
def test_incremental_keeps_its_budget(
    problem: tuple[np.ndarray, tuple[int, ...]], max_moves: int, seed: int
) -> None:
    counts_PE, slots_P = problem
    load_E = counts_PE.sum(0)
    current = plan_random(len(load_E), slots_P, seed)
    new = plan_incremental(load_E, current, FREE, max_moves=max_moves, noise=0.02)
    check_fits(new, len(load_E), slots_P)
    assert sum(move.weights for move in current.moves(new)) <= max_moves
    if new != current:
        assert expected_balance(new, load_E) > expected_balance(current, load_E) - 0.05


@pytest.mark.parametrize(
    ("shape", "least"), [((64, 8, 10), 0.999), ((256, 32, 10), 0.99), ((32, 16, 3), 0.97)]
)
def test_wrap_fill_balances_the_next_step(shape: tuple[int, int, int], least: float) -> None:
    num_experts, num_ranks, slots = shape
    rng = np.random.default_rng(0)
    weight = rng.permutation(np.arange(1, num_experts + 1) ** -1.2)
    seen, after = (rng.multinomial(32768, weight / weight.sum(), size=num_ranks) for _ in range(2))
    placement = plan_two_level(seen, (slots,) * num_ranks, [0] * num_ranks, noise=0.01)
    split = split_rows(after, ReplicaTable.of(placement, seen.sum(0)))
    assert split.balance >= least
    static = Placement.contiguous(num_experts, num_ranks)
    assert split_rows(after, ReplicaTable.of(static)).balance < 0.5


def test_nothing_moves_when_the_split_is_enough() -> None:
    """Loads that drift a little: replicas take it up, and the plan is the placement itself."""
    rng = np.random.default_rng(1)
    weight = np.arange(1, 65) ** -1.2
    counts_PE = rng.multinomial(32768, weight / weight.sum(), size=8)
    current = plan_greedy(counts_PE.sum(0), (10,) * 8)
    weight = weight * np.exp(rng.normal(0, 0.1, 64))
    drifted = rng.multinomial(32768, weight / weight.sum(), size=8).astype(float)
    assert plan(PlanConfig(), drifted, (10,) * 8, current, COSTS) is current


def test_a_dear_migration_is_not_made() -> None:
    load_E = np.array([900.0, 100.0, 100.0, 100.0])
    current = Placement.parse([[0, 1], [2, 3]])
    moved = plan_incremental(load_E, current, FREE, max_moves=4, slots_P=[3, 3])
    assert expected_balance(moved, load_E) > 0.95
    dear = PlacementCosts(
        row_seconds=1e-9,
        row_bytes=0,
        weight_bytes=1e9,
        gradient_bytes=0,
        state_bytes=1e10,
        near_bandwidth=1e9,
        far_bandwidth=1e9,
    )
    assert plan_incremental(load_E, current, dear, max_moves=4, slots_P=[3, 3]) is current


def test_few_moves_repair_a_drifted_placement() -> None:
    rng = np.random.default_rng(3)
    weight = rng.permutation(np.arange(1, 65) ** -1.2)
    load_E = weight / weight.sum() * 1e6
    current = plan_wrap_fill(load_E, (5,) * 16)
    drifted = load_E * np.exp(rng.normal(0, 0.4, 64))
    new = plan_incremental(drifted, current, FREE, max_moves=8)
    moves = [move for move in current.moves(new) if move.weights]
    assert 0 < len(moves) <= 8
    assert expected_balance(new, drifted) > expected_balance(current, drifted) + 0.03


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
    assert search(draft, 0) == []


def test_relabelling_moves_less() -> None:
    counts_PE = zipf_counts(16, 64, 1.2)
    old = plan_wrap_fill(counts_PE.sum(0), (6,) * 16)
    shuffled = Placement(tuple(old.slots[(p * 5) % 16] for p in range(16)))
    assert len(old.moves(shuffled)) > 50
    again = relabelled(shuffled, old)
    assert not [move for move in old.moves(again) if move.weights]


def test_two_levels_keep_rows_on_their_node() -> None:
    rng = np.random.default_rng(0)
    weight = np.arange(1, 33) ** -1.5
    counts_PE = rng.multinomial(8192, weight / weight.sum(), size=16)
    nodes = nodes_of(16, 2)
    two, flat = (
        score(plan_two_level(counts_PE, (4,) * 16, node_P), counts_PE, COSTS, node_P=nodes)
        for node_P in (nodes, (0,) * 16)
    )
    assert two.balance > 0.97
    assert two.cross_share < 0.15
    assert two.cross_share < flat.cross_share / 1.5


def test_optimizer_state_must_pay_for_its_journey() -> None:
    """Two experts that change places take master weights and moments along: six times their weights."""
    current, load_E = Placement.contiguous(4, 2), np.array([10.0, 10.0, 1.0, 1.0])
    assert replace(FREE, weight_bytes=2.0, state_bytes=12.0).move_seconds(3, 2) == 3 * 2 + 2 * 12
    assert plan_incremental(load_E, current, FREE, max_moves=4) != current
    dear = replace(FREE, state_bytes=1e6)
    assert plan_incremental(load_E, current, dear, max_moves=4) is current
    patient = replace(dear, every=10**7)
    assert plan_incremental(load_E, current, patient, max_moves=4) != current


def test_on_a_shared_wire_a_rank_has_its_part_of_all_rows() -> None:
    counts_PE = np.array([[5, 7], [3, 9]])
    costs = replace(FREE, row_bytes=2.0, near_bandwidth=10.0)
    placement = Placement.contiguous(2, 2)
    assert score(placement, counts_PE, costs).near == pytest.approx(4 * 2 * 7 / 10)
    shared = replace(costs, shared_wire=True)
    assert score(placement, counts_PE, shared).near == pytest.approx(4 * 2 * (7 + 3) / 2 / 10)


def test_the_score_adds_up() -> None:
    current = Placement.contiguous(4, 2)
    new = Placement.parse([[0, 1, 2], [2, 3, 0]]).arranged_like(current)
    counts_PE = np.array([[10, 0, 0, 0], [10, 0, 0, 20]])
    costs = PlacementCosts(
        row_seconds=1.0,
        row_bytes=2.0,
        weight_bytes=10.0,
        gradient_bytes=20.0,
        state_bytes=60.0,
        near_bandwidth=10.0,
        far_bandwidth=4.0,
        every=5,
    )
    found = score(new, counts_PE, costs, current=current, node_P=[0, 1])
    assert found.fullest == 20  # expert 0 is poured so that both ranks have 20 rows
    assert found.cross == 4 * 2.0 * 10 / 4.0  # 10 rows of rank 1 go to rank 0
    assert (found.moves, found.states) == (2, 0)
    assert found.migration == pytest.approx(2 * 10.0 / 4.0 / 5)
    assert sync_copies(new) == 1
    assert found.sync == pytest.approx(30.0 / 4.0)
    assert found.total == found.fullest + found.cross + found.sync + found.migration
    assert (found.balance, found.cross_share) == (1.0, 0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: slots_for(9, 2, 4), r"9 experts do not fit into 8 slots \(2 ranks\); .* at least 5 slots"),
        (lambda: slots_for(4, 2, [4]), "slots are given for 1 ranks, but there are 2"),
        (lambda: slots_for(1, 2, [2, -1]), r"slots \(-1\) must not be negative"),
        (lambda: nodes_of(6, 4), r"nodes \(4\) must divide ranks \(6\); choose one of 1, 2, 3, 6"),
        (lambda: PlanConfig(planner="best"), "planner 'best' is unknown; choose one of random, greedy"),
        (lambda: PlanConfig(max_moved=2, noise=-1), "2 problems"),
        (
            lambda: plan(PlanConfig(), np.ones((2, 4)), (1, 3), Placement.contiguous(4, 2), COSTS),
            "rank 0 has 2 slots now, but only 1 in the plan; give it 2",
        ),
        (
            lambda: plan(PlanConfig(), np.ones((2, 5)), (2, 2), Placement.contiguous(4, 2), COSTS),
            r"counts are \[2, 5\] .* the current placement has 2 ranks and 4 experts",
        ),
        (lambda: PlacementCosts.from_shapes(d_model=8, d_ff=8, every=0), r"every \(0\) must be positive"),
    ],
)
def test_bad_questions_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.full
@settings(deadline=None, max_examples=500)
@given(problems(), st.integers(0, 1000))
def test_many_random_replacements(problem: tuple[np.ndarray, tuple[int, ...]], seed: int) -> None:
    counts_PE, slots_P = problem
    current = plan_random(counts_PE.shape[1], slots_P, seed)
    for planner in ("incremental", "wrap_fill", "greedy", "random"):
        config = PlanConfig(planner=planner, seed=seed)
        current = plan(config, counts_PE.astype(float), slots_P, current, COSTS)
        check_fits(current, counts_PE.shape[1], slots_P)
