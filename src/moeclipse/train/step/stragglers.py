"""Names a rank that computes longer than the others do, for many steps: a throttled GPU, a busy neighbour.

Ranks are held against those that hold the same layers: a stage may well have more to do than another. A rank
whose experts are asked for more than others computes longer, too, and nothing is wrong with its machine: the
note says by how many rows.

Contract: every rank adds the same numbers and says the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from moeclipse.core.steps import nth

Named = dict[str, Any]
"""As `incidents.jsonl` keeps it: rank, step, what."""
SLOW = 1.25
"""Times the median of its peers."""
STEPS = 20
"""Slow ones before a rank is named, then twice as many, and so on; one that is not slow counts off two."""


@dataclass(kw_only=True)
class Stragglers:
    peers: Sequence[Sequence[int]]
    """Ranks with the same layers."""
    _slow_for: dict[int, int] = field(default_factory=dict)
    _told_at: dict[int, int] = field(default_factory=dict)

    def add(self, step: int, compute_ms: Sequence[float], rows: Sequence[float] | None = None) -> list[Named]:
        """Who there is to name after a step; `rows` are those that the experts of each rank computed."""
        return [named for ranks in self.peers for named in self._among(ranks, step, compute_ms, rows)]

    def _among(
        self, ranks: Sequence[int], step: int, compute_ms: Sequence[float], rows: Sequence[float] | None
    ) -> Iterator[Named]:
        for rank in ranks:
            others = [other for other in ranks if other != rank]
            if not others:
                continue
            usual = median(compute_ms[other] for other in others)
            before = self._slow_for.get(rank, 0)
            slow = compute_ms[rank] > SLOW * usual > 0
            self._slow_for[rank] = before + 1 if slow else max(before - 2, 0)
            if not self._slow_for[rank]:
                self._told_at.pop(rank, None)
            if slow and self._slow_for[rank] >= self._told_at.get(rank, STEPS):
                self._told_at[rank] = 2 * self._slow_for[rank]
                text = (
                    f"step {nth(step)}: rank {rank} computes {compute_ms[rank] / usual:.2f} times as long as "
                    f"the others ({compute_ms[rank]:.0f} ms against {usual:.0f}), and has for "
                    f"{self._slow_for[rank]} steps: {_why(rank, others, rows)}"
                )
                yield {"rank": rank, "step": step, "what": text}


def _why(rank: int, others: Sequence[int], rows: Sequence[float] | None) -> str:
    usual = median(rows[other] for other in others) if rows else 0
    if rows and rows[rank] > 1.1 * usual:
        share = f"{rows[rank] / usual:.2f} times the rows of the others" if usual else "all rows"
        return f"its experts have {share}; placement.planner = 'incremental' would spread them"
    return "its experts have no more rows than the others, so look at its machine (clocks, heat, neighbours)"
