"""Whichever planner is asked: every expert is placed, slots are kept to, bad questions are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import COSTS, FREE, asked, check_fits, problems
from strategies import zipf_counts

from moeclipse.balance.config import padded
from moeclipse.balance.draft import Change, Draft
from moeclipse.balance.objective import PlacementCosts, nodes_of
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import (
    FEW_TRIES,
    PLANNERS,
    ROUGH,
    Offers,
    PlanConfig,
    answer,
    expected_balance,
    plan,
    tries_for,
)
from moeclipse.balance.problem import PlanProblem, fitted
from moeclipse.balance.replicate import plan_greedy, plan_random
from moeclipse.core.errors import ConfigError


@settings(deadline=None, max_examples=settings.default.max_examples // 2)
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


def test_nothing_moves_when_the_split_is_enough() -> None:
    """Loads that drift a little: replicas take it up, and no expert is sent anywhere."""
    rng = np.random.default_rng(1)
    weight = np.arange(1, 65) ** -1.2
    counts_PE = rng.multinomial(32768, weight / weight.sum(), size=8)
    current = plan_greedy(counts_PE.sum(0), (10,) * 8)
    weight = weight * np.exp(rng.normal(0, 0.1, 64))
    drifted = rng.multinomial(32768, weight / weight.sum(), size=8).astype(float)
    found = plan(PlanConfig(), drifted, (10,) * 8, current, COSTS)
    assert not any(move.weights for move in current.moves(found))


def real_looking(num_experts: int, num_ranks: int, exponent: float, seed: int, tokens: int) -> np.ndarray:
    """Counts of a gate with Zipf loads whose ranks do not all send the same."""
    rng = np.random.default_rng(seed)
    weight = rng.permutation(np.arange(1, num_experts + 1) ** -exponent)
    weights = weight * np.exp(rng.normal(0, 0.2, (num_ranks, num_experts)))
    return np.stack([rng.multinomial(tokens, w / w.sum()) for w in weights]).astype(float)


COSTLY = replace(
    COSTS, gradient_bytes=COSTS.gradient_bytes / 50, weight_bytes=COSTS.weight_bytes / 50, far_bandwidth=1e10
)
ANY_MOVES = PlanConfig(min_gain=0.0, max_moved=1.0, noise=0.0, turnover=0.0)


@settings(deadline=None, max_examples=settings.default.max_examples // 3)
@given(
    st.integers(2, 6),
    st.integers(3, 14),
    st.floats(0.0, 2.0),
    st.integers(0, 99),
    st.sampled_from([64, 4096]),
    st.integers(1, 2),
    st.sampled_from([COSTS, COSTLY]),
)
def test_one_objective(
    num_ranks: int,
    num_experts: int,
    exponent: float,
    seed: int,
    tokens: int,
    nodes: int,
    costs: PlacementCosts,
) -> None:
    """More slots are never worse, and no plan is worse than greedy, than wrap-fill or than doing nothing."""
    counts_PE = real_looking(num_experts, num_ranks, exponent, seed, tokens)
    node_P = tuple(rank % nodes for rank in range(num_ranks))
    current, share = Placement.contiguous(num_experts, num_ranks), -(-num_experts // num_ranks)
    before = np.inf
    for slots in range(share, min(share + 3, num_experts + 1)):
        slots_P = (slots,) * num_ranks
        found = plan(ANY_MOVES, counts_PE, slots_P, current, costs, node_P)
        problem = PlanProblem(
            counts_PE=counts_PE, slots_P=slots_P, current=current, costs=costs, node_P=node_P
        )
        seconds = problem.judge(found).total
        assert seconds <= problem.judge(problem.start).total * (1 + 1e-9), "doing nothing"
        greedy = plan(PlanConfig(planner="greedy"), counts_PE, slots_P, current, costs, node_P)
        assert seconds <= problem.judge(greedy).total * (1 + 1e-9)
        assert seconds <= before * (1 + 1e-9), f"{slots} slots are worse than {slots - 1}"
        before = seconds


def milliseconds_by_slots(seed: int) -> list[float]:
    """What the plans of one random layer cost in a step, from the fewest slots to all experts everywhere."""
    rng = np.random.default_rng(seed)
    num_ranks, num_experts = int(rng.integers(2, 5)), int(rng.integers(2, 9))
    tokens, exponent, nodes = (
        int(rng.choice([64, 300, 4096])),
        float(rng.uniform(0, 2)),
        int(rng.integers(1, 3)),
    )
    costs = PlacementCosts.from_shapes(
        d_model=int(rng.choice([256, 2048])), d_ff=int(rng.choice([128, 1408])), links_per_node=nodes
    )
    counts_PE = real_looking(num_experts, num_ranks, exponent, seed, tokens)
    fewest = -(-num_experts // num_ranks)
    current = Placement.contiguous(num_experts, num_ranks)
    if rng.random() < 0.5:
        fewest = min(fewest + int(rng.integers(0, 2)), num_experts)
        current = plan_random(num_experts, (fewest,) * num_ranks, seed)
    config = PlanConfig() if rng.random() < 0.5 else ANY_MOVES
    config = replace(config, planner=str(rng.choice(["incremental", "auto"])))
    empty_slots, found = rng.random() < 0.5, []
    for slots in range(fewest, num_experts + 1):
        problem = PlanProblem(
            counts_PE=counts_PE,
            slots_P=(slots,) * num_ranks,
            current=padded(current, slots) if empty_slots else current,
            costs=costs,
            node_P=tuple(rank % nodes for rank in range(num_ranks)),
            noise=config.noise,
            turnover=config.turnover,
        )
        found.append(1e3 * problem.judge(answer(config, problem)).total)
    return found


def check_never_slower(by_slots: list[float]) -> None:
    for fewer, more in pairwise(by_slots):
        assert more <= fewer * (1 + 1e-9), by_slots


@pytest.mark.parametrize("seed", [30, 32, 47, 67])
def test_more_slots_never_make_a_plan_slower(seed: int) -> None:
    check_never_slower(milliseconds_by_slots(seed))


@pytest.mark.full
@settings(deadline=None, max_examples=100)
@given(st.integers(100, 10**6))
def test_more_slots_never_make_any_plan_slower(seed: int) -> None:
    check_never_slower(milliseconds_by_slots(seed))


@pytest.mark.parametrize(
    ("num_experts", "slots_P", "exponent", "most", "even"),
    [
        (256, (8,) * 32, 0.5, 1.0, 0.65),  # no slot to spare: experts change places
        (128, (9,) * 4 + (8,) * 12, 1.0, 1.0, 0.86),  # four to spare
        (32, (9,) * 16, 1.2, 1.0, 0.99),  # many, which greedy fills
        (32, (3,) * 16, 1.2, 1.0, 0.99),
    ],
)
def test_no_worse_than_greedy_where_it_once_was(
    num_experts: int, slots_P: tuple[int, ...], exponent: float, most: float, even: float
) -> None:
    """Seconds at most this part of greedy's, and ranks at least this even."""
    counts_PE = zipf_counts(len(slots_P), num_experts, exponent, tokens=32768).astype(float)
    current = Placement.contiguous(num_experts, len(slots_P))
    problem = PlanProblem(counts_PE=counts_PE, slots_P=slots_P, current=current, costs=COSTS)
    incremental, greedy = (
        problem.judge(plan(PlanConfig(planner=planner), counts_PE, slots_P, current, COSTS))
        for planner in ("incremental", "greedy")
    )
    assert incremental.total <= most * greedy.total
    assert incremental.balance >= even


@settings(deadline=None, max_examples=settings.default.max_examples // 3)
@given(
    st.integers(2, 6),
    st.integers(3, 14),
    st.floats(0.0, 2.0),
    st.integers(0, 99),
    st.floats(0.0, 0.5),
    st.sampled_from([COSTS, COSTLY]),
)
def test_what_moves_pays_for_itself(
    num_ranks: int, num_experts: int, exponent: float, seed: int, noise: float, costs: PlacementCosts
) -> None:
    """From any placement, for loads that may come: a plan wins `min_gain`, and each copy its part.

    Only where ranks are far from even may a plan move as much as it likes, and then it is the fastest.
    """
    counts_PE = real_looking(num_experts, num_ranks, exponent, seed, 4096)
    slots_P = (-(-num_experts // num_ranks) + 1,) * num_ranks
    current = plan_random(num_experts, slots_P, seed)
    config = PlanConfig(noise=noise)
    problem = PlanProblem(
        counts_PE=counts_PE,
        slots_P=slots_P,
        current=current,
        costs=costs,
        noise=noise,
        turnover=config.turnover,
    )
    found = answer(config, problem)
    if found is current:
        return
    now, then = problem.judge(current), problem.judge(found)
    assert then.total < (1 - config.min_gain) * now.total
    greedy = problem.judge(answer(PlanConfig(planner="greedy"), problem))
    price = then.total + problem.turnover_seconds * then.moves
    if now.balance < ROUGH:
        assert then.total <= greedy.total * (1 + 1e-9)
    else:
        assert price < (1 - config.min_gain) * now.total


def test_work_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries of a large table end where its time does."""
    tries = 0
    trial = Draft.trial

    def counted(draft: Draft, change: Change) -> Draft:
        nonlocal tries
        tries += 1
        return trial(draft, change)

    monkeypatch.setattr(Draft, "trial", counted)
    current, slots_P = Placement.contiguous(256, 64), (5,) * 64
    for turn in range(2):
        counts_PE = zipf_counts(64, 256, 1.2, tokens=32768).astype(float)
        counts_PE *= np.exp(np.random.default_rng(turn).normal(0, 0.1 * turn, 256))
        tries = 0
        found = plan(PlanConfig(), counts_PE, slots_P, current, COSTS)
        assert tries <= tries_for(slots_P, FEW_TRIES)
        moved = sum(move.weights for move in current.moves(found))
        assert turn == 0 or moved <= 0.05 * 320, "once it stands, few slots change"
        current = found
    assert tries > 0


def test_far_from_even_no_copy_is_too_many() -> None:
    """Copies that are far too dear are taken all the same where a yardstick is faster without them."""
    counts_PE = np.array([[900.0, 800.0, 10.0, 10.0], [900.0, 800.0, 10.0, 10.0]])
    current = Placement.contiguous(4, 2)
    even, config = Placement.parse([[0, 2], [1, 3]]), PlanConfig(turnover=10.0)
    problem = replace(asked(counts_PE, (2, 2), current, COSTS), turnover=config.turnover)
    for yardstick, chosen in ((False, current), (True, even)):
        offers = Offers(problem, config.min_gain)
        offers.offer(even, yardstick=yardstick)
        assert offers.table.slots == chosen.slots
    assert answer(config, problem) != current, "below this balance greedy is a yardstick"


def test_fewer_copies_do_not_make_up_for_a_slower_table() -> None:
    """Of one tier the cheaper table is chosen; against one of fewer slots it must be as fast, too."""
    counts_PE = np.array([[900.0, 800.0, 400.0, 10.0], [900.0, 800.0, 400.0, 10.0]])
    current = Placement.contiguous(4, 2)
    problem = replace(asked(counts_PE, (3, 3), current), turnover=1.0)
    slow, fast = Placement.parse([[0, 3], [1, 2]]), Placement.parse([[0, 2, 3], [1, 2, 3]])
    for tiers, chosen in ((1, slow), (2, fast)):
        offers = Offers(problem, 0.0)
        offers.offer(fast)
        if tiers == 2:
            offers.enter(problem)
        offers.offer(slow)
        assert offers.table.holders == chosen.holders


def test_even_loads_are_seen_to_be_even_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no placement can win enough, none is drafted: looking costs a judgement."""

    def drafted(*_: object) -> None:
        raise AssertionError("a search was begun")

    counts_PE = np.full((8, 32), 4096.0) + np.arange(32) % 3
    current = Placement.contiguous(32, 8)
    with monkeypatch.context() as spied:
        spied.setattr(Draft, "of", drafted)
        assert plan(PlanConfig(), counts_PE, (4,) * 8, current, COSTS) is current
        with pytest.raises(AssertionError, match="begun"):
            plan(PlanConfig(), counts_PE + 4096 * (np.arange(32) < 4), (4,) * 8, current, COSTS)


def test_slots_stay_empty_where_that_is_faster() -> None:
    """32 experts on 16 ranks, three slots and nine: what more replicas even out, their gradients cost."""
    counts_PE = zipf_counts(16, 32, 1.2, tokens=32768).astype(float)
    current = Placement.contiguous(32, 16)
    few, many = (plan(PlanConfig(), counts_PE, (slots,) * 16, current, COSTS) for slots in (3, 9))
    problem = PlanProblem(counts_PE=counts_PE, slots_P=(9,) * 16, current=current, costs=COSTS)
    assert problem.judge(many).total <= problem.judge(few).total * (1 + 1e-9)
    assert many.num_replicas < 9 * 16 * 2 / 3


def test_a_small_plan_can_move() -> None:
    """A twentieth of six slots is none, but two experts can always change places."""
    counts_PE = np.array([[900.0, 800.0, 10.0, 10.0], [900.0, 800.0, 10.0, 10.0]])
    current = Placement.contiguous(4, 2)
    found = plan(PlanConfig(), counts_PE, (2, 2), current, COSTS)
    assert expected_balance(found, counts_PE.sum(0)) > 0.9 > expected_balance(current, counts_PE.sum(0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.nan, "not finite"),
        (np.inf, "not finite"),
        (-1.0, r"negative numbers \(-1\)"),
        (0.0, "all zero"),
    ],
)
@pytest.mark.parametrize("planner", PLANNERS)
def test_loads_that_no_gate_has_are_refused(planner: str, wrong: float, message: str) -> None:
    counts_PE = np.zeros((2, 4)) if wrong == 0 else np.array([[1.0, 2, 3, wrong], [1, 2, 3, 4]])
    with pytest.raises(ConfigError, match=message):
        plan(PlanConfig(planner=planner), counts_PE, (3, 3), Placement.contiguous(4, 2), COSTS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PlanConfig(planner="best"), "planner 'best' is unknown; choose one of random, greedy"),
        (lambda: PlanConfig(max_moved=2, noise=-1), "2 problems"),
        (
            lambda: plan(PlanConfig(), np.ones((2, 4)), (1, 3), Placement.contiguous(4, 2), COSTS),
            "rank 0 has 2 slots now, but only 1 in the plan; give it 2",
        ),
        (
            lambda: plan(PlanConfig(), np.ones((2, 5)), (2, 2), Placement.contiguous(4, 2), COSTS),
            r"counts are \[2, 5\], but the current placement has 2 ranks and 4 experts",
        ),
    ],
)
def test_bad_questions_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


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


def over_nodes(experts: int, slots: int, exponent: float, nodes: int) -> PlanProblem:
    """64 ranks with experts in order, under Zipf's law."""
    rng = np.random.default_rng(0)
    weight_E = rng.permutation(np.arange(1, experts + 1) ** -exponent)
    counts_PE = rng.multinomial(32768, weight_E / weight_E.sum(), size=64)
    costs = PlacementCosts.from_shapes(d_model=2048, d_ff=1408, every=50)
    return PlanProblem(
        counts_PE=counts_PE,
        slots_P=(slots,) * 64,
        current=padded(Placement.contiguous(experts, 64), slots),
        costs=replace(costs, row_seconds=8 * costs.row_seconds, row_bytes=8 * costs.row_bytes),
        node_P=nodes_of(64, nodes),
        noise=0.02,
    )


def test_wrap_fill_stays_where_that_is_faster() -> None:
    problem = over_nodes(256, 5, 0.8, 8)
    even = answer(PlanConfig(planner="greedy"), problem)
    held = replace(problem, current=even)
    assert answer(PlanConfig(planner="wrap_fill"), held) is even
    assert answer(PlanConfig(planner="wrap_fill"), problem) is not problem.current


def test_rows_that_could_stay_are_looked_for_where_all_ranks_are_even() -> None:
    """Two ranks with the same rows, and room for six of eight: sets of ranks see nothing to do."""
    current = fitted(Placement.contiguous(4, 2), (3, 3))
    costs = replace(FREE, row_bytes=1.0, near_bandwidth=4.0, gradient_bytes=1e-3)
    found = plan(PlanConfig(noise=0.1), np.full((2, 4), 100), (3, 3), current, costs)
    problem = asked(np.full((2, 4), 100), (3, 3), current, costs)
    assert problem.judge(current).sent_share == 0.5
    assert problem.judge(found).sent_share == 0.25 == 1 - problem.could_stay


def test_where_replicas_are_dear_experts_just_move() -> None:
    """Two hot experts on slow cables, a cable for each rank: each expert once is faster than any replica."""
    counts_PE = np.full((4, 16), 20.0)
    counts_PE[:, [0, 10]] = 120.0
    costs = PlacementCosts(
        row_seconds=1e-5,
        row_bytes=400,
        weight_bytes=98304,
        gradient_bytes=98304,
        state_bytes=294912,
        near_bandwidth=7.5e6,
        far_bandwidth=7.5e6,
        card_per_rank=True,
        replicas_seconds=7e-3,
        every=10**6,
    )
    current = padded(Placement.contiguous(16, 4), 6)
    found = plan(PlanConfig(), counts_PE, (6,) * 4, current, costs, node_P=range(4))
    assert found.num_replicas == 16
    assert expected_balance(found, counts_PE.sum(0)) > 0.9
