"""A base in few bits: gradients of its numbers in any layout, its bits in checkpoints, its sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError, CorruptionError
from moeclipse.ops.frozen import KINDS, Frozen, Parts, encode
from moeclipse.ops.random import fill_normal
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.ranks import OneRank, PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.base import PARTS, BaseSource
from moeclipse.train.weights.init_from import load_weights_of

BASES = ("model.base", "model.dense_base")
Shards = list[tuple[str, int, torch.Tensor]]
VALUES: dict[str, Any] = {
    "model.num_layers": 3,
    "model.num_dense_layers": 1,
    "model.d_model": 32,
    "model.d_ff": 64,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.dtype": "float64",
    "moe.num_experts": 4,
    "moe.d_ff": 32,
    "moe.num_shared_experts": 1,
    "gate.top_k": 2,
    "lora.rank": 4,
    "lora.targets": ("q", "v", "experts"),
    "model.base": "nf4",
    "model.dense_base": "nf4",
    "data.seq_len": 8,
    "data.batch_size": 4,
    "optim.accumulate": 2,
    "parallel.check_launches": True,
}
LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "1": (1, {}, {}),
    "full recompute": (1, {}, {"pipeline.recompute": "full"}),
    "ep2": (2, {}, {"moe.schedule": "smart", "moe.chunks": 2}),
    "dp2": (2, {"dp": 2}, {"parallel.dp": 2}),
    "pp2": (2, {"pp": 2}, {"parallel.pp": 2}),
}


def configuration(folder: Path, **values: Any) -> TrainConfig:
    return with_values(TrainConfig(), {**VALUES, "data.files": (str(folder / "tokens.npy"),), **values})


def moved(learner: Learner) -> Learner:
    """With adapters that add something."""
    for number, (name, parameter) in enumerate(learner.model.named_parameters()):
        if "lora_" in name:
            fill_normal(parameter.data, number, 0.2)
    learner.optim.load_weights(DecodedModel(learner))
    return learner


class DecodedModel:
    """What the model of one rank has, for its optimizer."""

    def __init__(self, learner: Learner) -> None:
        self.named = {f"weight/{name}": p.detach() for name, p in learner.model.named_parameters()}

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor | None:
        return self.named[name].flatten()[start:stop] if name in self.named else None


def write(mesh: Mesh, folder: Path, kind: str) -> None:
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 256, 600).astype(np.uint16))
    config = configuration(folder, **dict.fromkeys(BASES, kind))
    moved(Learner(config, mesh)).save(folder / "checkpoints", 0)


def begun(mesh: Mesh, config: TrainConfig, folder: Path) -> Learner:
    learner = Learner(config, mesh)
    load_weights_of(str(folder / "checkpoints" / "step-00000000"), learner, PatientRanks(mesh, 60))
    return learner


def gradients(mesh: Mesh, config: TrainConfig, folder: Path, as_kernels: bool = False) -> Shards:
    """Of the adapters; then a step, after which the base is what it was."""
    learner = begun(mesh, config, folder)
    for layer in learner.layers:
        layer.fused = as_kernels
    learner.backward(0)
    found = []
    for bucket in learner.buckets:
        shard = bucket.reduced()
        found += [
            (s.entry.name, s.start, shard[s.offset : s.offset + s.length].clone()) for s in bucket.segments()
        ]
    base = {name: p.detach().clone() for name, p in learner.model.named_parameters() if "lora_" not in name}
    learner.step(0)
    now = dict(learner.model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in base.items())
    return found


def apart(ranks: list[Shards], whole: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest of its tensor; every element once."""
    seen, far = dict.fromkeys(whole, 0), 0.0
    for name, start, values in (shard for rank in ranks for shard in rank):
        expected = whole[name][start : start + len(values)]
        far = max(far, float((values - expected).abs().max() / whole[name].abs().max()))
        seen[name] += len(values)
    assert seen == {name: len(value) for name, value in whole.items()}
    return far


def decoded_gradients(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """Of a model without a base whose weights are the decoded ones."""
    plain = configuration(folder, **dict.fromkeys(BASES, ""))
    return {name: values for name, _, values in gradients(mesh, plain, folder)}


def far_from_decoded(mesh: Mesh, folder: Path, kind: str) -> list[float]:
    """By plain torch, and by the kernels' references."""
    write(mesh, folder, kind)
    config, expected = configuration(folder, **dict.fromkeys(BASES, kind)), decoded_gradients(mesh, folder)
    return [apart([gradients(mesh, config, folder, as_kernels)], expected) for as_kernels in (False, True)]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_decoded_weights(tmp_path: Path, kind: str) -> None:
    assert max(run_alone(far_from_decoded, tmp_path, kind)) <= 1e-12


@pytest.fixture(scope="module")
def nf4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("layouts")
    run_alone(write, folder, "nf4")
    return folder, run_alone(decoded_gradients, folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_any_layout(nf4: tuple[Path, dict[str, torch.Tensor]], layout: str) -> None:
    (folder, expected), (num_ranks, axes, values) = nf4, LAYOUTS[layout]
    found = run_ranks(num_ranks, gradients, configuration(folder, **values), folder, **axes)
    assert apart(found, expected) <= 1e-12


# --- checkpoints -----------------------------------------------------------------------------------------


def trained(mesh: Mesh, config: TrainConfig, found: Path, out: Path) -> None:
    """A step from a checkpoint on, saved."""
    learner = Learner(config, mesh)
    step = learner.load(Checkpoint.open(found, PatientRanks(mesh, 60)))
    learner.step(step)
    learner.save(out / "checkpoints", step + 1)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(path, OneRank())
    return {name: checkpoint.read(name) for name in checkpoint.names if not name.startswith("loads/")}


def test_a_checkpoint_has_the_bits_of_the_base_and_goes_on_in_another_layout(
    nf4: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, start = nf4[0], nf4[0] / "checkpoints" / "step-00000000"
    first = tensors_of(start)
    assert first["weight/layers.1.moe.experts.3.up.codes"].dtype == torch.uint8
    assert "weight/layers.1.moe.experts.3.up" not in first
    run_ranks(2, trained, configuration(folder), start, tmp_path)
    run_alone(trained, configuration(folder), tmp_path / "checkpoints" / "step-00000001", tmp_path)
    last = tensors_of(tmp_path / "checkpoints" / "step-00000002")
    base = [name for name in first if name.startswith("weight/") and "lora_" not in name]
    assert all(torch.equal(last[name], first[name]) for name in base)
    assert not torch.equal(
        last["weight/layers.1.moe.experts.3.lora_up_b"], first["weight/layers.1.moe.experts.3.lora_up_b"]
    )


def test_another_base_is_not_gone_on_with(nf4: tuple[Path, dict[str, torch.Tensor]]) -> None:
    def goes_on(mesh: Mesh) -> str:
        learner = Learner(configuration(nf4[0], **{"model.base": "fp8"}), mesh)
        with pytest.raises(CheckpointError) as error:
            learner.load(Checkpoint.open(nf4[0] / "checkpoints" / "step-00000000", OneRank()))
        return str(error.value)

    assert "model.base is 'nf4' in the checkpoint, 'fp8' in this run" in run_alone(goes_on)


def flipped(mesh: Mesh, folder: Path) -> str:
    """What a run says of a bit of its base that changed."""
    learner = Learner(configuration(folder, **{"integrity.every": 1}), mesh)
    learner.step(0)
    up = learner.layers[0].experts.up
    assert isinstance(up, Frozen)
    up.get_parameter("codes").data.view(-1)[3] ^= 1
    with pytest.raises(CorruptionError) as error:
        learner.step(1)
    return str(error.value)


def test_a_changed_bit_of_the_base_is_named(nf4: tuple[Path, dict[str, torch.Tensor]]) -> None:
    assert "layers.1.moe.experts.0.up.codes[0:] has changed" in run_alone(flipped, nf4[0])


# --- sources ---------------------------------------------------------------------------------------------


ODD = {"model.head_dim": 6, "moe.shared_d_ff": 34}
"""Matrices whose factors are no whole words."""


def write_plain(mesh: Mesh, folder: Path) -> None:
    np.save(folder / "tokens.npy", np.arange(600).astype(np.uint16) % 256)
    config = configuration(folder, **ODD, **dict.fromkeys(BASES, ""))
    Learner(config, mesh).save(folder / "checkpoints", 0)


def parts_here(mesh: Mesh, folder: Path) -> dict[str, torch.Tensor]:
    """Of the base of this rank, each expert by its number; at most one stack is held while it is read."""
    held = []
    quantised = BaseSource._quantised

    def spy(source: BaseSource, name: str, frozen: Frozen) -> Parts:
        held.append(len(source.parts))
        return quantised(source, name, frozen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseSource, "_quantised", spy)
        learner = begun(mesh, configuration(folder, **ODD), folder)
    assert max(held) < 4
    found = {}
    for name, part in learner.model.named_parameters():
        if not name.endswith(PARTS):
            continue
        assert not name.endswith("codes") or part.data_ptr() % 16 == 0  # kernels read words
        if ".moe.experts." in name:
            ids = learner.layers[0].experts.ids
            found |= {name.replace("experts.", f"experts.{e}."): part[i].clone() for i, e in enumerate(ids)}
        else:
            found[name] = part.detach().clone()
    return found


def test_numbers_are_quantised_while_they_are_read_and_copies_are_equal(tmp_path: Path) -> None:
    run_alone(write_plain, tmp_path)
    checkpoint = Checkpoint.open(tmp_path / "checkpoints" / "step-00000000", OneRank())
    alone = run_alone(parts_here, tmp_path)
    matrices = {name.rpartition(".")[0] for name in alone}
    assert len(matrices) == 2 * 4 * 2 + 3 * 4 + 2 + 2 * 2  # experts, attention, a dense layer, shared experts
    for name in matrices:
        values = checkpoint.read(f"weight/{name}").view(checkpoint.shape(f"weight/{name}"))
        for part, expected in encode("nf4", values).items():
            assert torch.equal(alone[f"{name}.{part}"].view_as(expected), expected), (name, part)
    for axes in ({"dp": 2}, {}):
        for rank in run_ranks(2, parts_here, tmp_path, **axes):
            assert len(rank) == len(alone) if axes else len(rank) < len(alone)
            assert all(torch.equal(part, alone[name]) for name, part in rank.items())
