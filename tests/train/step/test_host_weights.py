"""Weights of experts on the host, which visit layer by layer: bits of weights that stay on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import host_bed
import pytest
import torch
from host_bed import without_memory
from test_host_states import given_back

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of
from moeclipse.core.errors import ConfigError, CorruptionError, ScheduleError
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig, layout_problems
from moeclipse.train.generate.sample import write_sample
from moeclipse.train.observe.memory_table import watched
from moeclipse.train.step.host_weights import HostWeights
from moeclipse.train.step.learner import Learner

SMALL: dict[str, Any] = {
    **host_bed.SMALL,
    "model.num_layers": 6,
    "optim.bucket_mb": 0.01,
    "pipeline.recompute": "full",
}
HOST = {"memory.weights": "host", "memory.buffers": 2}
ADAPTERS = {"lora.rank": 4}
LAYER = {"optim.clip": "layer", "optim.clip_norm": 0.05}
BY_LAYERS = {"pipeline.schedule": "layers", "optim.accumulate": 4}


def config_of(*changes: dict[str, Any]) -> TrainConfig:
    return host_bed.merged(SMALL, *changes)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {f"{piece.name}[{piece.start}]": piece.values.clone() for piece in learner._pieces()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def trained(mesh: Mesh, config: TrainConfig, steps: int = 3) -> tuple[list[float], Learner]:
    learner = Learner(config, mesh)
    return [learner.step(step)["loss"] for step in range(steps)], learner


def compared(mesh: Mesh, ways: dict[str, dict[str, Any]]) -> None:
    for way, how in ways.items():
        losses, resident = trained(mesh, config_of(without_memory(how)))
        assert resident.weights is None
        some, learner = trained(mesh, config_of(HOST, how))
        assert isinstance(learner.weights, HostWeights), way
        assert some == losses, way
        assert_same(weights_of(learner), weights_of(resident))
        assert_same(state_of(learner), state_of(resident))


ALONE: dict[str, dict[str, Any]] = {
    "adapters": ADAPTERS,
    "adapters, slow, several": {**ADAPTERS, "optim.accumulate": 4, "memory.copy_gb_s": 0.001},
    "adapters beside attention": {**ADAPTERS, "lora.targets": ("q", "v"), "memory.buffers": 3},
    "one buffer": {**ADAPTERS, "memory.buffers": 1, "optim.accumulate": 2},
    "in few bits": {**ADAPTERS, "model.base": "nf4", "moe.d_ff": 16, "model.dtype": "bfloat16"},
    "frozen": {"optim.frozen": ("experts.up", "experts.down")},
    "frozen below": {"optim.frozen": ("embedding", "layers.0", "layers.1", "layers.2", "experts")},
    "trained above": {
        **LAYER,
        "optim.frozen": ("embedding", "layers.0", "layers.1", "layers.2"),
        "memory.copy_gb_s": 0.002,
    },
    "by memory.place": {
        **ADAPTERS,
        "memory.place": "auto",
        "memory.weights": "auto",
        "memory.device_gb": 1e-9,
    },
    "biases": {"moe.expert_bias": True, "optim.frozen": ("moe.experts",)},
    "adapters, by layers": {**ADAPTERS, **BY_LAYERS},
    "trained": LAYER,
    "trained, several, slow": {**LAYER, "optim.accumulate": 2, "memory.copy_gb_s": 0.001},
    "trained in bfloat16": {**LAYER, "model.dtype": "bfloat16"},
    "trained, few bits": {
        **LAYER,
        "model.dtype": "bfloat16",
        "optim.state": "8bit",
        "optim.master": "low-bits",
    },
    "trained, no masters": {
        **LAYER,
        "model.dtype": "bfloat16",
        "optim.state": "8bit",
        "optim.master": "none",
    },
    "up alone": {**LAYER, "optim.frozen": ("experts.down",)},
    "trained, state beside": {**LAYER, "memory.place": "host", "model.dtype": "bfloat16"},
    "trained, by layers": {**LAYER, **BY_LAYERS},
    "all beside, by layers": {
        **LAYER,
        **BY_LAYERS,
        "memory.place": "host",
        "memory.activations": "host",
        "memory.copy_gb_s": 0.01,
    },
}


SHORT = (
    "adapters, slow, several",
    "in few bits",
    "frozen below",
    "trained, few bits",
    "all beside, by layers",
)
"""One of each kind; the others are in the long part."""


@pytest.mark.parametrize(
    "way", [way if way in SHORT else pytest.param(way, marks=pytest.mark.full) for way in ALONE]
)
def test_the_same_bits_as_weights_that_stay(way: str) -> None:
    run_alone(compared, {way: ALONE[way]})


def gradients_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Of one step, as each bucket is complete: updates follow at once, and others take the memory."""
    found: dict[str, torch.Tensor] = {}
    update = learner.buckets.on_reduce

    def kept(number: int) -> None:
        bucket = learner.buckets.buckets[number]
        found[bucket.name] = bucket.grads.clone()
        update(number)

    learner.buckets.on_reduce = kept
    learner.backward(0)
    return found


def parity(mesh: Mesh) -> None:
    """The gradients of a model that keeps everything, in float64."""
    for trains in (ADAPTERS, {}):
        wide = {"model.dtype": "float64", "optim.accumulate": 2, "optim.clip": "layer", **trains}
        resident = Learner(config_of(wide, {"pipeline.recompute": "off"}), mesh)
        wanted = gradients_of(resident)
        assert len(wanted) > 15
        for how in ({}, {**BY_LAYERS, "optim.accumulate": 2, "memory.buffers": 1}):
            found = gradients_of(Learner(config_of(wide, HOST, how), mesh))
            assert found.keys() == wanted.keys()
            for name, grad in wanted.items():
                assert (found[name] - grad).abs().max() <= 1e-12 * grad.abs().max(), name


def test_gradients_are_those_of_a_model_that_keeps_everything() -> None:
    run_alone(parity)


def evaluated(mesh: Mesh) -> None:
    held_out = {"eval.every": 1, "eval.share": 0.2, "eval.samples": 4, "memory.copy_gb_s": 0.002}
    for how in (ADAPTERS, LAYER, {**LAYER, **BY_LAYERS}):
        resident, learner = (Learner(config_of(held_out, how, more), mesh) for more in ({}, HOST))
        weights = learner.weights
        assert weights is not None
        for step in range(3):
            assert learner.step(step)["loss"] == resident.step(step)["loss"]
            for _ in range(2):
                wanted, found = resident.evaluate(step + 1), learner.evaluate(step + 1)
                assert found["eval_loss"] == wanted["eval_loss"]
            assert weights._here == [0, 1], "the next step begins with these"


def test_evaluation_between_steps_finds_every_layers_weights() -> None:
    run_alone(evaluated)


def written(mesh: Mesh) -> None:
    """Texts of the model that was trained, by the learner's own model."""
    for how in (ADAPTERS, LAYER):
        resident, learner = (Learner(config_of(how, more), mesh) for more in ({}, HOST))
        for one in (resident, learner):
            one.step(0)
        texts = write_sample(resident, 2)
        assert texts["lines"]
        assert write_sample(learner, 2) == texts
        assert learner.step(1)["loss"] == resident.step(1)["loss"]


def test_texts_are_written_with_weights_that_visit() -> None:
    run_alone(written)


def saved_and_resumed(mesh: Mesh, folder: Path, how: dict[str, Any]) -> None:
    placed = {"d": config_of(how, {"integrity.every": 1}), "h": config_of(how, HOST, {"integrity.every": 1})}
    _, resident = trained(mesh, placed["d"], steps=4)
    wanted = state_of(resident)
    for before, after in (("h", "d"), ("d", "h"), ("h", "h")):
        _, learner = trained(mesh, placed[before], steps=2)
        path = learner.save(folder / f"{before}{after}", 2)
        resumed = Learner(placed[after], mesh)
        resumed.step(0)  # what lies in the ring is old then
        assert resumed.load(Checkpoint.open(path, OneRank())) == 2
        for step in (2, 3):
            resumed.step(step)
        assert_same(state_of(resumed), wanted)


def begun(mesh: Mesh, folder: Path) -> None:
    """From weights of another run, with moments of its own; and bits that flip on the host are found."""
    for how in (ADAPTERS, {**LAYER, "model.dtype": "bfloat16"}):
        other = Learner(config_of(how, {"run.seed": 7}), mesh)
        source = Checkpoint.open(other.save(folder / how.get("model.dtype", "wide"), 0), OneRank())
        resident, learner = (
            Learner(config_of(how, more, {"integrity.every": 1}), mesh) for more in ({}, HOST)
        )
        for one in (resident, learner):
            one.step(0)
            one.load_weights(source)
        assert_same(weights_of(learner), weights_of(resident))
        assert learner.step(1)["loss"] == resident.step(1)["loss"]
        assert learner.weights is not None
        learner.optim.states  # noqa: B018  (nothing is under way)
        learner.weights._held[3][40] ^= 4
        with pytest.raises(CorruptionError, match=r"layers\.4\.moe\.experts"):
            learner.step(2)


def test_weights_of_another_run_are_taken_and_flipped_bits_are_found(tmp_path: Path) -> None:
    run_alone(begun, tmp_path)


FEW_BITS = {**LAYER, "model.dtype": "bfloat16", "optim.state": "8bit", "optim.master": "low-bits"}


@pytest.mark.parametrize(
    "how",
    [
        ADAPTERS,
        pytest.param(FEW_BITS, marks=pytest.mark.full),
        {**LAYER, "model.dtype": "bfloat16"},
        pytest.param(LAYER, marks=pytest.mark.full),
    ],
    ids=["adapters", "few bits", "masters", "own"],
)
def test_a_checkpoint_of_either_goes_on_as_the_other(tmp_path: Path, how: dict[str, Any]) -> None:
    run_alone(saved_and_resumed, tmp_path, how)


def as_they_lie(mesh: Mesh) -> None:
    for how in (ADAPTERS, LAYER):
        learner = Learner(config_of(HOST, how), mesh)
        learner.step(0)
        weights = learner.weights
        assert weights is not None
        assert not learner.checkpointing.asynchronous
        stretches = [(held.data_ptr(), held.data_ptr() + held.nbytes) for held in weights._held]
        mine = [p for p in learner.optim.pieces() if p.name.startswith("weight") and "experts" in p.name]
        mine = [piece for piece in mine if "lora" not in piece.name]
        assert len(mine) == 2 * 4 * 5
        for piece in mine:
            assert isinstance(piece.data, torch.Tensor)
            assert any(first <= piece.data.data_ptr() < last for first, last in stretches)


def test_a_checkpoint_is_written_from_the_hosts_memory() -> None:
    run_alone(as_they_lie)


def told(mesh: Mesh) -> None:
    changes = {**LAYER, "memory.copy_gb_s": 0.002, "optim.accumulate": 2}
    learner = Learner(config_of(HOST, changes), mesh)
    weights = learner.weights
    assert weights is not None
    table = watched(learner)
    learner.step(0)
    learner.times.take()
    learner.step(1)
    labels = [transfer.label for transfer in learner.times.transfers]
    fetched = [label for label in labels if label.startswith("fetch of weights")]
    assert len(fetched) == 2 * 2 * (5 - 2), "of five layers two are there as forward and as backward begin"
    assert sum(label.startswith("store of weights") for label in labels) == 5
    assert "fetch of weights, layer 3" in labels
    (record,) = (one.times for one in learner.times.take())
    assert record["comm_ms"] > 900 * len(fetched) * weights._held[0].nbytes / 2e6
    assert record["hidden_ms"] > 0
    state = table.state()
    assert state["buffers for weights of the host"] == weights.buffer_bytes == 2 * weights._ring[0].nbytes
    experts = 5 * 4 * (24 * 16 + 16 * 12) * 4
    assert weights.num_bytes == experts
    resident = watched(Learner(config_of(changes), mesh)).state()
    assert resident["weights"] - state["weights"] == experts
    assert "weights in the host's memory" in "\n".join(table.lines())


def test_copies_are_told_like_other_transfers_and_memory_by_its_place() -> None:
    run_alone(told)


class Broken(Exception):
    pass


def interrupted(mesh: Mesh, how: dict[str, Any]) -> None:
    """A step that ends in the middle of forward, or of backward, leaves nothing behind for the next."""
    for calls in (4, 9):
        resident, learner = (
            Learner(config_of(how, more), mesh) for more in ({}, {**HOST, "memory.copy_gb_s": 0.002})
        )
        wanted = resident.step(0)["loss"]
        count = 0

        def stop(*_: Any, calls: int = calls) -> None:
            nonlocal count
            count += 1
            if count == calls:
                raise Broken

        hooks = [layer.attention.register_forward_pre_hook(stop) for layer in learner.model.all_layers]
        with pytest.raises(Broken):
            learner.backward(0)
        for hook in hooks:
            hook.remove()
        learner.model.tp.wgrads._queues.clear()
        assert learner.step(0)["loss"] == wanted
        assert_same(weights_of(learner), weights_of(resident))


@pytest.mark.parametrize(
    "how",
    [ADAPTERS, pytest.param({**ADAPTERS, **BY_LAYERS}, marks=pytest.mark.full)],
    ids=["plain", "layers"],
)
def test_a_step_that_is_interrupted_leaves_nothing_behind(how: dict[str, Any]) -> None:
    run_alone(interrupted, how)


def out_of_order(mesh: Mesh) -> None:
    learner = Learner(config_of(HOST, LAYER), mesh)
    weights = learner.weights
    assert weights is not None
    weights.begin_step()
    with pytest.raises(ScheduleError, match="layer 2 reads its weights for microbatch 0, forward, but the"):
        weights.come(1, 0, again=False)
    bucket = next(one for one in learner.buckets if one.lent is not None and one.lent.number == 4)
    with pytest.raises(ScheduleError, match="layer 5 needs its weights, and they were not fetched"):
        weights.arrived(bucket)
    weights.updated(bucket)
    with pytest.raises(ScheduleError, match=r"layer 5 is stored, but only .* were updated"):
        weights._store(4)


def test_another_order_than_the_programs_is_refused() -> None:
    run_alone(out_of_order)


def without_room(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"the host has .* GB of memory for this rank, and the weights of"):
        Learner(config_of(HOST, ADAPTERS, {"memory.host_gb": 1e-6}), mesh)


def on_two(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"memory.weights = 'host' needs one rank, not 2"):
        Learner(config_of(HOST, ADAPTERS), mesh)


def test_a_host_without_room_and_several_ranks_are_refused() -> None:
    run_alone(without_room)
    run_ranks(2, on_two)
    words = "memory.weights = 'host' needs one rank, not 2; set it to 'device', or --ranks 1"
    assert words in list(layout_problems(config_of(HOST, ADAPTERS), 2))
    assert not list(layout_problems(config_of(HOST, ADAPTERS), 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline.recompute": "attn"}, "needs pipeline.recompute = 'full' in all layers"),
        ({"pipeline.recompute_layers": 2}, "needs pipeline.recompute = 'full' in all layers"),
        ({"memory.buffers": 5}, "needs more layers with experts (5) than memory.buffers (5)"),
        ({"model.num_dense_layers": 6}, "needs more layers with experts (0) than memory.buffers (2)"),
        ({"pipeline.schedule": "1f1b"}, "needs one rank whose microbatches go one after the other"),
        ({"parallel.pp": 2, "optim.accumulate": 4}, "needs one rank whose microbatches go one after the"),
        ({"pipeline.overlap": "pair", "optim.accumulate": 2}, "needs one rank whose microbatches go one"),
        ({"placement.planner": "incremental"}, "memory.weights = 'host' needs experts that stay where they"),
        ({"lora.rank": 0}, "needs optim.clip = 'layer' where experts are trained, not 'global'"),
        (
            {"lora.rank": 0, "moe.expert_bias": True, "optim.frozen": ("experts.up", "experts.down.")},
            "needs optim.clip = 'layer' where experts are trained",
        ),
    ],
)
def test_what_cannot_be_right_is_said(changes: dict[str, Any], words: str) -> None:
    assert not list(problems_of(config_of(HOST, ADAPTERS)))
    assert [text for text in problems_of(config_of(HOST, ADAPTERS, changes)) if words in text]


def test_memory_and_threads_are_given_back_with_the_learner() -> None:
    run_alone(given_back, config_of(HOST, ADAPTERS))
