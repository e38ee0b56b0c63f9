"""Which changes of a draft are worth a try: all of them guessed at once, by the ranks that they touch.

    replications    a replica of an expert of a busy rank, in a slot that another rank can spare
    exchanges       an expert of the fullest rank against a lighter one elsewhere
    displacements   a replica in place of an expert that finds another slot
    returns         a replica of what a busy sender sends most, on that sender itself, or on its node
    drops           a replica less on the rank with most gradients to exchange

Contract: every change that is returned is legal: no expert is lost, none stands twice on a rank.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from moeclipse.balance.draft import Change, Draft
from moeclipse.balance.futures import Pool
from moeclipse.balance.placement import EMPTY

FEWEST_TRIES, MOST_TRIES, TRIED_SLOTS = 3, 6, 480
"""Of each kind of change, so many of the best guesses are tried: more where placements are small."""


class Guesses:
    """All changes around the fullest rank at once, each guessed by the two ranks it touches."""

    def __init__(self, draft: Draft, pool: Pool | None = None) -> None:
        """`pool`: whose fullest rank is to be relieved; the average by default."""
        self.draft, pool = draft, pool or draft.pools[0]
        width = max(map(len, draft.slots))
        # -2 marks a slot that a rank does not have: nothing may be put there.
        self.slots_PS = np.array([row + [EMPTY - 1] * (width - len(row)) for row in draft.slots])
        self.tries = min(max(TRIED_SLOTS // self.slots_PS.size, FEWEST_TRIES), MOST_TRIES)
        self.level_P = np.array(pool.level)
        self.leave_P = np.array(draft.problem.source) - np.array(draft.books.kept)
        self.fullest = float(self.level_P.max())
        self.hot = int(self.level_P.argmax())
        self.replicas_E = np.array([len(ranks) for ranks in draft.holders])
        share_EP = np.zeros((len(draft.holders), len(draft.slots)))
        expert_X = np.repeat(np.arange(len(draft.holders)), self.replicas_E)
        share_EP[expert_X, list(chain(*draft.holders))] = list(chain(*pool.shares))
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

    def returns(self) -> list[Change]:
        """Rows that need not travel: what the busiest sender sends most, in a slot near it."""
        draft, problem = self.draft, self.draft.problem
        sender = int(self.leave_P.argmax())
        targets = [sender]
        if problem.num_nodes > 1:
            in_N, out_N = (np.bincount(problem.node_index, rows) for rows in draft.rows_across_nodes)
            node = int(np.maximum(in_N, out_N).argmax())
            inside = np.flatnonzero(problem.node_index == node)
            targets.append(int(inside[self.level_P[inside].argmin()]))
        found: list[Change] = []
        for target in targets:
            wanted_E = problem.counts_PE[target].astype(float)
            if target != sender:
                wanted_E = problem.rows_NE[problem.node_index[target]].astype(float)
                for rank in np.flatnonzero(problem.node_index == problem.node_index[target]):
                    wanted_E[[e for e in draft.slots[rank] if e >= 0]] = 0
            wanted_E[[e for e in draft.slots[target] if e >= 0]] = 0
            spare = self._spare_slot(target)
            if spare is not None:
                best = np.argsort(-wanted_E, kind="stable")[: self.tries].tolist()
                found += [Change(put=e, target=target, slot=spare) for e in best if wanted_E[e] > 0]
        return found

    def _spare_slot(self, rank: int) -> int | None:
        """An empty slot of a rank, or that of the replica which carries least."""
        places = [
            (self.share_PS[rank, slot] if expert >= 0 else -1.0, slot)
            for slot, expert in enumerate(self.slots_PS[rank].tolist())
            if expert == EMPTY or (expert >= 0 and self.replicas_E[expert] > 1)
        ]
        return min(places)[1] if places else None

    def drops(self) -> list[Change]:
        """Replicas that carry little, on the rank with most gradients to exchange or owned there."""
        copies = self.draft.copies
        if max(copies) <= 0:
            return []
        several_PS = (self.slots_PS >= 0) & (self.replicas_E[np.maximum(self.slots_PS, 0)] > 1)
        if len(copies) == len(self.level_P):
            busy = int(np.argmax(copies))
            theirs = [e for e in self.draft.slots[busy] if e >= 0]
            several_PS &= np.isin(self.slots_PS, theirs)
        harm_PS = np.where(several_PS, self.level_P[:, None] / self.fullest + self.share_PS, np.inf)
        order = np.argsort(harm_PS, axis=None, kind="stable")[: self.tries]
        places = [divmod(int(i), harm_PS.shape[1]) for i in order if np.isfinite(harm_PS.flat[i])]
        return [Change(put=EMPTY, target=rank, slot=slot) for rank, slot in places]

    def _of_the_fullest(self) -> list[tuple[int, int]]:
        """(slot, expert) of the fullest rank."""
        return [(place, e) for place, e in enumerate(self.slots_PS[self.hot].tolist()) if e >= 0]

    def _best(self, guess_PS: np.ndarray) -> list[tuple[float, int, int]]:
        """(guess, rank, slot) of the best places that are better than the fullest rank is now."""
        order = np.argsort(guess_PS, axis=None, kind="stable")[: self.tries].tolist()
        places = [(float(guess_PS.flat[i]), *divmod(i, guess_PS.shape[1])) for i in order]
        return [place for place in places if place[0] < self.fullest]
