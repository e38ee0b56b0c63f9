"""What is under way: one word for it, and one call.

    rows = transport.all_to_all(...)      # launched; nothing waits
    ...                                   # compute that does not need them
    rows.get()                            # from here on they may be used

Whatever is launched returns an `InFlight`: transfers on a lane (`lane.Transfer`), what is there already
(`Ready`), what somebody else waits for (`Awaited`), what is still to be done with it when it has come
(`Then`), and several as one (`Joined`).

Contract: what is in flight must be got; `get` may be called again and returns the same. On CUDA it orders the
current stream and the host goes on; on CPU it blocks, no longer than the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Source = TypeVar("Source")


class InFlight(Protocol[T_co]):
    def get(self) -> T_co:
        """Wait until what follows may use the result, and return it."""


class Ready(Generic[T]):
    """There already: nothing was sent, or whoever comes next waits by itself."""

    def __init__(self, value: T) -> None:
        self._value = value

    def get(self) -> T:
        return self._value


class Awaited(Generic[T]):
    """`value` may be used after `wait` has returned; it is called once, and let go then."""

    def __init__(self, value: T, wait: Callable[[], object]) -> None:
        self._value = value
        self._wait: Callable[[], object] | None = wait

    def get(self) -> T:
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._value


class Then(Generic[Source, T]):
    """What `finish` makes of something in flight, once it has come; the source is let go then."""

    def __init__(self, source: InFlight[Source], finish: Callable[[Source], T]) -> None:
        self._open: tuple[InFlight[Source], Callable[[Source], T]] | None = (source, finish)
        self._value: T

    def get(self) -> T:
        if self._open is not None:
            source, finish = self._open
            self._value = finish(source.get())
            self._open = None
        return self._value


class Joined:
    """Launched one after the other, waited for as one."""

    def __init__(self, several: Iterable[InFlight[Any] | None]) -> None:
        self._several = [one for one in several if one is not None]

    def get(self) -> None:
        for one in self._several:
            one.get()
