"""What a solver reaches that knows every step for which its placement will hold.

    x[e,p] in {0,1}  rank p holds expert e        y[t,e,p]  part of e's load that p computes in step t
    minimise the mean over t of T[t],   T[t] >= load of each rank in step t, in means

No planner can know these steps: this is the end of the scale on which they are measured. HiGHS, from a cold
start, within a time limit: large tables do not end in it. For a whole run random changes of one table do
better (`one_table`).
"""

from __future__ import annotations

from typing import Any

import numpy as np


def held_balance(rows_TE: np.ndarray, ranks: int, slots: int, seconds: float) -> float | None:
    """Mean over fullest rank, on average over the steps; None without the solver."""
    try:
        import highspy
    except ImportError:
        return None
    steps, experts = rows_TE.shape
    part_TE = rows_TE * ranks / rows_TE.sum(1, keepdims=True)
    x = np.arange(experts * ranks).reshape(experts, ranks)
    y = x.size + np.arange(steps * experts * ranks).reshape(steps, experts, ranks)
    top = x.size + y.size + np.arange(steps)
    solver = highspy.Highs()
    for option, value in (("output_flag", False), ("time_limit", seconds), ("threads", 1)):
        solver.setOptionValue(option, value)
    most = np.r_[np.ones(x.size + y.size), np.full(steps, highspy.kHighsInf)]
    cost = np.r_[np.zeros(x.size + y.size), np.full(steps, 1 / steps)]
    empty: list[Any] = [np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), np.empty(0)]
    solver.addCols(len(cost), cost, np.zeros(len(cost)), most, 0, *empty)
    solver.changeColsIntegrality(
        x.size, x.ravel().astype(np.int32), np.full(x.size, highspy.HighsVarType.kInteger.value, np.uint8)
    )
    least = -highspy.kHighsInf

    def bound(low: float, high: float, columns: np.ndarray, values: np.ndarray) -> None:
        solver.addRow(low, high, len(columns), columns.astype(np.int32), values.astype(float))

    for rank in range(ranks):
        bound(0.0, slots, x[:, rank], np.ones(experts))
    for t in range(steps):
        for e in range(experts):
            bound(1.0, 1.0, y[t, e], np.ones(ranks))
            for rank in range(ranks):
                bound(least, 0.0, np.array([y[t, e, rank], x[e, rank]]), np.array([1.0, -1.0]))
        for rank in range(ranks):
            bound(least, 0.0, np.r_[y[t, :, rank], top[t]], np.r_[part_TE[t], -1.0])
    solver.run()
    fullest_T = np.array(solver.getSolution().col_value)[top]
    return float(np.mean(1 / fullest_T)) if fullest_T.min() > 0 else None


def fullest_of(part_TE: np.ndarray, mask_E: np.ndarray, ranks: int) -> np.ndarray:
    """In each step the fullest rank of the best split, in means; `mask_E`: a bit for each rank of an expert.

    No split leaves a set of ranks with less than what they alone hold, and the best one reaches the largest
    of these bounds: maximum flow is minimum cut. So all sets are looked at, which small tables allow.
    """
    only = np.zeros((len(part_TE), 1 << ranks))
    np.add.at(only.T, mask_E, part_TE.T)
    for bit in range(ranks):
        pairs = only.reshape(len(part_TE), -1, 2, 1 << bit)
        pairs[:, :, 1] += pairs[:, :, 0]
    sizes = np.array([max(mask.bit_count(), 1) for mask in range(1 << ranks)])
    found: np.ndarray = (only * ranks / sizes).max(1)
    return found


def one_table(rows_TE: np.ndarray, start: list[list[int]], tries: int = 6000) -> float:
    """Mean balance of the best table that random changes find for all these steps at once."""
    part_TE = rows_TE / rows_TE.sum(1, keepdims=True)
    ranks, experts, rng = len(start), rows_TE.shape[1], np.random.default_rng(0)

    def balance(rows: list[list[int]]) -> float:
        mask = [sum(1 << rank for rank, row in enumerate(rows) if e in row) for e in range(experts)]
        return float((1 / fullest_of(part_TE, np.array(mask), ranks)).mean())

    rows = [list(row) for row in start]
    now = best = balance(rows)
    for turn in range(tries):
        new = [list(row) for row in rows]
        (p, q), expert = rng.integers(ranks, size=2), int(rng.integers(experts))
        i, j = int(rng.integers(len(new[p]))), int(rng.integers(len(new[q])))
        mine, theirs = new[p][i], new[q][j]
        if rng.random() < 0.5 and p != q and mine not in new[q] and theirs not in new[p]:
            new[p][i], new[q][j] = theirs, mine
        elif expert not in new[p] and (mine < 0 or sum(mine in row for row in new) > 1):
            new[p][i] = expert
        else:
            continue
        found, heat = balance(new), 0.01 * (1 - turn / tries) ** 2 + 1e-5
        if found > now or rng.random() < np.exp((found - now) / heat):
            rows, now, best = new, found, max(best, found)
    return best
