"""What a planner is asked for one layer: loads, slots, what holds now, and what things cost.

Idea: planners differ in how they search, not in what they look for. All of them read one record, and its
`judge` says what a plan costs, in seconds of a step with these loads (`balance/objective`).

Contract: checked when it is made. Loads that no gate can have (not finite, negative, none at all) and slots
that are too few are refused, whoever asks: a solver would search for ever.

Shapes: P ranks, E experts, N nodes.

Nearly equal numbers are the same to all who plan: compared with half of their bits, equal ones by number. It
is the rule of `moe/gate/routing` for averages of loads, which are float64: the order of their sums must not
decide which of two equally busy experts moves.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from moeclipse.balance.futures import futures_of
from moeclipse.balance.lending import lent
from moeclipse.balance.objective import EXCHANGES, PlacementCosts, Score, score
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.replicate import slots_for
from moeclipse.balance.split import ReplicaTable, pour
from moeclipse.core.errors import ConfigError

EXPERTS_IN_TIERS = 400
"""Experts times tiers that are worth their time: large tables are filled at their full size only."""


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    counts_PE: np.ndarray
    """Rows of each source rank for each expert, averaged over the last steps."""
    slots_P: tuple[int, ...]
    current: Placement
    costs: PlacementCosts
    node_P: tuple[int, ...] = ()
    """The node of each rank; left out: all on one."""
    noise: float = 0.0
    """How far loads may be from the average while the plan holds, in mean loads."""
    turnover: float = 0.0
    """Part of a step's seconds that filling all slots anew must win beside what it costs."""
    lends: bool = False
    """Whether training lends experts for a step, too: what is lent need not be copied for long."""
    calls: int = 1
    """Of the layer in a step; what is lent travels in each."""
    tier: tuple[int, ...] = ()
    """Slots of each rank that a search fills, of all there are; left out: all."""

    def __post_init__(self) -> None:
        if not self.node_P:
            object.__setattr__(self, "node_P", (0,) * len(self.slots_P))
        if not self.tier:
            object.__setattr__(self, "tier", self.slots_P)
        problems = [
            *_load_problems(self.counts_PE, self.current),
            *_slot_problems(self.slots_P, self.current),
        ]
        if problems:
            raise ConfigError(problems)
        slots_for(self.current.num_experts, self.current.num_ranks, self.slots_P)
        object.__setattr__(self, "counts_PE", half_of_bits(self.counts_PE))

    @property
    def num_ranks(self) -> int:
        return len(self.slots_P)

    @property
    def num_slots(self) -> int:
        """Of its tier."""
        return sum(self.tier)

    @property
    def num_experts(self) -> int:
        return self.current.num_experts

    @cached_property
    def num_nodes(self) -> int:
        return len(set(self.node_P))

    @cached_property
    def load_E(self) -> np.ndarray:  # noqa: N802
        return self.counts_PE.sum(0)

    @cached_property
    def loads(self) -> list[float]:
        """Rows of each expert."""
        found: list[float] = self.load_E.astype(float).tolist()
        return found

    @cached_property
    def futures(self) -> list[list[float]]:
        """Loads that may come, beside the average."""
        return futures_of(self.load_E, self.noise)

    @cached_property
    def node_index(self) -> np.ndarray:
        """The node of each rank, counted from 0."""
        return np.unique(self.node_P, return_inverse=True)[1]

    @cached_property
    def rows_NE(self) -> np.ndarray:  # noqa: N802
        """Rows of each node for each expert."""
        return np.stack([self.counts_PE[self.node_index == n].sum(0) for n in range(self.num_nodes)])

    @cached_property
    def cards_N(self) -> np.ndarray:  # noqa: N802
        """Cards of each node, which the rows that cross are spread over."""
        return np.array([self.costs.cards(int(ranks)) for ranks in np.bincount(self.node_index)])

    @cached_property
    def copy_seconds(self) -> float:
        """An expert's gradients to their owner, and new weights back."""
        return self.costs.copy_seconds(self.node_P)

    @cached_property
    def move_seconds(self) -> float:
        """Of a step: one copy of parameters over a rank's link, shared among the steps that a plan lasts."""
        return self.costs.move_seconds(1, 0, self.node_P) / self.costs.every

    @cached_property
    def state_seconds(self) -> float:
        """The same of an expert's optimizer state."""
        return self.costs.move_seconds(0, 1, self.node_P) / self.costs.every

    @cached_property
    def turnover_seconds(self) -> float:
        """What each new copy must win, so that it is not taken back by the next plan."""
        return self.turnover * self.bound / self.num_slots

    @cached_property
    def start(self) -> Placement:
        """What holds now, with all slots that there are."""
        return fitted(self.current, self.slots_P)

    @cached_property
    def counts_of(self) -> list[list[float]]:
        """Rows by expert and source rank, as plain lists."""
        found: list[list[float]] = self.counts_PE.T.astype(float).tolist()
        return found

    @cached_property
    def source(self) -> list[float]:
        """Rows of each source rank."""
        found: list[float] = self.counts_PE.sum(1).astype(float).tolist()
        return found

    def judge(self, placement: Placement) -> Score:
        """What a step costs under a placement, the way there included."""
        args = (placement, self._rows_PE, self.costs)
        table = ReplicaTable.of(placement, self.load_E)
        found = score(*args, current=self.current, node_P=self.node_P, table=table)
        if self.futures:
            found = replace(found, drift=self._drift_seconds(table, found.fullest))
        if not self.lends:
            return found
        shadows = lent(*args, calls=self.calls, node_P=self.node_P, expected_E=self.load_E)
        return replace(found, lent=shadows.gain)

    def _drift_seconds(self, table: ReplicaTable, fullest: float) -> float:
        """What the fullest rank takes longer, on average over the average loads and those that may come."""
        levels = [max(pour(np.array(loads), table)[1]) for loads in self.futures]
        mean = self.costs.row_seconds * sum(levels) / len(levels)
        return max(mean - fullest, 0.0) * len(levels) / (len(levels) + 1)

    @cached_property
    def _rows_PE(self) -> np.ndarray:  # noqa: N802
        return np.rint(self.counts_PE).astype(np.int64)

    @cached_property
    def bound(self) -> float:
        """Seconds that no placement can be below: even ranks, and rows that need not leave theirs.

        Each expert stands somewhere, at best where most of its rows come from. What slots are left over keep
        rows on other ranks, the most there are, as long as that saves more than a replica's gradients cost.
        Rows that leave cost no more than lending their expert would. The largest expert cannot be spread over
        more ranks than there are slots for its replicas; one that is lent can.
        """
        costs, num_ranks = self.costs, self.num_ranks
        bytes_per_s = max(costs.near_bandwidth, costs.far_bandwidth)
        saved_PE = EXCHANGES * costs.row_bytes / bytes_per_s * self.counts_PE
        if self.lends:
            copy = (costs.weight_bytes + costs.gradient_bytes) / costs.bandwidth(self.node_P)
            saved_PE = np.minimum(saved_PE, self.calls * copy)
        at_home = float(saved_PE.max(0).sum())
        elsewhere = np.delete(
            saved_PE.T.ravel(), np.arange(self.num_experts) * num_ranks + saved_PE.argmax(0)
        )
        spare = sum(min(count, self.num_experts) for count in self.tier) - self.num_experts
        most = -np.sort(-elsewhere)[:spare]
        by_replicas = float(np.maximum(most - self.copy_seconds, 0.0).sum())
        by_replicas = max(by_replicas - num_ranks * costs.replicas_seconds, 0.0)
        working = num_ranks if self.lends else sum(count > 0 for count in self.slots_P)
        fullest = float(self.load_E.sum()) / working
        if not self.lends:
            fullest = max(fullest, largest_part(self.loads, max(spare, 0), working))
        rows = costs.row_seconds * fullest
        return rows + (float(saved_PE.sum()) - at_home - by_replicas) / num_ranks

    @cached_property
    def could_stay(self) -> float:
        """Part of the rows that need not leave their rank, at most.

        Each expert stands somewhere, at best where most of its rows come from; what slots are left over keep
        the largest of all other counts.
        """
        slots = sum(min(count, self.num_experts) for count in self.tier)
        home_E = self.counts_PE.argmax(0)
        rest_PE = self.counts_PE.copy()
        rest_PE[home_E, np.arange(self.num_experts)] = 0
        spare = -np.sort(-rest_PE, axis=None)[: slots - self.num_experts]
        return float(self.counts_PE.max(0).sum() + spare.sum()) / float(self.counts_PE.sum())

    @cached_property
    def tiers(self) -> tuple[tuple[int, ...], ...]:
        """Slots of each rank, from the fewest that will do to all there are.

        A plan for few slots is a plan for many: who looks at all tiers, from few to many, and at each as if
        there were no others, never does worse with more slots.
        """
        most = min(max(self.slots_P), self.num_experts)
        rows = [tuple(min(count, size) for count in self.slots_P) for size in range(1, most + 1)]
        enough = [row for row in rows if sum(row) >= self.num_experts]
        return tuple(enough if self.num_experts * len(enough) <= EXPERTS_IN_TIERS else enough[-1:])


def largest_part(loads: Sequence[float], spare: int, most: int) -> float:
    """Of any expert on one of its ranks, at least: with so many further replicas, at most so many of each."""
    parts = [(-load, expert, 1) for expert, load in enumerate(loads)]
    heapq.heapify(parts)
    for _ in range(spare):
        _, expert, replicas = parts[0]
        if replicas >= most:
            break
        heapq.heapreplace(parts, (-loads[expert] / (replicas + 1), expert, replicas + 1))
    return -parts[0][0]


def fitted(placement: Placement, slots_P: Sequence[int]) -> Placement:
    """With empty slots behind those of each rank, up to so many."""
    if all(len(row) == count for row, count in zip(placement.slots, slots_P, strict=True)):
        return placement
    rows = tuple(
        row + (EMPTY,) * (count - len(row)) for row, count in zip(placement.slots, slots_P, strict=True)
    )
    return Placement(rows, placement.primary)


def packed(placement: Placement, slots_P: Sequence[int]) -> Placement | None:
    """With so many slots, experts in order and empty slots behind them; None where they are too few.

    What a search finds may depend on which slot an expert stands in, so it begins here.
    """
    rows = [sorted(held) for held in placement.held]
    if any(len(row) > count for row, count in zip(rows, slots_P, strict=True)):
        return None
    return fitted(Placement(tuple(map(tuple, rows)), placement.primary), slots_P)


def _load_problems(counts_PE: np.ndarray, current: Placement) -> list[str]:
    expected = (current.num_ranks, current.num_experts)
    if counts_PE.shape != expected:
        return [
            f"counts are {list(counts_PE.shape)}, but the current placement has {expected[0]} ranks and "
            f"{expected[1]} experts"
        ]
    if not np.isfinite(counts_PE).all():
        return ["loads hold numbers that are not finite; leave out the steps that were skipped"]
    if (counts_PE < 0).any():
        return [f"loads hold negative numbers ({counts_PE.min():g}); they count rows"]
    if not counts_PE.any():
        return ["loads are all zero: there is nothing to plan for"]
    return []


def _slot_problems(slots_P: Sequence[int], current: Placement) -> list[str]:
    if len(slots_P) != current.num_ranks:
        return [
            f"slots are given for {len(slots_P)} ranks, but the current placement has {current.num_ranks}"
        ]
    return [
        f"rank {rank} has {len(row)} slots now, but only {count} in the plan; give it {len(row)}"
        for rank, (row, count) in enumerate(zip(current.slots, slots_P, strict=True))
        if len(row) > count
    ]


DROPPED = 26
"""Of the 52 bits behind the first one of a float64."""


def half_of_bits(values: np.ndarray) -> np.ndarray:
    """Rounded to half of their digits; whole numbers below 2^26 stay, and no order is turned round."""
    bits = np.ascontiguousarray(values, dtype=np.float64).view(np.int64)
    rounded: np.ndarray = ((bits + (1 << DROPPED - 1)) & -(1 << DROPPED)).view(np.float64)
    return rounded.reshape(np.shape(values))
