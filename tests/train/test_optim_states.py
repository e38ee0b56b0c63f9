"""Narrow state, weights without a master, narrow gradients: the same bits in any layout, and back again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.ops.random import normal
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.adamw import stretch_of
from moeclipse.train.optim.buckets import Bucket
from moeclipse.train.step.learner import Learner

SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.num_dense_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 24,
    "model.head_dim": 12,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.dtype": "bfloat16",
    "moe.num_experts": 4,
    "moe.d_ff": 12,
    "data.seq_len": 8,
    "data.batch_size": 4,
    "optim.bucket_mb": 0.003,
    "optim.lr": 1e-2,
    "run.steps": 20,
}
KINDS = ("weight", "adam_m", "adam_v")
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "state": {"optim.state": "bf16"},
    "master": {"optim.master": "none"},
    "low": {"optim.master": "low-bits"},
    "8bit": {"optim.state": "8bit", "optim.master": "low-bits"},
    "all": {"optim.state": "bf16", "optim.master": "none", "optim.main_grad": "bf16"},
}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "ep": (2, {}, {}),
    "dp": (2, {"dp": 2}, {}),
    "tp": (2, {"tp": 2}, {}),
    "dp x tp": (4, {"dp": 2, "tp": 2}, {"moe.expert_tp": "sharded"}),
    "moving": (2, {}, {"placement.planner": "greedy"}),
}


def config_of(changes: dict[str, Any]) -> TrainConfig:
    corpus = str(Path(__file__).with_name("text.txt"))
    return with_values(TrainConfig(), {**SMALL, "data.files": (corpus,), **changes})


def invent(bucket: Bucket, step: int) -> torch.Tensor:
    """A summed gradient of this rank's shard that depends on logical tensors alone."""
    shard = torch.zeros(len(bucket.weights()), dtype=bucket.grads.dtype)
    for segment in bucket.segments(everything=True):
        stretch = stretch_of(segment, step)
        place = torch.arange(stretch.start, stretch.start + stretch.length)
        index = (place // stretch.columns << 20) + place % stretch.columns + stretch.left
        part = slice(segment.offset, segment.offset + segment.length)
        shard[part] = normal(stretch.key, index).to(shard.dtype)
    return shard


def update(learner: Learner, updates: int) -> None:
    for step in range(learner.optim.updates, learner.optim.updates + updates):
        learner.optim.step([invent(bucket, step) for bucket in learner.buckets], 1e-2, 0.5)


def train_all(mesh: Mesh, changes: dict[str, Any], folder: Path) -> None:
    """Three updates in every way, and then two more in each other way from the checkpoint of "all"."""
    for name, way in WAYS.items():
        learner = Learner(config_of({**way, **changes}), mesh)
        update(learner, 3)
        learner.save(folder / name, 3)
    for name, way in WAYS.items():
        learner = Learner(config_of({**way, **changes}), mesh)
        learner.load(Checkpoint.open(checkpoint_in(folder / "all"), OneRank()))
        update(learner, 2)
        learner.save(folder / f"{name} from all", 5)


def checkpoint_in(folder: Path) -> Path:
    (path,) = (child for child in folder.iterdir() if child.is_dir())
    return path


def found_in(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(checkpoint_in(folder), OneRank())
    names = [name for name in checkpoint.names if name.split("/")[0] in ("weight", "adam_m", "adam_v")]
    return {name: checkpoint.read(name) for name in names}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run_ranks(1, train_all, {}, folder)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_same_bits(layout: str, one: Path, tmp_path: Path) -> None:
    num_ranks, axes, changes = LAYOUTS[layout]
    run_ranks(num_ranks, train_all, changes, tmp_path, **axes)
    for way in (*WAYS, *(f"{name} from all" for name in WAYS)):
        expected, found = found_in(one / way), found_in(tmp_path / way)
        assert len(expected) > 30
        assert found.keys() == expected.keys(), way
        differ = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not differ, way
        if way == "low":
            assert all(torch.equal(found[name], value) for name, value in found_in(one / "fp32").items())


def updated_weights(mesh: Mesh) -> list[tuple[str, bool, bool]]:
    """Of each weight without a master: whether the model has what its update made, and all of that is new."""
    learner = Learner(config_of({**WAYS["master"], **LAYOUTS["moving"][2]}), mesh)
    before = {name: weight.detach().clone() for name, weight in learner.model.named_parameters()}
    update(learner, 1)
    held = [
        (bucket.name, bool(bucket.weights(bucket.params.dtype).equal(state.weight)))
        for bucket, state in zip(learner.optim.buckets, learner.optim.states, strict=True)
    ]
    new = not any(weight.equal(before[name]) for name, weight in learner.model.named_parameters())
    return [(name, same, new) for name, same in held]


def test_experts_that_move_take_the_updates_of_weights_without_a_master() -> None:
    for found in run_ranks(2, updated_weights):
        assert any("experts" in name for name, *_ in found)
        assert all(same and new for _, same, new in found), found


def train_wide(mesh: Mesh, changes: dict[str, Any], folder: Path) -> None:
    """Rows of 512, which tp cuts between blocks of 256."""
    wide = {"model.d_ff": 512, "model.head_dim": 256, "moe.d_ff": 512, **WAYS["8bit"]}
    learner = Learner(config_of({**wide, **changes}), mesh)
    update(learner, 3)
    learner.save(folder, 3)


@pytest.mark.full
def test_columns_that_ranks_share_are_cut_between_blocks(tmp_path: Path) -> None:
    run_ranks(1, train_wide, {}, tmp_path / "one")
    run_ranks(4, train_wide, {"moe.expert_tp": "sharded"}, tmp_path / "four", dp=2, tp=2)
    expected, found = found_in(tmp_path / "one"), found_in(tmp_path / "four")
    assert expected["adam_m/layers.1.moe.experts.0.down"].dtype == torch.bfloat16
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_a_checkpoint_holds_what_was_asked_for(one: Path) -> None:
    types = {
        way: {kind: {t.dtype for n, t in found_in(one / way).items() if n.startswith(kind)} for kind in KINDS}
        for way in WAYS
    }
    wide, narrow = {torch.float32}, {torch.bfloat16}
    assert types["fp32"] == {"weight": wide, "adam_m": wide, "adam_v": wide}
    assert types["low"] == types["fp32"]
    assert types["8bit"] == {"weight": wide, "adam_m": wide | narrow, "adam_v": wide | narrow}, (
        "vectors: wide"
    )
    assert types["state"] == {"weight": wide, "adam_m": narrow, "adam_v": narrow}
    assert types["master"] == {"weight": narrow, "adam_m": wide, "adam_v": wide}
    assert types["all"] == {"weight": narrow, "adam_m": narrow, "adam_v": narrow}


def losses(mesh: Mesh) -> dict[str, list[float]]:
    found = {}
    for way, values in WAYS.items():
        changes = {**values, "optim.accumulate": 2, "optim.warmup_steps": 2, "run.steps": 16}
        learner = Learner(config_of(changes), mesh)
        assert learner.buckets.buckets[0].grads.dtype == (torch.bfloat16 if way == "all" else torch.float32)
        found[way] = [learner.step(step)["loss"] for step in range(16)]
    return found


def test_losses_stay_beside_those_of_fp32() -> None:
    found = run_alone(losses)
    expected = found.pop("fp32")
    assert found.pop("low") == expected
    assert expected[-1] < expected[0] - 1
    for way, curve in found.items():
        assert curve[-1] == pytest.approx(expected[-1], abs=0.1), way
        assert curve != expected, way


def small_updates(mesh: Mesh, way: str) -> float:
    """How far weights of 1 go in 100 updates of a 4000th part, which bf16 rounds away one by one."""
    learner = Learner(config_of({**WAYS[way], "optim.weight_decay": 0.0}), mesh)
    for bucket, state in zip(learner.buckets, learner.optim.states, strict=True):
        bucket.params.fill_(1.0)
        state.weight.fill_(1.0)
    for _ in range(100):
        shards = [torch.ones_like(bucket.weights(), dtype=bucket.grads.dtype) for bucket in learner.buckets]
        learner.optim.step(shards, 1 / 4000, 0.5)
    moved = torch.cat([1 - bucket.params.float() for bucket in learner.buckets])
    return float(moved.mean())


@pytest.mark.parametrize("way", ["master", "all"])
def test_small_updates_are_not_lost(way: str) -> None:
    assert run_alone(small_updates, way) == pytest.approx(100 / 4000, rel=0.05)
