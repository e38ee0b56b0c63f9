"""What is in flight: waited for once, the same afterwards, and nothing is kept that is not needed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from moeclipse.comm.async_ops.lane import Awaited, Joined, Ready, Then


class Rows:
    """Something that can be referred to weakly."""


def test_what_is_there_is_given() -> None:
    rows = Rows()
    assert Ready(rows).get() is rows


def test_it_is_waited_for_once_and_at_get() -> None:
    waits: list[str] = []
    flying = Awaited("rows", lambda: waits.append("waited"))
    assert waits == []
    assert [flying.get(), flying.get()] == ["rows", "rows"]
    assert waits == ["waited"]


def test_what_the_wait_holds_is_let_go() -> None:
    held = Rows()
    alive = weakref.ref(held)
    flying = Awaited("rows", lambda held=held: None)
    del held
    assert alive() is not None
    flying.get()
    assert alive() is None


def test_a_wait_that_fails_fails_again() -> None:
    """Else a second `get` would hand out rows that never came."""

    def fail() -> None:
        raise RuntimeError("rank 1 is gone")

    flying = Awaited("rows", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            flying.get()


def test_what_comes_then_is_done_once_and_forgets_its_source() -> None:
    done: list[Any] = []
    source: Ready[Rows] = Ready(Rows())
    alive = weakref.ref(source.get())

    def finish(rows: Rows) -> str:
        done.append(type(rows))
        return "sum"

    flying = Then(source, finish)
    del source
    assert done == []
    assert [flying.get(), flying.get()] == ["sum", "sum"]
    assert done == [Rows]
    assert alive() is None


def test_several_are_waited_for_in_the_order_of_their_launch() -> None:
    order: list[int] = []
    several = [Awaited(None, lambda i=i: order.append(i)) for i in range(3)]
    assert Joined([several[0], None, *several[1:]]).get() is None
    assert order == [0, 1, 2]
