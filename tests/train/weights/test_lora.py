"""Adapters of a run: begun from nothing or a folder, saved, resumed in any layout, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_learner import SMALL

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import to_toml, with_values
from moeclipse.core.errors import CheckpointError
from moeclipse.model.decode import Decoder, writing
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.frozen import decode, encode
from moeclipse.ops.random import fill_normal
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.config import TrainConfig
from moeclipse.train.generate.text import load_model
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.init_from import load_weights_of
from moeclipse.train.weights.lora import MergedWeights, lora_of, save_adapter

TEXT = str(Path(__file__).parents[1] / "text.txt")


def configure(**changes: Any) -> TrainConfig:
    plain = {**SMALL, "model.num_kv_heads": 2, "data.batch_size": 4, "data.files": (TEXT,)}
    return with_values(TrainConfig(), {**plain, "lora.rank": 2, "lora.alpha": 3.0, **changes})


def trained(mesh: Mesh, config: TrainConfig, folder: str) -> list[float]:
    learner = Learner(config, mesh)
    losses = [float(learner.step(step)["loss"]) for step in range(2)]
    learner.save(Path(folder), 2)
    return [*losses, float(learner.step(2)["loss"])]


def resumed(mesh: Mesh, config: TrainConfig, path: str) -> float:
    learner = Learner(config, mesh)
    step = learner.load(Checkpoint.open(path, PatientRanks(mesh, 60)))
    return float(learner.step(step)["loss"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    folder = tmp_path_factory.mktemp("adapters") / "checkpoints"
    (folder.parent / "config.toml").write_text(to_toml(configure()))
    losses = run_ranks(2, trained, configure(), str(folder))[0]
    return str(folder / "step-00000002"), losses


def test_any_layout_goes_on(saved: tuple[str, list[float]]) -> None:
    path, losses = saved
    assert run_alone(resumed, configure(), path) == pytest.approx(losses[2], rel=1e-12)
    tp = run_ranks(2, resumed, configure(**{"parallel.tp": 2}), path, tp=2)
    assert tp == pytest.approx([losses[2]] * 2, rel=1e-12)
    with pytest.raises(AssertionError, match=r"lora\.rank"):
        run_alone(resumed, configure(**{"lora.rank": 3}), path)


def test_adapters_of_sharded_experts_go_on_in_any_layout(
    saved: tuple[str, list[float]], tmp_path: Path
) -> None:
    path, losses = saved
    sharded = configure(**{"parallel.tp": 2, "moe.expert_tp": "sharded", "integrity.every": 1})
    assert run_ranks(2, resumed, sharded, path, tp=2) == pytest.approx([losses[2]] * 2, rel=1e-12)
    theirs = run_ranks(2, trained, sharded, str(tmp_path), tp=2)[0]
    assert theirs == pytest.approx(losses, rel=1e-12)
    assert run_alone(resumed, configure(), str(tmp_path / "step-00000002")) == pytest.approx(
        losses[2], rel=1e-12
    )


def test_merged_rows_are_weights_and_what_adapters_add(saved: tuple[str, list[float]]) -> None:
    checkpoint = Checkpoint.open(saved[0], OneRank())
    merged, lora = MergedWeights(checkpoint), lora_of(checkpoint.state)
    assert (lora.rank, lora.alpha) == (2, 3.0)

    def whole(name: str) -> torch.Tensor:
        return checkpoint.read(name).view(checkpoint.shape(name))

    experts = "weight/layers.1.moe.experts.3."
    attention = "weight/layers.0.attention."
    for name, before in ((f"{experts}down", f"{experts}lora_down_"), (f"{attention}o.weight", "")):
        a, b = (f"{before}{half}" if before else f"{attention}adapters.lora_o.{half}.weight" for half in "ab")
        expected = whole(name) + 1.5 * whole(b) @ whole(a)
        width = expected.shape[1]
        assert difference(merged.read(name, 2 * width, 5 * width), expected[2:5].flatten()) <= 1e-12
        assert whole(b).abs().sum() > 0
    gate = "weight/layers.0.moe.gate.weight"
    assert torch.equal(merged.read(gate, 0, 16), checkpoint.read(gate, 0, 16))


class Kept:
    """Adapters in bf16 beside a base in nf4, as a checkpoint tells of them."""

    state: ClassVar = {"fingerprint": {"lora": {"rank": 2, "alpha": 3.0, "targets": ["experts"]}}}

    def __init__(self) -> None:
        expert = "weight/layers.0.moe.experts.0."
        values = torch.empty(64, 64)
        self.base = decode("nf4", (64, 64), encode("nf4", fill_normal(values, 1, 0.5)))
        halves = ((2, 64, "lora_up_a"), (64, 2, "lora_up_b"))
        self.tensors = {f"{expert}up": self.base} | {
            f"{expert}{name}": fill_normal(torch.empty(rows, columns), rows, 0.3).bfloat16()
            for rows, columns, name in halves
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.tensors[name].flatten()[start:stop]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)


def test_a_base_in_few_bits_is_rounded_once_when_it_is_merged() -> None:
    kept = Kept()
    name = "weight/layers.0.moe.experts.0.up"
    a, b = (kept.tensors[f"weight/layers.0.moe.experts.0.lora_up_{half}"].double() for half in "ab")
    merged = MergedWeights(kept).read(name, 0, 64 * 64)  # type: ignore[arg-type]
    exact = (kept.base.double() + 1.5 * b @ a).flatten()
    assert merged.dtype == torch.float32
    assert difference(merged.double(), exact) <= 1e-7
    twice = (kept.base.bfloat16().double() + 1.5 * b @ a).flatten().bfloat16()
    assert torch.equal(merged.bfloat16(), exact.bfloat16())
    assert not torch.equal(twice, exact.bfloat16()), "numbers of which it can be told"


def written(mesh: Mesh, path: str, config: TrainConfig) -> tuple[list[list[float]], list[list[float]]]:
    """Logits of a text that is read piece by piece, and of one read whole by the model that was trained."""
    model = load_model(str(Path(path).parent.parent), mesh=mesh, dtype="float64", peer="off").model
    learner = Learner(config, mesh)
    learner.load(Checkpoint.open(path, PatientRanks(mesh, 60)))
    ids = [7, 3, 11, 5, 2]
    decoder = Decoder(model, 1, len(ids))
    with writing(model):
        found = [decoder.read([part])[0].tolist() for part in (ids[:2], *([one] for one in ids[2:]))]
    tokens = Tokens(mesh=mesh, first=0, total=len(ids))
    with writing(learner.model):
        whole = learner.model.logits(learner.model.hidden(torch.tensor([ids]), tokens)[0])
    return found, whole[1:].tolist()


def test_a_run_with_adapters_writes_with_them(saved: tuple[str, list[float]]) -> None:
    found, whole = run_alone(written, saved[0], configure())
    assert difference(found, whole) <= 1e-12


def test_so_does_latent_attention_on_a_base_in_few_bits(tmp_path: Path) -> None:
    latent = {"model.attention": "mla", "model.num_heads": 4, "model.d_model": 32, "model.d_ff": 32}
    latent |= {"model.base": "nf4", "model.dense_base": "nf4", "moe.d_ff": 32, "optim.lr": 0.1}
    config = configure(**latent)
    (tmp_path / "config.toml").write_text(to_toml(config))
    run_alone(trained, config, str(tmp_path / "checkpoints"))
    found, whole = run_alone(written, str(tmp_path / "checkpoints" / "step-00000002"), config)
    assert difference(found, whole) <= 1e-12


def begun(mesh: Mesh, config: TrainConfig, path: str) -> float:
    learner = Learner(config, mesh)
    load_weights_of(path, learner, PatientRanks(mesh, 60))
    return float(learner.step(0)["loss"])


def test_adapters_beside_a_run_that_had_none(tmp_path: Path) -> None:
    plain = configure(**{"lora.rank": 0})
    run_alone(trained, plain, str(tmp_path))
    path = str(tmp_path / "step-00000002")
    assert run_alone(begun, configure(), path) == run_alone(begun, plain, path)
    with pytest.raises(CheckpointError, match="has no adapters beside a Hugging Face model"):
        save_adapter(Checkpoint.open(path, OneRank()), tmp_path / "out")
    assert not (tmp_path / "out").exists()
