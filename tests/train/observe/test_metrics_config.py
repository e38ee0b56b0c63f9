"""What a run records: what cannot be is told."""

from __future__ import annotations

from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig


def test_a_trace_behind_the_last_step_is_told() -> None:
    """It would be silent: the run ends well, and no trace is there."""
    late = with_values(TrainConfig(), {"metrics.trace": 8, "run.steps": 7})
    assert any("metrics.trace (8) must be at most run.steps (7)" in told for told in problems_of(late))
    last = with_values(late, {"metrics.trace": 7})
    assert not any("metrics.trace" in told for told in problems_of(last))
