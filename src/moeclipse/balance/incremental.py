"""The planner that moves little: a few replicas change places, and only if that pays.

Idea: the split already evens out what the placement lets it. So look where seconds are spent (the fullest
rank, the busiest wire, the rank with most gradients) and try what would save most (`balance/guesses`). The
best guesses are tried, the best try is kept, and so on until the moves are spent or nothing helps. Of all
places on that way the one with the least seconds, migration included, is the plan.

Contract: pure and deterministic. No expert is lost, no rank gets more slots than the draft has.

Hazard: pouring is only as good as the loads. Feed it a moving average, not one step.
"""

from __future__ import annotations

from moeclipse.balance.draft import Draft
from moeclipse.balance.guesses import Guesses

FINALISTS = 3
"""Of all tries, so many are poured in full."""
PATIENCE = 3
STEP = 15
"""Tries that a step takes in a large table: with fewer left, none is begun."""
NOTICED = 1e-4
"""A step that saves less than this part is none."""


def improved(draft: Draft, max_moves: int, max_tries: int) -> Draft:
    """The best place on the way downhill: the draft itself where nothing helps."""
    return min([draft, *search(draft, max_moves, max_tries)], key=lambda found: found.seconds)


def search(draft: Draft, max_moves: int, max_tries: int) -> list[Draft]:
    """The way downhill, with at most so many copies of parameters and tries."""
    left = max_tries
    seen: list[Draft] = []
    spent, since_best, lowest = 0, 0, draft.seconds
    while left >= STEP and since_best < PATIENCE:
        step, tries = best_change(draft, max_moves - spent)
        left -= tries
        if step is None:
            break
        draft, moves = step
        spent += moves
        seen.append(draft)
        since_best = since_best + 1 if draft.seconds > (1 - NOTICED) * lowest else 0
        lowest = min(lowest, draft.seconds)
    return seen


def best_change(draft: Draft, max_moves: int) -> tuple[tuple[Draft, int] | None, int]:
    """(the draft that saves most for each move, and its moves; None if none does), tries."""
    now = draft.merit
    # Whose fullest rank costs most: where the average is even, some future is not.
    guesses = Guesses(draft, max(draft.pools, key=lambda pool: max(pool.level)))
    changes = guesses.drops()
    if max_moves > 0:
        changes += guesses.replications() + guesses.returns()
    if max_moves > 1:
        changes += guesses.exchanges() + guesses.displacements()
    tried = [
        ((now - draft.trial(change).merit) / max(change.moves, 1), i) for i, change in enumerate(changes)
    ]
    best: tuple[float, Draft, int] | None = None
    for _, i in sorted(tried, reverse=True)[:FINALISTS]:
        after = draft.settled(changes[i])
        won = (now - after.merit) / max(changes[i].moves, 1)
        if won > (best[0] if best else 1e-6 * now):
            best = (won, after, changes[i].moves)
    return None if best is None else best[1:], len(changes)
