"""How an exchange is cut: which granularities there are, which the simulator prefers, which is fastest.

Costs measured on idle ranks do not know everything: several ranks may share a processor, small products are
slower than their share of a large one, a wire may be shared. So the simulator only says which granularities
are worth a try; each of those runs a few calls, forward and backward, and the fastest stays, judged by the
slowest rank. Where the blocking exchange stays otherwise, cuts that even the simulator finds slower are not
tried, and trials take no more calls than they are given. Where calls scatter, of those that are about as fast
the one with fewest units stays: every cut makes products smaller, and what a noisy trial likes about many of
them is mostly the noise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.plan.search import choose_exchange
from moeclipse.schedule.shape import even_groups
from moeclipse.schedule.smart import backward_of, end_units, exchange_shape, smart
from moeclipse.sim.exchange import simulate_exchange

Groups = tuple[tuple[int, ...], ...]
CHUNKS = (1, 2, 4)
ALIKE = 1.03
"""Costs are not known better than that. Of orders so close, own rows at both ends stay: they hide the ends
of an exchange also where the wire turns out slower than it was measured."""
TRIED = 4
"""Granularities that are tried ..."""
CALLS = 6
"""... in so many calls each; the first of them builds programs and does not count."""
LEAST_CALLS = 3
"""Where trials may not take as many, two granularities have so many at least, or there are no trials."""
MOST_SCATTER = 0.05
"""As fast as the fastest is who takes as much longer as calls scatter, but no more than this ..."""
LEAST_GAIN = 0.03
"""... and the plain one, where it is what stays otherwise, also who takes no more than this longer, or than
calls scatter, without limit."""


@dataclass(frozen=True, kw_only=True)
class Granularity:
    """How the exchange is cut, and how long that was predicted to take."""

    groups: Groups
    chunks: int
    units: tuple[tuple[int, int], ...] | None = None
    predicted_s: float = 0.0
    """Of forward, which is also what is measured afterwards ..."""
    both_s: float = 0.0
    """... and of forward and backward, which decides."""
    blocking_s: float = 0.0
    rule: str = "start"

    def __post_init__(self) -> None:
        """It may come from a file."""
        ranks = sorted(rank for group in self.groups for rank in group)
        units = () if self.units is None else self.units
        slices = max(self.chunks, 2)  # own rows may be halved where others stay whole
        known = all(0 <= step < len(self.groups) and 0 <= chunk < slices for step, chunk in units)
        if ranks != [*range(len(ranks))] or not all(self.groups) or self.chunks < 1:
            raise ValueError(f"groups {self.groups} in {self.chunks} chunks are no way to cut an exchange")
        if not known or len(set(units)) < len(units) or (self.units is not None and not units):
            raise ValueError(f"units {self.units} are not those of {len(self.groups)} x {self.chunks}")

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.groups))

    @property
    def num_units(self) -> int:
        return len(self.groups) * self.chunks if self.units is None else len(self.units)

    @property
    def plain(self) -> bool:
        """Whether nothing is cut: the blocking exchange."""
        return self.num_units == 1


def granularity_of(written: dict[str, Any]) -> Granularity:
    """One that was written down as JSON."""
    units = written["units"]
    given = {
        "groups": tuple(tuple(members) for members in written["groups"]),
        "units": None if units is None else tuple((step, chunk) for step, chunk in units),
    }
    return Granularity(**{**written, **given})


def start_groups(
    schedule: Literal["blocking", "smart"], size: int | Literal["auto"], hosts: tuple[int, ...]
) -> Groups:
    """The partition of the ranks before anything was measured."""
    ranks = range(len(hosts))
    if schedule == "blocking":
        return (tuple(ranks),)
    if size != "auto":
        return even_groups(len(ranks), size)
    if len(set(hosts)) > 1:
        return tuple(tuple(rank for rank in ranks if hosts[rank] == host) for host in dict.fromkeys(hosts))
    return even_groups(len(ranks), 1)


def partitions_to_try(size: int | Literal["auto"], hosts: tuple[int, ...]) -> list[Groups]:
    """Ever larger groups of ranks; but ranks of one host stay together."""
    start = start_groups("smart", size, hosts)
    if size != "auto" or len(set(hosts)) > 1:
        return [start]
    sizes = [size for size in (1, 2, 4, 8) if size <= max(len(hosts) // 2, 1)]
    # One group of all ranks is the blocking exchange, or its chunks: sometimes nothing is faster.
    return [start_groups("smart", size, hosts) for size in (*sizes, len(hosts))]


def rank_by_simulation(
    partitions: Sequence[Groups], chunks: Sequence[int], rows_PR: np.ndarray, costs: ExchangeCosts
) -> list[Granularity]:
    """Every granularity with its predicted time, the most promising first. `rows_PR`: rows for each slot."""
    num_ranks = len(rows_PR)
    per_rank = rows_PR.shape[1] // num_ranks
    one = exchange_shape(num_ranks, group_size=num_ranks, experts_per_rank=per_rank)
    blocking = choose_exchange(one, rows_PR, costs, chunks=(1,), swaps=0).seconds
    found = []
    for groups in partitions:
        shape = exchange_shape(num_ranks, groups=groups, experts_per_rank=per_rank)
        for number in chunks:
            best = choose_exchange(shape, rows_PR, costs, chunks=(number,), swaps=0)
            rule, seconds, cut = best.rule, best.seconds, best.shape
            if best.tried.get(f"ends/{number}", math.inf) <= ALIKE * seconds:
                rule, seconds = "ends", best.tried[f"ends/{number}"]
                cut = replace(cut, units=end_units(len(groups), number))
            back = simulate_exchange(smart(backward_of(cut)), rows_PR, costs).makespan
            found.append(
                Granularity(
                    groups=groups,
                    chunks=number,
                    units=cut.units,
                    predicted_s=seconds,
                    both_s=seconds + back,
                    blocking_s=blocking,
                    rule=rule,
                )
            )
    found.sort(key=lambda use: use.both_s)
    # The best of each partition first: neighbours differ less from one another than partitions do.
    firsts = list({use.groups: use for use in reversed(found)}.values())
    firsts.sort(key=lambda use: use.both_s)
    return [*firsts, *(use for use in found if use not in firsts)]


class Stopwatch:
    """Times a few exchanges, forward and backward, to hold them against what was predicted; never blocks."""

    LAPS = CALLS

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self._laps: dict[str, list[tuple[Any, Any]]] = {"F": [], "B": []}

    def stamp(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, began: Any, letter: str) -> None:
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


class Trials:
    """The most promising granularities, tried in turn in the same order on all ranks."""

    def __init__(
        self,
        ranked: Sequence[Granularity],
        cuda: bool,
        careful: bool = False,
        number: int = TRIED,
        calls: int = CALLS,
    ) -> None:
        """`number` of the ranked ones have so many `calls` each.

        `careful`: the plain one is tried in any case, and stays unless another is seen to be faster.
        """
        self.candidates, self.cuda, self.careful, self.calls = list(ranked[:number]), cuda, careful, calls
        if careful and not any(one.plain for one in self.candidates):
            self.candidates[number - 1 :] = [next(one for one in ranked if one.plain)]
        self.over_plain: float | None = None
        """How many times as long as the chosen one the plain one took, where it was tried."""
        self.scatter: float | None = None
        """By how much of it a usual call was longer than the best, on the rank where that was most."""
        self.watches = [Stopwatch(cuda) for _ in self.candidates]
        self._calls = 0

    @property
    def unseen(self) -> Granularity:
        """What stays as long as no times are known."""
        plain = (one for one in self.candidates if one.plain)
        return next(plain, self.candidates[0]) if self.careful else self.candidates[0]

    @property
    def over(self) -> bool:
        return len(self.candidates) == 1 or self._calls >= self.calls * len(self.candidates)

    def next(self) -> tuple[Granularity, Stopwatch]:
        """What this call runs. Candidates take turns, so that all see the same weather."""
        number = self._calls % len(self.candidates)
        self._calls += 1
        return self.candidates[number], self.watches[number]

    def skip(self, calls: int) -> None:
        """So many calls have been made already."""
        self._calls = calls

    def choose(self, tell: Callable[[list[float]], list[list[float]]]) -> Granularity:
        """The fastest, judged by the slowest rank; collective through `tell`.

        Where a rank has no time of some candidate (its backward runs elsewhere), the prediction decides, or
        the plain one stays.
        """
        if self.cuda:
            torch.cuda.synchronize()
        mine = [self._seconds(watch) for watch in self.watches]
        scatter = statistics.median(watch.scatter() for watch in self.watches)
        *columns, scatters = zip(*tell([*mine, scatter]), strict=True)
        if any(min(column) < 0 for column in columns):
            return self.unseen
        slowest = [max(column) for column in columns]
        self.scatter = scatter = max(scatters)
        near = [(1 + self._about(one, scatter)) * min(slowest) for one in self.candidates]
        as_fast = [number for number, seconds in enumerate(slowest) if seconds <= near[number]]
        best = min(as_fast, key=lambda number: (self.candidates[number].num_units, slowest[number]))
        chosen = self.candidates[best]
        plain = [seconds for one, seconds in zip(self.candidates, slowest, strict=True) if one.plain]
        self.over_plain = plain[0] / slowest[best] if plain else None
        return chosen if best == 0 else replace(chosen, rule=f"{chosen.rule}, fastest of {len(slowest)}")

    def _about(self, one: Granularity, scatter: float) -> float:
        """By which part a granularity may take longer than the fastest and count as fast as it.

        Who leaves what stays otherwise must be faster than by chance, however much calls scatter.
        """
        if self.careful and one.plain:
            return max(LEAST_GAIN, scatter)
        return max(LEAST_GAIN if self.careful else 0.0, min(MOST_SCATTER, scatter))

    @staticmethod
    def _seconds(watch: Stopwatch) -> float:
        """Forward and backward; -1 where one of them was not seen."""
        forward, backward = watch.best("F"), watch.best("B")
        return -1.0 if forward is None or backward is None else forward + backward


def worth_a_try(ranked: Sequence[Granularity]) -> list[Granularity]:
    """The plain one, and those that are predicted to be faster than it."""
    plain = next(one for one in ranked if one.plain)
    return [one for one in ranked if one is plain or one.both_s < plain.both_s]


def affordable(most: int | None) -> tuple[int, int]:
    """(granularities, calls of each) where trials may take so many calls in all; (0, 0): no trials."""
    if most is None or most >= 2 * CALLS:
        return min(TRIED, (most or TRIED * CALLS) // CALLS), CALLS
    return (2, most // 2) if most >= 2 * LEAST_CALLS else (0, 0)


def cut_in_words(steps: int, chunks: int) -> str:
    return "one go" if steps == chunks == 1 else f"{steps} steps x {chunks} chunks"


def against_blocking(reports: Sequence[dict[str, Any]]) -> str:
    """What trials of some layers saw; nothing where the blocking exchange was not among them, or stays."""
    seen = [report["over_plain"] for report in reports if report["over_plain"] is not None]
    if not seen or set(seen) == {1.0}:
        return ""
    scatters = [report["scatter"] for report in reports if report.get("scatter") is not None]
    sure = f" (calls scattered by {100 * max(scatters):.0f} %)" if scatters else ""
    return f", blocking took {statistics.mean(seen):.2f} times as long{sure}"
