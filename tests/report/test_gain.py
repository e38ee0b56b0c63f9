"""What plans won: from runs whose answers are known, and from runs in which no plan was."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import make_run, record_of, write_lines

from moeclipse.report.gain import (
    Difference,
    Gain,
    Lines,
    PlanTaken,
    cost_of_a_row,
    estimate,
    gain_of,
    short,
)
from moeclipse.report.run import RunData, StepTable, read_run

JITTER = (0.0, 1.0, -1.0, 2.0, -2.0)
UNEVEN, EVEN = (1000.0, 1400.0), (1190.0, 1210.0)
"""Rows of two ranks; one costs 0.05 ms."""


def planned_run(
    folder: Path,
    plans: dict[int, tuple[float, ...]],
    rows: list[tuple[float, float]],
    more_ms: list[float] | None = None,
) -> RunData:
    """Two ranks with so many rows a step, and plans (predicted before, after) taken behind some of them.

    Both ranks compute `more_ms` longer than their rows take.
    """
    make_run(folder, steps=1)
    records: list[dict[str, Any]] = []
    for step, (mine, slow) in enumerate(zip(rows, more_ms or [0.0] * len(rows), strict=True)):
        compute = [50 + slow + 0.05 * count for count in mine]
        late = [max(compute) - one for one in compute]
        # The other parts jitter, step by step: less than a plan wins.
        idle, jitter = 2.0, 0.3 * JITTER[step % 5]
        times = {
            "compute_ms": compute,
            "exposed_ms": [6.0 + jitter] * 2,
            "straggle_ms": late,
            "idle_ms": [idle] * 2,
            "comm_ms": [20.0] * 2,
            "step_ms": [max(compute) + 6.0 + jitter + idle] * 2,
        }
        told = {name: sum(values) / 2 for name, values in times.items()}
        if step in plans:
            names = ("plan_before_ms", "plan_after_ms", "plan_step", "plan_since")
            told |= dict(zip(names, plans[step], strict=False))  # older runs have the first two
        records.append(record_of(step) | told | {"ranks": {**times, "rows": list(mine)}})
    write_lines(folder / "metrics.jsonl", records)
    return read_run(folder)


def won(run: RunData) -> Gain:
    gain = gain_of(run)
    assert gain is not None
    return gain


def test_rows_and_clock_agree_where_a_plan_evens_ranks(tmp_path: Path) -> None:
    run = planned_run(tmp_path / "run", {150: (90.0, 45.0)}, [UNEVEN] * 151 + [EVEN] * 150)
    gain = won(run)
    assert cost_of_a_row(run) == pytest.approx(0.05)
    assert (gain.plans, gain.predicted_ms, gain.above) == (1, ((90.0, 45.0),) * 2, (200.0, 10.0))
    assert gain.rows is not None
    assert gain.clock is not None
    assert gain.rows.ms == pytest.approx(0.05 * 190)
    assert gain.clock.ms == pytest.approx(0.05 * 190, abs=0.2)
    assert gain.clock_tells
    words = gain.in_words()
    assert words.startswith("1 plan moved experts, predicted to take 45 ms a step instead of 90; ")
    assert "had 200 rows above the mean before and 10 after: 9.5 ms less to wait for it (give or ta" in words
    assert "; by the clock a step takes 9.5 ms less (give or take" in words


def test_other_work_beside_a_plan_is_no_gain(tmp_path: Path) -> None:
    """A stretch of slow steps ended when the plan was taken; rows stayed as they were."""
    busy = [0.0] * 120 + [200.0] * 30 + [0.0] * 151
    gain = won(planned_run(tmp_path / "run", {150: (90.0, 82.6)}, [UNEVEN] * 301, busy))
    assert gain.clock is not None
    assert gain.clock.ms == pytest.approx(200.0, abs=1.0), "what a comparison of steps would tell"
    assert not gain.clock_tells
    assert gain.rows is not None
    assert gain.rows.ms == 0
    words = gain.in_words()
    assert "before and 200 after, no more than they move by without a plan; the clock cannot tell" in words


def test_steps_that_differ_as_much_without_a_plan_tell_nothing(tmp_path: Path) -> None:
    """Slow and fast steps take turns: the plan stands at one of many such places."""
    waves = [30.0 * (step // 25 % 2) for step in range(301)]
    gain = won(planned_run(tmp_path / "run", {174: (90.0, 80.0)}, [UNEVEN] * 301, waves))
    assert gain.clock is not None
    assert gain.clock.ms == pytest.approx(-30.0, abs=1.0)
    assert not gain.clock.stands_out
    assert "the clock cannot tell, steps differ by 30 ms without a plan" in gain.in_words()


def test_compute_that_moves_beside_a_plan_is_not_its_gain(tmp_path: Path) -> None:
    slower = [40.0] * 151 + [0.0] * 150
    gain = won(planned_run(tmp_path / "run", {150: (90.0, 80.0)}, [UNEVEN] * 151 + [EVEN] * 150, slower))
    assert gain.clock is not None
    assert gain.clock.stands_out
    assert not gain.clock_tells
    assert gain.in_words().endswith(
        "the clock cannot tell, compute and idle time became 40 ms shorter meanwhile"
    )


def test_plans_are_told_from_the_first_before_to_the_last_after(tmp_path: Path) -> None:
    halfway = (1100.0, 1300.0)
    rows = [UNEVEN] * 31 + [halfway] * 20 + [UNEVEN] * 20 + [EVEN] * 40
    plans = {30: (96.8, 70.0), 50: (90.0, 80.0), 70: (120.0, 99.3)}
    gain = won(planned_run(tmp_path / "run", plans, rows))
    assert (gain.plans, gain.predicted_ms, gain.above) == (3, ((96.8, 70.0), (120.0, 99.3)), (200.0, 10.0))
    assert gain.rows is not None
    assert gain.rows.ms == pytest.approx(0.05 * 190), "not the sum of what each of them won"
    words = gain.in_words()
    predicted = "the first predicted to take 70 ms a step instead of 96.8, the last 99.3 instead of 120; "
    assert words.startswith(f"3 plans moved experts, {predicted}")
    assert "9.5 ms less to wait for it, if it was the plans that moved them" in words
    assert words.endswith("the clock cannot tell, there are too few steps without a plan")


def test_no_more_is_won_than_was_waited() -> None:
    rows = np.array([200.0] * 30 + [10.0] * 30)
    even = np.full(60, 100.0)

    def lines(straggle: list[float]) -> Lines:
        numbers = {"above": rows, "step_ms": even, "straggle_ms": np.array(straggle), "rest_ms": even}
        return Lines(step=np.arange(60), counts=np.ones(60, dtype=bool), **numbers)

    plan = [PlanTaken(step=29, asked=math.nan, since=math.nan)]
    for straggle, cost, expected in (
        ([3.0] * 30 + [0.5] * 30, 0.05, 3.0),
        ([30.0] * 30 + [0.5] * 30, 0.05, 9.5),
        ([30.0] * 30 + [0.5] * 30, -0.05, -0.5),
    ):
        rows_gain = estimate(lines(straggle), cost, plan).rows
        assert rows_gain is not None
        assert rows_gain.ms == pytest.approx(expected)


@pytest.mark.parametrize(("after", "known"), [(4, False), (5, True)])
def test_the_step_that_moves_experts_counts_on_neither_side(tmp_path: Path, after: int, known: bool) -> None:
    gain = won(planned_run(tmp_path / "run", {11: (90.0, 80.0)}, [UNEVEN] * 12 + [EVEN] * after))
    assert (gain.above is not None) == known
    assert ("what that won is not known, there are too few steps around" in gain.in_words()) != known


def test_steps_beside_which_a_plan_is_made_or_cuts_are_tried_do_not_count(tmp_path: Path) -> None:
    trials, plain, planning = [100.0] * 5, [0.0] * 6, [200.0] * 9
    slow = [*trials, *plain, *planning, 400.0, *[0.0] * 8]
    place = len(slow) - 9
    asked, since = len(trials) + len(plain) - 1, len(trials)
    for name, plan, expected in (
        ("both known", (90.0, 80.0, asked, since), 0.0),
        ("all counted", (90.0, 80.0), 200.0),
        ("trials until then", (90.0, 80.0, asked, place + 1), None),
        ("asked early", (90.0, 80.0, since + 3, since), None),
    ):
        gain = won(planned_run(tmp_path / name, {place: plan}, [UNEVEN] * len(slow), slow))
        clock = None if gain.clock is None else gain.clock.ms
        assert clock == (None if expected is None else pytest.approx(expected, abs=1)), name


def test_runs_that_tell_too_little(tmp_path: Path) -> None:
    assert gain_of(read_run(make_run(tmp_path / "none"))) is None, "no plan"
    gain = estimate(None, None, [PlanTaken(step=3, asked=2, since=0)])
    assert gain.above is None
    alone = read_run(make_run(tmp_path / "single", ranks=1))
    assert Lines.of(alone) is None
    told = Gain(
        plans=1, predicted_ms=((2, 1), (2, 1)), above=(5, 3), rows=None, clock=Difference(ms=1, noise_ms=None)
    )
    assert "(what a row costs is not known); the clock cannot tell" in told.in_words()


def test_a_slope_made_of_jitter_is_no_cost() -> None:
    draw = np.random.default_rng(0)
    rows = 1000 + draw.normal(0, 1, (40, 2))
    found = []
    for slope in (0.0, 5.0):
        ranks = {"rows": rows, "compute_ms": 50 + slope * rows + draw.normal(0, 1, (40, 2))}
        table = StepTable(step=np.arange(40), columns={}, ranks=ranks, rank_step=np.arange(40))
        found.append(cost_of_a_row(run_of(table)))
    assert found[0] is None
    assert found[1] == pytest.approx(5.0, rel=0.1)


def run_of(steps: StepTable) -> RunData:
    nothing: dict[str, Any] = {"summary": {}, "config": {}, "notes": [], "incidents": [], "choices": {}}
    return RunData(name="made", directory=Path(), steps=steps, load=None, trace=None, gaps=[], **nothing)


def test_numbers_have_no_exponents() -> None:
    assert [short(number) for number in (0.0123, 45.0, 999.4, 1000.0, 23456.7)] == [
        *("0.0123", "45", "999", "1000", "23457"),
    ]
    assert short(217.0, 2) == "217"


# --- placebo: places of runs without a plan --------------------------------------------------------------

NUM_STEPS, NUM_RUNS, PLACES = 240, 5, 40


def weather(kind: str, draw: np.random.Generator, num_ranks: int) -> np.ndarray:
    """What other work makes of compute, step by step and rank by rank."""
    slow_NP = 1 + 0.005 * draw.normal(size=(NUM_STEPS, num_ranks))
    if kind in ("bursts", "all"):
        edges = np.cumsum(draw.integers(5, 60, size=40))
        for begin, end in list(pairwise(edges[edges < NUM_STEPS + 60]))[::2]:
            rank, times = draw.integers(num_ranks + 1), draw.uniform(1.05, 1.8)
            slow_NP[begin:end, rank if rank < num_ranks else slice(None)] *= times
    if kind in ("drift", "all"):
        slow_NP *= np.exp(np.cumsum(draw.normal(0, 0.01, NUM_STEPS)))[:, None]
    if kind in ("tails", "all"):
        slow_NP *= 1 + 0.03 * np.abs(draw.standard_t(1.5, slow_NP.shape))
    return slow_NP


def unplanned(kind: str, seed: int, num_ranks: int) -> RunData:
    """Rows drift and jitter, compute takes 100 ms and what rows cost, beside other work."""
    draw = np.random.default_rng(seed)
    share_NP = np.zeros((NUM_STEPS, num_ranks))
    for step in range(1, NUM_STEPS):
        share_NP[step] = 0.97 * share_NP[step - 1] + 0.24 * draw.normal(size=num_ranks)
    share_NP += 0.5 * draw.normal(size=share_NP.shape)
    rows_NP = 2000 * (1 + 0.1 * (share_NP - share_NP.mean(1, keepdims=True)))
    compute_NP = (100 + 0.02 * rows_NP) * weather(kind, draw, num_ranks)
    straggle_N = compute_NP.max(1) - compute_NP.mean(1)
    exposed_N = 6 + np.abs(draw.normal(0, 0.5, NUM_STEPS))
    columns = {"straggle_ms": straggle_N, "exposed_ms": exposed_N}
    columns |= {"step_ms": compute_NP.max(1) + exposed_N + 2}
    ranks = {"rows": rows_NP, "compute_ms": compute_NP, "step_ms": compute_NP}
    steps = np.arange(NUM_STEPS)
    return run_of(StepTable(step=steps, columns=columns, ranks=ranks, rank_step=steps))


def medians_tell(step_ms: np.ndarray, place: int) -> bool:
    """Medians of the steps on both sides with their standard errors, and nothing else."""
    found = []
    for side in (step_ms[place - 20 : place], step_ms[place + 1 : place + 21]):
        sigma = 1.4826 * np.median(np.abs(side - np.median(side)))
        found.append((np.median(side), 1.2533 * sigma / math.sqrt(len(side))))
    (before, noise), (after, more) = found
    return bool(before - after > 2 * math.hypot(noise, more))


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("calm", 2), ("bursts", 2), ("all", 2), ("bursts", 8), ("drift", 8), ("tails", 8)]
)
def test_nothing_is_claimed_where_no_plan_was(kind: str, num_ranks: int) -> None:
    """At 200 places of five runs: a gain by rows or by the clock at one in twenty at most."""
    claimed = known = by_medians = 0
    for seed in range(NUM_RUNS):
        run = unplanned(kind, seed, num_ranks)
        lines, cost = Lines.of(run), cost_of_a_row(run)
        for place in np.linspace(25, NUM_STEPS - 26, PLACES).astype(int):
            gain = estimate(lines, cost, [PlanTaken(step=place, asked=place, since=0)])
            assert gain.clock is not None
            known += gain.clock.noise_ms is not None
            by_rows = gain.rows is not None and gain.rows.stands_out and gain.rows.ms > 0
            claimed += by_rows or (gain.clock_tells and gain.clock.ms > 0)
            by_medians += medians_tell(run.steps.column("step_ms"), int(place))
    places = NUM_RUNS * PLACES
    assert places == known == 200
    assert claimed <= places // 20
    if kind in ("bursts", "drift", "all"):
        assert by_medians > places // 8, "these runs are easy"


def test_what_a_plan_won_is_told_beside_all_that() -> None:
    """Ranks become even in the middle: rows tell in any weather, the clock in calm weather, too."""
    told = {}
    for kind in ("calm", "bursts", "tails"):
        run = unplanned(kind, 3, 2)
        rows_NP = run.steps.ranks["rows"]
        late = np.arange(NUM_STEPS) >= 120
        uneven = np.where(late[:, None], 0.0, [-900.0, 900.0])
        straggle = run.steps.columns["straggle_ms"]
        more = np.where(late, 0.0, 0.02 * 900)
        columns = {**run.steps.columns, "straggle_ms": straggle + more}
        columns["step_ms"] = run.steps.columns["step_ms"] + more
        ranks = {"rows": rows_NP + uneven, "compute_ms": run.steps.ranks["compute_ms"] + 0.02 * uneven}
        table = StepTable(step=run.steps.step, columns=columns, ranks=ranks, rank_step=run.steps.step)
        made = run_of(table)
        gain = estimate(Lines.of(made), cost_of_a_row(made), [PlanTaken(step=119, asked=119, since=0)])
        assert gain.rows is not None
        told[kind] = (gain.rows.stands_out and 10 < gain.rows.ms < 25, gain.clock_tells)
    assert [by_rows for by_rows, _ in told.values()] == [True] * 3
    assert told["calm"] == (True, True)
