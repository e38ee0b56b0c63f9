"""What people call a step, and that nothing else is printed: terminal, page, notes and traces agree."""

from __future__ import annotations

from moeclipse.core.steps import nth, nth_window
from moeclipse.train.observe.metrics_config import MetricsConfig


def test_the_third_step_is_step_3() -> None:
    assert nth(2) == 3
    assert nth_window("steps 3 to 299") == "steps 4 to 300"
    assert nth_window("no steps") == "no steps"


def test_a_trace_begins_at_the_step_that_is_named() -> None:
    assert MetricsConfig(trace=3).traced(300, 3) == range(2, 5)
    assert MetricsConfig(trace=300).traced(300, 3) == range(299, 300)
    assert not MetricsConfig().traced(300, 3)
    assert [*MetricsConfig(trace=300).trace_problems(300)] == []
    (told,) = MetricsConfig(trace=301).trace_problems(300)
    assert told.startswith("metrics.trace (301) must be at most run.steps (300)")
