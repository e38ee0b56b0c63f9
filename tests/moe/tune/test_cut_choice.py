"""The granularity that stays is the fastest one tried, on all ranks alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.moe.tune.cut_choice import (
    CALLS,
    LEAST_CALLS,
    TRIED,
    Trials,
    affordable,
    worth_a_try,
)
from moeclipse.moe.tune.granularity import Granularity

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


def test_the_fastest_of_the_without_times_stays() -> None:
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
        assert trials.without_times == PLAIN
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


def test_a_single_candidate_needs_no_trial() -> None:
    assert Trials(RANKED[:1], cuda=False).over
