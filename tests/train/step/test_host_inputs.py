"""Inputs of layers on the host between forward and backward: bits of inputs that stay on the device."""

from __future__ import annotations

import gc
from typing import Any

import host_bed
import pytest
import torch
from host_bed import without_memory
from test_host_states import given_back
from torch.multiprocessing.reductions import StorageWeakRef

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.schedule.input_travel import InputKey
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.memory_table import MemoryTable, watched
from moeclipse.train.step.learner import Learner

SMALL: dict[str, Any] = {
    **host_bed.SMALL,
    "model.num_layers": 5,
    "optim.bucket_mb": 0.01,
    "pipeline.recompute": "full",
}
HOST = {"memory.activations": "host", "memory.buffers": 2}


def config_of(*changes: dict[str, Any]) -> TrainConfig:
    return host_bed.merged(SMALL, *changes)


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


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
        assert resident.inputs is None
        some, learner = trained(mesh, config_of(HOST, how))
        assert learner.inputs is not None, way
        assert learner.inputs.num_bytes > 0
        assert some == losses, way
        assert_same(weights_of(learner), weights_of(resident))


BY_LAYERS = {"pipeline.schedule": "layers", "optim.accumulate": 4, "parallel.check_launches": True}
ALONE: dict[str, dict[str, Any]] = {
    "one microbatch": {},
    "several, one buffer": {"optim.accumulate": 4, "memory.buffers": 1, "memory.copy_gb_s": 1e-4},
    "slow": {"memory.copy_gb_s": 0.0005},
    "state beside": {"memory.place": "host", "memory.copy_gb_s": 0.01},
    "updates in backward": {"memory.place": "host", "optim.clip": "layer", "optim.accumulate": 2},
    "auto": {
        "memory.place": "auto",
        "memory.device_gb": 1e-9,
        "memory.activations": "auto",
        "memory.buffers": 1,
    },
    "by layers": BY_LAYERS,
    "by layers, updates in backward": {**BY_LAYERS, "memory.place": "host", "optim.clip": "layer"},
    "some layers": {"pipeline.recompute_layers": 3},
    "norms behind": {"model.norms": "after"},
    "adapters": {"lora.rank": 4, "optim.accumulate": 2},
    "adapters, by layers": {"lora.rank": 4, **BY_LAYERS},
    "frozen below": {"optim.frozen": ("embedding", "layers.0", "layers.1"), "optim.accumulate": 2},
    "adapters above, state beside": {
        "lora.rank": 4,
        "optim.frozen": ("layers.0", "layers.1"),
        "memory.place": "host",
    },
    "frozen between": {"optim.frozen": ("layers.2", "norm"), "memory.buffers": 1},
}


@pytest.mark.parametrize(
    "ways",
    [
        ("several, one buffer", "auto", "by layers, updates in backward", "adapters above, state beside"),
        pytest.param(tuple(ALONE), marks=pytest.mark.full),
    ],
    ids=["some", "all"],
)
def test_the_same_bits_as_inputs_that_stay(ways: tuple[str, ...]) -> None:
    run_alone(compared, {way: ALONE[way] for way in ways})


@pytest.mark.parametrize(
    ("axes", "how"),
    [
        ({}, {"optim.accumulate": 2}),
        pytest.param({"dp": 2}, {"memory.place": "host"}, marks=pytest.mark.full),
        pytest.param({"tp": 2}, {"parallel.sequence_parallel": True}, marks=pytest.mark.full),
        pytest.param({"pp": 2}, {"optim.accumulate": 4, "pipeline.schedule": "1f1b"}, marks=pytest.mark.full),
        pytest.param({}, {"optim.accumulate": 2, "pipeline.overlap": "pair+self"}, marks=pytest.mark.full),
    ],
    ids=["ep", "dp", "tp", "pp", "overlapped"],
)
def test_the_same_bits_on_several_ranks(axes: dict[str, int], how: dict[str, Any]) -> None:
    given = {f"parallel.{name}": size for name, size in axes.items() if name in ("tp", "pp")}
    ways = {"one": {**how, **given, "parallel.check_launches": True}}
    run_ranks(2, compared, ways, **axes)


def parity(mesh: Mesh) -> None:
    """The gradients of a model that keeps everything, in float64."""
    wide = {"model.dtype": "float64", "optim.accumulate": 2}
    found = []
    for how in ({"pipeline.recompute": "off"}, HOST, {**HOST, **BY_LAYERS, "optim.accumulate": 2}):
        learner = Learner(config_of(wide, how), mesh)
        learner.backward(0)
        found.append(torch.cat([bucket.reduced().flatten() for bucket in learner.buckets]))
    for other in found[1:]:
        assert (other - found[0]).abs().max() <= 1e-12 * found[0].abs().max()


def test_gradients_are_those_of_a_model_that_keeps_everything() -> None:
    run_alone(parity)


def gone(mesh: Mesh, how: dict[str, Any]) -> None:
    learner = Learner(config_of(HOST, how), mesh)
    inputs = learner.inputs
    assert inputs is not None
    store, seen = inputs.store, list[StorageWeakRef]()

    def noted(key: InputKey, parts: Any) -> None:
        store(key, parts)
        seen.append(StorageWeakRef(parts[0].untyped_storage()))
        # The layer itself still reads its own.
        kept.append(sum(not one.expired() for one in seen))

    kept: list[int] = []
    inputs.store = noted  # type: ignore[method-assign]
    learner.step(0)
    accumulate, frozen = learner.config.optim.accumulate, len(learner.config.optim.frozen)
    assert len(kept) == (3 - frozen) * accumulate, "below the first that is trained nothing comes back"
    assert max(kept) <= inputs.slots + 1, "more are there than wait for their way out"
    gc.collect()
    assert not inputs._coming


@pytest.mark.parametrize(
    "how",
    [
        {"memory.buffers": 1},
        {**BY_LAYERS, "memory.buffers": 1},
        {"lora.rank": 4, "optim.frozen": ("layers.0",), "memory.buffers": 1},
    ],
    ids=["plain", "layers", "adapters"],
)
def test_what_has_left_takes_no_memory_of_the_device(how: dict[str, Any]) -> None:
    run_alone(gone, how)


def told(mesh: Mesh) -> None:
    learner = Learner(config_of(HOST, {"memory.copy_gb_s": 0.0005, "optim.accumulate": 2}), mesh)
    table = watched(learner)
    learner.step(0)
    each = 4 * 8 * 16 * 4 // 2
    labels = [transfer.label for transfer in learner.times.transfers]
    for way in ("store", "fetch"):
        wanted = [f"{way} of input, layer {layer}, microbatch {m}" for m in range(2) for layer in (1, 2, 3)]
        assert sorted(label for label in labels if label.startswith(way)) == sorted(wanted)
    (record,) = (one.times for one in learner.times.take())
    assert record["comm_ms"] > 900 * 6 * each / 5e5
    assert record["hidden_ms"] > 0
    assert table.kept["layer 2"] < each, "autograd keeps its input, too"
    assert table.kept["layer 4"] >= each
    lines = "\n".join(table.lines())
    assert "inputs of layers in the host's memory" in lines
    assert "buffers for inputs of layers" in lines
    assert learner.inputs is not None
    state = MemoryTable(learner.optim, [], by_autograd=False, inputs=learner.inputs).state()
    assert state["buffers for inputs of layers"] == learner.inputs.buffer_bytes


def test_copies_are_told_like_other_transfers_and_memory_by_its_place() -> None:
    run_alone(told)


class Broken(Exception):
    pass


def interrupted(mesh: Mesh, how: dict[str, Any]) -> None:
    """A step that ends in the middle of forward, or of backward, leaves nothing behind for the next."""
    for calls in (4, 9):  # of layer 2: in forward, and when it runs again
        resident, learner = (
            Learner(config_of(how, more), mesh) for more in ({}, {**HOST, "memory.copy_gb_s": 1e-3})
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
    "how", [{}, pytest.param(BY_LAYERS, marks=pytest.mark.full)], ids=["plain", "layers"]
)
def test_a_step_that_is_interrupted_leaves_nothing_behind(how: dict[str, Any]) -> None:
    run_alone(interrupted, how)


def evaluated(mesh: Mesh) -> None:
    held_out = {"eval.every": 1, "eval.share": 0.2, "eval.samples": 4}
    resident, learner = (Learner(config_of(held_out, more), mesh) for more in ({}, HOST))
    for step in range(2):
        assert learner.step(step)["loss"] == resident.step(step)["loss"]
        wanted, found = resident.evaluate(step + 1), learner.evaluate(step + 1)
        assert found["eval_loss"] == wanted["eval_loss"]


def test_evaluation_moves_nothing() -> None:
    run_alone(evaluated)


def refused(mesh: Mesh) -> None:
    with pytest.raises(
        ConfigError, match=r"the host has .* GB of memory for this rank, and the inputs of layers"
    ):
        Learner(config_of(HOST, {"memory.host_gb": 1e-6}), mesh)
    below = {"lora.rank": 4, "optim.frozen": tuple(f"layers.{n}" for n in range(4))}
    with pytest.raises(ConfigError, match="moves nothing: no layer between the first that has something"):
        Learner(config_of(HOST, below), mesh)
    learner = Learner(config_of(HOST), mesh)
    assert learner.inputs is not None
    learner.inputs.begin_step()
    with pytest.raises(ScheduleError, match="layer 2, microbatch 0 is not the program's next"):
        learner.inputs.entered(InputKey(0, 2, 0), torch.zeros(1))
    with pytest.raises(ScheduleError, match="is read, but was not fetched"):
        learner.inputs.arrived(InputKey(0, 2, 0))


def test_a_host_without_room_and_another_order_are_refused() -> None:
    run_alone(refused)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline.recompute": "attn"}, "needs pipeline.recompute = 'full', not 'attn'"),
        ({"model.num_layers": 2}, "needs three layers, not 2"),
        (
            {"pipeline.schedule": "zb-h1", "parallel.pp": 2, "optim.accumulate": 4},
            "leaves weight gradients for",
        ),
        ({"pipeline.recompute_layers": 1}, "needs pipeline.recompute_layers above 1: the first layer"),
    ],
)
def test_what_cannot_be_right_is_said(changes: dict[str, Any], words: str) -> None:
    assert not list(problems_of(config_of(HOST)))
    assert [text for text in problems_of(config_of(HOST, changes)) if words in text]


def test_memory_and_threads_are_given_back_with_the_learner() -> None:
    run_alone(given_back, config_of(HOST))
