"""Seconds that ranks take: of a work that all do together, how sure they are, and of calls under way.

A work is timed a few times: the median counts, and what it may be off by follows from how the others lie
around it (`Timing.noise`). The slope between two sizes is known where it is larger than twice its noise.
Where it is not, both are timed again, with more to do; what cannot be told then is None, never a number.

Contract. What one rank does by itself between two transfers, and may fail in, goes through `by_all`: it fails
on all ranks of the stage or on none. A rank that left alone would meet the others in transfers that are not
the same.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moeclipse.comm import gather_json
from moeclipse.comm.async_ops.lane import gather, gather_to_host
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError, MoEclipseError

REPEATS = 5
MAD_TO_SIGMA, MEDIAN_NOISE = 1.4826, 1.2533
"""What makes a standard deviation of the median distance from the median, and of that the error of a median
in standard deviations over the root of their number."""
SURE = 2.0
"""Times its noise that a slope must be, or it is not known."""
MORE = {"cpu": (1, 4, 16), "cuda": (1, 1, 1)}
"""Attempts to find a slope, each with so many times the larger size; a device may have no memory for more."""


class CannotMeasure(MoEclipseError):
    """A rank failed in what was to be timed; all ranks of the stage know."""


class Timing(NamedTuple):
    seconds: float
    noise: float
    """What they may be off by."""


class Slope(NamedTuple):
    """Of seconds over size."""

    each: float | None
    """Seconds of one more; None: larger sizes took no longer that could be seen."""
    doubt: float
    """Part of it that it may be off by."""

    @property
    def rate(self) -> float | None:
        return None if self.each is None else 1 / self.each


def timing_of(seconds: list[float]) -> Timing:
    middle = statistics.median(seconds)
    spread = statistics.median(abs(one - middle) for one in seconds)
    return Timing(middle, MEDIAN_NOISE * MAD_TO_SIGMA * spread / math.sqrt(len(seconds)))


def slope_of(small: Timing, large: Timing, more: float) -> Slope:
    """`more`: by how much the second is larger than the first."""
    longer, noise = large.seconds - small.seconds, math.hypot(small.noise, large.noise)
    return Slope(longer / more, noise / longer) if longer > SURE * noise else Slope(None, 1.0)


def timed(work: Callable[[], object], device: torch.device) -> Timing:
    """Of `work`, which all ranks run at the same time."""
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return timing_of(seconds)


class Stopwatch:
    """Times a few exchanges, forward and backward, to hold them against what was predicted; never blocks."""

    LAPS = 6

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._laps: dict[str, list[tuple[Any, Any]]] = {"F": [], "B": []}

    def stamp(self) -> object:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, began: object, letter: str) -> None:
        if len(self._laps[letter]) < self.LAPS:
            self._laps[letter].append((began, self.stamp()))

    def seconds(self, letter: str = "F") -> float | None:
        """Median of the laps; None where there are none."""
        laps = self._all(letter)
        return statistics.median(laps) if laps else None

    def best(self, letter: str) -> float | None:
        """Of all laps but the first: what disturbs a lap, lengthens it."""
        return min(self._all(letter)[1:], default=None)

    def scatter(self) -> float:
        """By how much of it a usual lap is longer than the best."""
        laps = [self._all(letter)[1:] for letter in "FB"]
        if not all(laps):
            return 0.0
        return sum(map(statistics.median, laps)) / sum(map(min, laps)) - 1

    def _all(self, letter: str) -> list[float]:
        return [a.elapsed_time(b) * 1e-3 if self.cuda else b - a for a, b in self._laps[letter]]


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `work`, which all ranks run at the same time."""
    return timed(work, device).seconds


def slowest(works: list[Callable[[], object]], mesh: Mesh) -> list[Timing]:
    """Of each work, once tried, what the slowest rank takes; the same on every rank of the stage."""
    mine: list[float] = []
    for work in works:
        work()
        tell(mesh, [])
        mine += timed(work, mesh.device)
    everyone = tell(mesh, mine)
    return [max(Timing(*row[at : at + 2]) for row in everyone) for at in range(0, len(mine), 2)]


def tell(mesh: Mesh, numbers: list[float]) -> list[list[float]]:
    """Everyone's numbers, on every rank of the stage; without any, a barrier."""
    mine = torch.tensor([*numbers, 0.0], dtype=torch.float64, device=mesh.device)
    return [
        row[:-1] for row in gather_to_host(mesh.a2a, mesh.stage, mine, "exchange of measured costs").get()
    ]


def by_all(mesh: Mesh, work: Callable[[], list[float]], count: int = 0) -> list[list[float]]:
    """The `count` numbers of `work` on every rank of the stage, which sends nothing; CannotMeasure on all of
    them where it fails on one."""
    problem = ""
    try:
        mine = work()
    except CommError:  # a peer is gone: the others learn of it as this rank did
        raise
    except Exception as error:  # experts may be anybody's modules
        mine, problem = [0.0] * count, f"rank {mesh.rank}: {type(error).__name__}: {error}"
    everyone = tell(mesh, [*mine, float(bool(problem))])
    if any(row[-1] for row in everyone):
        texts = gather_json.tell(
            problem,
            mesh.device,
            lambda part: gather(mesh.a2a, mesh.stage, part, "why costs are not known").get(),
        )
        raise CannotMeasure("; ".join(filter(None, texts)))
    return [row[:-1] for row in everyone]
