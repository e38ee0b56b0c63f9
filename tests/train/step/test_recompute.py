"""What runs again changes no bit, and keeps less; the first that fits is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of, with_values
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.recompute import LADDER, kept_by, pick, told

LEVELS = ("norms", "attn", "mlp", "moe", "full")
SMALL: dict[str, Any] = {
    "model.num_layers": 3,
    "model.num_dense_layers": 1,
    "model.d_ff": 24,
    "model.d_model": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "moe.num_experts": 4,
    "moe.d_ff": 16,
    "moe.num_shared_experts": 1,
    "gate.top_k": 2,
    "gate.z_loss": 0.01,
    "data.seq_len": 8,
    "data.batch_size": 4,
    "optim.accumulate": 2,
    "run.steps": 3,
    "data.files": (str(Path(__file__).parents[1] / "text.txt"),),
}
MODELS: dict[str, dict[str, Any]] = {
    "experts behind a dense layer": {"model.dtype": "float64"},
    "bf16, norms of heads, a bound": {
        "model.dtype": "bfloat16",
        "model.qk_norm": "head",
        "gate.capacity_factor": 1.0,
    },
    "latent attention, norms behind, a moving choice": {
        "model.dtype": "float64",
        "model.attention": "mla",
        "model.norms": "both",
        "gate.choose": "top_p",
        "gate.mean_experts": 1.5,
    },
    "frozen in part": {"model.dtype": "float32", "optim.frozen": ("embedding", "*attention*")},
}


def trained(changes: dict[str, Any], level: str) -> tuple[list[Any], list[torch.Tensor]]:
    values = {**SMALL, **changes, "pipeline.recompute": level}
    learner = Learner(with_values(TrainConfig(), values), Mesh.single("cpu"))
    assert learner.pipelined is None
    assert {layer.again for layer in learner.model.layers.values()} == {level}
    keys = ("loss", "aux_loss", "grad_norm", "dropped")
    records = [learner.step(step) for step in range(3)]
    told = [[record[key] for key in keys] for record in records]
    loads = [layer.load_E.tolist() for layer in learner.layers]
    return [told, loads], [p.detach().clone() for p in learner.model.parameters()]


def compared(_: Mesh, changes: dict[str, Any]) -> dict[str, bool]:
    told, weights = trained(changes, "off")
    same = {}
    for level in LEVELS:
        also_told, other_weights = trained(changes, level)
        bits = all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
        same[level] = bits and told == also_told
    return same


@pytest.mark.parametrize("name", MODELS)
def test_no_bit_changes(name: str) -> None:
    assert run_alone(compared, MODELS[name]) == dict.fromkeys(LEVELS, True)


def kept(mesh: Mesh, changes: dict[str, Any]) -> list[int]:
    learner = Learner(with_values(TrainConfig(), {**SMALL, **changes}), mesh)
    found = [kept_by(learner.model, learner.mesh, 64, level) for level in LADDER]
    assert {layer.again for layer in learner.model.layers.values()} == {"off"}
    assert all(layer.load_E.sum() == 0 for layer in learner.layers)
    return found


def test_each_rung_keeps_less() -> None:
    off, norms, attn, full = run_alone(kept, {"model.dtype": "bfloat16"})
    assert off > norms > attn > full
    tokens_in = 64 * 32 * 2
    assert off - norms == 2 * tokens_in, "what two norms gave"
    assert full == tokens_in, "of a whole layer its input"


def test_the_first_that_fits() -> None:
    expected = {"off": 100.0, "norms": 90.0, "attn": 60.0, "full": 40.0}
    assert [pick(expected, room) for room in (1e3, 96, 64, 50, 10)] == [
        "off",
        "norms",
        "attn",
        "full",
        "full",
    ]
    assert told(expected, 1e3, "off") == []
    assert told(expected, 64, "attn") == ["recompute: attn, for 60 B of 64 B; without it 100 B"]
    assert "may not fit" in told(expected, 10, "full")[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline.recompute": "some"}, "one of auto, off, norms, attn"),
        ({"pipeline.recompute": "norms", "pipeline.overlap": "pair+self"}, "one after the other"),
        ({"pipeline.recompute": "norms", "parallel.pp": 2}, "cannot go with stages"),
        ({"pipeline.recompute": "norms", "model.memory": 8}, "cannot go with model.memory"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], message: str) -> None:
    found = list(problems_of(with_values(TrainConfig(), {**SMALL, **changes})))
    assert any(message in problem for problem in found), found
