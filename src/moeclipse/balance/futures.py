"""Loads that may come: a plan is made for all of them, not for the average alone.

Idea: a placement that is even for the average may be brittle. It may have filled a rank to the brim with
experts that stand nowhere else, so the first drift runs over; another one, as even now, lets load flow from
any rank to any other. Both differ only in what they do with other loads. So planners pour a few more: the
average with each expert a little up or down, by as much as loads have been seen to change until the end of a
plan (`balance/drift`), and take the mean of the fullest ranks.

    future k      load_e + sign_ke x noise x sqrt(load_e x mean load)     scaled to the same rows in all

The loads of real gates change by about the root of their size: small experts by more than their part.

Contract: pure and deterministic. Futures come in pairs with opposite signs, so their mean is the average.
Without noise there are none.

Shapes: K futures, E experts.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moeclipse.balance.split import sweep

PAIRS, POURED = 2, 200
"""Pairs of futures: fewer where there are many experts, so that plans keep to their time."""

LEAST = 0.1
"""Of its load: an expert never falls below that."""


def futures_of(load_E: np.ndarray, noise: float) -> list[list[float]]:
    pairs = min(PAIRS, POURED // len(load_E)) if noise > 0 else 0
    if not pairs:
        return []
    load_E = load_E.astype(float)
    change_E = noise * np.sqrt(load_E * load_E.mean())
    sign_KE = _signs(pairs, len(load_E))
    load_KE = np.maximum(load_E + np.concatenate([sign_KE, -sign_KE]) * change_E, LEAST * load_E)
    load_KE *= load_E.sum() / load_KE.sum(1, keepdims=True)
    found: list[list[float]] = load_KE.tolist()
    return found


@lru_cache(maxsize=8)
def _signs(pairs: int, num_experts: int) -> np.ndarray:
    return np.random.default_rng(0).choice([-1.0, 1.0], (pairs, num_experts))


class Pool:
    """One load poured over the ranks of its experts: what each of them gets, and how full they are."""

    __slots__ = ("level", "loads", "shares")

    def __init__(self, loads: list[float], shares: list[list[float]], level: list[float]) -> None:
        self.loads, self.shares, self.level = loads, shares, level

    @classmethod
    def even(cls, loads: list[float], holders: list[tuple[int, ...]], num_ranks: int) -> Pool:
        """Replicas at even parts."""
        shares, level = [], [0.0] * num_ranks
        for load, ranks in zip(loads, holders, strict=True):
            part = load / len(ranks)
            shares.append([part] * len(ranks))
            for rank in ranks:
                level[rank] += part
        return cls(loads, shares, level)

    def copy(self) -> Pool:
        return Pool(self.loads, list(self.shares), list(self.level))

    def spread(self, expert: int, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        """An expert on other ranks: who stays keeps its share, what is left over is shared evenly."""
        level, before = self.level, dict(zip(old, self.shares[expert], strict=True))
        lost = (self.loads[expert] - sum([before.get(rank, 0.0) for rank in new])) / len(new)
        for rank, share in before.items():
            level[rank] -= share
        found = [before.get(rank, 0.0) + lost for rank in new]
        for rank, share in zip(new, found, strict=True):
            level[rank] += share
        self.shares[expert] = found

    def pour(self, several: list[int], holders: list[tuple[int, ...]], sweeps: int) -> None:
        """Let these experts find their level, over and over."""
        loads, shares, level = self.loads, self.shares, self.level
        jobs = [(e, holders[e], loads[e]) for e in several if loads[e] > 0]
        for e, _, _ in jobs:
            shares[e] = list(shares[e])
        fullest = max(level)
        for _ in range(sweeps):
            sweep(jobs, level, shares)
            before, fullest = fullest, max(level)
            if fullest > 0.9995 * before:
                break
