"""The step of a run, simulated: overlap wins what the wire takes, and holds more."""

from __future__ import annotations

import pytest

from moeclipse.cli.simulate_run import bytes_of
from moeclipse.core.config import with_values
from moeclipse.cost.cluster import cluster
from moeclipse.cost.hardware import Link, device
from moeclipse.plan.layout import Layout
from moeclipse.plan.layouts import Request, plan_of
from moeclipse.plan.step import Terms
from moeclipse.sim.compare import Answer
from moeclipse.sim.step_costs import StepCosts
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.model_sizes import sizes_of
from moeclipse.train.predict.plan_config import config_for, planned_config, state_of
from moeclipse.train.predict.run_step import RunStep
from moeclipse.train.predict.step_sizes import cluster_costs, step_work

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


AGREE = {
    "alone": Layout(ep=8, microbatches=2),
    "recomputed": Layout(ep=8, microbatches=2, recompute="full"),
    "pairs": Layout(ep=8, microbatches=4, schedule="pp1", overlap="pair"),
    "tensor": Layout(dp=2, ep=4, tp=2, microbatches=2),
    "stages": Layout(pp=4, ep=8, microbatches=8, schedule="1f1b"),
    "folded": Layout(
        pp=4, ep=8, microbatches=8, schedule="dualpipev", stages_per_rank=2, overlap="pair", recompute="attn"
    ),
    "two directions": Layout(
        pp=4, ep=8, microbatches=8, schedule="dualpipe", stages_per_rank=2, overlap="pair", recompute="attn"
    ),
}


@pytest.mark.parametrize("name", AGREE)
def test_a_plan_and_the_program_of_its_run_agree(name: str) -> None:
    """Formulas of actions, and every op of every layer of what a run would execute: seconds and bytes."""
    layout, machine, sequence = AGREE[name], cluster("h200"), 4096
    config = with_values(config_for("qwen3-30b-a3b"), {"model.num_layers": 16})
    batch = layout.microbatches * layout.dp * layout.ep
    sizes = sizes_of(config.model, config.moe, config.gate)
    terms = Terms(model=sizes, cluster=machine, sequence=sequence, imbalance=1.1, state=state_of(config))
    request = Request(terms=terms, num_gpus=layout.num_ranks, batch=batch)
    plan = plan_of(request, layout)
    run = planned_config(config, plan, batch, sequence)
    axes = (layout.dp, layout.ep)
    step = RunStep(
        config=run,
        dp=layout.dp,
        ep=layout.ep,
        costs=None,
        step_costs=cluster_costs(run, machine, axes, 1.1),
        bytes=bytes_of(run, machine, axes, 1.1),
    )
    found = step.answer(run.pipeline.schedule)
    assert found.summary.makespan == pytest.approx(plan.time.seconds, rel=0.06)
    assert found.bytes_of == pytest.approx(plan.bytes_of, rel=0.07)
