"""A goal that no limit reaches is told, once; one that is reached never is."""

from __future__ import annotations

from moeclipse.train.run.metrics import SETTLED, ExpertsHeld


def rows(*means: float) -> tuple[list[list[int]], int]:
    """Of 400 tokens, by layer and expert."""
    return [[round(300 * mean), round(100 * mean)] for mean in means], 400


def test_layers_that_stay_off_are_named_once() -> None:
    held = ExpertsHeld(6.0)
    told = [note for _ in range(4 * SETTLED) for note in held.after_step(*rows(6.1, 4.88))]
    assert len(told) == 1
    assert "gate.mean_experts (6) is out of reach in layers with experts 1 (4.88):" in told[0]


def test_a_start_far_off_does_not_count() -> None:
    held = ExpertsHeld(2.0)
    told = [note for _ in range(SETTLED // 2) for note in held.after_step(*rows(4.0))]
    for step in range(4 * SETTLED):
        told += held.after_step(*rows(2.0 + 0.5 * (-1) ** step))
    assert not told


def test_without_a_goal_nothing_is_said() -> None:
    held = ExpertsHeld(0.0)
    assert not [note for _ in range(3 * SETTLED) for note in held.after_step(*rows(4.0))]
