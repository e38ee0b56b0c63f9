"""Training with dynamic gates in any layout: raw gradients, curves and limits equal one process."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import BOUND, SMALL, curve, gradients, join, save_after

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

TEXT = str(Path(__file__).with_name("text.txt"))
"""A text that stays as it is."""
RULES: dict[str, dict[str, Any]] = {
    "gap": {"gate.choose": "gap", "gate.top_k": 2, "gate.threshold": 0.02},
    "top_p": {"gate.choose": "top_p", "gate.top_k": 4, "gate.top_p": 0.6, "gate.z_loss": 0.01},
    "threshold": {"gate.choose": "threshold", "gate.top_k": 3, "gate.threshold": 0.16},
    "mean": {"gate.choose": "top_p", "gate.top_k": 3, "gate.top_p": 0.5, "gate.mean_experts": 1.8},
    "sigmoid": {
        "gate.choose": "top_p",
        "gate.kind": "sigmoid",
        "gate.top_k": 3,
        "gate.top_p": 0.5,
        "gate.bias_rate": 0.01,
        "gate.mean_experts": 2.3,
        "gate.capacity_factor": 1.1,
        "moe.schedule": "smart",
    },
}


def configure(rule: str, **changes: Any) -> TrainConfig:
    values = {**SMALL, "data.files": (TEXT,), "moe.num_experts": 6, **RULES[rule], **changes}
    return with_values(TrainConfig(), values)


@cache
def reference(config: TrainConfig) -> tuple[dict[str, torch.Tensor], float]:
    found = run_alone(gradients, config)
    return join([found]), found[1]


def compare_gradients(config: TrainConfig, num_ranks: int, **layout: int) -> None:
    (expected, loss), results = reference(config), run_ranks(num_ranks, gradients, config, **layout)
    found = join(results)
    assert found.keys() == expected.keys()
    bad = {name: difference(found[name], expected[name]) for name in expected}
    assert not (bad := {name: value for name, value in bad.items() if not value <= BOUND}), bad
    assert math.isclose(sum(part for _, part in results), loss, rel_tol=BOUND)


@pytest.mark.parametrize(("dp", "ep"), [(1, 2), (2, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("rule", RULES)
def test_raw_gradients_equal_one_process(rule: str, dp: int, ep: int) -> None:
    compare_gradients(configure(rule), dp * ep, dp=dp)


@pytest.mark.parametrize("expert_tp", ["folded", "sharded"])
def test_raw_gradients_with_tensor_parallelism(expert_tp: str) -> None:
    config = configure("mean", **{"moe.expert_tp": expert_tp, "model.num_kv_heads": 2, "parallel.tp": 2})
    results = run_ranks(2, records, config, 3, tp=2)
    expected = run_alone(records, config, 3)
    for steps, limits in results:
        assert limits == expected[1], "the tp ranks see each token once or together: limits are the same"
        for record, reference in zip(steps, expected[0], strict=True):
            assert math.isclose(record["loss"], reference["loss"], rel_tol=BOUND)
            assert record["load"] == reference["load"]


def records(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[list[dict[str, Any]], list[float]]:
    learner = Learner(config, mesh)
    found = [learner.step(step) for step in range(steps)]
    return found, [float(layer.gate.dynamic.limit) for layer in learner.layers]


@cache
def records_alone(config: TrainConfig, steps: int) -> tuple[list[dict[str, Any]], list[float]]:
    found: tuple[list[dict[str, Any]], list[float]] = run_alone(records, config, steps)
    return found


@pytest.mark.parametrize(
    ("rule", "dp", "ep"),
    [*((rule, 2, 2) for rule in RULES), ("mean", 2, 1), ("mean", 1, 2), ("gap", 1, 4)],
)
def test_loss_curves_of_20_steps_agree(rule: str, dp: int, ep: int) -> None:
    config = configure(rule)
    expected, limits = records_alone(config, 20)
    truth = torch.tensor([record["loss"] for record in expected], dtype=torch.float64)
    assert truth[-1] < 0.97 * truth[0], "it must learn something, or the curve proves nothing"
    assert len({record["mean_experts"] for record in expected}) > 1, "the number of experts must vary"
    for found, other_limits in run_ranks(dp * ep, records, config, 20, dp=dp):
        losses = torch.tensor([record["loss"] for record in found], dtype=torch.float64)
        assert difference(losses, truth) <= BOUND
        assert [record["load"] for record in found] == [record["load"] for record in expected]
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(other_limits, limits, strict=True))


def test_the_controller_holds_the_mean_while_training() -> None:
    config = configure("mean", **{"moe.num_shared_experts": 0, "data.batch_size": 4})
    means = [record["mean_experts"] for record in run_alone(records, config, 40)[0]]
    assert abs(means[0] - 1.8) > 0.2, "it must begin elsewhere, or it holds nothing"
    assert abs(sum(means[20:]) / 20 - 1.8) < 0.05


@pytest.mark.parametrize("rule", ["gap", "mean"])
def test_limits_are_saved_and_read_by_another_layout(rule: str, tmp_path: Path) -> None:
    config = configure(rule)
    path = run_ranks(2, save_after, config, str(tmp_path), 4)[0]
    expected = run_alone(curve, config, 7)[4:]
    for losses in [run_alone(go_on, config, path), *run_ranks(2, go_on, config, path, dp=2)]:
        assert difference(torch.tensor(losses), torch.tensor(expected)) < 1e-11


def go_on(mesh: Mesh, config: TrainConfig, path: str) -> list[float]:
    learner = Learner(config, mesh)
    start = learner.load(Checkpoint.open(path, mesh))
    return [learner.step(step)["loss"] for step in range(start, start + 3)]


def test_another_way_to_choose_does_not_resume(tmp_path: Path) -> None:
    path = run_alone(save_after, configure("mean"), str(tmp_path), 1)
    mesh = Mesh.single()
    other = Learner(configure("gap"), mesh)
    with pytest.raises(CheckpointError, match=r"gate\.choose is 'top_p with gate\.mean_experts'"):
        other.load(Checkpoint.open(path, mesh))
