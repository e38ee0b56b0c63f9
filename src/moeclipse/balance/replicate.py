"""Planners that start from a clean table: random, greedy, and wrap-fill.

Idea of wrap-fill: with a split that is chosen anew each step, a placement need not cut loads into equal
shares; it only has to let them flow. Ranks are filled one after the other up to the mean load: each takes
what is left of the largest expert and some small ones, and what does not fit flows on to the next rank. So
neighbours share an expert, all ranks hang together, and E + P - 1 slots are enough for perfect balance.
Slots that remain become further replicas of the experts whose replicas carry most.

Greedy is the baseline that others use: replicas by load per replica, then largest first onto the least loaded
rank, as if each replica got an equal share.

Contract: pure and deterministic. Every expert is placed, never twice on a rank, and no rank holds more than
its slots. `slots_P` gives the slots of each rank; a rank may have none.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np

from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.core.errors import ConfigError

STRETCH = (1.0, 1.01, 1.03, 1.1, 1.3, 2.0, np.inf)
"""Targets that wrap-fill tries, in mean loads: tight slots may need a fuller rank."""


def slots_for(num_experts: int, num_ranks: int, slots: int | Sequence[int]) -> tuple[int, ...]:
    """The slots of each rank, checked: there must be room for every expert."""
    slots_P = (slots,) * num_ranks if isinstance(slots, int) else tuple(slots)
    if len(slots_P) != num_ranks:
        raise ConfigError(f"slots are given for {len(slots_P)} ranks, but there are {num_ranks}")
    if min(slots_P, default=0) < 0:
        raise ConfigError(f"slots ({min(slots_P)}) must not be negative")
    room = sum(min(count, num_experts) for count in slots_P)
    if room < num_experts:
        least = -(-num_experts // max(num_ranks, 1))
        raise ConfigError(
            f"{num_experts} experts do not fit into {room} slots ({num_ranks} ranks); "
            f"give each rank at least {least} slots"
        )
    return slots_P


def plan_random(num_experts: int, slots_P: Sequence[int], seed: int = 0) -> Placement:
    """Every expert once, in random order; every slot that remains holds a random further replica."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = [[] for _ in slots_P]
    places = [rank for rank, count in enumerate(slots_P) for _ in range(min(count, num_experts))]
    first = rng.permutation(len(places))
    order = [places[i] for i in first]
    waiting = rng.permutation(num_experts).tolist()
    for expert, rank in zip(waiting, order, strict=False):
        rows[rank].append(expert)
    for rank in order[num_experts:]:
        absent = np.setdiff1d(np.arange(num_experts), rows[rank])
        rows[rank].append(int(rng.choice(absent)))
    return placement_of(rows, slots_P)


def plan_greedy(load_E: np.ndarray, slots_P: Sequence[int], spare: bool = True) -> Placement:
    """The baseline: replicas by load per replica, largest first onto the least loaded rank.

    Without `spare` no expert gets a second replica.
    """
    num_experts = len(load_E)
    loads = load_E.astype(float).tolist()
    holders = sum(count > 0 for count in slots_P)
    replicas = [1] * num_experts
    queue = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(queue)
    room = sum(min(count, num_experts) for count in slots_P) if spare else num_experts
    for _ in range(room - num_experts):
        while queue and replicas[queue[0][1]] >= holders:
            heapq.heappop(queue)
        if not queue:
            break
        expert = queue[0][1]
        replicas[expert] += 1
        heapq.heapreplace(queue, (-loads[expert] / replicas[expert], expert))
    items = sorted((-loads[e] / replicas[e], e) for e in range(num_experts) for _ in range(replicas[e]))
    rows: list[list[int]] = [[] for _ in slots_P]
    where: dict[int, list[int]] = {}
    level_P = np.where(np.array(slots_P) > 0, 0.0, np.inf)
    free = sum(slots_P)
    for share, expert in items:
        mine = where.setdefault(expert, [])
        # First copies before second ones where slots are tight: no expert may be left without a place.
        if mine and free <= num_experts - len(where):
            continue
        open_P = level_P.copy()
        open_P[mine] = np.inf
        rank = int(open_P.argmin())
        if open_P[rank] == np.inf:
            continue
        rows[rank].append(expert)
        mine.append(rank)
        free -= 1
        level_P[rank] = level_P[rank] - share if len(rows[rank]) < slots_P[rank] else np.inf
    return placement_of(rows, slots_P)


def plan_wrap_fill(
    load_E: np.ndarray, slots_P: Sequence[int], spare: bool = True, at_least: float = 1.0
) -> Placement:
    """Fill ranks in turn up to the mean load, or a multiple of it, which takes fewer replicas.

    `spare` fills the slots that remain with further replicas.
    """
    rows: list[list[int]] | None = None
    for stretch in [at_least, *(stretch for stretch in STRETCH if stretch > at_least)]:
        rows = _wrap(load_E.astype(float), slots_P, stretch)
        if rows is not None:
            break
    if rows is None:
        return plan_greedy(load_E, slots_P)
    if spare:
        _fill_spare(rows, load_E, slots_P)
    return placement_of(rows, slots_P)


def _wrap(load_E: np.ndarray, slots_P: Sequence[int], stretch: float) -> list[list[int]] | None:
    """None when experts are left over at this target."""
    order = np.argsort(-load_E, kind="stable")
    left = load_E[order].tolist()  # descending: what remains of each expert
    names = order.tolist()
    ranks = [rank for rank, count in enumerate(slots_P) if count > 0]
    target = stretch * float(load_E.sum()) / max(len(ranks), 1)
    rows: list[list[int]] = [[] for _ in slots_P]
    for turn, rank in enumerate(ranks):
        if not names:
            break
        # Spread over the ranks that are left, so that spare slots are found on every rank.
        wanted = -(-(len(names) - 1) // (len(ranks) - turn))
        later = sum(slots_P[p] - 1 for p in ranks[turn + 1 :]) + 1
        small = min(slots_P[rank] - 1, max(wanted, len(names) - later), len(names) - 1)
        rows[rank], rest = _fill_rank(names, left, small, target)
        if rest > 1e-9 * target:
            place = bisect.bisect_left(left, -rest, key=float.__neg__)
            names.insert(place, rows[rank][0])
            left.insert(place, rest)
    return None if names else rows


def _fill_rank(names: list[int], left: list[float], small: int, target: float) -> tuple[list[int], float]:
    """Take the largest expert and some small ones out of (names, left); how much of the largest flows on."""
    big, amount = names.pop(0), left.pop(0)
    window = sum(left[len(left) - small :])
    while small > 0 and window > target:
        small -= 1
        window = sum(left[len(left) - small :])
    start = len(left) - small
    # Slide up from the smallest ones until the rank is full.
    while small > 0 and start > 0 and amount + window < target:
        start -= 1
        window += left[start] - left[start + small]
    row = [big, *names[start : start + small]]
    del names[start : start + small], left[start : start + small]
    return row, min(max(amount + window - target, 0.0), amount)


def _fill_spare(rows: list[list[int]], load_E: np.ndarray, slots_P: Sequence[int]) -> None:
    replicas = np.bincount([e for row in rows for e in row], minlength=len(load_E))
    for rank, row in enumerate(rows):
        while len(row) < min(slots_P[rank], len(load_E)):
            share = load_E / replicas
            share[row] = -1.0
            expert = int(share.argmax())
            row.append(expert)
            replicas[expert] += 1


def placement_of(rows: Sequence[Sequence[int]], slots_P: Sequence[int]) -> Placement:
    """Rows filled up with empty slots; primaries spread over ranks."""
    table = tuple(
        tuple(row) + (EMPTY,) * (count - len(row)) for row, count in zip(rows, slots_P, strict=True)
    )
    return Placement(table, spread_primaries(rows))


def spread_primaries(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Experts with few replicas choose first; each takes the holder that owns least so far."""
    where: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        for expert in row:
            where.setdefault(expert, []).append(rank)
    owned = [0] * len(rows)
    primary = [0] * len(where)
    for expert in sorted(where, key=lambda e: (len(where[e]), e)):
        primary[expert] = min(where[expert], key=lambda rank: (owned[rank], rank))
        owned[primary[expert]] += 1
    return tuple(primary)


def relabelled(new: Placement, old: Placement, groups: Sequence[Sequence[int]] | None = None) -> Placement:
    """`new` with its rows given to the ranks that hold most of them already, inside groups of ranks."""
    shared_PP = np.zeros((new.num_ranks, old.num_ranks), dtype=np.int64)
    for row, experts in enumerate(new.held):
        shared_PP[row] = old.holds_EP[list(experts)].sum(0)
    rank_of = list(range(new.num_ranks))
    for group in groups or [range(new.num_ranks)]:
        ranks = list(group)
        part = shared_PP[np.ix_(ranks, ranks)]
        for _ in ranks:
            row, rank = divmod(int(part.argmax()), len(ranks))
            rank_of[ranks[row]] = ranks[rank]
            part[row] = part[:, rank] = -1
    slots: list[tuple[int, ...]] = [()] * new.num_ranks
    for row, rank in enumerate(rank_of):
        slots[rank] = new.slots[row]
    moved = Placement(tuple(slots), tuple(rank_of[rank] for rank in new.primary))
    return moved.arranged_like(old)
