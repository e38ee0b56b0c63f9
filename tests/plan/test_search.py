"""The chosen exchange order: never slower than what it was chosen from, near the bound, same on all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.plan import search
from moeclipse.plan.search import candidate_orders, choose_exchange
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.smart import backward_of, end_units, exchange_shape, natural_units, smart
from moeclipse.sim.exchange import Counts, lower_bound, simulate_exchange
from moeclipse.sim.measure import compute_intervals


def equal_costs(
    tokens: int, *, near: float = 1.0, latency: float = 0.0, launch: float = 0.0
) -> ExchangeCosts:
    """Compute of a rank takes as long as its two exchanges over far links."""
    row_bytes, far = 4096.0, 25e9
    return ExchangeCosts(
        row_bytes=row_bytes,
        near_bandwidth=near * far,
        far_bandwidth=far,
        row_seconds=2 * row_bytes / far,
        latency=latency,
        kernel=latency,
        launch=launch,
    )


def even(P: int, experts: int, tokens: int) -> np.ndarray:
    return np.full((P, P * experts), tokens // (P * experts))


def skewed(P: int, experts: int, tokens: int, s: float = 1.2, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    load = 1 / np.arange(1, P * experts + 1) ** s
    return np.array([rng.multinomial(tokens, load / load.sum()) for _ in range(P)])


@pytest.mark.parametrize("backward", [False, True])
def test_sixty_four_ranks_come_near_the_bound_and_blocking_does_not(backward: bool) -> None:
    counts = even(64, 1, 65536)
    costs = equal_costs(65536, latency=10e-6)
    shape = exchange_shape(64, group_size=8, backward=backward)
    choice = choose_exchange(shape, counts, costs, chunks=(1, 2), swaps=0)
    bound = lower_bound(smart(shape), counts, costs)
    assert choice.seconds <= 1.1 * bound
    blocking = simulate_exchange(
        smart(exchange_shape(64, group_size=8, blocking=True, backward=backward)), counts, costs
    )
    # Backward has three products per row against two exchanges, so its blocking order loses less.
    assert blocking.makespan >= (1.4 if backward else 1.8) * bound


@pytest.mark.parametrize(("P", "chunks"), [(2, 2), (4, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("ratio", [0.5, 0.8, 1.0, 1.25, 2.0])
def test_backward_reaches_the_bound(P: int, chunks: int, ratio: float) -> None:
    """Weight gradients of own rows fill the wait for the first rows, which else costs up to an eighth."""
    counts, seconds = np.full((P, P), 1024 // P), 1e-6
    bandwidth = (P - 1) / P / (ratio * seconds)
    costs = ExchangeCosts(
        row_bytes=1.0, near_bandwidth=bandwidth, far_bandwidth=bandwidth, row_seconds=seconds
    )
    shape = exchange_shape(P, chunks=chunks, units=end_units(P, chunks))
    bound = max(2 * 1024 * seconds, 2 * 1024 * ratio * seconds)
    early = simulate_exchange(smart(backward_of(shape)), counts, costs).makespan
    late = simulate_exchange(smart(backward_of(shape, own_weights=0)), counts, costs).makespan
    assert early <= bound * 1.0001
    assert late >= 0.9999 * early
    assert ratio != 1.0 or late >= 1.05 * bound


def exposed_ends(verified: Verified, counts: Counts, costs: ExchangeCosts) -> tuple[float, float]:
    """Seconds before the first C and after the last C of the rank that computes most."""
    result = simulate_exchange(verified, counts, costs)
    busiest: tuple[float, float, float] = (-1.0, 0.0, 0.0)
    for rank in range(result.program.num_ranks):
        start, finish = compute_intervals(result, rank)
        work = float((finish - start).sum())
        busiest = max(busiest, (work, float(start.min()), result.makespan - float(finish.max())))
    return busiest[1], busiest[2]


def test_own_group_at_both_ends_wins_where_near_links_are_faster() -> None:
    counts, costs = even(16, 2, 8192), equal_costs(8192, near=8.0, latency=5e-6)
    choice = choose_exchange(exchange_shape(16, group_size=4, experts_per_rank=2), counts, costs, swaps=0)
    assert choice.rule == "ends"
    assert choice.shape.units[0][0] == choice.shape.units[-1][0] == 0
    assert choice.seconds < min(spent for rule, spent in choice.tried.items() if rule.startswith("ring"))
    assert choice.tried["ends/1"] < choice.tried["ring/1"], "halving the own rows alone pays already"
    first, last = exposed_ends(choice.verified, counts, costs)
    shape = exchange_shape(16, group_size=4, experts_per_rank=2)
    assert first + last < sum(exposed_ends(verify(smart(shape)), counts, costs))


def test_the_choice_is_the_best_tried_and_search_only_improves() -> None:
    counts, costs = skewed(12, 1, 4096), equal_costs(4096)
    shape = exchange_shape(12, group_size=5)
    choice = choose_exchange(shape, counts, costs, chunks=(1, 2, 4))
    assert choice.seconds == pytest.approx(min(choice.tried.values()))
    assert choice.bound <= choice.seconds
    searched = [spent for rule, spent in choice.tried.items() if rule.startswith("search")]
    assert searched == [choice.seconds]
    assert choice.rule == "search"  # ragged groups and skew: swaps find more than any rule
    plain = choose_exchange(shape, counts, costs, chunks=(1, 2, 4), swaps=0)
    assert choice.seconds <= plain.seconds


def test_chunks_stop_paying_when_ops_have_a_price() -> None:
    counts = even(8, 1, 512)
    cheap = choose_exchange(exchange_shape(8, group_size=2), counts, equal_costs(512), swaps=0)
    dear = choose_exchange(exchange_shape(8, group_size=2), counts, equal_costs(512, latency=1e-4), swaps=0)
    assert cheap.shape.chunks > dear.shape.chunks == 1


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 7), st.integers(1, 4), st.integers(1, 2))
def test_every_rank_would_choose_alike(seed: int, P: int, size: int, experts: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 50, (P, P * experts))
    costs = equal_costs(50, near=4.0)
    shape = exchange_shape(P, group_size=size, experts_per_rank=experts)
    one, other = (choose_exchange(shape, counts.copy(), costs, chunks=(1, 2), swaps=5) for _ in range(2))
    assert one.shape == other.shape
    shape = one.shape
    assert sorted(shape.units) == list(natural_units(shape.num_steps, shape.chunks, shape.own_chunks))


def test_johnson_puts_the_short_way_in_first_and_the_short_way_out_last() -> None:
    shape = exchange_shape(4)
    counts = np.zeros((4, 4))
    for rank in range(4):
        for step, rows in enumerate((40, 10, 30, 20)):
            counts[rank, (rank + step) % 4] = rows
    costs = equal_costs(100)
    units = candidate_orders(shape, counts, costs)["johnson"]
    # S and R of a unit are alike, so the rule orders by falling C + R. C is two per row, R one, and own rows
    # (step 0) do not travel: 80, 30, 90, 60.
    assert [step for step, _ in units] == [2, 0, 3, 1]


@pytest.mark.parametrize("tokens", [2048, 65536])
@pytest.mark.parametrize("experts", [2, 8])
@pytest.mark.parametrize("skew", [False, True])
def test_events_per_step_beat_events_per_step_and_expert(tokens: int, experts: int, skew: bool) -> None:
    """Chunks cut as finely as pays; experts cut as finely as there are experts, and each op has its price."""
    P = 8
    counts = skewed(P, experts, tokens, 1.0) if skew else even(P, experts, tokens)
    costs = equal_costs(tokens, near=4.0, latency=1e-5, launch=5e-6)
    shape = exchange_shape(P, group_size=2, experts_per_rank=experts)
    chosen = choose_exchange(shape, counts, costs, swaps=0)
    fine = smart(exchange_shape(P, group_size=2, experts_per_rank=experts, per_expert=True))
    assert fine.num_ops == experts * smart(shape).num_ops
    assert chosen.seconds < simulate_exchange(fine, counts, costs).makespan


def test_bad_input_is_refused() -> None:
    shape, costs = exchange_shape(4), equal_costs(64)
    with pytest.raises(ScheduleError, match=r"counts have shape \(4, 3\), expected 4 ranks x 4 experts"):
        choose_exchange(shape, np.zeros((4, 3)), costs)
    with pytest.raises(ScheduleError, match="must not be negative"):
        choose_exchange(shape, np.full((4, 4), -1), costs)
    for chunks in ((), (1, 0)):
        with pytest.raises(ScheduleError, match="must list numbers of at least 1"):
            choose_exchange(shape, np.zeros((4, 4)), costs, chunks=chunks)


def test_no_rows_at_all() -> None:
    choice = choose_exchange(exchange_shape(4), np.zeros((4, 4)), equal_costs(1), swaps=3)
    assert choice.seconds == 0.0


def test_where_all_orders_are_alike_the_plainest_is_taken() -> None:
    choice = choose_exchange(exchange_shape(4), np.zeros((4, 4)), equal_costs(1), swaps=3)
    assert choice.rule == "ring", "a search that found nothing is not what was chosen"
    assert choice.shape.chunks == 1, "and no op is cut for nothing"


def test_swaps_are_the_same_on_every_rank() -> None:
    """Of eighteen pairs six are tried; drawn anew, they lead to another order each time."""
    counts = np.random.default_rng(1).integers(0, 400, (10, 10))
    costs, shape = equal_costs(4096), exchange_shape(10)
    chosen = [choose_exchange(shape, counts, costs, chunks=(1,), swaps=6) for _ in range(3)]
    assert chosen[0].rule == "search"
    assert {(one.shape.units, one.seconds) for one in chosen} == {(chosen[0].shape.units, chosen[0].seconds)}


def test_johnson_asks_the_busiest_rank_of_each_unit() -> None:
    counts = np.ones((4, 4))
    counts[0] = 40, 10, 30, 20
    units = candidate_orders(exchange_shape(4), counts, equal_costs(100))["johnson"]
    assert [step for step, _ in units] == [2, 0, 3, 1], "rank 3 alone would say 3, 1, 2, 0"


def test_the_bound_is_that_of_the_busiest_lane() -> None:
    counts, costs, shape = skewed(4, 1, 256), equal_costs(256, latency=1e-6), exchange_shape(4)
    choice = choose_exchange(shape, counts, costs, chunks=(1,), swaps=0)
    assert choice.bound == lower_bound(choice.verified.program, counts, costs) < choice.seconds


def test_no_more_swaps_are_tried_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, really = [], search.simulate_exchange
    monkeypatch.setattr(search, "simulate_exchange", lambda *given: (tried.append(given), really(*given))[1])
    numbers = []
    for swaps in (0, 3):
        tried.clear()
        choose_exchange(exchange_shape(6), skewed(6, 1, 256), equal_costs(256), chunks=(1,), swaps=swaps)
        numbers.append(len(tried))
    assert numbers[1] == numbers[0] + 3
