"""The exact polish: a mixed-integer program over replicas, solved by HiGHS, or Gurobi where licensed.

Idea: heuristics find a good placement; a solver finds one that is as even with fewer moves. It starts from
the heuristic's plan, so whatever the time limit cuts off, the answer is never worse than that plan.

    x[e,p] in {0,1}  rank p holds expert e          y[e,p] in [0,1]  part of e's load that p computes
    sum_p y[e,p] = 1         y[e,p] <= x[e,p]       sum_e x[e,p] <= slots of p
    sum_e load_e y[e,p] <= T                        v[e,p] >= x[e,p] where p does not hold e now
    minimise  row_seconds T + (weight_seconds / every) sum v + (state_seconds / every) sum q
    q[e] >= 1 - x[e, primary now]                   the optimizer state has to move

Contract: a placement that fits the slots, no expert lost. Without a solver a ConfigError says what to
install.

Hazard: a cold start is hopeless from 256 experts on 32 ranks on (ranks are interchangeable). Run it beside
training, never in its way; and never import highspy and ortools into one process.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.split import ReplicaTable, pour
from moeclipse.core.errors import ConfigError

RELATIVE_GAP = 1e-3


def polish(
    load_E: np.ndarray,
    slots_P: Sequence[int],
    current: Placement,
    start: Placement,
    costs: PlacementCosts,
    *,
    time_limit: float = 10.0,
) -> Placement:
    """`start`, or a placement with fewer seconds for the same loads: migration from `current` included."""
    module = solver_module()
    program = LinearProgram.of(load_E, slots_P, current, costs)
    guess = program.guess(start)
    solve = _solve_gurobi if module.__name__ == "gurobipy" else _solve_highs
    answer = solve(module, program, guess, time_limit)
    if answer is None or program.cost @ answer >= program.cost @ guess - 1e-12:
        return start
    return program.placement(answer, current, slots_P)


def solver_module() -> Any:
    """gurobipy if it is installed and has a licence, else highspy."""
    try:
        gurobi = importlib.import_module("gurobipy")
        gurobi.Env(params={"OutputFlag": 0}).dispose()
        return gurobi
    except Exception:  # not installed, or any kind of licence trouble: the other solver will do
        pass
    try:
        return importlib.import_module("highspy")
    except ImportError:
        raise ConfigError(
            "the exact planner needs a solver, and neither highspy nor a licensed gurobipy is installed; "
            "run: pip install 'moeclipse[solver]', or choose another planner"
        ) from None


@dataclass(frozen=True, kw_only=True)
class LinearProgram:
    """Columns: x (E*P), y (E*P), q (E), T. Rows in sparse form: lower <= A column <= upper."""

    num_experts: int
    num_ranks: int
    load_E: np.ndarray
    cost: np.ndarray
    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    @classmethod
    def of(
        cls, load_E: np.ndarray, slots_P: Sequence[int], current: Placement, costs: PlacementCosts
    ) -> LinearProgram:
        E, P = len(load_E), len(slots_P)
        load_E = load_E.astype(float)
        scale = max(costs.row_seconds * float(load_E.sum()) / P, 1e-300)
        x, y = np.arange(E * P).reshape(E, P), E * P + np.arange(E * P).reshape(E, P)
        q, T = 2 * E * P + np.arange(E), 2 * E * P + E
        cost = np.zeros(T + 1)
        cost[x] = ~current.holds_EP * costs.move_seconds(1, 0) / costs.every / scale
        cost[q] = costs.move_seconds(0, 1) / costs.every / scale
        cost[T] = 1.0  # T counts mean loads, so the whole cost does too
        part_E = load_E / max(float(load_E.sum()) / P, 1e-300)
        rows: list[tuple[np.ndarray, np.ndarray, float, float]] = []
        for e in range(E):
            rows.append((y[e], np.ones(P), 1.0, 1.0))
            primary = current.primary[e]
            rows.append((np.array([x[e, primary], q[e]]), np.ones(2), 1.0, np.inf))
            rows += [(np.array([y[e, p], x[e, p]]), np.array([1.0, -1.0]), -np.inf, 0.0) for p in range(P)]
        for p in range(P):
            rows.append((x[:, p], np.ones(E), 0.0, float(slots_P[p])))
            rows.append((np.append(y[:, p], T), np.append(part_E, -1.0), -np.inf, 0.0))
        sizes = [len(columns) for columns, *_ in rows]
        return cls(
            num_experts=E,
            num_ranks=P,
            load_E=load_E,
            cost=cost,
            row=np.repeat(np.arange(len(rows)), sizes),
            column=np.concatenate([columns for columns, *_ in rows]),
            value=np.concatenate([values for _, values, *_ in rows]),
            lower=np.array([low for *_, low, _ in rows]),
            upper=np.array([high for *_, high in rows]),
        )

    @property
    def num_binary(self) -> int:
        return self.num_experts * self.num_ranks

    def guess(self, start: Placement) -> np.ndarray:
        """The columns that a placement stands for."""
        table = ReplicaTable.of(start)
        shares, level = pour(self.load_E, table, 200, good_enough=1.0, worth_a_sweep=0.99999)
        part_EP = start.holds_EP / start.holds_EP.sum(1, keepdims=True)
        for expert, ranks, mine in zip(table.several, table.ranks_of, shares, strict=True):
            if self.load_E[expert] > 0:
                part_EP[expert] = 0.0
                part_EP[expert, list(ranks)] = np.array(mine) / sum(mine)
        answer = np.zeros(len(self.cost))
        count = self.num_binary
        answer[:count] = start.holds_EP.ravel()
        answer[count : 2 * count] = part_EP.ravel()
        first_q = 2 * count
        columns, rows = self.column, self.row
        # q[e] stands beside x[e, primary now] in its row.
        for row in np.unique(rows[columns >= first_q]):
            pair = columns[rows == row]
            if len(pair) == 2 and pair[1] != len(answer) - 1:
                answer[pair[1]] = 1.0 - answer[pair[0]]
        mean = max(float(self.load_E.sum()) / self.num_ranks, 1e-300)
        answer[-1] = max(level) / mean
        return answer

    def placement(self, answer: np.ndarray, current: Placement, slots_P: Sequence[int]) -> Placement:
        holds_EP = answer[: self.num_binary].reshape(self.num_experts, self.num_ranks) > 0.5
        rows = []
        for rank, count in enumerate(slots_P):
            held = np.flatnonzero(holds_EP[:, rank]).tolist()
            rows.append((*held, *[EMPTY] * (count - len(held))))
        return Placement(tuple(rows)).arranged_like(current)


def _solve_highs(
    highspy: Any, program: LinearProgram, guess: np.ndarray, time_limit: float
) -> np.ndarray | None:
    size, rows = len(program.cost), len(program.lower)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = size, rows
    model.col_cost_ = program.cost
    model.col_lower_ = np.zeros(size)
    model.col_upper_ = np.append(np.ones(size - 1), highspy.kHighsInf)
    infinity = highspy.kHighsInf
    model.row_lower_ = np.where(np.isfinite(program.lower), program.lower, -infinity)
    model.row_upper_ = np.where(np.isfinite(program.upper), program.upper, infinity)
    order = np.lexsort((program.column, program.row))
    starts = np.searchsorted(program.row[order], np.arange(rows + 1))
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_ = starts, program.column[order]
    model.a_matrix_.value_ = program.value[order]
    kinds = highspy.HighsVarType
    model.integrality_ = [
        kinds.kInteger if i < program.num_binary else kinds.kContinuous for i in range(size)
    ]
    solver = highspy.Highs()
    for option, value in (("output_flag", False), ("time_limit", time_limit), ("mip_rel_gap", RELATIVE_GAP)):
        solver.setOptionValue(option, value)
    solver.passModel(model)
    warm = highspy.HighsSolution()
    warm.col_value = guess.tolist()
    solver.setSolution(warm)
    solver.run()
    values = np.array(solver.getSolution().col_value)
    return values if len(values) == size and solver.getSolution().value_valid else None


def _solve_gurobi(
    gurobipy: Any, program: LinearProgram, guess: np.ndarray, time_limit: float
) -> np.ndarray | None:
    size = len(program.cost)
    with gurobipy.Env(params={"OutputFlag": 0}) as env, gurobipy.Model(env=env) as model:
        model.Params.TimeLimit, model.Params.MIPGap = time_limit, RELATIVE_GAP
        kinds = ["B" if i < program.num_binary else "C" for i in range(size)]
        upper = np.append(np.ones(size - 1), np.inf)
        columns = model.addMVar(size, ub=upper, vtype=kinds)
        columns.Start = guess
        model.setObjective(program.cost @ columns)
        for row, (low, high) in enumerate(zip(program.lower, program.upper, strict=True)):
            at = program.row == row
            left = program.value[at] @ columns[program.column[at]]
            if np.isfinite(low):
                model.addConstr(left >= low)
            if np.isfinite(high):
                model.addConstr(left <= high)
        try:
            model.optimize()
        except gurobipy.GurobiError:
            return None  # the licence that comes with the package ends at 2,000 variables
        return np.array(columns.X) if model.SolCount else None
