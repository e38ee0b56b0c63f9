"""The granularity that stays is the fastest one tried, on all ranks alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.moe.tune.granularity import (
    CALLS,
    LEAST_CALLS,
    TRIED,
    Granularity,
    Stopwatch,
    Trials,
    affordable,
    against_blocking,
    cut_in_words,
    partitions_to_try,
    rank_by_simulation,
    worth_a_try,
)
from moeclipse.schedule.shape import even_groups

RANKED = [
    Granularity(groups=((0,), (1,)), chunks=chunks, predicted_s=chunks * 1e-3) for chunks in (1, 2, 4, 8, 16)
]


def run(trials: Trials, seconds: dict[int, float], backward: bool = True) -> int:
    """Pretend to run every call; returns how many there were."""
    count = 0
    while not trials.over:
        use, watch = trials.next()
        now = watch.stamp()
        watch._laps["F"].append((now, now + seconds[use.chunks]))
        if backward:
            watch._laps["B"].append((now, now + 2 * seconds[use.chunks]))
        count += 1
    return count


def test_the_fastest_of_the_best_predicted_stays() -> None:
    trials = Trials(RANKED, cuda=False)
    assert run(trials, {1: 5.0, 2: 3.0, 4: 4.0, 8: 6.0}) == TRIED * CALLS  # the fifth is not worth a try
    chosen = trials.choose(lambda mine: [mine, mine])
    assert chosen.chunks == 2
    assert "fastest of 4" in chosen.rule


def test_the_slowest_rank_decides() -> None:
    trials = Trials(RANKED, cuda=False)
    run(trials, {1: 5.0, 2: 3.0, 4: 4.0, 8: 6.0})
    chosen = trials.choose(lambda mine: [mine, [60.0, 90.0, 7.0, 80.0, 0.0]])
    assert chosen.chunks == 4


def test_fewer_units_stay_where_calls_scatter_more_than_granularities_differ() -> None:
    seconds = {1: 5.0, 2: 3.1, 4: 3.0, 8: 6.0}
    trials = Trials(RANKED, cuda=False)
    run(trials, seconds)
    assert trials.choose(lambda mine: [mine, mine]).chunks == 4, "calls do not scatter: the fastest"
    assert trials.choose(lambda mine: [mine, [*mine[:-1], 0.02]]).chunks == 4, "by less than they differ"
    assert trials.choose(lambda mine: [mine, [*mine[:-1], 0.04]]).chunks == 2
    assert trials.choose(lambda mine: [mine, [*mine[:-1], 0.90]]).chunks == 2, "not all are alike then"


def test_without_times_the_prediction_decides() -> None:
    trials = Trials(RANKED, cuda=False)
    run(trials, {1: 5.0, 2: 3.0, 4: 4.0, 8: 6.0}, backward=False)
    assert trials.choose(lambda mine: [mine, mine]) == RANKED[0]


PLAIN = Granularity(groups=((0, 1),), chunks=1, predicted_s=1.0)


def test_the_plain_exchange_is_tried_in_any_case_and_left_only_for_what_is_faster() -> None:
    seconds = {1: 5.0, 2: 3.0, 4: 4.0}
    cuts = [one for one in RANKED if one.chunks > 1]
    for ranked in ([*cuts, PLAIN], [PLAIN, *cuts], [cuts[0], PLAIN]):
        trials = Trials(ranked, cuda=False, careful=True)
        assert PLAIN in trials.candidates
        assert len(trials.candidates) == min(TRIED, len(ranked))
        assert trials.unseen == PLAIN
        run(trials, seconds | {8: 9.0})
        assert trials.choose(lambda mine: [mine, mine]).chunks == 2
        assert trials.over_plain == pytest.approx(5 / 3)
    for faster, scatter in (
        (5.0, 0.04),
        (4.9, 0.04),
        (4.9, 0.0),
        (4.0, 0.3),  # a quarter faster, where calls scatter by more
    ):  # what calls scatter by, or next to nothing
        trials = Trials([*cuts, PLAIN], cuda=False, careful=True)
        run(trials, {1: 5.0, 2: faster, 4: 6.0, 8: 9.0})
        chosen = trials.choose(lambda mine, scatter=scatter: [mine, [*mine[:-1], scatter]])  # type: ignore[misc]
        assert chosen == replace(PLAIN, rule="start, fastest of 4")
        assert trials.over_plain == 1
    trials = Trials([*cuts, PLAIN], cuda=False, careful=True)
    run(trials, seconds | {8: 9.0}, backward=False)
    assert trials.choose(lambda mine: [mine, mine]) == PLAIN, "nothing was seen to be faster"
    assert trials.over_plain is None


def test_a_busy_machine_takes_the_same_decision_again() -> None:
    """Equal candidates whose best calls lie apart by chance, as calls do: three runs, one answer."""
    chosen = []
    for weather in ({1: 5.0, 2: 4.2, 4: 5.5}, {1: 5.2, 2: 5.6, 4: 4.4}, {1: 4.9, 2: 4.7, 4: 5.1}):
        trials = Trials([*[one for one in RANKED if one.chunks > 1], PLAIN], cuda=False, careful=True)
        run(trials, weather | {8: 6.0})
        chosen.append(trials.choose(lambda mine: [mine, [*mine[:-1], 0.25]]).num_units)
        assert trials.scatter == 0.25
    assert chosen == [1, 1, 1]


def test_choices_in_words() -> None:
    assert [cut_in_words(1, 1), cut_in_words(2, 1)] == ["one go", "2 steps x 1 chunks"]
    assert against_blocking([{"over_plain": None}]) == ""
    assert against_blocking([{"over_plain": 1.0}, {"over_plain": 1.0}]) == ""
    sure = against_blocking([{"over_plain": 1.1, "scatter": 0.04}, {"over_plain": 1.3, "scatter": 0.02}])
    assert sure == ", blocking took 1.20 times as long (calls scattered by 4 %)"
    assert against_blocking([{"over_plain": 1.1}, {"over_plain": None}, {"over_plain": 1.3}]).endswith(
        " 1.20 times as long"
    )


def test_trials_take_no_more_calls_than_they_may() -> None:
    assert affordable(None) == (TRIED, CALLS)
    for most in range(2 * TRIED * CALLS):
        number, calls = affordable(most)
        assert number * calls <= most
        assert number <= TRIED
        assert (number, calls) == (0, 0) or (number >= 2 and LEAST_CALLS <= calls <= CALLS)
        assert (number > 0) == (most >= 2 * LEAST_CALLS)
    trials = Trials([RANKED[1], PLAIN], False, True, 2, 3)
    assert run(trials, {1: 5.0, 2: 3.0}) == 6
    assert trials.choose(lambda mine: [mine, mine]).chunks == 2


def test_only_what_is_predicted_to_be_faster_than_the_plain_one_is_tried() -> None:
    ranked = [replace(RANKED[number], both_s=float(number)) for number in (1, 2, 3)]
    plain = replace(PLAIN, both_s=2.0)
    assert worth_a_try([*ranked[:1], plain, *ranked[1:]]) == [ranked[0], plain]
    assert worth_a_try([*ranked, replace(plain, both_s=0.5)]) == [replace(plain, both_s=0.5)]


@pytest.mark.parametrize(
    ("hosts", "size", "groups"),
    [
        ((0,) * 8, "auto", [8, 4, 2, 1]),
        ((0,) * 3, "auto", [3, 1]),
        ((0, 0, 1, 1), "auto", [2]),
        ((0,) * 4, 2, [2]),
    ],
    ids=["eight ranks", "three", "two hosts", "as told"],
)
def test_groups_that_are_tried(hosts: tuple[int, ...], size: Any, groups: list[int]) -> None:
    """Ever larger ones, and last the blocking exchange; but ranks of one host stay together."""
    assert [len(ring) for ring in partitions_to_try(size, hosts)] == groups


def test_a_single_candidate_needs_no_trial() -> None:
    assert Trials(RANKED[:1], cuda=False).over


def test_a_stopwatch_tells_the_median_and_the_best() -> None:
    watch = Stopwatch(cuda=False)
    assert watch.seconds() is None
    assert watch.best("F") is None
    watch._laps["F"] = [(0.0, 1.0), (0.0, 4.0), (0.0, 3.0), (0.0, 2.0), (0.0, 9.0)]
    assert watch.seconds("F") == pytest.approx(3.0)
    assert watch.best("F") == pytest.approx(2.0), "the first lap does not count"
    assert watch.scatter() == 0.0, "nothing is known of backward"
    watch._laps["B"] = [(0.0, 9.0), (0.0, 6.0), (0.0, 7.0)]
    assert watch.scatter() == pytest.approx((3.5 + 6.5) / (2.0 + 6.0) - 1)
    watch._laps["B"] = []
    for _ in range(20):
        watch.lap(watch.stamp(), "B")
    assert len(watch._laps["B"]) == Stopwatch.LAPS


def test_own_rows_stand_at_both_ends_where_orders_are_alike() -> None:
    """A latency that fills the wire makes orders equal on paper; the ends are hidden all the same."""
    costs = ExchangeCosts(
        row_bytes=1024, near_bandwidth=7.5e6, far_bandwidth=7.5e6, row_seconds=1.9e-4, latency=5e-3
    )
    partitions = [even_groups(4, size) for size in (1, 2, 4)]
    ranked = rank_by_simulation(partitions, (1, 2), np.full((4, 4), 320), costs)
    assert {use.rule for use in ranked if len(use.groups) > 1} == {"ends"}
    for use in ranked:
        if use.rule == "ends":
            assert use.units is not None
            assert use.units[0] == (0, 0)
            assert use.units[-1][0] == 0
        assert use.both_s > use.predicted_s
    assert [use.both_s for use in ranked[:3]] == sorted(use.both_s for use in ranked[:3])
