"""What a solver reaches that knows every step for which its placement will hold.

    x[e,p] in {0,1}  rank p holds expert e        y[t,e,p]  part of e's load that p computes in step t
    minimise the mean over t of T[t],   T[t] >= load of each rank in step t, in means

No planner can know these steps: this is the end of the scale on which they are measured. HiGHS, from a cold
start, within a time limit: large tables do not end in it.
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
