"""One door to all planners, and the rule when to use which.

    random        for tests and as a yardstick
    greedy        the baseline: replicas and packing as if each replica got an equal share
    wrap_fill     from a clean table, over nodes and ranks, ranks renamed so that little moves
    incremental   a few moves from the current placement; wrap_fill only where that is far from enough
    exact         what incremental says, polished by a solver (`moeclipse.balance.solve`)

Contract: pure and deterministic (exact: as far as the solver's time limit allows). `plan` never returns a
placement that does not fit, and returns `current` itself when nothing is worth moving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeclipse.balance.incremental import plan_incremental
from moeclipse.balance.nodes import plan_two_level
from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.replicate import plan_greedy, plan_random, relabelled, slots_for
from moeclipse.balance.solve import polish
from moeclipse.balance.split import ReplicaTable, balance_of, pour
from moeclipse.core.errors import ConfigError

HOPELESS = 0.7
"""Below this the few moves of one plan are not even tried."""
SMALL = 128
"""Tables with so few slots are searched further."""
PLANNERS = ("random", "greedy", "incremental", "wrap_fill", "exact")
FAR_FROM_ENOUGH = 0.95
"""Below this predicted balance a few moves will not do, and a clean table is considered."""
UPHEAVAL = 0.05
"""Gain from which a plan that moves most of many slots is taken."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    planner: str = "incremental"
    """random, greedy, incremental, wrap_fill or exact."""
    max_moved: float = 0.05
    """Part of the slots that one incremental plan may fill anew."""
    min_gain: float = 0.01
    """A plan must win this part of the fullest rank's time."""
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
    _refuse_what_does_not_fit(counts_PE, slots_P, current)
    load_E = counts_PE.sum(0)
    node_P = tuple(node_P) if node_P is not None else (0,) * len(slots_P)
    if config.planner == "random":
        return plan_random(len(load_E), slots_P, config.seed).arranged_like(current)
    if config.planner == "greedy":
        return plan_greedy(load_E, slots_P).arranged_like(current)
    if config.planner == "wrap_fill":
        return wrap_filled(counts_PE, slots_P, current, node_P, config.noise)
    found = incremental(config, counts_PE, slots_P, current, costs, node_P)
    if config.planner == "exact":
        return polish(load_E, slots_P, current, found, costs, time_limit=config.time_limit)
    return found


def _refuse_what_does_not_fit(counts_PE: np.ndarray, slots_P: Sequence[int], current: Placement) -> None:
    expected = (current.num_ranks, current.num_experts)
    if counts_PE.shape != expected or len(slots_P) != current.num_ranks:
        raise ConfigError(
            f"counts are {list(counts_PE.shape)} and slots are given for {len(slots_P)} ranks, "
            f"but the current placement has {expected[0]} ranks and {expected[1]} experts"
        )
    slots_for(current.num_experts, current.num_ranks, slots_P)
    problems = [
        f"rank {rank} has {len(row)} slots now, but only {count} in the plan; give it {len(row)}"
        for rank, (row, count) in enumerate(zip(current.slots, slots_P, strict=True))
        if len(row) > count
    ]
    if problems:
        raise ConfigError(problems)


def wrap_filled(
    counts_PE: np.ndarray, slots_P: Sequence[int], current: Placement, node_P: Sequence[int], noise: float
) -> Placement:
    fresh = plan_two_level(counts_PE, slots_P, node_P, noise)
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, node in enumerate(node_P):
        # Ranks may take each other's rows only if they have as many slots.
        groups.setdefault((node, slots_P[rank]), []).append(rank)
    return relabelled(fresh, current, list(groups.values()))


def incremental(
    config: PlanConfig,
    counts_PE: np.ndarray,
    slots_P: Sequence[int],
    current: Placement,
    costs: PlacementCosts,
    node_P: Sequence[int],
) -> Placement:
    """A few moves where that is enough; else the cheapest, in seconds, of few, many and all."""
    load_E = counts_PE.sum(0)

    def few(share: float) -> Placement:
        return plan_incremental(
            load_E,
            current,
            costs,
            max_moves=int(share * sum(slots_P)),
            min_gain=config.min_gain,
            noise=config.noise,
            slots_P=slots_P,
        )

    candidates = [current]
    if expected_balance(current, load_E) >= HOPELESS:
        candidates = [few(config.max_moved)]
        if expected_balance(candidates[0], load_E) >= FAR_FROM_ENOUGH and len(set(node_P)) == 1:
            return candidates[0]
    elif sum(slots_P) <= SMALL:
        candidates.append(few(0.5))
    candidates.append(wrap_filled(counts_PE, slots_P, current, node_P, config.noise))
    if sum(slots_P) <= SMALL:
        # Hot experts on many ranks keep rows on their rank, which may be worth more than few moves.
        candidates.append(plan_greedy(load_E, slots_P).arranged_like(current))
    rows_PE = np.rint(counts_PE).astype(np.int64)
    best, least = candidates[0], np.inf
    for number, candidate in enumerate(candidates):
        seconds = score(candidate, rows_PE, costs, current=current, node_P=node_P, expected_E=load_E).total
        # Of many slots most would move: that must be worth more than what a prediction may be wrong by.
        margin = max(config.min_gain, UPHEAVAL) if number and sum(slots_P) > SMALL else config.min_gain
        if seconds < (1 - margin) * least:
            best, least = candidate, seconds
    return best


def expected_balance(placement: Placement, load_E: np.ndarray) -> float:
    """Mean over fullest rank when these loads are poured as well as the placement allows."""
    _, level = pour(load_E, ReplicaTable.of(placement), 30, good_enough=1.0, worth_a_sweep=0.9998)
    return balance_of(np.array(level))
