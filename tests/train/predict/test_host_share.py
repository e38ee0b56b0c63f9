"""How much state leaves the device: no more than it takes to fit, and what the simulator says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import host_bed
import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.cost.hardware import device
from moeclipse.schedule.kinds import WEIGHT_COPIES
from moeclipse.schedule.weight_travel import READERS
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.host_share import (
    best_placing,
    buffer_bytes,
    grads_open,
    placing,
    prices_of,
    share_for,
    simulated,
    state_and_rest,
    weights_open,
)
from moeclipse.train.predict.plan_config import config_for
from moeclipse.train.predict.run_step import RunStep
from moeclipse.train.predict.state_bytes import each_element
from moeclipse.train.predict.step_program import leaving_inputs
from moeclipse.train.step.learner import Learner

BIG = {
    "optim.state": "8bit",
    "optim.master": "low-bits",
    "optim.main_grad": "bf16",
    "optim.clip": "layer",
    "memory.place": "auto",
    "data.seq_len": 4096,
    "data.batch_size": 16,
}
ONE = (1, 1, 1)


def big(**changes: Any) -> TrainConfig:
    return with_values(config_for("qwen3-30b-a3b"), {**BIG, **changes})


def test_thirty_billion_parameters_fit_an_h200_and_nothing_leaves_a_device_that_is_large_enough() -> None:
    found = best_placing(big(), ONE, 0.95 * 141e9, device("h200"), torch.bfloat16)
    assert found.fits
    assert 0.5 < found.share < 1
    assert found.again == "full"
    assert found.host_bytes < 125 * 2**30
    assert f"{100 * found.share:.0f} % of the optimizer state" in found.line()
    assert best_placing(big(), ONE, 400e9, device("h200"), torch.bfloat16).share == 0
    small = best_placing(big(), ONE, 60e9, device("h200"), torch.bfloat16)
    assert not small.fits
    assert "may not fit" in small.line()


def test_the_share_is_the_smallest_that_fits() -> None:
    config = big(**{"pipeline.recompute": "full"})
    for room in (110e9, 120e9, 133e9):
        found = best_placing(config, ONE, room, device("h200"), torch.bfloat16)
        assert found.fits
        less = placing(config, ONE, room, device("h200"), torch.bfloat16, "full", found.share - 0.02)
        assert not less.fits


def test_what_travels_takes_time_only_where_it_is_not_hidden() -> None:
    config = big(**{"pipeline.recompute": "full"})
    times = [simulated(config, ONE, device("h200"), torch.bfloat16, share).step for share in (0, 0.4, 1)]
    assert max(times) < 1.05 * min(times)  # under backward, and the next forward
    few = big(**{"pipeline.recompute": "full", "data.batch_size": 2})
    (short, _), (wire, exposed) = (
        simulated(few, ONE, device("h200"), torch.bfloat16, share) for share in (0, 1)
    )
    assert wire > 1.5 * short
    assert exposed > 0.3 * wire
    assert wire >= placing(few, ONE, 1e12, device("h200"), torch.bfloat16, "full", 1.0).copies_s
    late = big(**{"pipeline.recompute": "full", "optim.clip": "global"})
    one, two = (simulated(late, axes, device("h200"), torch.bfloat16, 0.4) for axes in (ONE, (2, 1, 1)))
    assert one.step < 1.05 * times[1]  # under the next forward
    alone = simulated(late, (2, 1, 1), device("h200"), torch.bfloat16, 0)
    assert two.step > 1.15 * alone.step  # behind the norm nothing hides them, but for the last stores


@pytest.mark.parametrize(
    "stages", [{"pipeline.layers": (20, 20, 8)}, {"pipeline.layers_per_virtual_stage": 16}]
)
def test_stages_of_several_ranks_are_one_on_one_rank(stages: dict[str, Any]) -> None:
    h200 = device("h200")
    found, plain = (simulated(big(**given), ONE, h200, torch.bfloat16, 0.5) for given in (stages, {}))
    assert found == plain


def test_bytes_are_those_of_a_learner() -> None:
    run_alone(bytes_of_a_learner)


def bytes_of_a_learner(mesh: Mesh) -> None:
    shape = {
        "model.num_layers": 3,
        "model.d_model": 64,
        "model.vocab_size": 256,
        "moe.num_experts": 8,
        "moe.d_ff": 64,
        "data.files": (str(Path(__file__).parents[1] / "text.txt"),),
        "data.batch_size": 2,
        "data.seq_len": 16,
        "model.dtype": "bfloat16",
        "memory.place": "host",
        "optim.clip": "layer",
    }
    for changes in ({}, {"optim.state": "8bit", "optim.master": "low-bits"}, {"memory.states": "moments"}):
        config = with_values(TrainConfig(), {**shape, **changes})
        learner = Learner(config, mesh)
        assert learner.optim.host is not None
        state, _ = state_and_rest(config, ONE, torch.bfloat16, "off")
        travel = each_element(config.optim, config.memory.states, torch.bfloat16)
        travel /= each_element(config.optim, "all", torch.bfloat16)
        assert learner.optim.host.num_bytes == pytest.approx(travel * state, rel=0.03)
        buffers = buffer_bytes(config, ONE, torch.bfloat16)
        assert learner.optim.host.buffer_bytes == pytest.approx(
            buffers, rel=0.25
        )  # where buckets end, varies


def test_inputs_of_layers_leave_where_nothing_fits_without() -> None:
    many = {"pipeline.recompute": "full", "data.batch_size": 32}
    given = (ONE, 120e9, device("h200"), torch.bfloat16)
    stay = best_placing(big(**many, **{"memory.activations": "device", "memory.weights": "device"}), *given)
    assert not stay.fits
    found = best_placing(big(**many), *given)
    assert found.fits
    each = 32 * 4096 * 2048 * 2
    assert found.input_bytes == 46 * each
    assert placing(big(**many), *given, "full", stay.share).input_bytes == 0
    away = big(**many, **{"memory.activations": "host"})
    saved = placing(away, *given, "full", stay.share).peak - stay.peak
    assert saved == -(46 - 2 * 3) * each, "but for the ring and those that wait for their way out"
    enough = (ONE, 133e9, device("h200"), torch.bfloat16)
    assert best_placing(big(**many), *enough).input_bytes == 0


def test_of_adapters_only_what_is_trained_has_state_and_inputs_leave_above_it() -> None:
    few = big(**{"pipeline.recompute": "full", "lora.rank": 16, "optim.clip": "global"})
    given = (ONE, 85e9, device("h200"), torch.bfloat16)
    found = best_placing(few, *given)
    assert found.fits
    assert found.input_bytes == 46 * 16 * 4096 * 2048 * 2
    stay = best_placing(
        with_values(few, {"memory.activations": "device", "memory.weights": "device"}), *given
    )
    assert not stay.fits
    assert stay.host_bytes < 3e9, "all that there is"
    above = {"optim.frozen": tuple(f"layers.{n}.*" for n in range(40)), "memory.activations": "host"}
    assert leaving_inputs(with_values(few, above), ONE) == list(range(41, 47))
    assert leaving_inputs(with_values(few, above), (2, 1, 1)) == list(range(1, 47)), (
        "ranks want all gradients"
    )


def test_gradients_on_the_host_leave_those_of_some_layers_and_are_priced() -> None:
    """Clipped by one norm, 30 billion parameters fit no other way."""
    changes = {"pipeline.recompute": "full", "optim.clip": "global", "optim.master": "none"}
    stay = big(**changes, **{"memory.place": "host"})
    away = with_values(stay, {"memory.main_grad": "host"})
    given = (ONE, 133e9, device("h200"), torch.bfloat16, "full", 0.9)
    resident, found = placing(stay, *given), placing(away, *given)
    each = 2 * (30.5e9 - 2 * 151936 * 2048) / 48
    assert not resident.fits
    assert found.fits
    assert resident.peak - found.peak == pytest.approx(45 * each, rel=0.01), "all but those of three layers"
    assert found.step_s > 1.1 * resident.step_s, "a fourth of a step has two ways to hide"
    assert found.exposed_s > resident.exposed_s
    assert resident.peak - found.peak == pytest.approx(found.grad_bytes, rel=0.01)
    asked = with_values(stay, {"memory.place": "auto"})
    given = (ONE, 112e9, device("h200"), torch.bfloat16)
    found = best_placing(asked, *given)
    assert found.fits
    assert found.grad_bytes == pytest.approx(45 * each, rel=0.01)
    assert f"and gradients, {found.grad_bytes / 1e9:.3g} GB," in found.line()
    assert not best_placing(with_values(asked, {"memory.main_grad": "device"}), *given).fits
    assert best_placing(asked, ONE, 400e9, *given[2:]).grad_bytes == 0
    for closed in ({"optim.accumulate": 2}, {"optim.clip": "layer"}, {"memory.buffers": 48}):
        assert best_placing(with_values(asked, closed), *given).grad_bytes == 0
    assert grads_open(asked, (2, 1, 1)) == (False,)


def chosen(mesh: Mesh) -> None:
    config = with_values(TrainConfig(), {"memory.place": "auto", "memory.device_gb": 1e3})
    assert share_for(config, mesh)[1] == 0.0
    _, share, notes = share_for(with_values(config, {"memory.device_gb": 1e-3}), mesh)
    assert share == 1.0
    assert "on the host" in notes[0]
    given = with_values(config, {"memory.place": "host", "memory.share": 0.25})
    assert share_for(given, mesh) == (given, 0.25, [])
    assert share_for(TrainConfig(), mesh) == (TrainConfig(), 0.0, [])
    again = {"pipeline.recompute": "full", "model.num_layers": 12, "memory.device_gb": 1e-3}
    found, share, notes = share_for(with_values(config, again), mesh)
    assert (found.memory.activations, found.memory.main_grad, share) == ("host", "host", 1.0)
    assert "and inputs of layers, " in notes[0]
    roomy = with_values(config, {**again, "memory.device_gb": 1e3})
    assert share_for(roomy, mesh)[0].memory.activations == "device"


def test_by_hand_or_by_itself() -> None:
    run_alone(chosen)


ALL_EXPERTS = 48 * 128 * 3 * 2048 * 768 * 2.0
"""Bytes of those of the model of 30.5 B parameters, in bfloat16."""


@pytest.mark.parametrize("how", [{"lora.rank": 16, "optim.clip": "global"}, {}], ids=["adapters", "trained"])
def test_weights_on_the_host_are_counted_and_priced(how: dict[str, Any]) -> None:
    here, away = (
        placing(
            big(**{"pipeline.recompute": "full", "memory.weights": place, **how}),
            ONE,
            1e12,
            device("h200"),
            torch.bfloat16,
            "full",
            share=0.0,
        )
        for place in ("device", "host")
    )
    assert here.peak - away.peak == pytest.approx(ALL_EXPERTS * (48 - 3) / 48)
    assert away.weight_bytes == pytest.approx(ALL_EXPERTS)
    assert "weights of experts, 58 GB" in away.line()
    assert here.step_s * 0.999 < away.step_s < 1.05 * here.step_s, "forward takes about as long as one way"
    few = with_values(
        big(**{"pipeline.recompute": "full", "memory.weights": "host", **how}), {"data.batch_size": 1}
    )
    rushed = simulated(few, ONE, device("h200"), torch.bfloat16, 0.0)
    still = simulated(
        with_values(few, {"memory.weights": "device"}), ONE, device("h200"), torch.bfloat16, 0.0
    )
    wire = 2 * ALL_EXPERTS * (48 - 3) / 48 / (0.95 * 55e9)
    assert rushed.step > 0.8 * wire > 2 * still.step, "4,096 tokens are computed while a third of them comes"


def test_experts_leave_where_nothing_else_is_enough() -> None:
    few = big(**{"pipeline.recompute": "full", "lora.rank": 16, "optim.clip": "global"})
    there = (device("h200"), torch.bfloat16)
    assert best_placing(few, ONE, 85e9, *there).weight_bytes == 0, "inputs of layers are enough"
    found = best_placing(few, ONE, 40e9, *there)
    assert found.fits
    assert found.weight_bytes == pytest.approx(ALL_EXPERTS)
    assert found.input_bytes == 0, "and these are not needed"
    small = best_placing(few, ONE, 30e9, *there)
    assert small.fits
    assert min(small.weight_bytes, small.input_bytes) > 0
    for closed in (
        {"memory.weights": "device"},
        {"pipeline.recompute": "auto"},
        {"lora.rank": 0},
        {"memory.buffers": 48},
    ):
        assert best_placing(with_values(few, closed), ONE, 40e9, *there).weight_bytes == 0
    assert weights_open(few, (1, 2, 1)) == (False,)
    assert weights_open(with_values(few, {"memory.weights": "host"}), ONE) == (True,)


def programs(mesh: Mesh) -> None:
    """Weights travel in the program of a run as in the one that is simulated for it."""
    small = {**host_bed.SMALL, "model.num_layers": 6, "pipeline.recompute": "full"}
    for how in (
        {"lora.rank": 4, "optim.accumulate": 2},
        {"optim.clip": "layer", "pipeline.schedule": "layers", "optim.accumulate": 2},
        {"optim.frozen": ("embedding", "layers.0", "layers.1", "layers.2", "experts"), "model.base": "fp8"},
    ):
        config = host_bed.merged(small, {"memory.weights": "host", "memory.buffers": 2}, how)
        learner = Learner(config, mesh)
        costs = prices_of(config, ONE, device("cpu"), learner.dtype)
        made, _ = RunStep(config=config, dp=1, ep=1, costs=None, step_costs=costs).verified(
            "layers" if "pipeline.schedule" in how else "1f1b"
        )
        real, guess = learner.program().program, made.program
        listed = [
            [str(op) for op in program.ranks[0] if op.kind in (*WEIGHT_COPIES, *READERS)]
            for program in (real, guess)
        ]
        assert listed[0] == listed[1]
        for real_stage, guessed in zip(real.pipeline().layers, guess.pipeline().layers, strict=True):
            for one, other in zip(real_stage, guessed, strict=True):
                assert other.weight_bytes == pytest.approx(
                    one.weight_bytes, rel=0.02 if "model.base" in how else 0
                )
                assert other.stored_bytes == pytest.approx(one.stored_bytes)


def test_the_program_of_a_run_is_the_one_that_is_simulated() -> None:
    run_alone(programs)
