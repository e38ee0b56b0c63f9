"""Logits and gradients of every parameter are those of transformers, at every layout.

The weights of each model pass through a folder of safetensors; so do the gradients of transformers, which are
compared name by name through the same table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TINY, load, loss_and_gradients, write_tiny

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.hf.folder import HfFolder
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.hugging_face import load_folder

LAYOUTS = {
    "ep2": (2, {}, {}),
    "tp2": (2, {"tp": 2}, {"parallel.tp": 2}),
    "pp2": (2, {"pp": 2}, {"parallel.pp": 2}),
    "tp2-sequence": (2, {"tp": 2}, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}, {"parallel.tp": 2, "parallel.pp": 2}),
}
SHORT = "glm4_moe_lite"
"""One family on one rank in every run of the tests; all of them, cut over ranks, in the long one."""


def configuration(path: Path, tokens: Path, **values: Any) -> TrainConfig:
    folder = HfFolder.open(path)
    given = {
        "model.from_hf": str(path),
        "model.dtype": "float64",
        "gate.balance_loss": 0.0,
        "data.files": (str(tokens),),
        "data.seq_len": 8,
        "data.batch_size": 4,
        "optim.accumulate": 2,
    }
    return with_values(TrainConfig(), {**folder.values, **given, **values})


def learner_of(config: TrainConfig, mesh: Mesh) -> Learner:
    learner = Learner(config, mesh)
    load_folder(learner, PatientRanks(mesh, 60))
    return learner


def batch(learner: Learner) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [learner.batches.microbatch(0, m, 0, 1) for m in range(2)]
    return torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts])


def gradients(mesh: Mesh, config: TrainConfig) -> tuple[float, list[tuple[str, int, torch.Tensor]]]:
    """(this rank's part of the loss, the gradients that it owns after reduction)."""
    learner = learner_of(config, mesh)
    sums = learner.backward(0)
    found = []
    for bucket in learner.buckets:
        shard = bucket.reduced()
        found += [
            (s.entry.name, s.start, shard[s.offset : s.offset + s.length].clone()) for s in bucket.segments()
        ]
    return float(sums["loss"]) / learner.tokens_per_step, found


def reference(mesh: Mesh, model_type: str, root: Path) -> tuple[float, float, float]:
    """Writes model and gradients; (difference of logits in float64, in float32, the loss)."""
    path, tokens = root / "model", root / "tokens.npy"
    write_tiny(model_type, path)
    np.save(tokens, np.random.default_rng(0).integers(0, 48, 200).astype(np.uint16))
    config = configuration(path, tokens)
    learner = learner_of(config, mesh)
    ids, targets = batch(learner)
    logits, loss = loss_and_gradients(path, ids, targets, root / "gradients")
    apart = difference(our_logits(learner, ids), logits.flatten(0, 1))
    narrow = learner_of(with_values(config, {"model.dtype": "float32"}), mesh)
    as_shipped = load(path, torch.float32)(input_ids=ids, use_cache=False).logits
    return apart, difference(our_logits(narrow, ids), as_shipped.flatten(0, 1)), float(loss)


@torch.no_grad()
def our_logits(learner: Learner, ids: torch.Tensor) -> torch.Tensor:
    tokens = Tokens(mesh=learner.mesh, first=0, total=ids.numel())
    return learner.model.logits(learner.model.hidden(ids, tokens)[0])


def check(root: Path, ranks: list[Any], loss: float) -> None:
    expected = HfFolder.open(root / "gradients")
    covered = 0
    scale = {name: expected.read(name).abs().max() for name in expected.names}
    for _, found in ranks:
        for name, start, grad in found:
            wanted = expected.read(f"weight/{name}", start, start + grad.numel())
            apart = (grad - wanted).abs().max() / scale[f"weight/{name.partition('[')[0]}"]
            assert apart < 1e-12, f"{name}: {apart:.1e}"
            covered += grad.numel()
    wanted = sum(t.rows * t.width for name, t in expected.table.items() if name.startswith("weight/"))
    assert covered == wanted, "every gradient is one rank's"
    assert sum(part for part, _ in ranks) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(
    ("model_type", "layouts"),
    [
        pytest.param(SHORT, (), id=SHORT),
        *(pytest.param(name, tuple(LAYOUTS), id=f"{name}-ranks", marks=pytest.mark.full) for name in TINY),
    ],
)
def test_logits_and_gradients_are_those_of_transformers(
    model_type: str, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    wide, narrow, loss = run_alone(reference, model_type, tmp_path)
    assert wide < 1e-12
    assert narrow < 1e-5
    config = configuration(tmp_path / "model", tmp_path / "tokens.npy")
    check(tmp_path, [run_alone(gradients, config)], loss)
    for layout in layouts:
        number, mesh, values = LAYOUTS[layout]
        config = configuration(tmp_path / "model", tmp_path / "tokens.npy", **values)
        ranks = run_ranks(number, gradients, config, **mesh)
        try:
            check(tmp_path, ranks, loss)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from None
