"""The step of a run, simulated: overlap wins what the wire takes, and holds more."""

from __future__ import annotations

from moeclipse.core.config import with_values
from moeclipse.cost.hardware import Link, device
from moeclipse.sim.compare import Answer
from moeclipse.sim.step_costs import StepCosts
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.run_step import RunStep
from moeclipse.train.predict.step_sizes import step_work

SLOW = Link(name="slow", bandwidth=1.2e8, latency=1e-4, efficiency=1.0, source="made up")


def answer(overlap: str, wire: Link = SLOW) -> Answer:
    values = {"optim.accumulate": 4, "data.batch_size": 16, "pipeline.overlap": overlap}
    config = with_values(TrainConfig(), values)
    costs = StepCosts(step_work(config, 1, 2, 4.0), device("cpu"), wire)
    return RunStep(config=config, dp=1, ep=2, costs=None, step_costs=costs).answer("auto")


def test_pairs_hide_a_slow_wire_and_hold_a_second_microbatch() -> None:
    plain, pair = answer("off"), answer("pair")
    assert (plain.name, pair.name) == ("1f1b", "pp1")
    assert pair.summary.makespan < 0.9 * plain.summary.makespan
    assert pair.summary.peak[0] > plain.summary.peak[0]


def test_what_is_left_open_is_the_plain_step() -> None:
    assert answer("auto").summary.makespan == answer("off").summary.makespan
    assert answer("auto").name == "1f1b"
