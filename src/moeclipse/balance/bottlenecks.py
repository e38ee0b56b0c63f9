"""A search that sees bottlenecks: ranks that share loads among themselves and can hand none of it on.

Idea. However rows are split, a set S of ranks computes at least what stands nowhere else, so one of them has

    confined(S) / |S|      confined: the load of all experts whose replicas stand inside S

and the best split reaches the largest of these bounds over all sets: maximum flow is minimum cut. Few of them
are ever tight. So a table is judged by sets that were tight once, in microseconds where pouring takes
milliseconds, and thousands of changes can be tried, many at once: any two experts exchanged, any replica put
elsewhere, chains of two such moves. Most take an expert out of a set that is tight; the tightest sets sift
them, all sets judge what is left, and the best is taken. Then sets next to tight ones are looked at. Where no
change helps any more the table is poured in full, its tight sets join the others, and so on. A search
that relieves one full rank at a time ends soon, in tables that are perfect for the average loads and brittle
for all others (`balance/futures`); this one finds tables that bear them.

Contract: pure and deterministic: work is counted, never timed. It counts rows and copies alone; whoever calls
it compares what it finds by all seconds of a step.

Shapes: K loads, E experts, C sets of ranks, X slots, B changes that are tried together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import chain, combinations

import numpy as np

from moeclipse.balance.draft import Draft
from moeclipse.balance.futures import Pool
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.problem import PlanProblem

MOST_RANKS = 62
"""Sets of ranks are bits of a word."""
PAIRED_RANKS = 24
"""Up to so many ranks all pairs of them are known from the start."""
TOGETHER, FINALISTS = 256, 8
"""Changes that are guessed at once, and those of them that are judged by all sets; the best is taken."""
GUIDED = 0.8
"""Part of the guesses that take an expert out of a tight set: the others may do anything."""
TIGHTEST = 2
"""Sets for each load that guesses are sifted by."""
WIDENED = 4
"""Ranks that a tight set may gain or lose before the table changes again."""
POURS = 20
FEWEST_BATCHES, BATCHES, BATCHES_FOR = 8, 24, 2
"""A change is the best of a batch: of a search so many, more for each spare slot, up to all."""
PATIENCE = 12
"""Batches without any change for the better, after which the table is poured."""
SAME = 1e-9
TIGHT = 1e-3
"""Of a load: a smaller share is as good as none."""
EVEN = 1e-3
"""Fullest ranks so near the mean need no better table."""


def steadies(problem: PlanProblem) -> bool:
    """Whether this search is for it: loads may come, and ranks are no more than bits."""
    return bool(problem.futures) and problem.num_ranks <= MOST_RANKS


def batches_for(problem: PlanProblem) -> int:
    spare = problem.num_slots - problem.num_experts
    return min(max(BATCHES_FOR * spare, FEWEST_BATCHES), BATCHES)


def steadied(draft: Draft) -> Draft:
    """The draft, or one that bears its loads better."""
    if not steadies(draft.problem):
        return draft
    batches = batches_for(draft.problem)
    walk = Walk(draft)
    walk.widen()
    for _ in range(POURS):
        if walk.fullest < 1 + EVEN or batches <= 0:
            break
        better, tried = walk.improve(batches)
        batches -= tried
        if not better:
            break
        after = Draft.of(walk.placement(), draft.problem)
        walk.learn(after)
        if after.seconds < draft.seconds:
            draft = after
        walk.stand_at(draft)
        walk.widen()
    return draft


@dataclass(frozen=True)
class Changes:
    """Changes of a table, side by side.

    exchange    two experts change places
    spare       an expert in place of a replica, or in an empty slot
    displace    an expert in place of one that stands nowhere else, which takes a slot that can be spared
    """

    x_B: np.ndarray
    """A slot, ..."""
    y_B: np.ndarray
    """... another one, ..."""
    put_B: np.ndarray
    """... and the expert that comes into the first."""
    to_y_B: np.ndarray
    """What stands in the second afterwards."""
    expert_B3: np.ndarray
    """Experts that change ranks: of the first slot, of the second, and the one that comes."""
    toggle_B3: np.ndarray
    """Ranks that they come to or leave, as bits."""
    copies_B: np.ndarray
    """That the current placement lacks, more than before."""

    def of(self, which: np.ndarray) -> Changes:
        """Some of them."""
        return Changes(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


class Walk:
    """Tables that follow from one another by random changes, judged by the sets that were tight once.

    Experts have a last one that has no load and no rank: it stands in empty slots.
    """

    def __init__(self, draft: Draft) -> None:
        problem = draft.problem
        self.rng = np.random.default_rng(0)
        self.inside_EC: np.ndarray
        self.bound_KC: np.ndarray
        load_KE = np.array([pool.loads for pool in draft.pools])
        working = sum(count > 0 for count in problem.slots_P)
        load_KE = load_KE * working / load_KE.sum(1, keepdims=True)
        self.load_KE = np.pad(load_KE, ((0, 0), (0, 1)))
        """In mean loads of a rank."""
        mean_s = problem.costs.row_seconds * float(np.sum(draft.pools[0].loads)) / working
        self.copy_price = (problem.turnover_seconds + problem.move_seconds) / mean_s if mean_s > 0 else 0.0
        self.lacks_EP = np.pad(~problem.current.holds_EP, ((0, 1), (0, 0))).astype(np.int64)
        """Copies that would have to travel."""
        self.rank_X = np.repeat(np.arange(len(draft.slots)), list(map(len, draft.slots)))
        """The rank of each slot."""
        self.bit_P = np.left_shift(np.uint64(1), np.arange(len(draft.slots), dtype=np.uint64))
        self.bit_X = self.bit_P[self.rank_X]
        ranks = range(len(draft.slots))
        pairs = combinations(ranks, 2) if len(ranks) <= PAIRED_RANKS else ()
        sets = [1 << rank for rank in ranks] + [1 << p | 1 << q for p, q in pairs]
        self.set_C = np.array(sets, dtype=np.uint64)
        self.learn(draft)
        self.stand_at(draft)

    def learn(self, draft: Draft) -> None:
        """What is tight in a draft that has been poured."""
        new = {tight_ranks(draft, pool) for pool in draft.pools} - set(self.set_C.tolist())
        self.set_C = np.concatenate([self.set_C, np.array(sorted(new), dtype=np.uint64)])
        self.scale_C = 1.0 / np.array([ranks.bit_count() for ranks in self.set_C.tolist()])

    def widen(self) -> None:
        """Learn sets next to those that are tightest, a rank more or less, as long as they are tighter."""
        for _ in range(WIDENED):
            near_C = (self.set_C[self.bound_KC.argmax(1)][:, None] ^ self.bit_P).ravel()
            near_C = near_C[near_C != 0]
            size_C = ((near_C[:, None] & self.bit_P) != 0).sum(1)
            bound_KC = self.load_KE @ ((self.mask_E[:, None] & ~near_C) == 0) / size_C
            tighter_C = (bound_KC > self.bound_KC.max(1)[:, None] + SAME).any(0)
            if not tighter_C.any():
                return
            self._know(np.unique(near_C[tighter_C]))

    def _know(self, set_C: np.ndarray) -> None:
        """These sets, too."""
        scale_C = 1.0 / ((set_C[:, None] & self.bit_P) != 0).sum(1)
        inside_EC = ((self.mask_E[:, None] & ~set_C) == 0).astype(float)
        self.set_C = np.concatenate([self.set_C, set_C])
        self.scale_C = np.concatenate([self.scale_C, scale_C])
        self.inside_EC = np.concatenate([self.inside_EC, inside_EC], 1)
        self.bound_KC = np.concatenate([self.bound_KC, self.load_KE @ inside_EC * scale_C], 1)

    def stand_at(self, draft: Draft) -> None:
        """Go on from there."""
        self._read(np.array(list(chain(*draft.slots)), dtype=np.int64))

    def _read(self, expert_X: np.ndarray) -> None:
        """All that follows from slots and sets."""
        self.expert_X = expert_X
        self.holds_EP = np.zeros_like(self.lacks_EP)
        self.holds_EP[expert_X, self.rank_X] = 1
        self.holds_EP[EMPTY] = 0
        self.mask_E = (self.holds_EP * self.bit_P.astype(np.int64)).sum(1).astype(np.uint64)
        self.replicas_E = self.holds_EP.sum(1)
        self.copies = int((self.holds_EP * self.lacks_EP).sum())
        self.inside_EC = ((self.mask_E[:, None] & ~self.set_C) == 0).astype(float)
        self.bound_KC = (self.load_KE @ self.inside_EC) * self.scale_C

    @property
    def fullest(self) -> float:
        """The largest of the known bounds, on average over loads."""
        return float(self.bound_KC.max(1).mean())

    @property
    def price(self) -> float:
        return self.fullest + self.copy_price * self.copies

    def improve(self, batches: int) -> tuple[bool, int]:
        """Stand at the best table that changes lead to: (whether one is better, batches that were tried)."""
        now = best = self.price
        kept: np.ndarray | None = None
        patience = PATIENCE
        for batch in range(batches):
            if not patience or self.fullest < 1 + EVEN:
                return self._back_at(kept), batch
            patience -= 1
            changes = self._sifted(self._guesses(TOGETHER))
            price_B = self._prices(changes)
            # What changes nothing that is known may break what is not: only a difference is followed.
            if not len(price_B) or price_B.min() >= now - SAME:
                continue
            self._take(changes, int(price_B.argmin()))
            self.widen()
            now = self.price
            if now < best - SAME:
                best, kept, patience = now, self.expert_X, PATIENCE
        return self._back_at(kept), batches

    def _back_at(self, kept: np.ndarray | None) -> bool:
        if kept is not None:
            self._read(kept)
        return kept is not None

    def _sifted(self, changes: Changes) -> Changes:
        """Those that look best to the tightest sets alone."""
        if len(changes.x_B) <= FINALISTS:
            return changes
        tightest_KC = np.argsort(-self.bound_KC, axis=1, kind="stable")[:, :TIGHTEST]
        price_B = self._prices(changes, np.unique(tightest_KC))
        return changes.of(np.argsort(price_B, kind="stable")[:FINALISTS])

    def _guesses(self, tries: int) -> Changes:
        """At random, those left out that cannot be."""
        draw_4B = self.rng.random((4, tries))
        kind_B = (3 * draw_4B[0]).astype(np.int64)
        x_B, y_B = (len(self.rank_X) * draw_4B[1:3]).astype(np.int64)
        put_B = ((len(self.mask_E) - 1) * draw_4B[3]).astype(np.int64)
        holds_EP, replicas_E = self.holds_EP, self.replicas_E
        self._guide(kind_B, x_B, y_B, put_B)
        p_B, q_B = self.rank_X[x_B], self.rank_X[y_B]
        mine_B, theirs_B = self.expert_X[x_B], self.expert_X[y_B]
        crosses_B = (p_B != q_B) & (mine_B != theirs_B) & (holds_EP[mine_B, q_B] == 0)
        comes_B, alone_B = holds_EP[put_B, p_B] == 0, replicas_E[mine_B] == 1
        exchange_B = (kind_B == 0) & crosses_B & (holds_EP[theirs_B, p_B] == 0)
        spare_B = (kind_B == 1) & comes_B & ~alone_B
        displace_B = (kind_B == 2) & comes_B & crosses_B & alone_B
        displace_B &= (replicas_E[theirs_B] != 1) & (theirs_B != put_B)
        at = np.flatnonzero(exchange_B | spare_B | displace_B)
        return self._changes(x_B[at], y_B[at], put_B[at], exchange_B[at], spare_B[at])

    def _guide(self, kind_B: np.ndarray, x_B: np.ndarray, y_B: np.ndarray, put_B: np.ndarray) -> None:
        """Let most of them take an expert out of the set that is tightest for one of the loads."""
        tight = int(self.bound_KC[self.rng.integers(len(self.bound_KC))].argmax())
        confined = np.flatnonzero((self.inside_EC[self.expert_X, tight] > 0) & (self.expert_X != EMPTY))
        outside = np.flatnonzero((self.set_C[tight] & self.bit_X) == 0)
        spare = np.flatnonzero(self.replicas_E[self.expert_X] != 1)
        if not len(confined) or not len(outside):
            return
        guided = int(GUIDED * len(kind_B))
        swaps = kind_B[:guided] == 0
        draw_3B = self.rng.random((3, guided))
        from_B, to_B = _drawn(confined, draw_3B[0]), _drawn(outside, draw_3B[1])
        free_B = _drawn(spare, draw_3B[2]) if len(spare) else to_B
        x_B[:guided] = np.where(swaps, from_B, to_B)
        y_B[:guided] = np.where(swaps, to_B, free_B)
        put_B[:guided] = self.expert_X[from_B]

    def _changes(
        self, x_B: np.ndarray, y_B: np.ndarray, put_B: np.ndarray, exchange_B: np.ndarray, spare_B: np.ndarray
    ) -> Changes:
        """With what they do to experts."""
        p_B, q_B, lacks_EP = self.rank_X[x_B], self.rank_X[y_B], self.lacks_EP
        mine_B, theirs_B = self.expert_X[x_B], self.expert_X[y_B]
        on_p_B, on_q_B, none = self.bit_P[p_B], self.bit_P[q_B], np.uint64(0)
        toggle_B3 = [
            on_p_B | np.where(spare_B, none, on_q_B),
            np.where(spare_B, none, on_q_B) | np.where(exchange_B, on_p_B, none),
            np.where(exchange_B, none, on_p_B),
        ]
        put_B = np.where(exchange_B, theirs_B, put_B)
        to_q_B = np.where(spare_B, 0, lacks_EP[mine_B, q_B] - lacks_EP[theirs_B, q_B])
        return Changes(
            x_B=x_B,
            y_B=y_B,
            put_B=put_B,
            to_y_B=np.where(spare_B, theirs_B, mine_B),
            # Of an exchange, the third is the second again: it has done all already.
            expert_B3=np.stack([mine_B, theirs_B, put_B], 1),
            toggle_B3=np.stack(toggle_B3, 1),
            copies_B=lacks_EP[put_B, p_B] - lacks_EP[mine_B, p_B] + to_q_B,
        )

    def _prices(self, changes: Changes, sets: np.ndarray | slice = slice(None)) -> np.ndarray:
        """What the table costs after each change, by all sets or some of them."""
        mask_B3 = self.mask_E[changes.expert_B3] ^ changes.toggle_B3
        change_B3C = ((mask_B3[..., None] & ~self.set_C[sets]) == 0) - self.inside_EC[:, sets][
            changes.expert_B3
        ]
        load_BK3 = self.load_KE.T[changes.expert_B3].transpose(0, 2, 1)
        bound_BKC = self.bound_KC[:, sets] + load_BK3 @ (change_B3C * self.scale_C[sets])
        found: np.ndarray = bound_BKC.max(2).mean(1) + self.copy_price * (self.copies + changes.copies_B)
        return found

    def _take(self, changes: Changes, chosen: int) -> None:
        expert_X = self.expert_X.copy()
        # The second slot first: where both are one, the expert that comes counts.
        expert_X[changes.y_B[chosen]] = changes.to_y_B[chosen]
        expert_X[changes.x_B[chosen]] = changes.put_B[chosen]
        self._read(expert_X)

    def placement(self) -> Placement:
        """Whoever pours it brings primaries home (`Draft.of`)."""
        rows = [self.expert_X[self.rank_X == rank] for rank in range(len(self.bit_P))]
        return Placement(tuple(tuple(row.tolist()) for row in rows))


def _drawn(places: np.ndarray, draw_B: np.ndarray) -> np.ndarray:
    found: np.ndarray = places[(len(places) * draw_B).astype(np.int64)]
    return found


def tight_ranks(draft: Draft, pool: Pool) -> int:
    """The fullest rank, and all to which load could flow from it: the set that is tight, as bits."""
    fullest = pool.level.index(max(pool.level))
    found, todo = 1 << fullest, [fullest]
    while todo:
        rank = todo.pop()
        for expert in draft.slots[rank]:
            if expert == EMPTY or len(draft.holders[expert]) == 1:
                continue
            holders = draft.holders[expert]
            if pool.shares[expert][holders.index(rank)] <= TIGHT * pool.loads[expert]:
                continue
            for other in holders:
                if not found >> other & 1:
                    found |= 1 << other
                    todo.append(other)
    return found
