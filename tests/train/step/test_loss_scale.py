"""Loss scaling: exact where it does nothing, found by itself in float16, kept by checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import configure

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import validate, with_values
from moeclipse.core.errors import ConfigError, DivergedError
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.results import FIRST, GROW_AFTER, LEAST, MOST, LossScale


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:4000])
    return str(path)


def trained(mesh: Mesh, config: TrainConfig) -> tuple[list[torch.Tensor], list[float]]:
    """Weights after three steps, and the gradient norms on the way."""
    learner = Learner(config, mesh)
    norms = [learner.step(step)["grad_norm"] for step in range(3)]
    return [bucket.params.clone() for bucket in learner.buckets], norms


# Granularities that are chosen from measured costs may differ from run to run, and so the order of sums.
SMART = {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2}


@pytest.mark.parametrize("more", [{}, {"pipeline.overlap": "pair+self", **SMART}])
def test_a_power_of_two_changes_nothing(corpus: str, more: dict[str, Any]) -> None:
    """Exponents alone differ, so every bit of every update is the same, aux loss and clipping included."""
    changes = {**more, "optim.clip_norm": 0.1, "gate.balance_loss": 0.01}
    plain, scaled = (
        run_ranks(2, trained, configure(corpus, **changes, **{"optim.loss_scale": scale}))
        for scale in (1.0, 2.0**10)
    )
    for (weights, norms), (others, other_norms) in zip(plain, scaled, strict=True):
        assert norms == other_norms
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_another_factor_changes_rounding_alone(corpus: str) -> None:
    plain, scaled = (
        run_alone(trained, configure(corpus, **{"optim.loss_scale": scale}))[0] for scale in (1.0, 1000.0)
    )
    assert all(difference(a, b) < 1e-12 for a, b in zip(plain, scaled, strict=True))


def in_half(mesh: Mesh, config: TrainConfig, folder: str) -> tuple[list[bool], list[float], float]:
    learner = Learner(config, mesh)
    learner.loss_scale.value = 2.0**40  # far too high: the first steps overflow
    records = [learner.step(step) for step in range(24)]
    path = learner.save(Path(folder), 24)
    other = Learner(config, mesh)
    other.load(Checkpoint.open(path, mesh))
    assert other.loss_scale.state() == learner.loss_scale.state()
    return (
        [record["skipped"] for record in records],
        [record.get("loss_scale", 1.0) for record in records],
        records[-1]["loss"],
    )


def test_half_precision_finds_its_factor(corpus: str, tmp_path: Path) -> None:
    config = configure(corpus, **{"model.dtype": "float16", "run.steps": 24, "optim.max_bad_steps": 3})
    results = run_ranks(2, in_half, config, str(tmp_path))
    assert results[0] == results[1], "all ranks decide alike"
    skipped, scales, loss = results[0]
    first_good = skipped.index(False)
    assert 3 < first_good < 24, "overflows of the factor are no bad steps, however many"
    assert sum(skipped[first_good:]) < 3
    for before, after, bad in zip(scales, scales[1:], skipped, strict=False):
        assert after == (before / 2 if bad else before)
    assert math.isfinite(loss)


def gradient(mesh: Mesh, config: TrainConfig) -> torch.Tensor:
    learner = Learner(config, mesh)
    learner.backward(0)
    whole = torch.cat([bucket.reduced().flatten().double() for bucket in learner.buckets])
    return whole / learner.loss_scale.value


def test_small_gradients_survive_in_half_precision(corpus: str) -> None:
    """A factor far below 1 stands for a model whose gradients are small: many of them become zero."""
    half = {"model.dtype": "float16"}
    found = run_alone(gradient, configure(corpus, **half))
    high, low = (
        run_alone(gradient, configure(corpus, **half, **{"optim.loss_scale": scale}))
        for scale in (2.0**15, 2.0**-12)
    )
    errors = [float((other - found).norm() / found.norm()) for other in (high, low)]
    assert errors[0] < 1e-3
    assert errors[1] > 0.05


def test_the_factor_doubles_after_many_good_steps_and_has_limits() -> None:
    scale = LossScale("auto", torch.float16)
    assert scale.value == FIRST
    for _ in range(GROW_AFTER):
        assert not scale.after_step(1.0, 1.0)
    assert scale.value == 2 * FIRST
    while scale.value > LEAST:
        assert scale.after_step(1.0, math.inf)
    assert not scale.after_step(1.0, math.inf), "nothing is left to lower: the step is a bad one"
    assert scale.value == LEAST


def test_the_factor_does_not_grow_for_ever() -> None:
    scale = LossScale("auto", torch.float16)
    scale.load_state({"value": MOST, "good_steps": GROW_AFTER - 1})
    assert not scale.after_step(1.0, 1.0)
    assert scale.value == MOST


def test_a_loss_that_is_not_finite_is_no_matter_of_scale() -> None:
    scale = LossScale("auto", torch.float16)
    assert not scale.after_step(math.nan, math.nan)
    assert scale.value == FIRST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_other_types_need_none(dtype: torch.dtype) -> None:
    scale = LossScale("auto", dtype)
    scale.load_state({"value": 8.0, "good_steps": 3})
    assert scale.value == 1.0
    assert not scale.after_step(1.0, math.inf)


def test_a_given_factor_stays(corpus: str) -> None:
    scale = LossScale(128.0, torch.float16)
    assert not scale.after_step(1.0, math.inf)
    assert scale.value == 128.0


def diverges(mesh: Mesh, config: TrainConfig) -> None:
    learner = Learner(config, mesh)
    for step in range(2):
        assert learner.step(step)["skipped"]
    with pytest.raises(DivergedError, match="3 steps in a row"):
        learner.step(2)


def test_a_given_factor_that_overflows_ends_the_run(corpus: str) -> None:
    changes = {"model.dtype": "float16", "optim.loss_scale": 2.0**40, "optim.max_bad_steps": 3}
    run_alone(diverges, configure(corpus, **changes))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (0.0, r"optim\.loss_scale \(0\.0\) must be auto or a positive number"),
        (-1.0, r"optim\.loss_scale \(-1\.0\) must be auto or a positive number"),
        (math.inf, r'optim\.loss_scale = inf: expected a number or "auto"'),
    ],
)
def test_a_factor_must_be_positive(wrong: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(with_values(TrainConfig(), {"optim.loss_scale": wrong}))
