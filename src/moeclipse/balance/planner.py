"""One door to all planners, and the rule when to use which.

    random        for tests and as a yardstick
    greedy        the baseline: replicas and packing as if each replica got an equal share
    wrap_fill     from a clean table, over nodes and ranks, ranks renamed so that little moves
    incremental   a few moves from the current placement; a clean table where that is far from enough
    exact         what incremental says, polished by a solver (`moeclipse.balance.solve`)
    auto          incremental, where enough can be won at all: nothing, a copy, a move or (by shadows) a loan

A policy of one's own is a function from a `PlanProblem` to a `Placement` (`balance/policy`).

Contract: pure and deterministic (exact: as far as the solver's time limit allows). `plan` never returns a
placement that does not fit, and returns `current` itself when nothing is worth moving.

Searches begin from what holds now, and from clean tables. Few replicas are cheap to keep equal, many even the
ranks out, and which is better depends on prices. So tables are made for each tier of slots, from sparse to
full: greedy ones, and wrap-filled ones whose ranks may be fuller than the mean; ranks are then renamed so
that little moves. A table fits its tier, so a plan for few slots is found again where there are more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeclipse.balance.bottlenecks import steadied, steadies
from moeclipse.balance.draft import Draft
from moeclipse.balance.drift import UNKNOWN
from moeclipse.balance.incremental import improved
from moeclipse.balance.nodes import plan_two_level, tables_for_nodes
from moeclipse.balance.objective import PlacementCosts, sync_copies
from moeclipse.balance.placement import Placement
from moeclipse.balance.problem import PlanProblem, fitted, packed
from moeclipse.balance.replicate import plan_greedy, plan_random, plan_wrap_fill, relabelled
from moeclipse.balance.solve import polish
from moeclipse.balance.split import ReplicaTable, balance_of, pour
from moeclipse.core.errors import ConfigError

SMALL = 128
"""Slots up to which everything is searched, whatever holds now."""
PLANNERS = ("random", "greedy", "incremental", "wrap_fill", "exact", "auto")
WORTHWHILE = 0.05
"""With auto, a plan must win this part of a step; where even the best could not, none is searched for."""
ROUGH = 0.8
"""Large tables keep to their time: below this balance they are made anew, above it changed a little."""
FEWEST_MOVES = 8
"""However small the table: a few moves are kinder than the clean table that is taken without them."""

FEW_TRIES, CLEAN_TRIES, MOST_TRIES = 4_500_000, 1_500_000, 300
"""Of a search, times the square of its slots: work is counted, never timed, so that plans repeat."""
NODES = 10
"""Over nodes a search of a large table may try so much more: the wire between them is most of a step."""
MANY_LEAVE = 0.2
"""Part of all rows that might stay on their rank and do not: sets of ranks know nothing of wires."""
POLISH_TRIES, LEAST_POLISH = 70_000, 30
"""Behind a search by sets of ranks: what is left are wires, and copies that carry little."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    planner: str = "incremental"
    """random, greedy, incremental, wrap_fill, exact or auto."""
    max_moved: float = 0.05
    """Part of the slots that one incremental plan may fill anew."""
    min_gain: float = 0.01
    """A plan must win this part of a step's seconds."""
    turnover: float = 0.1
    """Part of a step's seconds that filling all slots anew must win beside what it costs; a copy its part."""
    noise: float = UNKNOWN
    """How far loads may be from the average while the plan holds, in mean loads."""
    time_limit: float = 10.0
    """Seconds for the exact solver."""
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.planner not in PLANNERS:
            problems.append(f"planner {self.planner!r} is unknown; choose one of {', '.join(PLANNERS)}")
        if not 0 <= self.max_moved <= 1:
            problems.append(f"max_moved ({self.max_moved}) must lie between 0 and 1: a part of the slots")
        for name in ("min_gain", "turnover", "noise", "time_limit"):
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
        turnover=config.turnover,
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
        better = improved(start, problem.num_slots, tries_for(slots_P, CLEAN_TRIES))
        found = better.placement().arranged_like(current)
        # Over nodes a clean table may be less even than what holds now.
        return found if problem.judge(found).total <= problem.judge(problem.start).total else current
    if config.planner == "auto":
        if problem.bound >= (1 - WORTHWHILE) * problem.judge(problem.start).total:
            return current
        config = replace(config, min_gain=max(config.min_gain, WORTHWHILE))
    found = incremental(config, problem)
    if config.planner == "exact":
        return polish(problem, found, time_limit=config.time_limit)
    return found


def incremental(config: PlanConfig, problem: PlanProblem) -> Placement:
    """What the tiers of slots offer, from few to many: none depends on those after it."""
    offers = Offers(problem, config.min_gain)
    if not offers.can_win(config.min_gain):
        return problem.current  # loads are even: there is nothing to win, and looking for it costs time
    for slots_P in problem.tiers:
        offers.enter(replace(problem, tier=slots_P))
        if offers.can_win(0.0):
            search_tier(config, offers)
    return offers.table


def search_tier(config: PlanConfig, offers: Offers) -> None:
    """What holds now, changed a little, and the best of all clean tables where that is clearly cheaper."""
    problem, rough = offers.problem, offers.now.balance < ROUGH
    large = problem.num_slots > SMALL
    by_sets = not large and steadies(problem)
    leaving = problem.could_stay - (1 - offers.now.sent_share)
    if by_sets and problem.num_nodes == 1 and leaving < MANY_LEAVE:
        search_by_sets(config, offers, rough)
        return
    if not (large and rough) or problem.num_nodes > 1:
        offers.offer(few_moves(config, problem))
    worth = config.min_gain if rough else max(config.min_gain, problem.turnover)
    if (rough or not large or problem.num_nodes > 1) and offers.can_win(worth):
        tries = tries_of(problem, CLEAN_TRIES)
        for start in clean_starts(offers, rough):
            offers.offer(improved(start, problem.num_slots, tries).placement())
    best = packed(offers.table, problem.tier) if by_sets else None
    if best is not None:
        offers.offer(steadied(Draft.of(best, problem)).placement())


def search_by_sets(config: PlanConfig, offers: Offers, rough: bool) -> None:
    """The same where rows are most of a step: from a clean table only if what holds now is far from even."""
    problem, starts = offers.problem, []
    now = packed(offers.table, problem.tier)
    if now is not None:
        starts.append(Draft.of(now, problem))
    if rough and offers.can_win(config.min_gain):
        starts += clean_starts(offers, rough)
    if starts:
        found = steadied(min(starts, key=lambda draft: draft.seconds))
        tries = max(tries_for(problem.tier, POLISH_TRIES), LEAST_POLISH)
        offers.offer(improved(found, moves_of(config, problem), tries).placement())


def moves_of(config: PlanConfig, problem: PlanProblem) -> int:
    return max(round(config.max_moved * problem.num_slots), FEWEST_MOVES)


class Offers:
    """Tables that were offered, and the best of them.

    A table must win more the more of it is new (`problem.turnover`). But none is chosen that is slower than a
    yardstick: if one is, the fastest of all is taken, however much it moves. Nor is one chosen that is slower
    than the best one of fewer slots.
    """

    def __init__(self, problem: PlanProblem, min_gain: float) -> None:
        self.problem, self.now = problem, problem.judge(problem.start)
        # What holds now may be slower than others by `min_gain`.
        self.offered = [((1 - min_gain) * self.now.total, 0, problem.current)]
        """(seconds, copies, table), the first one from fewer slots."""
        self.yardstick = np.inf

    def enter(self, problem: PlanProblem) -> None:
        """The next tier: only its best table has to be beaten, and copies have another price."""
        self.offered = [self._best]
        self.problem = problem

    def offer(self, table: Placement, yardstick: bool = False) -> float:
        """Its price."""
        table = fitted(table, self.problem.slots_P).arranged_like(self.problem.current)
        judged = self.problem.judge(table)
        self.offered.append((judged.total, judged.moves, table))
        if yardstick:
            self.yardstick = min(self.yardstick, judged.total)
        return self._price(self.offered[-1])

    def can_win(self, part: float) -> bool:
        """Whether any table could be faster than the best one by this part."""
        seconds, _, table = self._best
        if table is self.problem.current and part > 0:
            seconds = self.now.total
        return self.problem.bound < (1 - part) * seconds

    def _price(self, offer: tuple[float, int, Placement]) -> float:
        return offer[0] + self.problem.turnover_seconds * offer[1]

    @property
    def _best(self) -> tuple[float, int, Placement]:
        slowest = self.offered[0][0]
        best = min([offer for offer in self.offered if offer[0] <= slowest], key=self._price)
        return best if best[0] <= self.yardstick else min(self.offered, key=lambda offer: offer[0])

    @property
    def table(self) -> Placement:
        return self._best[2]


def tries_for(slots_P: Sequence[int], tries: int) -> int:
    """Changes that a search of such a table may try: about 30 ms for a plan of 64 ranks with 5 slots."""
    return min(tries // max(sum(slots_P), 1) ** 2, MOST_TRIES)


def tries_of(problem: PlanProblem, tries: int) -> int:
    return tries_for(problem.tier, tries * (NODES if problem.num_nodes > 1 else 1))


def few_moves(config: PlanConfig, problem: PlanProblem) -> Placement:
    """What holds now, improved by a few copies; itself where it does not fit."""
    now = packed(problem.current, problem.tier)
    if now is None:
        return problem.current
    start = Draft.of(now, problem)
    return improved(start, moves_of(config, problem), tries_of(problem, FEW_TRIES)).placement()


def clean_starts(offers: Offers, rough: bool) -> list[Draft]:
    """The best of some tables with replicas, and one without: a search adds few, and takes few back.

    Of large tables the better of both. What a tier gives depends on it alone.
    """
    problem = offers.problem
    greedy = plan_greedy(problem.load_E, problem.tier)
    price = offers.offer(greedy, yardstick=rough)
    alone = renamed(plan_greedy(problem.load_E, problem.tier, spare=False), problem)
    if problem.num_nodes > 1:
        start = start_over_nodes(offers, renamed(greedy, problem))
        offers.offer(alone)
    else:
        start = Draft.of(wrap_filled(problem, problem.tier, spare=False), problem)
        start = start if start.seconds <= price else Draft.of(renamed(greedy, problem), problem)
    starts = [start, Draft.of(alone, problem)]
    return starts if problem.num_slots <= SMALL else [min(starts, key=lambda draft: draft.seconds)]


def start_over_nodes(offers: Offers, greedy: Placement) -> Draft:
    """The cheapest as a step is judged: a draft does not know whose rows cross."""
    problem = offers.problem
    tables = [wrap_filled(problem, problem.tier, spare=False)]
    for table in tables_for_nodes(problem.counts_PE, problem.tier, problem.node_P):
        tables.append(renamed(table, problem))
    for table in tables:
        offers.offer(table)
    return Draft.of(min([greedy, *tables], key=lambda table: problem.judge(table).total), problem)


def expected_balance(placement: Placement, load_E: np.ndarray) -> float:
    """Mean over fullest rank when these loads are poured as well as the placement allows."""
    _, level = pour(load_E, ReplicaTable.of(placement), 30, good_enough=1.0, worth_a_sweep=0.9998)
    return balance_of(np.array(level))


STRETCHES = (1.0, 1.3, 2.0)
"""Loads that a wrap-filled rank may have, in means: what is fuller needs fewer replicas."""


def wrap_filled(problem: PlanProblem, slots_P: Sequence[int], spare: bool = True) -> Placement:
    """Over nodes and ranks, ranks renamed."""
    if problem.num_nodes > 1:
        return renamed(plan_two_level(problem.counts_PE, slots_P, problem.node_P), problem)
    if spare:
        return renamed(plan_wrap_fill(problem.load_E, slots_P), problem)
    mean = float(problem.load_E.sum()) / max(sum(count > 0 for count in slots_P), 1)
    best, least = None, np.inf
    for stretch in STRETCHES:
        rows = problem.costs.row_seconds * stretch * mean
        if rows >= least:
            break  # fuller ranks would cost more than all replicas
        table = plan_wrap_fill(problem.load_E, slots_P, False, stretch)
        copies = max(sync_copies(table, problem.costs.shared_owners))
        seconds = rows + problem.costs.sync_seconds(copies, problem.node_P)
        if seconds < least:
            best, least = table, seconds
    assert best is not None
    return renamed(best, problem)


def renamed(table: Placement, problem: PlanProblem) -> Placement:
    """With its rows on those ranks that hold most of them already, and no more slots than before."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, node in enumerate(problem.node_P):
        # Ranks may take each other's rows only if they have as many slots.
        groups.setdefault((node, len(table.slots[rank])), []).append(rank)
    moved = packed(relabelled(table, problem.current, list(groups.values())), list(map(len, table.slots)))
    assert moved is not None
    return moved
