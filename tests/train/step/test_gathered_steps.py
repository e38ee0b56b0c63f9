"""Training steps whose layers gather all tokens: numbers of one process, launches as listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_graphs import with_graphs

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import problems_of, with_values
from moeclipse.ops import expert_mlp
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load
from moeclipse.train.step.graphs import WARM_STEPS, obstacle
from moeclipse.train.step.learner import Learner

BASE: dict[str, Any] = {
    "model.dtype": "float64",
    "model.num_layers": 2,
    "data.files": (str(Path(__file__).parents[1] / "text.txt"),),
    "data.batch_size": 6,
    "data.seq_len": 16,
    "optim.accumulate": 2,
    "moe.schedule": "gathered",
    "parallel.check_launches": True,
    "placement.planner": "static",
}


AGAIN = [{"pipeline.recompute": level} for level in ("attn", "full")]


def trained(mesh: Mesh, changes: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps, and the gradients of this rank's parameters in a further one."""
    learner = Learner(with_values(load(preset="tiny"), {**BASE, **changes}), mesh)
    losses = [learner.step(step)["loss"] for step in range(3)]
    learner.backward(3)
    for bucket in learner.buckets:
        bucket.reduced()
    return losses, {name: value.detach().clone() for name, value in learner.model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, *AGAIN, {"data.batch_size": 7}])
def test_losses_and_weights_are_those_of_one_process(changes: dict[str, Any]) -> None:
    losses, weights = run_alone(trained, changes)
    ranks = run_ranks(2, trained, changes)
    for found, mine in ranks:
        assert difference(found, losses) < 1e-12
        for name in weights:
            if ".experts." not in name:
                assert difference(mine[name], weights[name]) < 1e-12, name
    for name in weights:
        if ".experts." in name:
            assert difference(torch.cat([mine[name] for _, mine in ranks]), weights[name]) < 1e-12, name


def products(mesh: Mesh) -> tuple[int, int, float]:
    """How often a step by kernels, all of it recomputed, has the first and the second product; its loss."""
    config = with_values(load(preset="tiny"), {**BASE, "pipeline.recompute": "full"})
    learner, found = Learner(config, mesh), [0, 0]
    for layer in learner.layers:
        layer.fused = True
    for number, name in enumerate(("up", "down")):
        before = getattr(expert_mlp, name)

        def counted(*given: Any, number: int = number, before: Any = before, **how: Any) -> Any:
            found[number] += 1
            return before(*given, **how)

        setattr(expert_mlp, name, counted)
    loss = float(learner.step(0)["loss"])
    return found[0], found[1], loss


def test_experts_that_run_again_leave_out_their_second_product() -> None:
    expected = run_alone(trained, {})[0][0]
    for first, second, loss in run_ranks(2, products):
        assert first == 2 * second > 0
        assert difference(loss, expected) < 1e-12


def replayed(mesh: Mesh) -> tuple[list[float], list[float], int]:
    """Losses without and with graphs, under a ledger that hears of everything; and how many were captured."""
    config = with_values(load(preset="tiny"), {**BASE, "data.batch_size": 12, "optim.accumulate": 3})
    plain, learner = Learner(config, mesh), Learner(config, mesh)
    capture = with_graphs(learner)
    steps = range(WARM_STEPS + 2)
    found = [[float(one.step(step)["loss"]) for step in steps] for one in (plain, learner)]
    assert capture.replays == 2 * 3
    return found[0], found[1], capture.captures


def test_a_microbatch_of_two_ranks_is_replayed() -> None:
    """A capture is played on CPU: transfers inside pass at every replay, with the microbatch's own number."""
    for eager, graphs, captures in run_ranks(2, replayed):
        assert graphs == eager
        assert captures == 2


def obstacles(mesh: Mesh) -> list[str]:
    found = []
    for schedule in ("gathered", "blocking"):
        config = with_values(load(preset="tiny"), {**BASE, "moe.schedule": schedule, "data.batch_size": 8})
        found.append(obstacle(config, mesh, Learner(config, mesh).model))
    return found


def test_the_table_of_obstacles_says_why_a_microbatch_is_no_graph() -> None:
    gathered, blocking = run_ranks(2, obstacles)[0]
    assert "no CUDA device" in gathered
    assert "sizes of rows" in blocking


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"parallel.pp": 2}, "'gathered' cannot go with stages or overlapped"),
        ({"pipeline.overlap": "pair"}, "'gathered' cannot go with stages or overlapped"),
        ({"pipeline.recompute": "mlp"}, "'mlp' cannot go with moe.schedule = 'gathered'"),
        ({"parallel.tp": 2}, "'gathered' needs parallel.tp = 1"),
    ],
)
def test_what_places_parts_of_an_exchange_is_refused(how: dict[str, Any], text: str) -> None:
    changes = {"moe.schedule": "gathered", "optim.accumulate": 2, "data.batch_size": 8, **how}
    said = list(problems_of(with_values(TrainConfig(), changes)))
    assert any(text in one for one in said), said
