"""What a run saves and checks: values that make no sense are refused in words."""

from __future__ import annotations

import pytest

from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.run.survival_config import CheckpointConfig, IntegrityConfig


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (CheckpointConfig(every=-1), "checkpoint.every (-1) must not be negative"),
        (CheckpointConfig(minutes=0.0), "checkpoint.minutes (0.0) must be positive"),
        (CheckpointConfig(minutes=-1.0), "checkpoint.minutes (-1.0) must be positive"),
        (CheckpointConfig(keep=0), "checkpoint.keep (0) must be at least 1"),
        (CheckpointConfig(deadline_s=0.0), "checkpoint.deadline_s (0.0)"),
        (IntegrityConfig(every=-1), "integrity.every (-1) must not be negative; 0: never"),
    ],
)
def test_what_makes_no_sense(config: CheckpointConfig | IntegrityConfig, told: str) -> None:
    (problem,) = problems_of(config)
    assert problem.startswith(told)


def test_runs_are_saved_and_checked_unless_told_otherwise() -> None:
    config = TrainConfig()
    assert (config.checkpoint.every, config.checkpoint.minutes, config.checkpoint.at_end) == (
        "auto",
        10.0,
        True,
    )
    assert (config.integrity.every, config.integrity.repair) == ("auto", "stop")
    assert not list(problems_of(CheckpointConfig(every=0)))


def test_the_old_name_of_the_check_still_works() -> None:
    with pytest.warns(FutureWarning, match="placement.check_every is now called integrity.every"):
        assert with_values(TrainConfig(), {"placement.check_every": 7}).integrity.every == 7
