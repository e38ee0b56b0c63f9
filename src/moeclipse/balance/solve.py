"""The exact polish: a mixed-integer program over replicas, solved by HiGHS, or Gurobi where licensed.

Idea: heuristics find a good placement; a solver finds one that is as even with fewer moves. It starts from
the heuristic's plan, so whatever the time limit cuts off, the answer is never worse than that plan.

    x[e,p] in {0,1}  rank p holds expert e          y[e,p] in [0,1]  part of e's load that p computes
    sum_p y[e,p] = 1         y[e,p] <= x[e,p]       sum_e x[e,p] <= slots of p
    k[e,p] <= load_e y[e,p], rows of p for e        rows that p keeps; the same of nodes
    w[e,p] <= x[e,p], sum_p w[e,p] >= sum_p x[e,p] - 1          copies of e's gradients that p exchanges

    minimise the seconds of `balance/objective`, each maximum as a column that no rank may exceed:
    T >= sum_e load_e y[e,p]     A >= rows that enter or leave p     B >= ... card of n     C >= sum_e w[e,p]
    D >= what p gets, x[e,p] where it does not hold e now, or gives, to those, and 1 - x[e,p] where it does

Four prices are not linear. Three stand here as guesses: that all replicas exchange alike, that the cards of a
node carry alike, and how much optimizer state changes its owner. What replicas cost beside their bytes, were
it only one, is left out. So the answer is judged again, as all plans are.

Contract: a placement that fits the slots, no expert lost. Without a solver a ConfigError says what to
install.

Hazard: a cold start is hopeless from 256 experts on 32 ranks on (ranks are interchangeable). Run it beside
training, never in its way; and never import highspy and ortools into one process.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeclipse.balance.objective import EXCHANGES
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.problem import PlanProblem
from moeclipse.balance.split import ReplicaTable, pour
from moeclipse.core.errors import ConfigError

RELATIVE_GAP = 1e-3
Term = tuple[np.ndarray | int, np.ndarray | float]
"""Columns, and what they are multiplied by."""


def polish(problem: PlanProblem, start: Placement, *, time_limit: float = 10.0) -> Placement:
    """`start`, or a placement with fewer seconds for the same loads: migration from `current` included."""
    module = solver_module()
    program = LinearProgram.of(problem)
    guess = program.guess(start)
    solve = _solve_gurobi if module.__name__ == "gurobipy" else _solve_highs
    answer = solve(module, program, guess, time_limit)
    if answer is None or program.cost @ answer >= program.cost @ guess - 1e-12:
        return start
    found = program.placement(answer)
    # The program pours as well as can be; the split that runs may come less far.
    return found if problem.judge(found).total < problem.judge(start).total else start


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


class SparseRows:
    """Rows of a program in sparse form: lower <= sum of value x column <= upper."""

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.bounds: list[tuple[float, float]] = []

    def add(self, *terms: Term, low: float, high: float) -> None:
        flat = np.concatenate([np.ravel(column) for column, _ in terms])
        values = [np.broadcast_to(value, np.shape(column)).ravel() for column, value in terms]
        # A column that stands twice in a row breaks solvers.
        columns, places = np.unique(flat, return_inverse=True)
        self.columns.append(columns)
        self.values.append(np.bincount(places, np.concatenate(values)))
        self.bounds.append((low, high))


@dataclass(frozen=True, kw_only=True)
class LinearProgram:
    """Columns: x, y, k and w (E x P each), k of nodes (E x N, if several), then T, A, B, C, D."""

    problem: PlanProblem
    cost: np.ndarray
    most: np.ndarray
    """What a column is at most."""
    row: np.ndarray
    column: np.ndarray
    value: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    @classmethod
    def of(cls, problem: PlanProblem) -> LinearProgram:
        places, costs = Columns(problem), problem.costs
        scale = max(costs.row_seconds * places.mean, 1e-300)  # seconds, and loads in means: numbers near 1
        row_seconds = EXCHANGES * costs.row_bytes * places.mean / scale
        cost = np.zeros(places.size)
        cost[places.T] = 1.0
        cost[places.A] = row_seconds / costs.near_bandwidth
        cost[places.B] = row_seconds / costs.far_bandwidth
        cost[places.C] = problem.copy_seconds / scale
        cost[places.D] = move_seconds = (problem.move_seconds + problem.state_seconds) / scale
        most = np.ones(places.size)
        most[places.k] = problem.counts_PE.T / places.mean
        most[places.T :] = np.inf
        if problem.num_nodes > 1:
            most[places.k_nodes] = problem.rows_NE.T / places.mean
        rows = SparseRows()
        _add_placement(rows, places)
        _add_wires(rows, places)
        _add_copies(rows, places)
        if move_seconds > 0:
            _add_moves(rows, places)
        sizes = [len(columns) for columns in rows.columns]
        lower, upper = np.array(rows.bounds).T
        return cls(
            problem=problem,
            cost=cost,
            most=most,
            row=np.repeat(np.arange(len(sizes)), sizes),
            column=np.concatenate(rows.columns),
            value=np.concatenate(rows.values),
            lower=lower,
            upper=upper,
        )

    @property
    def num_binary(self) -> int:
        return self.problem.num_experts * self.problem.num_ranks

    def guess(self, start: Placement) -> np.ndarray:
        """The columns that a placement stands for."""
        problem, places = self.problem, Columns(self.problem)
        table = ReplicaTable.of(start)
        shares, _ = pour(problem.load_E.astype(float), table, 200, good_enough=1.0, worth_a_sweep=0.99999)
        part_EP = start.holds_EP / start.holds_EP.sum(1, keepdims=True)
        for expert, ranks, mine in zip(table.several, table.ranks_of, shares, strict=True):
            if problem.load_E[expert] > 0:
                part_EP[expert] = 0.0
                part_EP[expert, list(ranks)] = np.array(mine) / sum(mine)
        answer = np.zeros(places.size)
        answer[places.x], answer[places.y] = start.holds_EP, part_EP
        load_EP = part_EP * places.part_E[:, None]
        answer[places.k] = np.minimum(load_EP, self.most[places.k])
        if problem.num_nodes > 1:
            load_EN = np.stack([load_EP[:, ranks].sum(1) for ranks in places.ranks_of], axis=1)
            answer[places.k_nodes] = np.minimum(load_EN, self.most[places.k_nodes])
        replicas_E = start.holds_EP.sum(1)
        answer[places.w] = start.holds_EP * ((replicas_E - 1) / replicas_E)[:, None]
        # Every maximum is as small as the rows that bound it allow.
        for top in (places.T, places.A, places.B, places.C, places.D):
            bounding = np.unique(self.row[self.column == top])
            used = np.isin(self.row, bounding) & (self.column != top)
            sums = np.bincount(self.row[used], self.value[used] * answer[self.column[used]], len(self.lower))
            over = (sums - self.upper)[bounding]
            answer[top] = max(float(over.max(initial=0.0)), 0.0)
        return answer

    def placement(self, answer: np.ndarray) -> Placement:
        problem = self.problem
        holds_EP = answer[: self.num_binary].reshape(problem.num_experts, problem.num_ranks) > 0.5
        rows = []
        for rank, count in enumerate(problem.slots_P):
            held = np.flatnonzero(holds_EP[:, rank]).tolist()
            rows.append((*held, *[EMPTY] * (count - len(held))))
        return Placement(tuple(rows)).arranged_like(problem.current)


class Columns:
    """Where the columns of each kind stand, and loads in terms of a rank's mean."""

    def __init__(self, problem: PlanProblem) -> None:
        E, P, N = problem.num_experts, problem.num_ranks, problem.num_nodes
        self.problem = problem
        self.x, self.y, self.k, self.w = np.arange(4 * E * P).reshape(4, E, P)
        first = 4 * E * P
        self.k_nodes = first + np.arange(E * N).reshape(E, N) if N > 1 else np.empty((E, 0), dtype=np.int64)
        self.T = first + self.k_nodes.size
        self.A, self.B, self.C, self.D = (self.T + more for more in range(1, 5))
        self.size = self.D + 1
        self.mean = max(float(problem.load_E.sum()) / P, 1e-300)
        self.part_E = problem.load_E.astype(float) / self.mean
        self.ranks_of = [np.flatnonzero(problem.node_index == n) for n in range(N)]


def _add_placement(rows: SparseRows, at: Columns) -> None:
    problem = at.problem
    for e in range(problem.num_experts):
        rows.add((at.y[e], 1.0), low=1.0, high=1.0)
        for p in range(problem.num_ranks):
            rows.add((at.y[e, p], 1.0), (at.x[e, p], -1.0), low=-np.inf, high=0.0)
            rows.add((at.k[e, p], 1.0), (at.y[e, p], -at.part_E[e]), low=-np.inf, high=0.0)
    for p, count in enumerate(problem.slots_P):
        rows.add((at.x[:, p], 1.0), low=0.0, high=float(count))
        rows.add((at.y[:, p], at.part_E), (at.T, -1.0), low=-np.inf, high=0.0)


def _add_wires(rows: SparseRows, at: Columns) -> None:
    """Rows in and out of ranks, less what of it crosses nodes: that is counted by node."""
    problem = at.problem
    source_P = problem.counts_PE.sum(1) / at.mean
    if problem.costs.shared_wire:
        share = 1 / problem.num_ranks
        rows.add((at.k, -share), (at.A, -1.0), low=-np.inf, high=-share * float(source_P.sum()))
    for n, ranks in enumerate(at.ranks_of):
        enter: list[Term] = []
        leave: list[Term] = []
        crossing, part = 0.0, 1 / len(ranks)
        if problem.num_nodes > 1:
            load = np.repeat(at.part_E[:, None], len(ranks), axis=1)
            for e in range(problem.num_experts):
                inside = (at.y[e, ranks], -at.part_E[e])
                rows.add((at.k_nodes[e, n], 1.0), inside, low=-np.inf, high=0.0)
            crossing = float(source_P[ranks].sum())
            card = 1 / float(problem.cards_N[n])
            kept = (at.k_nodes[:, n], -card)
            rows.add((at.y[:, ranks], card * load), kept, (at.B, -1.0), low=-np.inf, high=0.0)
            rows.add(kept, (at.B, -1.0), low=-np.inf, high=-card * crossing)
            enter = [(at.y[:, ranks], -part * load), (at.k_nodes[:, n], part)]
            leave = [(at.k_nodes[:, n], part)]
        for p in [] if problem.costs.shared_wire else ranks.tolist():
            mine = (at.y[:, p], at.part_E)
            rows.add(mine, (at.k[:, p], -1.0), *enter, (at.A, -1.0), low=-np.inf, high=0.0)
            out = float(source_P[p]) - part * crossing
            rows.add((at.k[:, p], -1.0), *leave, (at.A, -1.0), low=-np.inf, high=-out)


def _add_copies(rows: SparseRows, at: Columns) -> None:
    """Gradients that replicas exchange: of each expert one copy less than it has replicas."""
    problem = at.problem
    if problem.costs.shared_wire:
        share = 1 / problem.num_ranks
        rows.add((at.x, share), (at.C, -1.0), low=-np.inf, high=share * problem.num_experts)
        return
    for e in range(problem.num_experts):
        rows.add((at.w[e], 1.0), (at.x[e], -1.0), low=-1.0, high=np.inf)
        for p in range(problem.num_ranks):
            rows.add((at.w[e, p], 1.0), (at.x[e, p], -1.0), low=-np.inf, high=0.0)
    for p in range(problem.num_ranks):
        rows.add((at.w[:, p], 1.0), (at.C, -1.0), low=-np.inf, high=0.0)


def _add_moves(rows: SparseRows, at: Columns) -> None:
    """What ranks get and give on the way there, in copies of an expert with all its state.

    A rank more among r takes over 1 / (r + 1) of an expert's state, at even parts from those r; one that
    leaves gives up its 1 / r.
    """
    problem, held_EP = at.problem, at.problem.current.holds_EP
    whole = problem.move_seconds + problem.state_seconds
    replicas_E = held_EP.sum(1)
    gets_E = (problem.move_seconds + problem.state_seconds / (replicas_E + 1)) / whole
    leaves_E = problem.state_seconds / whole / replicas_E
    gets_EP = np.where(held_EP, 0.0, gets_E[:, None])
    if problem.costs.shared_wire:
        rows.add((at.x, gets_EP / problem.num_ranks), (at.D, -1.0), low=-np.inf, high=0.0)
        return
    for p in range(problem.num_ranks):
        new, mine = np.flatnonzero(~held_EP[:, p]), np.flatnonzero(held_EP[:, p])
        rows.add((at.x[new, p], gets_E[new]), (at.D, -1.0), low=-np.inf, high=0.0)
        given_EP = gets_EP[mine] / replicas_E[mine, None]
        given_EP[:, p] = -leaves_E[mine]
        rows.add((at.x[mine], given_EP), (at.D, -1.0), low=-np.inf, high=-float(leaves_E[mine].sum()))


def _solve_highs(
    highspy: Any, program: LinearProgram, guess: np.ndarray, time_limit: float
) -> np.ndarray | None:
    size, rows = len(program.cost), len(program.lower)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = size, rows
    model.col_cost_ = program.cost
    model.col_lower_ = np.zeros(size)
    infinity = highspy.kHighsInf
    model.col_upper_ = np.where(np.isfinite(program.most), program.most, infinity)
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
        columns = model.addMVar(size, ub=program.most, vtype=kinds)
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
