"""A reduction that was begun: who runs it on, and when it is ready."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moeclipse.comm.reduce.begun import BegunReduction


def begun(num_steps: int) -> tuple[BegunReduction, list[str]]:
    events: list[str] = []

    def steps() -> Iterator[None]:
        for number in range(num_steps):
            events.append(f"step {number}")
            yield
        events.append("end")

    def complete() -> None:
        events.append("complete")
        while one.advance():
            pass

    def arrived() -> bool:
        events.append("asked")
        return False

    one = BegunReduction(steps(), torch.ones(2), complete, arrived)
    return one, events


def test_its_owner_runs_it_from_stop_to_stop() -> None:
    one, events = begun(2)
    assert [one.advance(), one.advance(), one.advance(), one.advance()] == [True, True, False, False]
    assert events == ["step 0", "step 1", "end"]


def test_whoever_wants_the_value_lets_its_owner_complete_it_once() -> None:
    one, events = begun(1)
    one.advance()
    assert one.get() is one.value
    assert one.get() is one.value
    assert events == ["step 0", "complete", "end"]


def test_it_is_ready_when_peers_are_or_when_it_is_done() -> None:
    one, events = begun(1)
    one.advance()
    assert not one.ready
    one.get()
    assert one.ready
    assert events.count("asked") == 1, "what is done need not ask"
    nothing = BegunReduction(None, torch.ones(0), lambda: None, lambda: False)
    assert nothing.ready
    assert nothing.get().numel() == 0
