"""One door to all planners, and the rule when to use which.

    random        for tests and as a yardstick
    greedy        the baseline: replicas and packing as if each replica got an equal share
    wrap_fill     from a clean table, over nodes and ranks, ranks renamed so that little moves
    incremental   a few moves from the current placement; wrap_fill only where that is far from enough
    exact         what incremental says, polished by a solver (`moeclipse.balance.solve`)
    auto          incremental, where enough can be won at all: nothing, a copy, a move or (by shadows) a loan

A policy of one's own is a function from a `PlanProblem` to a `Placement` (`balance/policy`).

Contract: pure and deterministic (exact: as far as the solver's time limit allows). `plan` never returns a
placement that does not fit, and returns `current` itself when nothing is worth moving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moeclipse.balance.draft import Draft
from moeclipse.balance.incremental import improved
from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.problem import PlanProblem, fitted
from moeclipse.balance.replicate import plan_greedy, plan_random
from moeclipse.balance.solve import polish
from moeclipse.balance.split import ReplicaTable, balance_of, pour
from moeclipse.balance.starts import clean_starts, wrap_filled
from moeclipse.core.errors import ConfigError

SMALL = 128
"""Slots up to which everything is searched, whatever holds now."""
PLANNERS = ("random", "greedy", "incremental", "wrap_fill", "exact", "auto")
WORTHWHILE = 0.05
"""With auto, no placement is searched for where even the best could not win this part of a step."""
HOPELESS, EVEN = 0.5, 0.95
"""Large tables keep to their time: below one balance no few moves, above the other no clean tables."""
UPHEAVAL = 5
"""Most slots of a clean table are filled anew: that must win so many times `min_gain`."""
FEWEST_MOVES = 4
"""However small the table: a few moves are kinder than the clean table that is taken without them."""
FEWEST_STEPS, MOST_STEPS, SEARCHED = 4, 16, 2000
FEW_STEPS = 16
"""From what holds now: nothing else may be searched."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    planner: str = "incremental"
    """random, greedy, incremental, wrap_fill, exact or auto."""
    max_moved: float = 0.05
    """Part of the slots that one incremental plan may fill anew."""
    min_gain: float = 0.01
    """A plan must win this part of a step's seconds."""
    noise: float = 0.03
    """How much the load of an expert jitters from step to step, relative."""
    time_limit: float = 10.0
    """Seconds for the exact solver."""
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.planner not in PLANNERS:
            problems.append(f"planner {self.planner!r} is unknown; choose one of {', '.join(PLANNERS)}")
        if not 0 <= self.max_moved <= 1:
            problems.append(f"max_moved ({self.max_moved}) must lie between 0 and 1: a part of the slots")
        for name in ("min_gain", "noise", "time_limit"):
            if getattr(self, name) < 0:
                problems.append(f"{name} ({getattr(self, name)}) must not be negative")
        if problems:
            raise ConfigError(problems)


def plan(
    config: PlanConfig,
    counts_PE: np.ndarray,
    slots_P: Sequence[int],
    current: Placement,
    costs: PlacementCosts,
    node_P: Sequence[int] | None = None,
) -> Placement:
    """The next placement of one layer, for counts [source rank, expert] averaged over the last steps."""
    problem = PlanProblem(
        counts_PE=counts_PE,
        slots_P=tuple(slots_P),
        current=current,
        costs=costs,
        node_P=tuple(node_P or ()),
        noise=config.noise,
    )
    return answer(config, problem)


def answer(config: PlanConfig, problem: PlanProblem) -> Placement:
    """What a planner says to a problem."""
    slots_P, current = problem.slots_P, problem.current
    if config.planner == "random":
        return plan_random(problem.num_experts, slots_P, config.seed).arranged_like(current)
    if config.planner == "greedy":
        return plan_greedy(problem.load_E, slots_P).arranged_like(current)
    if config.planner == "wrap_fill":
        start = Draft.of(wrap_filled(problem, slots_P), problem)
        return improved(start, problem.num_slots, steps_for(problem)).placement().arranged_like(current)
    if config.planner == "auto" and problem.bound >= (1 - WORTHWHILE) * problem.judge(problem.start).total:
        return current
    found = incremental(config, problem)
    if config.planner == "exact":
        return polish(problem, found, time_limit=config.time_limit)
    return found


def steps_for(problem: PlanProblem) -> int:
    """Of a search, so that it keeps to its time: tries cost more where tables are larger."""
    return min(max(SEARCHED // (problem.num_experts + problem.num_ranks), FEWEST_STEPS), MOST_STEPS)


def incremental(config: PlanConfig, problem: PlanProblem) -> Placement:
    """A few moves from what holds now, or the best of all clean tables where that is clearly cheaper."""
    now = problem.judge(problem.start)
    best, least, balance = problem.current, now.total, now.balance
    if problem.bound >= (1 - config.min_gain) * least:
        return best  # loads are even: there is nothing to win, and looking for it costs time
    large = problem.num_slots > SMALL
    if not large or balance > HOPELESS:
        for table in few_moves(config, problem):
            found = problem.judge(table)
            if found.total < (1 - config.min_gain) * least:
                best, least, balance = table, found.total, found.balance
    margin = UPHEAVAL * config.min_gain
    if problem.bound >= (1 - margin) * least or (large and balance > EVEN and problem.num_nodes == 1):
        return best
    for table in clean_tables(problem):
        seconds = problem.judge(table).total
        if seconds < (1 - margin) * least:
            best, least, margin = table, seconds, 0.0
    return best


def few_moves(config: PlanConfig, problem: PlanProblem) -> Iterator[Placement]:
    """What holds now, improved by a few copies, in each tier that it fits into."""
    for slots_P in problem.tiers:
        max_moves = max(round(config.max_moved * sum(slots_P)), FEWEST_MOVES)
        if all(len(row) <= count for row, count in zip(problem.current.slots, slots_P, strict=True)):
            start = Draft.of(fitted(problem.current, slots_P), problem)
            found = improved(start, max_moves, max(steps_for(problem), FEW_STEPS))
            if found is not start:
                yield fitted(found.placement(), problem.slots_P)


def clean_tables(problem: PlanProblem) -> Iterator[Placement]:
    """Of each tier greedy as it is, and the better start, improved; what a tier gives depends on it alone."""
    for slots_P in problem.tiers:
        greedy = plan_greedy(problem.load_E, slots_P)
        yield fitted(greedy, problem.slots_P).arranged_like(problem.current)
        start = min(clean_starts(problem, slots_P, greedy), key=lambda draft: draft.seconds)
        found = improved(start, sum(slots_P), steps_for(problem)).placement()
        yield fitted(found, problem.slots_P).arranged_like(problem.current)


def expected_balance(placement: Placement, load_E: np.ndarray) -> float:
    """Mean over fullest rank when these loads are poured as well as the placement allows."""
    _, level = pour(load_E, ReplicaTable.of(placement), 30, good_enough=1.0, worth_a_sweep=0.9998)
    return balance_of(np.array(level))
