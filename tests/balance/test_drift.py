"""The decay of the average follows the drift that is measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moeclipse.balance.drift import FIRST, LAG, LEAST, MOST, UNKNOWN, Drift
from moeclipse.balance.load import LoadAverage, LoadTrace


def walked(walk: float, noise: float, steps: int, seed: int = 0) -> np.ndarray:
    """Rows [N, 2 layers, 64 experts]: each walks at random by `walk` a step and is seen with `noise`."""
    rng = np.random.default_rng(seed)
    true = 1000 + np.cumsum(rng.normal(0, walk, (steps, 2, 64)), axis=0)
    return np.maximum(true + rng.normal(0, noise, true.shape), 0)


def decay_of(rows_NLE: np.ndarray) -> float:
    drift = Drift()
    for rows_LE in rows_NLE:
        drift = drift.add(rows_LE)
    return drift.decay


@pytest.mark.parametrize(("walk", "noise"), [(1.0, 20.0), (5.0, 20.0), (10.0, 10.0)])
def test_it_is_the_decay_of_the_best_filter(walk: float, noise: float) -> None:
    error = (walk**2 + math.sqrt(walk**4 + 4 * walk**2 * noise**2)) / 2
    found = np.mean([decay_of(walked(walk, noise, 200, seed)) for seed in range(5)])
    assert found == pytest.approx(noise**2 / (error + noise**2), abs=0.06)


def test_still_loads_are_remembered_and_running_ones_followed() -> None:
    assert decay_of(walked(0.0, 20.0, 100)) > 0.9
    assert decay_of(np.tile(walked(0.0, 20.0, 1), (40, 1, 1))) == MOST, "nothing moves at all"
    assert decay_of(walked(20.0, 0.0, 100)) == LEAST
    few = walked(20.0, 0.0, LAG + 1)
    assert decay_of(few) == FIRST, "one distance is none"
    assert decay_of(np.zeros((40, 1, 4))) == MOST


@pytest.mark.parametrize(("walk", "noise"), [(0.2, 30.0), (20.0, 10.0)])
def test_it_predicts_better_than_any_one_decay_would_in_both_cases(walk: float, noise: float) -> None:
    """Mean square of what the average says of the next step, behind the first forty."""

    def error(decay: float | None) -> float:
        trace = LoadTrace(average=LoadAverage(decay=decay or FIRST), drift=None if decay else Drift())
        found = []
        for step, rows_LE in enumerate(walked(walk, noise, 200, seed=3)):
            if step > 40:
                found.append(float(((trace.average.rows_LPE.sum(1) - rows_LE) ** 2).mean()))
            trace.add(step, rows_LE[:, None])
        return float(np.mean(found))

    assert error(None) < 0.99 * error(FIRST)
    assert error(None) < 1.03 * min(error(decay) for decay in (0.3, 0.5, 0.7, 0.9, 0.95, 0.98))


@pytest.mark.parametrize(("walk", "noise"), [(1.0, 20.0), (5.0, 20.0), (10.0, 10.0)])
@pytest.mark.parametrize("ahead", [1, 10])
def test_it_knows_how_far_off_its_average_will_be(walk: float, noise: float, ahead: int) -> None:
    rows_NLE = walked(walk, noise, 300, seed=2)
    trace = LoadTrace(drift=Drift())
    off, expected = [], []
    for step, rows_LE in enumerate(rows_NLE[:-ahead]):
        trace.add(step, rows_LE[:, None])
        if step > 60:
            off.append(float(((trace.average.rows_LPE.sum(1) - rows_NLE[step + ahead]) ** 2).mean()))
            expected.append(trace.error(ahead))
    assert np.mean(expected) == pytest.approx(math.sqrt(np.mean(off)) / 1000, rel=0.15)


def test_a_jump_begins_the_average_anew_and_is_no_drift() -> None:
    rng = np.random.default_rng(0)
    before_E, after_E = np.ones(32), np.ones(32)
    before_E[:4] = after_E[-4:] = 8.0
    trace, jumps = LoadTrace(drift=Drift()), []
    for step in range(60):
        weights_E = before_E if step < 40 else after_E
        rows_E = rng.multinomial(4096, weights_E / weights_E.sum())
        trace.add(step, rows_E[None, None])
        jumps += [step] if trace.jumped else []
        if step == 39:
            calm = trace.drift
        if step == 40:
            assert np.array_equal(trace.average.rows_LPE[0, 0], rows_E), "of this step alone"
    assert jumps == [40]
    assert calm is not None
    assert trace.drift is not None
    assert trace.drift.decay == pytest.approx(calm.decay, abs=0.1)
    assert trace.error(7) == pytest.approx(calm.error(7), rel=0.3)


def test_nothing_is_known_of_a_young_run() -> None:
    trace = LoadTrace(drift=Drift())
    for step, rows_LE in enumerate(walked(20.0, 20.0, LAG + 1)):
        trace.add(step, rows_LE[:, None])
    assert trace.error(10) == UNKNOWN
    assert LoadTrace().error(10) == UNKNOWN, "a decay that was chosen measures no drift"


def test_a_resumed_drift_goes_on_alike() -> None:
    rows = walked(5.0, 20.0, 60)
    drift = Drift()
    for number, rows_LE in enumerate(rows):
        if number == 33:
            assert drift.last_LE is not None
            assert drift.anchor_LE is not None
            drift = Drift.from_numbers(drift.numbers(), drift.last_LE.copy(), drift.anchor_LE.copy())
        drift = drift.add(rows_LE)
    assert drift.decay == decay_of(rows)
