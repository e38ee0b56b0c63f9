"""Prices of actions against the simulator's layers, stages, the end of a step, and extrapolation."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.cluster import cluster
from moeclipse.cost.kernels import MEASURED_ON_HOPPER
from moeclipse.cost.layer_seconds import OURS, UPDATE_BYTES, Seconds, Software
from moeclipse.cost.model import Costs
from moeclipse.cost.sizes import TrainedLayer
from moeclipse.plan.layout import Layout, even_stages
from moeclipse.plan.published import QWEN3_30B, QWEN3_235B, V3
from moeclipse.plan.step import (
    Prices,
    Step,
    StepTime,
    Terms,
)
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.engine import simulate

IDEAL = Software(name="ideal", host_s=0.0, hides=1.0, source="")


def step_of(model: Any = QWEN3_30B, software: Software = IDEAL, **layout: Any) -> Step:
    terms = Terms(model=model, cluster=cluster("h100"), sequence=4096, software=software)
    return Step(terms, Layout(**layout))


@pytest.mark.parametrize(
    "model", [replace(QWEN3_30B, moe_layers=(True,) * 4), replace(V3, moe_layers=(True,) * 4)]
)
@pytest.mark.parametrize("ep", [8, 32])
def test_a_pair_takes_what_the_layers_of_the_simulator_take(model: Any, ep: int) -> None:
    step = step_of(model, schedule="pp1", microbatches=8, ep=ep, overlap="pair")
    parts = {"ATTN": step._inside(step.work.attention(0)), "ROUTE": step.parts["route"]}
    parts |= {"SHARED": step.parts["shared"], "MLP": step.parts["experts"]}
    seconds = {f"{name}_{form}": part[i] for name, part in parts.items() for i, form in enumerate("FBW")}
    dispatch, combine = step.work.dispatch(), step.work.combine()
    seconds |= {"DISPATCH_F": dispatch, "COMBINE_B": dispatch, "COMBINE_F": combine, "DISPATCH_B": combine}
    costs = Costs(seconds=seconds, contention={("compute", "a2a"): step.cluster.rate_beside_exchange})
    layers = [LayerShape(shared=model.shared_width > 0)] * 4

    def makespan(microbatches: int) -> float:
        program = expand(build("pp1", 1, microbatches), layers, Expansion(overlap="pair"))
        return simulate(program, costs).makespan

    steady = (makespan(8) - makespan(4)) / 4
    assert sum(prices.pair for prices in step.layers) == pytest.approx(steady, rel=0.06)
    alone = makespan(1)
    assert sum(prices.F + prices.B for prices in step.layers) == pytest.approx(alone, rel=1e-6)


def test_what_is_not_hidden_is_between_hidden_and_serial() -> None:
    pairs = {
        hides: step_of(software=replace(IDEAL, hides=hides), ep=32, overlap="pair").layers[0]
        for hides in (0.0, 0.5, 1.0)
    }
    assert pairs[0.0].pair == pytest.approx(pairs[0.0].F + pairs[0.0].B)
    assert pairs[0.5].pair == pytest.approx((pairs[0.0].pair + pairs[1.0].pair) / 2)
    assert pairs[1.0].pair < 0.95 * pairs[0.0].pair
    assert step_of(ep=32).layers[0].pair == pytest.approx(pairs[0.0].pair)


def test_an_exchange_slows_what_stands_beside_it() -> None:
    step = step_of(ep=8, overlap="pair")
    prices, moved = step.layers[0], 2 * (step.work.dispatch() + step.work.combine())
    assert prices.pair == pytest.approx(prices.compute_F + prices.compute_B + 20 / 132 * moved)


def test_recompute_runs_forward_again() -> None:
    plain = step_of(ep=8).layers[0]
    more = {
        again: step_of(ep=8, recompute=again).layers[0].B - plain.B
        for again in ("attn", "mlp", "moe", "full")
    }
    step = step_of(ep=8)
    attention, dispatch = step._inside(step.work.attention(0)).F, step.work.dispatch()
    assert more["attn"] == pytest.approx(attention)
    assert more["mlp"] == pytest.approx(step.parts["experts"].F)
    assert more["moe"] == pytest.approx(step.parts["experts"].F + step.parts["route"].F + dispatch)
    assert more["full"] == pytest.approx(more["moe"] + attention)
    dense = replace(V3, moe_layers=(False,) * 3)
    kept = step_of(dense).layers[0]
    assert pytest.approx(kept.B + kept.F) == step_of(dense, recompute="full").layers[0].B
    assert step_of(dense, recompute="attn").layers[0].B < kept.B + kept.F


def test_what_is_frozen_has_no_weight_gradients() -> None:
    frozen = replace(QWEN3_30B, trained=(TrainedLayer(),) * 48, trained_tables=(False, False))
    part = TrainedLayer(rank=16, attn_adapters=((4096, 2048),), expert_adapters=((1536, 2048), (2048, 768)))
    adapted = replace(frozen, trained=(part,) * 48)
    plain, bare, thin = (step_of(model, ep=8).layers[0] for model in (QWEN3_30B, frozen, adapted))
    assert (bare.F, bare.W) == (plain.F, 0.0)
    assert pytest.approx(plain.B - plain.W) == bare.B
    assert plain.F < thin.F < 1.6 * plain.F
    assert 0 < thin.W < plain.W
    packed = step_of(replace(adapted, expert_bits=4.13), ep=8).layers[0]
    decoded = 2.516 * 16 * QWEN3_30B.expert_parameters / (3.35e12 * 0.9)
    assert pytest.approx(MEASURED_ON_HOPPER.inside * decoded, rel=0.01) == packed.F - thin.F
    assert step_of(frozen, ep=8).end() < 1e-5, "latency alone"


def test_a_host_that_is_slow_is_waited_for() -> None:
    slow = step_of(software=replace(OURS, host_s=1.0), ep=8, overlap="pair").layers[0]
    assert (slow.F, slow.B, slow.pair) == (pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0)
    assert slow.compute_F < 0.1


def longest(seconds: list[float], head: float, cuts: tuple[int, ...]) -> float:
    ends = (0, *cuts, len(seconds))
    sums = [sum(seconds[a:b]) for a, b in pairwise(ends)]
    return max([*sums[:-1], sums[-1] + head])


@pytest.mark.parametrize("head", [0.0, 1.5, 4.0])
@pytest.mark.parametrize("seconds", [[1.0] * 9, [0.3, 0.3, 1, 1, 1, 1, 1], [1, 2, 3, 1, 1, 5, 1, 1]])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_are_cut_as_well_as_can_be(seconds: list[float], head: float, stages: int) -> None:
    found = even_stages(seconds, head, stages)
    assert len(found) == stages
    assert sum(found) == len(seconds)
    assert min(found) >= 1
    ends = tuple(sum(found[:i]) for i in range(1, stages))
    best = min(longest(seconds, head, cuts) for cuts in combinations(range(1, len(seconds)), stages - 1))
    assert longest(seconds, head, ends) == pytest.approx(best)


def test_every_stage_needs_a_layer() -> None:
    with pytest.raises(ScheduleError, match="5 stages need a layer each, but there are 4"):
        even_stages([1.0] * 4, 0.0, 5)


@pytest.mark.parametrize(
    ("schedule", "stages", "overlap"),
    [
        ("1f1b", 1, "off"),
        ("vpp+1", 4, "pair"),
        ("zb-v", 2, "off"),
        ("dualpipev", 2, "pair"),
        ("dualpipe", 2, "pair"),
    ],
)
def test_a_schedule_goes_on_as_it_began(schedule: str, stages: int, overlap: str) -> None:
    step = step_of(pp=4, ep=8, schedule=schedule, stages_per_rank=stages, microbatches=48, overlap=overlap)
    found = step.time()
    makespan, compute, exposed = step._simulated(48, step.busiest([48]))
    assert found.seconds - found.end == pytest.approx(makespan, rel=0.003)
    assert (found.compute, found.exposed) == (pytest.approx(compute), pytest.approx(exposed, rel=0.01))


def test_what_is_exposed_is_of_one_rank() -> None:
    """Of four microbatches the first rank is the busiest, of six or more the second."""
    given = {"schedule": "vpp+1", "stages_per_rank": 2, "overlap": "pair", "recompute": "attn"}
    layout = Layout(pp=2, ep=8, microbatches=61, **given)  # type: ignore[arg-type]
    step = Step(Terms(model=QWEN3_30B, cluster=cluster("h100"), sequence=4096, imbalance=1.1), layout)
    assert [step.busiest([number]) for number in (4, 6, 61)] == [0, 1, 1]
    assert step.time().exposed == pytest.approx(step._simulated(61, 1)[2], rel=0.03)


def test_times_add_up_and_name_what_bounds() -> None:
    found = step_of(pp=4, ep=8, schedule="1f1b", microbatches=8).time()
    assert found.seconds == pytest.approx(found.compute + found.exposed + found.bubble + found.end)
    assert found.bound == "bubble"
    usual = StepTime(seconds=1.0, compute=0.95, exposed=0.02, bubble=0.02, end=0.01)
    assert usual.bound == "compute"
    assert replace(usual, exposed=0.3).bound == "exchange and host"
    assert replace(usual, end=0.3).bound == "end of step"


def test_the_end_sums_updates_and_gathers() -> None:
    alone = step_of(QWEN3_30B)
    update = UPDATE_BYTES * QWEN3_30B.parameters / (3.35e12 * 0.9)
    assert alone.end() == pytest.approx(update, rel=0.001)
    apart = step_of(QWEN3_235B, pp=8, dp=4, ep=8, schedule="1f1b", microbatches=16)
    held = 12 * (128 / 8 * QWEN3_235B.expert_parameters)
    gathered = apart.cluster.collective(2.0 * held, 4, 8)
    assert gathered < apart.end() < 4 * gathered
    assert Prices(F=1.0) + Prices(F=2.0, W=1.0) == Prices(F=3.0, W=1.0)


def test_kernels_inside_a_step_are_slower_by_what_machine_and_software_say() -> None:
    plain = step_of(ep=8)
    known = plain.cluster.constants
    machine = replace(plain.cluster, constants=replace(known, inside=1.5 * known.inside))
    terms = replace(plain.terms, cluster=machine, software=replace(IDEAL, slows=2.0))
    slow = Step(terms, plain.layout)
    assert slow.parts["experts"] == Seconds(*(pytest.approx(3.0 * part) for part in plain.parts["experts"]))
    assert slow.layers[0].compute_F == pytest.approx(3.0 * plain.layers[0].compute_F)
    assert slow.work.dispatch() == plain.work.dispatch(), "links are not kernels"


def test_a_layout_says_what_it_is() -> None:
    layout = Layout(pp=2, dp=3, ep=4, tp=5, schedule="vpp", stages_per_rank=6, microbatches=7, samples=8)
    assert layout.title == "pp2 dp3 ep4 tp5, vpp x 6, 7 x 8, recompute off"
    assert (layout.num_ranks, layout.num_stages, layout.copies) == (120, 12, 1)
    assert Layout().title == "pp1 dp1 ep1 tp1, 1 x 1, recompute off"
