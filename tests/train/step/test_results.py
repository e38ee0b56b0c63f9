"""The numbers of a step: what all ranks said, the norm that the update is clipped by, bad steps in a row."""

from __future__ import annotations

import math

import pytest
import torch

from moeclipse.core.errors import DivergedError
from moeclipse.train.step.results import BadSteps, StepResults, norm_if_good


def message(loss: float = 8.0, squares: float = 9.0, corrupted: float = 0.0) -> torch.Tensor:
    return torch.tensor([loss, 0.5, 3.0, squares, corrupted, 2.0], dtype=torch.float64)


def test_the_norm_is_that_of_gradients_without_the_factor_on_the_loss() -> None:
    assert float(norm_if_good(message(squares=64.0), 4.0)) == 2.0


@pytest.mark.parametrize("wrong", [{"loss": math.inf}, {"squares": math.nan}, {"corrupted": 1.0}])
def test_what_must_not_change_anything_has_no_norm(wrong: dict[str, float]) -> None:
    assert math.isnan(float(norm_if_good(message(**wrong), 1.0)))


def test_ranks_add_up_and_what_is_of_one_stays_its_own() -> None:
    rows = [[*message().tolist(), 5.0, 0.0], [*message(loss=4.0, squares=16.0).tolist(), 1.0, 2.0]]
    found = StepResults.of(rows, targets=6, scale=2.0)
    assert (found.loss, found.aux_loss, found.dropped, found.norm) == (2.0, 1.0, 6, 2.5)
    assert (found.losses, found.signals, found.of_sources) == ([8.0, 4.0], [2, 2], [6.0, 2.0])
    assert not found.skipped


@pytest.mark.parametrize("wrong", [{"loss": math.nan}, {"squares": math.inf}, {"squares": math.nan}])
def test_a_step_that_is_not_finite_is_skipped(wrong: dict[str, float]) -> None:
    found = StepResults.of([message().tolist(), message(**wrong).tolist()], targets=1, scale=1.0)
    assert found.skipped


def test_a_good_step_begins_to_count_anew() -> None:
    bad = BadSteps(2)
    for step, skipped in enumerate([True, False, True]):
        bad.add(step, skipped, math.nan, 1.0)
    bad.why = "the gate"
    with pytest.raises(DivergedError, match=r"2 steps in a row, up to step 4, .*: the gate"):
        bad.add(3, True, math.nan, 1.0)
