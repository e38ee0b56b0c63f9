"""What uneven loads cost a layer, and what each cure leaves of that: steps replayed in seconds.

    static      experts stay, nothing is lent
    shadows     experts are lent for the step at hand, from its own counts (`balance/shadow`)
    replicas    spare slots are filled once, from the loads before the first plan is due, and stay
    planned     experts move and are copied as training does: asked for every ten steps and when loads jump,
                taken two steps later, moves paid for in the step that makes them
    auto        planned, and what is hot now is lent beside it
    even        the same rows under a gate that is forced to be even: what all others are held against

Idea. Every cure is replayed over the same steps, each as training would have met it: with the loads of the
steps before for what is planned, with its own counts for what is lent. Seconds are those of the planners' own
objective (`balance/objective`), compute and wires one after the other, so cures can be compared with each
other and with what planners promise.

Contract. Pure and deterministic but for `plan_s`, which is measured. A step is never priced by a plan that
was made from it.

Hazard. Nothing of a step but the layer is in these seconds, and wires hide behind compute in training: whole
steps lose less than a layer does here.

Shapes: P ranks, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from moeclipse.balance.config import PlacementConfig, padded
from moeclipse.balance.drift import Drift
from moeclipse.balance.lending import lent, lent_now
from moeclipse.balance.load import LoadTrace
from moeclipse.balance.objective import PlacementCosts, Score, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.shadow import ShadowPlan

CURES = ("static", "shadows", "replicas", "planned", "auto")
EVEN = "even"


@dataclass(frozen=True, kw_only=True)
class Bed:
    """On what steps are replayed."""

    costs: PlacementCosts
    slots: int
    """Experts that a rank can hold, for cures that need room."""
    node_P: tuple[int, ...]
    calls: int = 1
    """Of the layer in a step: what is lent travels in each."""
    config: PlacementConfig = field(default_factory=lambda: PlacementConfig(planner="incremental"))
    serves: bool = True
    """Whether shadows compute rows of other ranks, too (`balance/serving`)."""
    apart: int = 1
    """Steps from one that is given to the next; loads between them are taken to be the same."""


@dataclass
class CureSeconds:
    """Seconds of each step under each cure, and what was done."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in (EVEN, *CURES)})
    balance: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in CURES})
    """Mean over fullest rank, before anything is lent."""
    copies: list[int] = field(default_factory=list)
    """Of each plan that was taken."""
    loans: list[int] = field(default_factory=list)
    """Of each step, beside what was planned."""
    plan_s: list[float] = field(default_factory=list)
    """Processor seconds of each plan."""

    def throughput(self, way: str, first: int = 0) -> float:
        """Over that of an even gate, from a step on."""
        return float(np.sum(self.seconds[EVEN][first:]) / np.sum(self.seconds[way][first:]))


def evened(counts_PE: np.ndarray) -> np.ndarray:
    """[P, E]: the rows of each rank under a gate that is forced to be even: choices are dealt in turn."""
    num_experts = counts_PE.shape[1]
    bounds = np.cumsum([0, *counts_PE.sum(1).astype(int)])
    dealt = (np.arange(first, stop) % num_experts for first, stop in pairwise(bounds))
    return np.stack([np.bincount(each, minlength=num_experts) for each in dealt])


def replay(steps: Iterable[np.ndarray], bed: Bed) -> CureSeconds:
    """Counts [P, E] of one step after the other."""
    found, held = CureSeconds(), None
    for number, counts_PE in enumerate(steps):
        if held is None:
            held = _Held.of(counts_PE, bed)
        held.step(number, counts_PE, found)
    return found


@dataclass
class _Held:
    """Where experts stand under each cure while steps go by."""

    bed: Bed
    plain: Placement
    planned: Placement
    replicas: Placement
    trace: LoadTrace
    expected_E: np.ndarray | None = None
    replicas_expected_E: np.ndarray | None = None
    pending: tuple[int, Placement, np.ndarray] | None = None
    plans: int = 0

    @classmethod
    def of(cls, counts_PE: np.ndarray, bed: Bed) -> _Held:
        plain = Placement.contiguous(counts_PE.shape[1], counts_PE.shape[0])
        start = padded(plain, max(bed.slots, plain.max_slots))  # an even share at least
        trace = LoadTrace(drift=Drift())
        return cls(bed=bed, plain=plain, planned=start, replicas=start, trace=trace)

    def step(self, number: int, counts_PE: np.ndarray, found: CureSeconds) -> None:
        moves = self._take(number, counts_PE, found)
        bed = self.bed
        even = self._score(self.plain, evened(counts_PE))
        static = self._score(self.plain, counts_PE)
        kept = self._score(self.replicas, counts_PE, self.replicas_expected_E)
        now = self._score(self.planned, counts_PE, self.expected_E)
        lends: dict[str, Any] = {"calls": bed.calls, "node_P": bed.node_P}
        lending = lent_now if bed.serves else lent
        loans = lending(self.plain, counts_PE, bed.costs, **lends)
        more = lending(self.planned, counts_PE, bed.costs, expected_E=self.expected_E, **lends)
        first = moves if self.plans == 1 else 0.0
        for way, seconds in (
            (EVEN, even.total),
            ("static", static.total),
            ("shadows", static.total * _left(loans)),
            ("replicas", kept.total + first),
            ("planned", now.total + moves),
            ("auto", now.total * _left(more) + moves),
        ):
            found.seconds[way].append(seconds)
        for way, scored in zip(CURES, (static, static, kept, now, now), strict=True):
            found.balance[way].append(scored.balance)
        found.loans.append(sum(len(ranks) for _, ranks in more.shadows))
        self._ask(number, counts_PE, found)

    def _score(
        self, placement: Placement, counts_PE: np.ndarray, expected_E: np.ndarray | None = None
    ) -> Score:
        return score(placement, counts_PE, self.bed.costs, node_P=self.bed.node_P, expected_E=expected_E)

    def _take(self, number: int, counts_PE: np.ndarray, found: CureSeconds) -> float:
        """The plan that is due, and the seconds that its moves take in this step."""
        if self.pending is None or number < self.pending[0]:
            return 0.0
        _, new, expected_E = self.pending
        at_once = replace(self.bed.costs, every=1)
        paid = score(new, counts_PE, at_once, current=self.planned, node_P=self.bed.node_P)
        self.planned, self.expected_E, self.pending = new, expected_E, None
        self.plans += 1
        found.copies.append(paid.moves)
        if self.plans == 1:
            self.replicas, self.replicas_expected_E = new, expected_E
        # Steps that were left out have none.
        return paid.migration / self.bed.apart

    def _ask(self, number: int, counts_PE: np.ndarray, found: CureSeconds) -> None:
        bed, config, trace = self.bed, self.bed.config, self.trace
        trace.add(number, counts_PE[None])
        due = any(config.due(bed.apart * number + more) for more in range(bed.apart))
        if not (trace.jumped or (due and self.pending is None)) or not counts_PE.any():
            return
        begun = time.process_time()
        noise = trace.error(config.ahead / bed.apart)
        asked = PlanConfig(planner="incremental", max_moved=config.max_moved, noise=noise)
        seen_PE = trace.average.rows_LPE[0]
        slots_P = tuple(len(row) for row in self.planned.slots)
        new = plan(asked, seen_PE, slots_P, self.planned, bed.costs, node_P=bed.node_P)
        found.plan_s.append(time.process_time() - begun)
        # Taken at the end of a step, so it is the next one that has it.
        self.pending = (number + -(-(config.delay + 1) // bed.apart), new, seen_PE.sum(0))


def _left(loans: ShadowPlan) -> float:
    """Of a layer's seconds, with what is lent."""
    return loans.after.total / loans.before.total if loans.before.total > 0 else 1.0
