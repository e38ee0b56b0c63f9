"""How an exchange is cut: which granularities there are, and which the simulator prefers.

Which of them stays, calls of the layer say (`moe/tune/cut_choice`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, TypedDict

import numpy as np

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


class CutReport(TypedDict):
    """The choice, what was predicted of it, and how long forward exchanges took since."""

    steps: int
    chunks: int
    rule: str
    predicted_ms: float
    blocking_ms: float
    measured_ms: float | None
    over_plain: float | None
    scatter: float | None
    tried: int


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
    """Ever larger groups: of ranks, or of hosts where there are several, whose ranks stay together."""
    start = start_groups("smart", size, hosts)
    if size != "auto":
        return [start]
    sizes = [size for size in (1, 2, 4, 8) if size <= max(len(start) // 2, 1)]
    # One group of all ranks is the blocking exchange, or its chunks: sometimes nothing is faster.
    merged = [even_groups(len(start), size) for size in (*sizes, len(start))]
    return [
        tuple(tuple(sorted(chain(*(start[each] for each in group)))) for group in ring) for ring in merged
    ]


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


def cut_in_words(steps: int, chunks: int) -> str:
    return "one go" if steps == chunks == 1 else f"{steps} steps x {chunks} chunks"


def against_blocking(reports: Sequence[CutReport]) -> str:
    """What trials of some layers saw; nothing where the blocking exchange was not among them, or stays."""
    seen = [report["over_plain"] for report in reports if report["over_plain"] is not None]
    if not seen or set(seen) == {1.0}:
        return ""
    scatters = [scatter for report in reports if (scatter := report.get("scatter")) is not None]
    sure = f" (calls scattered by {100 * max(scatters):.0f} %)" if scatters else ""
    return f", blocking took {statistics.mean(seen):.2f} times as long{sure}"
