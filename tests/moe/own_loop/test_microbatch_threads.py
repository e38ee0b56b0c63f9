"""Jobs that take turns: one at a time, in an order that follows from their switches alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apart import apart
from moeclipse.moe.own_loop.microbatch_threads import Turns


def turns_of(*layers: Any) -> Turns:
    return Turns(layers, torch.device("cpu"))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([2, 2], "0a 1a 0b 1b 0c 1c"),
        ([1, 1, 1], "0a 1a 0b 1b 2a 2b"),
        ([2, 0, 1], "0a 1a 0b 2a 0c 2b"),
        ([0, 2], "0a 1a 1b 1c"),
        ([1], "0a 0b"),
    ],
)
@apart
def test_two_are_in_flight_and_take_turns(counts: list[int], expected: str) -> None:
    turns, events = turns_of(), []

    def job(number: int) -> int:
        for part in "abc"[: counts[number] + 1]:
            events.append(f"{number}{part}")
            if part != "abc"[counts[number]]:
                turns.switch()
        return 10 * number

    for _ in range(3):
        events.clear()
        assert turns.run([lambda n=n: job(n) for n in range(len(counts))]) == [
            10 * n for n in range(len(counts))
        ]
        assert " ".join(events) == expected


@apart
def test_reports_and_random_numbers_belong_to_a_job() -> None:
    layer = SimpleNamespace(last="before")
    turns = turns_of(layer)
    torch.manual_seed(5)
    alone = [torch.rand(2), torch.rand(2)]

    def job(number: int) -> list[torch.Tensor]:
        assert layer.last == "before"
        drawn = [torch.rand(2)]
        layer.last = number
        turns.switch()
        assert layer.last == number
        return [*drawn, torch.rand(2)]

    torch.manual_seed(5)
    first, second = turns.run([lambda: job(0), lambda: job(1)])
    assert torch.equal(torch.stack(first), torch.stack(alone)), "the first job has the numbers of the process"
    assert not torch.equal(first[0], second[0])
    assert turns.reports == {0: [0], 1: [1]}
    assert not torch.equal(torch.rand(2), alone[1])


@apart
def test_the_first_error_ends_all_jobs() -> None:
    turns, ended = turns_of(), []

    def job(number: int) -> None:
        try:
            for _ in range(3):
                turns.switch()
                if number == 1:
                    raise ValueError("mine")
        finally:
            ended.append(number)

    before = threading.active_count()
    with pytest.raises(ValueError, match="mine"):
        turns.run([lambda n=n: job(n) for n in range(3)])
    assert sorted(ended) == [0, 1], "the third had not begun"
    assert threading.active_count() == before


def test_a_thread_without_a_job_does_not_switch() -> None:
    turns = turns_of()
    turns.switch()
    assert not turns.taken
