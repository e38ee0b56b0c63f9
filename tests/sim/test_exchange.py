"""Durations of an exchange: who sends, receives and computes how many rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.schedule import kinds
from moeclipse.schedule.shape import Shadow
from moeclipse.schedule.smart import backward_of, exchange_shape, smart
from moeclipse.sim.exchange import exchange_durations, lower_bound, simulate_exchange


def test_near_links_carry_the_own_group_alone() -> None:
    """Groups of two: at step 0 one peer over the near link, then two over the far one, own rows nowhere."""
    costs = ExchangeCosts(
        row_bytes=10, near_bandwidth=100, far_bandwidth=10, row_seconds=0.5, latency=1, kernel=2
    )
    program = smart(exchange_shape(4, group_size=2))
    counts = [[7, 3, 2, 1]] * 4
    ops, seconds = program.ranks[0], exchange_durations(program, counts, costs)[0]
    spent = {str(op): value for op, value in zip(ops, seconds, strict=True)}
    assert spent["S_F@0"] == spent["R_F@0"] == pytest.approx(1 + 7 * 10 / 100)  # receives 7, sends 3
    assert spent["S_F@1"] == pytest.approx(1 + 14 * 10 / 10)  # receives 7 from each of two, sends 2 + 1
    assert spent["C_F@0"] == pytest.approx(2 + 14 * 0.5)


def test_a_group_of_several_hosts_uses_both_links() -> None:
    """One step around two hosts of two ranks: near rows and far rows one after the other."""
    costs = ExchangeCosts(
        row_bytes=10,
        near_bandwidth=100,
        far_bandwidth=10,
        row_seconds=0.5,
        latency=1,
        far_latency=3,
        hosts=(0, 0, 1, 1),
    )
    merged, cut = smart(exchange_shape(4, group_size=4)), smart(exchange_shape(4, group_size=2))
    first = [exchange_durations(program, [[7, 3, 2, 1]] * 4, costs)[0][0] for program in (merged, cut)]
    assert str(merged.ranks[0][0]) == str(cut.ranks[0][0]) == "S_F@0"
    assert first[0] == pytest.approx(3 + 7 * 10 / 100 + 14 * 10 / 10)
    assert first[1] == pytest.approx(1 + 7 * 10 / 100)
    with pytest.raises(ScheduleError, match="hosts of 4 ranks, but 2 exchange"):
        exchange_durations(smart(exchange_shape(2)), [[1, 1], [1, 1]], costs)


def test_rows_are_counted_once() -> None:
    """Over all steps: sent = received, and computed = what arrived and what stayed."""
    counts = np.random.default_rng(3).integers(0, 100, (6, 12))
    shape = exchange_shape(6, group_size=4, experts_per_rank=2, chunks=2)
    unit = ExchangeCosts(row_bytes=1, near_bandwidth=1, far_bandwidth=1, row_seconds=1)
    program = smart(shape)
    durations = exchange_durations(program, counts, unit)
    computed = [
        sum(d for op, d in zip(ops, seconds, strict=True) if op.kind is kinds.C_F)
        for ops, seconds in zip(program.ranks, durations, strict=True)
    ]
    assert sum(computed) == pytest.approx(counts.sum())
    assert computed == pytest.approx(counts.sum(0).reshape(6, 2).sum(1))


def test_shadows_keep_rows_where_they_are_and_pay_off_on_skew() -> None:
    P = 8
    counts = np.full((P, P), 150)
    counts[:, 0] = 3000
    others = tuple(range(1, P))
    costs = ExchangeCosts(
        row_bytes=4096,
        near_bandwidth=25e9,
        far_bandwidth=25e9,
        row_seconds=3e-7,
        expert_bytes=1e6,
        latency=5e-6,
    )
    totals = {}
    for shadows in ((), (Shadow(expert=0, owner=0, ranks=others),)):
        for backward in (False, True):
            shape = exchange_shape(P, group_size=2, shadows=shadows, backward=backward)
            totals[bool(shadows), backward] = simulate_exchange(smart(shape), counts, costs).makespan
    assert totals[True, False] < 0.7 * totals[False, False]
    assert totals[True, True] < 0.7 * totals[False, True]


def test_shadows_by_hand() -> None:
    """Expert 0 of rank 0 has shadows on ranks 1 and 2, whose rows for it stay there."""
    costs = ExchangeCosts(
        row_bytes=1, near_bandwidth=1, far_bandwidth=2, row_seconds=1, expert_bytes=10, latency=1, kernel=3
    )
    shape = exchange_shape(3, shadows=[Shadow(expert=0, owner=0, ranks=(1, 2))])
    counts = [[4, 5, 6], [7, 8, 9], [10, 11, 12]]
    spent = [
        {str(op): value for op, value in zip(ops, seconds, strict=True)}
        for ops, seconds in zip(
            smart(shape).ranks, exchange_durations(smart(shape), counts, costs), strict=True
        )
    ]
    assert [rank["SHADOW_SEND"] for rank in spent] == [1 + 2 * 10 / 2, 1 + 10 / 2, 1 + 10 / 2]
    assert [rank["SHADOW_F"] for rank in spent] == [3 + 0, 3 + 7, 3 + 10]
    assert [rank["C_F@0"] for rank in spent] == [3 + 4, 3 + 8, 3 + 12]
    assert spent[0]["C_F@1"] == 3, "what rank 2 has for expert 0 did not come"
    assert all(rank["S_F@0"] == rank["R_F@0"] == 0.0 for rank in spent), "own rows stay on their rank"


def test_copies_travel_both_ways_at_once() -> None:
    """Ranks 0 and 1 each send one copy and receive one: a link carries both directions in the time of one."""
    costs = ExchangeCosts(
        row_bytes=1, near_bandwidth=1, far_bandwidth=2, row_seconds=1, expert_bytes=10, latency=1
    )
    shadows = [Shadow(expert=0, owner=0, ranks=(1,)), Shadow(expert=1, owner=1, ranks=(0,))]
    program = smart(exchange_shape(2, shadows=shadows))
    for ops, seconds in zip(program.ranks, exchange_durations(program, [[1, 1], [1, 1]], costs), strict=True):
        assert dict(zip(map(str, ops), seconds, strict=True))["SHADOW_SEND"] == 1 + 10 / 2


def test_weight_gradients_by_hand() -> None:
    """All rows in the end, or those of the own group early and the others in the end."""
    costs = ExchangeCosts(row_bytes=1, near_bandwidth=1, far_bandwidth=1, row_seconds=1, kernel=3)
    counts = [[4, 5], [7, 8]]
    for own_weights, expected in ((0, {"C_W": 3 + 4 + 7}), (1, {"C_W@0": 3 + 4, "C_W": 3 + 7})):
        program = smart(backward_of(exchange_shape(2), own_weights=own_weights))
        seconds = exchange_durations(program, counts, costs)[0]
        spent = {str(op): s for op, s in zip(program.ranks[0], seconds, strict=True) if op.kind is kinds.C_W}
        assert spent == expected
    shadowed = exchange_shape(2, shadows=[Shadow(expert=0, owner=0, ranks=(1,))], backward=True)
    ops, seconds = smart(shadowed).ranks[1], exchange_durations(smart(shadowed), counts, costs)[1]
    spent = {str(op): value for op, value in zip(ops, seconds, strict=True)}
    assert (spent["SHADOW_B"], spent["SHADOW_W"], spent["SHADOW_ADD"]) == (3 + 7, 3 + 7, 3)


def test_the_bound_is_the_busiest_lane_of_the_busiest_rank() -> None:
    costs = ExchangeCosts(row_bytes=1, near_bandwidth=1, far_bandwidth=1, row_seconds=10)
    program = smart(exchange_shape(2))
    assert lower_bound(program, [[1, 2], [3, 4]], costs) == 10 * (2 + 4)
    cheap = replace(costs, row_seconds=0.0)
    assert lower_bound(program, [[1, 2], [3, 4]], cheap) == 3 + 3, "S and R of the rows that travel"
    for counts in ([[1, 2], [3, 4]], [[0, 9], [1, 0]]):
        assert simulate_exchange(program, counts, costs).makespan >= lower_bound(program, counts, costs)


def test_counts_must_fit() -> None:
    program, costs = (
        smart(exchange_shape(4)),
        ExchangeCosts(row_bytes=1, near_bandwidth=1, far_bandwidth=1, row_seconds=1),
    )
    with pytest.raises(ScheduleError, match=r"counts have shape \(4, 3\), expected 4 ranks x 4 experts"):
        exchange_durations(program, np.zeros((4, 3)), costs)
    with pytest.raises(ScheduleError, match="counts must not be negative"):
        exchange_durations(program, np.full((4, 4), -1), costs)
