"""How the rows of a layer are cut: one choice, from its candidates to what a resumed run takes over.

    candidates   what the simulator ranks, from costs measured after the first call and counts of the second
    trial        TRIED of them take turns, so that all see the same weather; forward and backward are timed
    decision     by the slowest rank, for the fastest
    record       what is tried is written down before it is, and what stays before it acts
    resume       a run that goes on amid its trials ends them; one that repeats another's makes none

Costs measured on idle ranks do not know everything: several ranks may share a processor, small products are
slower than their share of a large one, a wire may be shared. So the simulator only says which granularities
are worth a try. Where the blocking exchange stays otherwise ("auto", `careful`), cuts that even the simulator
finds slower are not tried, and trials take no more calls than they are given. Where calls scatter, of those
that are about as fast the one with fewest units stays: every cut makes products smaller, and what a noisy
trial likes about many of them is mostly the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypedDict

import numpy as np
import torch

from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.core.auto import Auto
from moeclipse.moe.config import MoEConfig
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.moe.tune.granularity import (
    CHUNKS,
    CutReport,
    Granularity,
    Groups,
    partitions_to_try,
    rank_by_simulation,
    start_groups,
)
from moeclipse.moe.tune.probe import Probe
from moeclipse.moe.tune.stopwatch import Stopwatch
from moeclipse.schedule.smart import end_units

TRIED = 4
"""Granularities that are tried ..."""
CALLS = Stopwatch.LAPS
"""... in so many calls each; the first of them builds programs and does not count."""
LEAST_CALLS = 3
"""Where trials may not take as many, two granularities have so many at least, or there are no trials."""
MOST_SCATTER = 0.05
"""As fast as the fastest is who takes as much longer as calls scatter, but no more than this ..."""
LEAST_GAIN = 0.03
"""... and the plain one, where it is what stays otherwise, also who takes no more than this longer, or than
calls scatter, without limit."""


class CutState(TypedDict):
    """Of a checkpoint, where tuples are lists."""

    groups: Groups
    chunks: int
    units: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """What is written down of a layer, for runs that choose alike."""

    probe: Probe
    tried: tuple[Granularity, ...]
    calls: int = CALLS
    """Of each that was tried."""
    chosen: Granularity | None
    over_plain: float | None = None
    scatter: float | None = None

    @property
    def cuts(self) -> list[Granularity]:
        return [*self.tried, *([] if self.chosen is None else [self.chosen])]


class CutChoice:
    """Of one layer."""

    def __init__(self, config: MoEConfig, hosts: tuple[int, ...]) -> None:
        self.config, self.hosts, self.careful = config, hosts, config.schedule == "auto"
        smart = config.schedule == "smart"
        groups = start_groups("smart" if smart else "blocking", config.group_size, hosts)
        chunks = int(config.chunks) if smart and config.chunks != "auto" else 1
        units = end_units(len(groups), chunks) if len(groups) > 1 else None
        self.use = Granularity(groups=groups, chunks=chunks, units=units)
        """What calls run now."""
        auto = self.careful or (smart and "auto" in (config.chunks, config.group_size))
        self.open = auto and len(hosts) > 1
        """Whether it is left to us."""
        self.most_calls: int | None = None
        """That "auto" may spend on trials; None: as many as they want."""
        self.ranked: list[Granularity] = []
        """What may be chosen, the fastest by simulation first, once costs are known."""
        self.trials: Trials | None = None
        self.watch: Stopwatch | None = None
        """Times the call at hand."""
        self.over_plain: float | None = None
        self.scatter: float | None = None
        self._tried = 0

    def tries(self, by_the_book: bool) -> bool:
        """Whether there is something to choose, and calls to spend on it.

        "auto" leaves the blocking exchange only for what was seen to be faster: never without trials.
        """
        timed = affordable(self.most_calls)[0] > 0 and not by_the_book
        return self.open and (timed or not self.careful)

    def rank(self, counts_PE: np.ndarray, dispatcher: Dispatcher, probe: Probe) -> list[Granularity]:
        """The allowed granularities, the fastest by simulation first."""
        table = dispatcher.table or ReplicaTable.of(dispatcher.placement)
        rows_PR = split_rows(counts_PE, table, self.hosts).rows_PR
        per_rank = dispatcher.placement.max_slots
        padded = np.zeros((len(self.hosts), per_rank * len(self.hosts)), dtype=np.int64)
        for rank, (first, stop) in enumerate(pairwise(dispatcher.slot_bounds)):
            padded[:, rank * per_rank : rank * per_rank + stop - first] = rows_PR[:, first:stop]
        chunks = CHUNKS if self.config.chunks == "auto" else (int(self.config.chunks),)
        partitions = dict.fromkeys(partitions_to_try(self.config.group_size, self.hosts))
        if self.careful:
            partitions[start_groups("blocking", "auto", self.hosts)] = None
        numbers = sorted({1, *chunks}) if self.careful else chunks
        costs = replace(probe.exchange_costs(), hosts=self.hosts if len(set(self.hosts)) > 1 else ())
        ranked = rank_by_simulation(list(partitions), numbers, padded, costs)
        return [one for one in ranked if one.chunks in chunks or (self.careful and one.plain)]

    def begin(self, counts_PE: np.ndarray, dispatcher: Dispatcher, probe: Probe, cuda: bool) -> None:
        """By the book there are no trials: what is predicted to be best is taken."""
        self.ranked = self.rank(counts_PE, dispatcher, probe)
        if probe.fixed:
            self.use, self.watch = self.ranked[0], Stopwatch(cuda)
            return
        tried = worth_a_try(self.ranked) if self.careful else self.ranked
        calls = affordable(self.most_calls if self.careful else None)
        self.trials = Trials(tried, cuda, self.careful, *calls)

    def take_turn(
        self,
        known: LayerChoice | None,
        tell: Callable[[list[float]], list[list[float]]],
        keep: Callable[[Granularity], None],
    ) -> None:
        """What this call runs; behind the last trial ranks `tell` each other their times, and one stays.

        `known`: what an equal run has kept. `keep` writes it down.
        """
        trials = self.trials
        assert trials is not None
        if not trials.over:
            self.use, self.watch = trials.next()
            return
        if known is not None and known.chosen is not None:
            self.use, self.over_plain, self.scatter = known.chosen, known.over_plain, known.scatter
        else:
            self.use = trials.choose(tell)
            self.over_plain, self.scatter = trials.over_plain, trials.scatter
            keep(self.use)
        self._tried = len(trials.candidates)
        self.watch, self.trials = Stopwatch(trials.cuda), None

    def record(self, probe: Probe, chosen: Granularity | None = None) -> LayerChoice:
        trials = self.trials
        return LayerChoice(
            probe=probe,
            tried=() if trials is None else tuple(trials.candidates),
            calls=0 if trials is None else trials.calls,
            chosen=chosen,
            over_plain=self.over_plain,
            scatter=self.scatter,
        )

    def repeat(self, known: LayerChoice, cuda: bool, calls: int = 0) -> None:
        """Go on behind so many calls of trials that an equal run made."""
        if self.open and known.tried:
            tried = [replace(one, rule="resumed") for one in known.tried]
            self.trials = Trials(tried, cuda, self.careful, len(tried), known.calls)
            self.trials.skip(calls)

    def take_tuned(self, known: LayerChoice) -> None:
        """What stays without a trial is in use from the first call on."""
        if self.open and known.chosen is not None and not known.tried:
            self.use = known.chosen

    def state(self) -> CutState:
        """Amid trials what stays without them."""
        use = self.use if self.trials is None else self.trials.without_times
        return {"groups": use.groups, "chunks": use.chunks, "units": use.units}

    def load_state(self, state: CutState) -> bool:
        """Whether it is taken over: not amid trials, and not where it was made for other ranks."""
        if self.trials is not None and not self.trials.over:
            return False
        self.trials = None
        groups = tuple(tuple(members) for members in state["groups"])
        if sum(map(len, groups)) != len(self.hosts) or not self.open:
            return False
        units = tuple((step, chunk) for step, chunk in state["units"]) if state["units"] else None
        self.use = Granularity(groups=groups, chunks=state["chunks"], units=units, rule="resumed")
        return True

    def report(self) -> CutReport:
        measured = self.watch.seconds() if self.watch is not None else None
        return {
            "steps": len(self.use.groups),
            "chunks": self.use.chunks,
            "rule": self.use.rule,
            "predicted_ms": 1e3 * self.use.predicted_s,
            "blocking_ms": 1e3 * self.use.blocking_s,
            "measured_ms": None if measured is None else 1e3 * measured,
            "over_plain": self.over_plain,
            "scatter": self.scatter,
            "tried": self._tried,
        }

    @property
    def has_chosen(self) -> bool:
        """Whether this run has decided how rows are cut, and times that."""
        return self.trials is None and self.watch is not None


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
    def without_times(self) -> Granularity:
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
            return self.without_times
        slowest = [max(column) for column in columns]
        self.scatter = scatter = max(scatters)
        seconds = dict(zip(self.candidates, slowest, strict=True))
        fewest = {one: (one.num_units, seconds[one]) for one in self.candidates}
        near = {one: (1 + self._about(one, scatter)) * min(slowest) for one in self.candidates}
        wins = Auto(costs=fewest, plain=self.without_times, wins=lambda one: seconds[one] <= near[one])
        chosen = wins.choice
        plain = [seconds[one] for one in self.candidates if one.plain]
        self.over_plain = plain[0] / seconds[chosen] if plain else None
        first = chosen == self.candidates[0]
        return chosen if first else replace(chosen, rule=f"{chosen.rule}, fastest of {len(slowest)}")

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
