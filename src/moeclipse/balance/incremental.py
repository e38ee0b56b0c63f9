"""The planner that moves little: a few replicas change places, and only if that pays.

Idea: the split already evens out what the placement lets it. So look at the fullest rank, and try what
would relieve it most: a replica of one of its experts on a rank with room (in an empty slot, or in the slot
of a replica that others can stand in for), or an exchange of two experts. The best guesses are tried, the
best try is kept, and so on until the ranks are even, the moves are spent or nothing helps. Of all places on
that way the one with the least seconds, migration included, is the plan.

Contract: pure and deterministic. No expert is lost, no rank gets more slots. A plan that does not win
`min_gain` of the step, or does not pay for its moves before the next plan, is not made: `current` is
returned.

Hazard: pouring is only as good as the loads. Feed it a moving average, not one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from moeclipse.balance.draft import Change, Draft
from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import EMPTY, Placement

FEWEST_TRIES, MOST_TRIES, TRIED_SLOTS = 3, 10, 960
"""Of each kind of change, so many of the best guesses are tried: more where placements are small."""
FINALISTS = 2
"""Of all tries, so many are poured in full."""
EVEN = 1.002
"""Search ends when the fullest rank is this close to the mean."""
PATIENCE = 3


def plan_incremental(
    load_E: np.ndarray,
    current: Placement,
    costs: PlacementCosts,
    *,
    max_moves: int,
    min_gain: float = 0.02,
    noise: float = 0.0,
    slots_P: Sequence[int] | None = None,
) -> Placement:
    """The current placement after at most `max_moves` copies of parameters, or unchanged."""
    begin = Draft.of(current, slots_P or [len(row) for row in current.slots], load_E, noise)
    best, best_seconds = begin, costs.row_seconds * begin.fullest
    for draft, moves in search(begin, max_moves):
        seconds = costs.row_seconds * draft.fullest + costs.move_seconds(moves, 0) / costs.every
        if seconds < best_seconds:
            best, best_seconds = draft, seconds
    if best is begin:
        return current
    new = best.placement(current)
    made = current.moves(new)
    gain = costs.row_seconds * (begin.fullest - best.fullest)
    paid = costs.move_seconds(sum(m.weights for m in made), sum(m.state for m in made)) / costs.every
    worth = gain > paid and gain > min_gain * costs.row_seconds * begin.fullest
    return new if worth else current


def refined(load_E: np.ndarray, placement: Placement, max_moves: int, noise: float = 0.0) -> Placement:
    """A placement that nobody holds yet, improved where moves cost nothing."""
    begin = Draft.of(placement, [len(row) for row in placement.slots], load_E, noise)
    best = begin
    for draft, _ in search(begin, max_moves):
        if draft.fullest < best.fullest:
            best = draft
    return best.placement(placement)


def search(draft: Draft, max_moves: int) -> list[tuple[Draft, int]]:
    """The way downhill: drafts and how many copies led to them."""
    seen: list[tuple[Draft, int]] = []
    spent, since_best, lowest = 0, 0, draft.fullest
    even = EVEN * sum(draft.level) / max(sum(bool(row) for row in draft.slots), 1)
    while spent < max_moves and draft.fullest > even and since_best < PATIENCE:
        step = best_change(draft, max_moves - spent)
        if step is None:
            break
        draft, moves = step
        spent += moves
        seen.append((draft, spent))
        since_best = since_best + 1 if draft.fullest > 0.9995 * lowest else 0
        lowest = min(lowest, draft.fullest)
    return seen


def best_change(draft: Draft, max_moves: int) -> tuple[Draft, int] | None:
    """The draft that evens out the ranks most for each move, and its moves; None if none does."""
    now = draft.merit()
    guesses = Guesses(draft)
    changes = guesses.replications()
    if max_moves > 1:
        changes += guesses.exchanges() + guesses.displacements()
    tried = [((now - draft.trial(change).merit()) / change.moves, i) for i, change in enumerate(changes)]
    best: tuple[float, Draft, int] | None = None
    for _, i in sorted(tried, reverse=True)[:FINALISTS]:
        after = draft.changed(changes[i]).poured()
        won = (now - after.merit()) / changes[i].moves
        if won > (best[0] if best else 1e-6 * now):
            best = (won, after, changes[i].moves)
    return None if best is None else best[1:]


class Guesses:
    """All changes around the fullest rank at once, each guessed by the two ranks it touches."""

    def __init__(self, draft: Draft) -> None:
        width = max(map(len, draft.slots))
        # -2 marks a slot that a rank does not have: nothing may be put there.
        self.slots_PS = np.array([row + [EMPTY - 1] * (width - len(row)) for row in draft.slots])
        self.tries = min(max(TRIED_SLOTS // self.slots_PS.size, FEWEST_TRIES), MOST_TRIES)
        self.level_P = np.array(draft.level)
        self.fullest = draft.fullest
        self.hot = int(self.level_P.argmax())
        self.replicas_E = np.array([len(ranks) for ranks in draft.holders])
        share_EP = np.zeros((len(draft.holders), len(draft.slots)))
        expert_X = np.repeat(np.arange(len(draft.holders)), self.replicas_E)
        share_EP[expert_X, list(chain(*draft.holders))] = list(chain(*draft.shares))
        ranks_P = np.arange(len(draft.slots))[:, None]
        self.share_PS = np.where(self.slots_PS >= 0, share_EP[np.maximum(self.slots_PS, 0), ranks_P], 0.0)

    def replications(self) -> list[Change]:
        """A replica of one of the fullest rank's experts in a slot that another rank can spare."""
        slots_PS = self.slots_PS
        others_PS = np.where(slots_PS >= 0, self.replicas_E[np.maximum(slots_PS, 0)] - 1, 0)
        spare_PS = (slots_PS == EMPTY) | (others_PS > 0)
        rest_PS = self.level_P[:, None] - self.share_PS
        # What the replica that gives way has carried falls to its other holders.
        raised_PS = self.share_PS / np.maximum(others_PS, 1)
        found: list[tuple[float, Change]] = []
        for place, expert in self._of_the_fullest():
            allowed = spare_PS & ~(slots_PS == expert).any(1)[:, None]
            given = np.clip((self.fullest - rest_PS) / 2, 0, self.share_PS[self.hot, place])
            guess = np.maximum(self.fullest - given, rest_PS + given) + 0.5 * raised_PS
            for value, target, slot in self._best(np.where(allowed, guess, np.inf)):
                found.append((value, Change(put=expert, target=target, slot=slot)))
        return [change for _, change in sorted(found, key=lambda pair: pair[0])[: self.tries]]

    def exchanges(self) -> list[Change]:
        """An expert of the fullest rank against a lighter one of another rank."""
        slots_PS = self.slots_PS
        elsewhere_PS = (slots_PS >= 0) & ~np.isin(slots_PS, slots_PS[self.hot])
        found: list[tuple[float, Change]] = []
        for place, expert in self._of_the_fullest():
            allowed = elsewhere_PS & ~(slots_PS == expert).any(1)[:, None]
            given = self.share_PS[self.hot, place] - self.share_PS
            guess = np.maximum(self.fullest - given, self.level_P[:, None] + given)
            for value, target, slot in self._best(np.where(allowed, guess, np.inf)):
                change = Change(put=expert, target=target, slot=slot, to_rank=self.hot, to_slot=place)
                found.append((value, change))
        return [change for _, change in sorted(found, key=lambda pair: pair[0])[: self.tries]]

    def displacements(self) -> list[Change]:
        """A replica of one of the fullest rank's experts in place of one that finds another slot."""
        slots_PS = self.slots_PS
        names = np.maximum(slots_PS, 0)
        others_PS = np.where(slots_PS >= 0, self.replicas_E[names] - 1, 0)
        harm_PS = self.level_P[:, None] - self.share_PS / 2
        harm_PS = np.where((slots_PS == EMPTY) | (others_PS > 0), harm_PS, np.inf)
        spare = [
            divmod(i, slots_PS.shape[1]) for i in np.argsort(harm_PS, axis=None, kind="stable")[: self.tries]
        ]
        spare = [(int(rank), int(slot)) for rank, slot in spare if np.isfinite(harm_PS[rank, slot])]
        alone_PS = (slots_PS >= 0) & (others_PS == 0)
        rest_PS = self.level_P[:, None] - self.share_PS
        found: list[tuple[float, Change]] = []
        for place, expert in self._of_the_fullest():
            allowed = alone_PS & ~(slots_PS == expert).any(1)[:, None]
            given = np.clip((self.fullest - rest_PS) / 2, 0, self.share_PS[self.hot, place])
            guess = np.maximum(self.fullest - given, rest_PS + given) + 0.1 * self.share_PS
            for value, target, slot in self._best(np.where(allowed, guess, np.inf)):
                leaving = slots_PS[target, slot]
                for rank, other in spare:
                    if rank != target and leaving not in slots_PS[rank] and slots_PS[rank, other] != expert:
                        change = Change(put=expert, target=target, slot=slot, to_rank=rank, to_slot=other)
                        found.append((value, change))
                        break
        return [change for _, change in sorted(found, key=lambda pair: pair[0])[: self.tries]]

    def _of_the_fullest(self) -> list[tuple[int, int]]:
        """(slot, expert) of the fullest rank."""
        return [(place, e) for place, e in enumerate(self.slots_PS[self.hot].tolist()) if e >= 0]

    def _best(self, guess_PS: np.ndarray) -> list[tuple[float, int, int]]:
        """(guess, rank, slot) of the best places that are better than the fullest rank is now."""
        order = np.argsort(guess_PS, axis=None, kind="stable")[: self.tries].tolist()
        places = [(float(guess_PS.flat[i]), *divmod(i, guess_PS.shape[1])) for i in order]
        return [place for place in places if place[0] < self.fullest]
