"""How much slower compute is under communication, from ops that ran with and without it.

Communication takes processors or memory bandwidth from the compute that it hides under, so time that is
hidden is not free. The same op, of the same layer and size, runs in a step both ways: in the steady state of
pairs beside transfers, at the edges alone. The ratio of their times is the price.

    slowdown = Slowdown()
    slowdown.add(ops, transfers)     # (name, start, stop) of compute; (start, stop) of what travelled
    slowdown.ratio()                 # 1.15: fifteen per cent slower; None where no op ran both ways
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from moeclipse.report.intervals import Span, length, subtract, union

ALONE, BESIDE = 0.1, 0.8
"""At most, and at least so much of an op's time under transfers. What lies between says little."""


@dataclass
class BothWays:
    alone_s: float = 0.0
    num_alone: int = 0
    beside_s: float = 0.0
    num_beside: int = 0


class Slowdown:
    """Sums by name: memory does not grow with steps."""

    def __init__(self) -> None:
        self._times: dict[Hashable, BothWays] = {}

    def add(self, ops: Iterable[tuple[Hashable, float, float]], transfers: Sequence[Span]) -> None:
        moving = union(transfers)
        for name, start, stop in ops:
            if stop <= start:
                continue
            seconds = stop - start
            covered = 1 - length(subtract([(start, stop)], moving)) / seconds
            times = self._times.setdefault(name, BothWays())
            if covered <= ALONE:
                times.alone_s, times.num_alone = times.alone_s + seconds, times.num_alone + 1
            elif covered >= BESIDE:
                times.beside_s, times.num_beside = times.beside_s + seconds, times.num_beside + 1

    def ratio(self) -> float | None:
        """All that ran beside transfers, over what the same ops would have taken alone."""
        both = [times for times in self._times.values() if times.num_alone and times.num_beside]
        alone = sum(times.num_beside * times.alone_s / times.num_alone for times in both)
        return sum(times.beside_s for times in both) / alone if alone > 0 else None
