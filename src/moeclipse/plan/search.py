"""Choosing the order of one layer's exchange: which step first, in how many chunks.

What cannot be hidden is the first S, before any C can run, and the last R, after the last C. So the order
matters at its two ends, and chunks shorten both. Candidates, all permutations that every rank shares:

    ring        own group first, then around the ring
    ends        the own group's first chunk first and its last chunk last: both ends use near links; where
                steps are not cut, the own rows alone are halved
    johnson     Johnson's rule for S, C, R: short way in first, short way out last
    search      the best of these, improved by swaps as long as the simulator finds a shorter one

Contract: a pure function of counts and costs, so ranks that hold the same count matrix choose alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.kinds import Part
from moeclipse.schedule.shape import ExchangeShape
from moeclipse.schedule.smart import end_units, natural_units, smart
from moeclipse.sim.exchange import Counts, exchange_durations, lower_bound, simulate_exchange

Units = tuple[tuple[int, int], ...]
CHUNKS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The chosen order, and what else was tried."""

    verified: Verified
    seconds: float
    bound: float
    """Busiest lane of the busiest rank: no order with this many chunks is faster."""
    rule: str
    tried: dict[str, float]
    """Predicted seconds by rule and number of chunks, as in `johnson/2`."""

    @property
    def shape(self) -> ExchangeShape:
        return self.verified.program.exchange()


def choose_exchange(
    shape: ExchangeShape,
    counts: Counts,
    costs: ExchangeCosts,
    *,
    chunks: Sequence[int] = CHUNKS,
    swaps: int = 40,
) -> Choice:
    """The fastest order found for these counts; `swaps` bounds the simulations spent on improving it."""
    if not chunks or min(chunks) < 1:
        raise ScheduleError(f"chunks ({list(chunks)}) must list numbers of at least 1")
    tried: dict[str, float] = {}
    best: tuple[float, str, Verified] | None = None
    for number in chunks:
        cut = replace(shape, chunks=number, units=natural_units(shape.num_steps, number))
        for rule, units in candidate_orders(cut, counts, costs).items():
            verified, seconds = _evaluate(cut, units, counts, costs)
            tried[f"{rule}/{number}"] = seconds
            if best is None or seconds < best[0] * (1 - 1e-9):
                best = (seconds, rule, verified)
    assert best is not None
    seconds, rule, verified = best
    if swaps:
        improved, found = _improve(verified, seconds, counts, costs, swaps)
        number = improved.program.exchange().chunks
        tried[f"search/{number}"] = found
        if found < seconds * (1 - 1e-9):
            seconds, rule, verified = found, "search", improved
    return Choice(
        verified=verified,
        seconds=seconds,
        bound=lower_bound(verified.program, counts, costs),
        rule=rule,
        tried=tried,
    )


def candidate_orders(shape: ExchangeShape, counts: Counts, costs: ExchangeCosts) -> dict[str, Units]:
    """The closed-form orders for a shape with its number of chunks."""
    ring = natural_units(shape.num_steps, shape.chunks)
    orders = {"ring": ring}
    if shape.num_steps > 1:
        orders["ends"] = end_units(shape.num_steps, shape.chunks)
    if shape.num_steps > 1:
        orders["johnson"] = _johnson(shape, counts, costs)
    return orders


def _johnson(shape: ExchangeShape, counts: Counts, costs: ExchangeCosts) -> Units:
    """Three machines by Johnson's rule: a = S + C and b = C + R of the busiest rank decide a unit's place."""
    program = smart(replace(shape, units=natural_units(shape.num_steps, shape.chunks)))
    durations = exchange_durations(program, counts, costs)
    longest: dict[tuple[Part, int], float] = {}
    for ops, seconds in zip(program.ranks, durations, strict=True):
        for op, spent in zip(ops, seconds, strict=True):
            if op.step is not None:
                key = (op.kind.part, op.step)
                longest[key] = max(longest.get(key, 0.0), spent)

    def ends(step: int) -> tuple[float, float]:
        middle = longest[Part.C, step]
        return longest[Part.S, step] + middle, middle + longest[Part.R, step]

    steps = range(shape.num_steps)
    early = sorted((s for s in steps if ends(s)[0] < ends(s)[1]), key=lambda s: ends(s)[0])
    late = sorted((s for s in steps if ends(s)[0] >= ends(s)[1]), key=lambda s: -ends(s)[1])
    return tuple((step, chunk) for step in (*early, *late) for chunk in range(shape.chunks))


def _evaluate(
    shape: ExchangeShape, units: Units, counts: Counts, costs: ExchangeCosts
) -> tuple[Verified, float]:
    verified = verify(smart(replace(shape, units=units)))
    return verified, simulate_exchange(verified, counts, costs).makespan


def _improve(
    verified: Verified, seconds: float, counts: Counts, costs: ExchangeCosts, swaps: int
) -> tuple[Verified, float]:
    """Swap units, the ends first, and keep what the simulator likes; same seed, same answer everywhere."""
    shape = verified.program.exchange()
    size = len(shape.units)
    if size < 2:
        return verified, seconds
    random = np.random.default_rng(0)
    ends = [(0, j) for j in range(1, size)] + [(size - 1, j) for j in range(size - 1)]
    pairs = [ends[int(i)] for i in random.permutation(len(ends))]
    for left, right in pairs[:swaps]:
        current = verified.program.exchange()
        units = list(current.units)
        units[left], units[right] = units[right], units[left]
        other, found = _evaluate(current, tuple(units), counts, costs)
        if found < seconds * (1 - 1e-9):
            verified, seconds = other, found
    return verified, seconds
