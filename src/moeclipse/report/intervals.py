"""Hidden and exposed time, from annotated intervals alone.

A span is (start, stop) in seconds. Of one rank's step we know when it computed, when each transfer was
launched, when the transfer's last member launched it, and when it was done. From these:

    compute   time inside compute spans, waits cut out
    exposed   transfers minus compute: communication that cost step time
    straggle  waiting for a peer that had not launched yet, minus compute and transfers
    idle      what is left; compute + exposed + straggle + idle = step, always
    hidden    transfers minus exposed: communication that cost nothing

A transfer counts from the moment its last member has launched it: waiting for a late peer is the
peer's fault, not the wire's, and must not be sold as communication (nor hidden as such).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class TransferInterval:
    """One collective as one rank saw it."""

    label: str
    launched: float
    last_launched: float
    done: float


@dataclass(frozen=True, kw_only=True)
class StepSplit:
    """Seconds of one step on one rank."""

    step: float
    compute: float
    exposed: float
    straggle: float
    idle: float
    comm: float

    @property
    def hidden(self) -> float:
        return self.comm - self.exposed


def union(spans: Iterable[Span]) -> list[Span]:
    """Sorted, disjoint spans that cover the same points; empty spans vanish."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def subtract(spans: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """The points of `spans` that are in no hole."""
    holes = union(holes)
    left: list[Span] = []
    first = 0
    for start, stop in union(spans):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        position, index = start, first
        while index < len(holes) and holes[index][0] < stop:
            if holes[index][0] > position:
                left.append((position, holes[index][0]))
            position = max(position, holes[index][1])
            index += 1
        if position < stop:
            left.append((position, stop))
    return left


def clip(spans: Iterable[Span], window: Span) -> list[Span]:
    return [(max(a, window[0]), min(b, window[1])) for a, b in spans if b > window[0] and a < window[1]]


def length(spans: Iterable[Span]) -> float:
    total = 0.0
    for start, stop in spans:
        total += stop - start
    return total


def split_step(
    window: Span, *, compute: Sequence[Span], waits: Sequence[Span], transfers: Sequence[TransferInterval]
) -> StepSplit:
    """One rank's step, split. `waits` are the times the rank stood still for a transfer."""
    computing = subtract(clip(compute, window), waits)
    moving = union(clip([(max(t.launched, t.last_launched), t.done) for t in transfers], window))
    late = clip([(t.launched, min(t.last_launched, t.done)) for t in transfers], window)
    exposed = subtract(moving, computing)
    straggle = subtract(subtract(late, computing), moving)
    step = window[1] - window[0]
    spent = {"compute": length(computing), "exposed": length(exposed), "straggle": length(straggle)}
    return StepSplit(step=step, **spent, idle=step - sum(spent.values()), comm=length(moving))
