"""What uneven loads cost a layer, and what each cure leaves of that: steps replayed in seconds.

    static      experts stay, nothing is lent
    shadows     experts are lent for the step at hand, from its own counts (`balance/shadow`)
    replicas    spare slots are filled once, from the loads before the first plan is due, and stay
    planned     experts move and are copied as training does: asked for every ten steps and when loads jump,
                taken two steps later, moves paid for in the step that makes them
    auto        experts move where that beats lending them, and what is hot now is lent
    even        the same rows under a gate that is forced to be even: what all others are held against

Idea. Every cure is replayed over the same steps, each as training would have met it and by what training
decides by: with the loads of the steps before for what is planned, with its own counts for what is lent,
where the step before made it ask for them (`balance/asking`). Seconds are those of the planners' own
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

from moeclipse.balance.asking import Asking, CallLoads
from moeclipse.balance.config import PlacementConfig, padded
from moeclipse.balance.drift import Drift
from moeclipse.balance.lending import lend_costs, lent, lent_now
from moeclipse.balance.load import LoadTrace
from moeclipse.balance.objective import PlacementCosts, Score, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, answer
from moeclipse.balance.problem import PlanProblem
from moeclipse.balance.split import ReplicaTable, split_rows

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
    look: float = 0.0
    """Seconds that a step's calls take to ask for shadows."""
    least_s: float = 0.0
    """That a plan of `auto` has to win of a step."""
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
    unsure: list[float] = field(default_factory=list)
    """Seconds that each step with experts that stay may be off by, as prices were measured."""

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
            held = _Held(counts_PE.shape[1], counts_PE.shape[0], bed)
        held.step(number, counts_PE, found)
    if held is not None:
        found.copies, found.plan_s = held.planned.copies, held.planned.plan_s
    return found


class _Held:
    """Where experts stand under each cure while steps go by."""

    def __init__(self, num_experts: int, num_ranks: int, bed: Bed) -> None:
        plain = Placement.contiguous(num_experts, num_ranks)
        start = padded(plain, max(bed.slots, plain.max_slots))  # an even share at least
        auto, stays = replace(bed.config, planner="auto"), replace(bed.config, planner="static")
        self.plain = _Planned(plain, bed, stays, lends=True)
        self.planned = _Planned(start, bed, bed.config, lends=False)
        self.replicas = _Planned(start, bed, stays, lends=False)
        self.auto = _Planned(start, bed, auto, lends=True)
        self.trace = LoadTrace(drift=Drift())

    def step(self, number: int, counts_PE: np.ndarray, found: CureSeconds) -> None:
        planned_s = self.planned.take(number, counts_PE)
        moved_s = self.auto.take(number, counts_PE)
        first = planned_s if self.planned.plans == 1 else 0.0
        if first:
            self.replicas.placement = self.planned.placement
            self.replicas.expected_E = self.planned.expected_E
        ways = (self.plain, self.plain, self.replicas, self.planned, self.auto)
        scored = [way.seconds(counts_PE) for way in ways]
        even = self.plain.seconds(evened(counts_PE)).total
        static, shadows, kept, now, auto = (each.total for each in scored)
        shadows *= self.plain.lend(counts_PE)[0]
        left, loans = self.auto.lend(counts_PE)
        for way, seconds in zip(
            (EVEN, *CURES),
            (even, static, shadows, kept + first, now + planned_s, auto * left + moved_s),
            strict=True,
        ):
            found.seconds[way].append(seconds)
        for way, each in zip(CURES, scored, strict=True):
            found.balance[way].append(each.balance)
        found.loans.append(loans)
        found.unsure.append(self.plain.bed.costs.unsure_seconds(scored[0]))
        self.trace.add(number, counts_PE[None])
        for planned in (self.plain, self.planned, self.auto):
            planned.ask(number, counts_PE, self.trace)


class _Planned:
    """Where experts stand under one planner while steps go by, and what is lent beside it."""

    def __init__(self, start: Placement, bed: Bed, config: PlacementConfig, lends: bool) -> None:
        self.bed, self.config, self.lends = bed, config, lends
        self.placement = start
        self.expected_E: np.ndarray | None = None
        self.asking = Asking()
        self.plans = 0
        self.copies: list[int] = []
        """Of each plan that was taken."""
        self.plan_s: list[float] = []
        """Processor seconds of each plan that was made."""
        self._pending: tuple[int, Placement, np.ndarray] | None = None

    def take(self, number: int, counts_PE: np.ndarray) -> float:
        """The plan that is due, and the seconds that its moves take in this step."""
        if self._pending is None or number < self._pending[0]:
            return 0.0
        _, new, expected_E = self._pending
        self._pending, self.plans = None, self.plans + 1
        if new == self.placement:
            self.copies.append(0)
            return 0.0
        at_once = replace(self.bed.costs, every=1)
        paid = score(new, counts_PE, at_once, current=self.placement, node_P=self.bed.node_P)
        self.placement, self.expected_E = new, expected_E
        self.copies.append(paid.moves)
        # Steps that were left out have none.
        return paid.migration / self.bed.apart

    def seconds(self, counts_PE: np.ndarray) -> Score:
        given = (self.placement, counts_PE, self.bed.costs)
        return score(*given, node_P=self.bed.node_P, expected_E=self.expected_E)

    def lend(self, counts_PE: np.ndarray) -> tuple[float, int]:
        """(part of a layer's seconds that is left with what is lent, copies); asked for as in training."""
        bed, asking = self.bed, self.asking
        if bed.apart == 1 and not asking.asks:
            loads = self._call_loads(counts_PE)
            prices = lend_costs(bed.costs, bed.calls, bed.node_P)
            anew = bed.serves and asking.surprised(loads.rows_P)
            if not (anew and asking.wanted(loads, prices, bed.look, bed.serves)):
                asking.after_call(loads if asking.looks else None, prices, bed.look, bed.serves)
                return 1.0, 0
        lending = lent_now if bed.serves else lent
        expected: dict[str, Any] = {"expected_E": self.expected_E, "calls": bed.calls, "node_P": bed.node_P}
        loans = lending(self.placement, counts_PE, bed.costs, **expected)
        asking.after_answer(loans.gain, bed.look)
        before = loans.before.total
        left = (loans.after.total + bed.look) / before if before > 0 else 1.0
        return left, sum(len(ranks) for _, ranks in loans.shadows)

    def _call_loads(self, counts_PE: np.ndarray) -> CallLoads:
        table = ReplicaTable.of(self.placement, self.expected_E)
        pairs_PR = split_rows(counts_PE, table, self.bed.node_P).rows_PR
        return CallLoads.of(pairs_PR, self.placement, self.bed.node_P, 1.0)

    def ask(self, number: int, counts_PE: np.ndarray, trace: LoadTrace) -> None:
        bed, config = self.bed, self.config
        if trace.jumped:
            self._pending = None
            self.asking.look_again()
        idle = self._pending is None
        asks = any(trace.asks(config, bed.apart * number + more, idle) for more in range(bed.apart))
        if not (asks and idle) or not counts_PE.any() or not config.moves:
            return
        begun = time.process_time()
        seen_PE = trace.average.rows_LPE[0]
        noise = trace.error(config.ahead / bed.apart)
        asked = PlanConfig(planner=config.planner, max_moved=config.max_moved, noise=noise)
        problem = PlanProblem(
            counts_PE=seen_PE,
            slots_P=tuple(len(row) for row in self.placement.slots),
            current=self.placement,
            costs=replace(bed.costs, every=trace.lasting(config)),
            node_P=bed.node_P,
            noise=asked.noise,
            turnover=asked.turnover,
            lends=self.lends,
            calls=bed.calls,
        )
        new = answer(asked, problem)
        if config.at_ease:
            now = problem.judge(self.placement)
            won, unsure = now.total - problem.judge(new).total, bed.costs.unsure_seconds(now)
            new = new if won >= max(bed.least_s, unsure) else self.placement
        self.plan_s.append(time.process_time() - begun)
        # Taken at the end of a step, so it is the next one that has it.
        self._pending = (number + -(-(config.delay + 1) // bed.apart), new, seen_PE.sum(0))
