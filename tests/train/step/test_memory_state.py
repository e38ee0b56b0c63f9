"""Training with memory: every layout, any cut into microbatches and any resume equal one process."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import BOUND, LATENT, SMALL, save_after
from test_tensor_parallel import Pieces, join, reduced

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import validate, with_values
from moeclipse.core.errors import ConfigError, DataError
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.step import memory_state
from moeclipse.train.step.learner import Learner

MEMORY: dict[str, Any] = {"model.memory": 8, "data.order": "stream", "moe.num_shared_experts": 0}
MODELS: dict[str, dict[str, Any]] = {
    "same": {},
    "short": {"model.memory": 4},
    "long": {"model.memory": 12, "moe.schedule": "smart"},
    "latent": {**LATENT, "model.memory": 6},
}
TENSOR: dict[str, Any] = {"model.num_heads": 4, "model.num_kv_heads": 2, "parallel.tp": 2}
STEPS = 20
TEXT = str(Path(__file__).parents[1] / "text.txt")
"""It stays as it is: with the text of a test, every edit of that test would train another model."""


def configure(model: str = "same", **changes: Any) -> TrainConfig:
    values = {**SMALL, "data.files": (TEXT,), **MEMORY, **MODELS[model], **changes}
    return with_values(TrainConfig(), values)


def gradients(mesh: Mesh, config: TrainConfig) -> Pieces:
    """This rank's shards of the gradient of a step that remembers the ones before, weights unchanged."""
    learner = Learner(config, mesh)
    for step in range(3):
        learner.backward(step)
        pieces = reduced(learner)
        memory_state.end_step(learner.memories, skipped=False)
    return pieces


@cache
def reference(config: TrainConfig) -> dict[str, torch.Tensor]:
    return join([run_alone(gradients, config)])


def compare(config: TrainConfig, other: TrainConfig, num_ranks: int, **layout: int) -> None:
    expected = reference(config)
    found = join(run_ranks(num_ranks, gradients, other, **layout))
    assert found.keys() == expected.keys()
    bad = {name: difference(found[name], expected[name]) for name in expected}
    assert not (bad := {name: value for name, value in bad.items() if not value <= BOUND}), bad


@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("model", MODELS)
def test_raw_gradients_equal_one_process(model: str, dp: int, ep: int) -> None:
    config = configure(model)
    compare(config, config, dp * ep, dp=dp)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_raw_gradients_with_tensor_parallelism(model: str, sequence_parallel: bool, dp: int) -> None:
    changes = {**TENSOR, "parallel.sequence_parallel": sequence_parallel}
    alone = {**TENSOR, "parallel.tp": 1}
    compare(configure(model, **alone), configure(model, **changes), 2 * dp, dp=dp, tp=2)


PIPELINES: dict[str, tuple[int, dict[str, Any], int]] = {
    "pairs in chunks, attention again": (
        1,
        {"pipeline.overlap": "pair+self", "pipeline.recompute": "full"},
        2,
    ),
    "two directions": (2, {"pipeline.schedule": "dualpipev", "pipeline.overlap": "pair"}, 2),
    "pairs": (1, {"pipeline.overlap": "pair"}, 2),
    "weights later": (2, {"pipeline.schedule": "zb-h1"}, 2),
    "four ranks": (2, {"pipeline.schedule": "1f1b", "pipeline.overlap": "off"}, 4),
}


@pytest.mark.parametrize("how", PIPELINES)
@pytest.mark.parametrize("model", ["same", "short", "latent"])
def test_raw_gradients_in_pipelines(model: str, how: str) -> None:
    pp, changes, num_ranks = PIPELINES[how]
    base = {"optim.accumulate": 4, "data.batch_size": 18, "model.num_layers": 4}
    other = configure(model, **base, **changes, **{"parallel.pp": pp})
    compare(configure(model, **base), other, num_ranks, pp=pp)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_microbatches_remember_their_own_rows(accumulate: int) -> None:
    plain = {"gate.balance_loss": 0.0}  # which is a mean over each microbatch
    one = configure("short", **plain, **{"optim.accumulate": 1})
    compare(one, configure("short", **plain, **{"optim.accumulate": accumulate}), 2)


def curve(mesh: Mesh, config: TrainConfig, steps: int) -> list[float]:
    learner = Learner(config, mesh)
    return [learner.step(step)["loss"] for step in range(steps)]


def go_on(mesh: Mesh, config: TrainConfig, path: str, steps: int) -> list[float]:
    learner = Learner(config, mesh)
    start = learner.load(Checkpoint.open(path, mesh))
    again = learner.save(Path(path).parent / "again", start)  # what was read is there to be saved
    start = learner.load(Checkpoint.open(again, mesh))
    return [learner.step(step)["loss"] for step in range(start, start + steps)]


@pytest.mark.parametrize("model", MODELS)
def test_curves_agree_and_any_layout_resumes(model: str, tmp_path: Path) -> None:
    config = configure(model, **TENSOR, **{"gate.balance_loss": 0.0, "gate.z_loss": 0.0})
    alone = with_values(config, {"parallel.tp": 1})
    expected = torch.tensor(run_alone(curve, alone, STEPS), dtype=torch.float64)
    assert expected[-1] < 0.99 * expected[0], "it must learn something, or the curve proves nothing"
    losses = torch.tensor(run_ranks(2, curve, alone, STEPS)[0], dtype=torch.float64)
    assert difference(losses, expected) <= BOUND
    path = run_ranks(4, save_after, config, str(tmp_path), 5, dp=2, tp=2)[0]
    layouts: list[tuple[int, dict[str, int], TrainConfig]] = [
        (2, {"tp": 2}, config),
        (2, {"dp": 2}, with_values(alone, {"optim.accumulate": 1})),
        (2, {"pp": 2}, with_values(alone, {"parallel.pp": 2, "pipeline.overlap": "pair+self"})),
        (1, {}, alone),
    ]
    for num_ranks, layout, other in layouts:
        found = run_ranks(num_ranks, go_on, other, path, 3, **layout)[0]
        assert difference(torch.tensor(found, dtype=torch.float64), expected[5:8]) < 1e-11


def test_nothing_is_remembered_across_the_end_of_the_streams() -> None:
    losses = run_alone(frozen_losses, configure(**{"data.shuffle": False, "data.batch_size": 60}))
    assert losses[-1] == losses[0], "an epoch begins like the first, with no past"
    assert len(set(losses)) == len(losses) - 1


def frozen_losses(mesh: Mesh, config: TrainConfig) -> list[float]:
    learner, losses = Learner(config, mesh), []
    for step in range(learner.batches.streams.length + 1):
        losses.append(float(learner.backward(step)["loss"]))
        memory_state.end_step(learner.memories, skipped=False)
    return losses


def poisoned(mesh: Mesh, config: TrainConfig) -> list[bool]:
    learner, skipped = Learner(config, mesh), []
    for step in range(4):
        weight = learner.layers[0].gate.weight
        kept = weight.detach().clone()
        if step == 1:
            weight.data.fill_(math.nan)
        skipped.append(learner.step(step)["skipped"])
        weight.data.copy_(kept) if step == 1 else None
    return skipped


def test_a_bad_step_leaves_nothing_behind() -> None:
    config = with_values(configure(), {"integrity.every": 0})  # which would name the weight
    for skipped in run_ranks(2, poisoned, config):
        assert skipped == [False, True, False, False]


def test_memory_helps_where_the_past_does(tmp_path: Path) -> None:
    """Each symbol mostly repeats the one 12 before it: farther than a segment of 8 can see."""
    rng = np.random.default_rng(0)
    symbols = rng.integers(0, 8, 24000).tolist()
    for place in range(12, len(symbols)):
        if rng.random() < 0.95:
            symbols[place] = symbols[place - 12]
    np.save(tmp_path / "text.npy", np.array(symbols, dtype=np.uint16))
    values = {
        "model.vocab_size": 8,
        "model.num_layers": 1,
        "model.d_model": 32,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "model.head_dim": 8,
        "model.dtype": "float32",
        "model.memory": 16,
        "data.files": (str(tmp_path / "text.npy"),),
        "data.batch_size": 16,
        "optim.accumulate": 1,
        "optim.lr": 1e-2,
        "run.steps": 150,
    }
    with_memory = run_alone(curve, configure(**values), 150)
    without = run_alone(curve, configure(**{**values, "model.memory": 0}), 150)
    assert sum(without[-10:]) / 10 > 1.9, "the past that helps is out of sight (ln 8 = 2.08)"
    assert sum(with_memory[-10:]) / 10 < 1.6


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.memory \(8\) needs data\.order = 'stream': row b of a step"
    ):
        validate(configure(**{"data.order": "samples"}))
    with pytest.raises(ConfigError, match=r"model\.memory \(5\) must be a multiple of parallel\.tp \(2\)"):
        validate(configure(**TENSOR, **{"model.memory": 5}))
    with pytest.raises(DataError, match=r"needs a sample for each of data\.batch_size \(9999\) streams"):
        Learner(configure(**{"data.batch_size": 9999}), Mesh.single())
