"""Gradients on the host between backward and the next forward: bits of gradients that stay on the device."""

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
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig, layout_problems
from moeclipse.train.observe.memory_table import MemoryTable
from moeclipse.train.step.learner import Learner

SMALL: dict[str, Any] = {**host_bed.SMALL, "model.num_layers": 6, "optim.clip_norm": 0.01}
HOST = {"memory.main_grad": "host", "memory.buffers": 2}
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "one buffer, slow": {"memory.buffers": 1, "memory.copy_gb_s": 0.0005},
    "state beside": {"memory.place": "host", "memory.copy_gb_s": 0.005},
    "half of the state beside": {"memory.place": "host", "memory.share": 0.5},
    "state and inputs beside": {
        "memory.place": "host",
        "memory.activations": "host",
        "pipeline.recompute": "full",
        "memory.copy_gb_s": 0.005,
    },
    "narrow": {"optim.state": "8bit", "optim.master": "low-bits", "model.dtype": "bfloat16"},
    "bf16": {"optim.main_grad": "bf16", "model.dtype": "bfloat16", "optim.master": "none"},
    "float64, same buckets": {"model.dtype": "float64", "memory.place": "host", "optim.bucket_mb": 1e-5},
    "adapters": {"lora.rank": 4, "pipeline.recompute": "full"},
    "frozen below": {"optim.frozen": ("embedding", "layers.0")},
    "tied": {"model.tie_embeddings": True, "moe.schedule": "blocking"},
}


def config_of(*changes: dict[str, Any]) -> TrainConfig:
    return host_bed.merged(SMALL, *changes)


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {f"{piece.name} {piece.start}": piece.data.clone() for piece in learner.optim.pieces()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Of every element of every logical tensor: buckets may be cut elsewhere."""

    def whole(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        joined: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for key, data in parts.items():
            name, start = key.split(" ")
            joined.setdefault(name, []).append((int(start), data.flatten()))
        return {
            name: torch.cat([data for _, data in sorted(parts, key=lambda part: part[0])])
            for name, parts in joined.items()
        }

    found, wanted = whole(found), whole(wanted)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def trained(mesh: Mesh, config: TrainConfig, steps: int = 4) -> tuple[list[float], list[float], Learner]:
    learner = Learner(config, mesh)
    records = [learner.step(step) for step in range(steps)]
    return [one["loss"] for one in records], [one["grad_norm"] for one in records], learner


def compared(mesh: Mesh, ways: tuple[str, ...]) -> None:
    for way in ways:
        how = WAYS[way]
        losses, norms, stays = trained(mesh, config_of(without_memory(how)))
        found, others, learner = trained(mesh, config_of(HOST, how))
        assert stays.grads is None
        assert learner.grads is not None, way
        assert learner.grads.num_bytes > 0
        assert found == losses, way
        assert min(norms) > 0.01, "something is clipped"
        assert others == pytest.approx(norms, rel=1e-15), "buckets end with layers, and add up in their order"
        assert_same(state_of(learner), state_of(stays))


@pytest.mark.parametrize(
    "ways",
    [("one buffer, slow", "state and inputs beside"), pytest.param(tuple(WAYS), marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_the_same_bits_as_gradients_that_stay(ways: tuple[str, ...]) -> None:
    run_alone(compared, ways)


def held(mesh: Mesh) -> None:
    """Layers share buffers, and those on the host are all but the last of backward."""
    learner, stays = Learner(config_of(HOST), mesh), Learner(config_of(), mesh)
    grads = learner.grads
    assert grads is not None
    alike = [
        bucket for bucket in learner.buckets if bucket.name.startswith("layers.") and "experts" in bucket.name
    ]
    places = {bucket.grads.data_ptr() for bucket in alike}
    assert len(alike) == 10
    assert len(places) == 4, "two of each stack of experts"
    total = sum(bucket.grads.nbytes for bucket in learner.buckets)
    there = sum({bucket.grads.data_ptr(): bucket.grads.nbytes for bucket in learner.buckets}.values())
    assert total == sum(bucket.grads.nbytes for bucket in stays.buckets)
    assert there == total - sum(learner.buckets.buckets[number].grads.nbytes for number in grads._leave)
    assert grads.num_bytes >= total - there > 0.4 * total
    learner.step(0)
    moved = [one.label for one in learner.times.transfers if "gradient" in one.label]
    assert moved == [f"store of gradient, bucket {grads.buckets[n].name}" for n in sorted(grads._leave)]
    learner.step(1)
    moved = [one.label for one in learner.times.transfers if one.label.startswith("fetch of gradient")]
    assert moved == [
        f"fetch of gradient, bucket {grads.buckets[n].name}" for n in sorted(grads._leave, reverse=True)
    ]
    lines = "\n".join(MemoryTable(learner.optim, [], by_autograd=False).lines())
    assert "gradients in the host's memory" in lines


def test_layers_take_buffers_in_turn_and_copies_are_told() -> None:
    run_alone(held)


def looked_at(mesh: Mesh, folder: Path) -> None:
    """Evaluation, state, a checkpoint and a load; a step that is not finite changes nothing."""
    more = {"eval.every": 1, "eval.share": 0.2, "eval.samples": 4, "optim.max_bad_steps": 3}
    stays, learner = (
        Learner(config_of(place, more), mesh) for place in ({}, {**HOST, "memory.place": "host"})
    )
    for one in (stays, learner):
        real = one.backward

        def sick(step: int, real: Any = real) -> dict[str, torch.Tensor]:
            sums: dict[str, torch.Tensor] = real(step)
            return {**sums, "loss": sums["loss"] * float("nan")} if step == 2 else sums

        one.backward = sick  # type: ignore[method-assign]
    for step in range(5):
        wanted, found = stays.step(step), learner.step(step)
        assert found["skipped"] == wanted["skipped"] == (step == 2)
        assert step == 2 or found["loss"] == wanted["loss"]
        if step % 2:
            assert learner.evaluate(step + 1)["eval_loss"] == stays.evaluate(step + 1)["eval_loss"]
    assert_same(state_of(learner), state_of(stays))
    path = learner.save(folder, 5)
    losses = [stays.step(5)["loss"], stays.step(6)["loss"]]
    assert [learner.step(5)["loss"], learner.step(6)["loss"]] == losses
    assert learner.load(Checkpoint.open(path, OneRank())) == 5
    assert [learner.step(5)["loss"], learner.step(6)["loss"]] == losses


def test_whoever_looks_between_steps_sees_what_is_updated(tmp_path: Path) -> None:
    run_alone(looked_at, tmp_path)


class Broken(Exception):
    pass


def interrupted(mesh: Mesh) -> None:
    """In the middle of forward or backward; the next step is that of a run that was not."""
    slow = {**HOST, "memory.copy_gb_s": 5e-4, "pipeline.recompute": "full"}
    for calls in (4, 9):  # of attention: in forward, and when a layer runs again
        stays, learner = Learner(config_of(without_memory(slow)), mesh), Learner(config_of(slow), mesh)
        assert learner.step(0)["loss"] == stays.step(0)["loss"]
        count = 0

        def stop(*_: Any, calls: int = calls) -> None:
            nonlocal count
            count += 1
            if count == calls:
                raise Broken

        hooks = [layer.attention.register_forward_pre_hook(stop) for layer in learner.model.all_layers]
        with pytest.raises(Broken):
            learner.backward(1)
        assert learner.grads is not None
        if calls > 6:
            assert not set(learner.grads._left) - set(range(len(learner.grads.shards))), "of the step before"
        for hook in hooks:
            hook.remove()
        learner.model.tp.wgrads._queues.clear()
        assert [learner.step(step)["loss"] for step in (1, 2)] == [
            stays.step(step)["loss"] for step in (1, 2)
        ]
        assert_same(state_of(learner), state_of(stays))


def test_a_step_that_is_interrupted_leaves_nothing_behind() -> None:
    run_alone(interrupted)


def refused(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match=r"the host has .* GB of memory for this rank, and the gradients"):
        Learner(config_of(HOST, {"memory.host_gb": 1e-6}), mesh)
    with pytest.raises(ConfigError, match=r"moves nothing: no two layers that are alike share memory"):
        Learner(config_of(HOST, {"memory.buffers": 6}), mesh)
    learner = Learner(config_of(HOST), mesh)
    grads = learner.grads
    assert grads is not None
    first = min(grads._leave)
    with pytest.raises(ScheduleError, match="is updated, and its gradient away"):
        grads.arrived(first)
    with pytest.raises(ScheduleError, match="which has not left it"):
        grads.make_room([first])


def test_a_host_without_room_and_another_order_are_refused() -> None:
    run_alone(refused)


def several(mesh: Mesh) -> None:
    with pytest.raises(ConfigError, match="needs one rank, not 2"):
        Learner(config_of(HOST), mesh)


def test_on_several_ranks_they_stay() -> None:
    run_ranks(2, several)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optim.clip": "layer"}, "needs optim.clip = 'global', not 'layer'"),
        ({"optim.accumulate": 2}, "needs optim.accumulate = 1, not 2"),
        ({"placement.planner": "greedy"}, "memory.main_grad = 'host' needs experts that stay where they are"),
        ({"parallel.pp": 2}, "needs one rank whose microbatches go one after the other"),
        ({"pipeline.schedule": "layers", "pipeline.recompute": "full"}, "go one after the other"),
    ],
)
def test_what_cannot_be_right_is_said(changes: dict[str, Any], words: str) -> None:
    assert not [*problems_of(config_of(HOST)), *layout_problems(config_of(HOST), 1)]
    assert "needs one rank, not 4" in next(layout_problems(config_of(HOST), 4))
    assert [text for text in problems_of(config_of(HOST, changes)) if words in text]


def test_memory_and_threads_are_given_back_with_the_learner() -> None:
    run_alone(given_back, config_of(HOST))
