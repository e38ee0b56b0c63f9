"""Memory that is left for a rank."""

from __future__ import annotations

from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.step.memory_bytes import memory_given, memory_left


def test_ranks_of_a_host_share_its_memory() -> None:
    alone = run_alone(memory_left)
    for found in run_ranks(2, memory_left):
        assert 0.3 * alone < found < 0.7 * alone


def test_what_a_host_has_does_not_depend_on_who_uses_it() -> None:
    alone = run_alone(memory_given)
    assert alone >= run_alone(memory_left)
    assert run_ranks(2, memory_given) == [alone / 2] * 2
