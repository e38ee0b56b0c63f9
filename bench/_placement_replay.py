"""Planners on the loads of five real runs, whose gates had no balance loss to even them out.

    .venv/bin/python bench/placement.py --part replay

`bench/loads/*.npz` are the `load.npz` of runs of the preset `small` (32 experts, top-4), cut to 3 layers,
d_model and d_ff 64, 8,192 tokens a step: `python` read Python's standard library for 510 steps, `pages` the
pages of docs/ for 260, every other step kept. `code` read this project's own code for 520 steps, every fourth
kept; it was recorded after the planner's settings had been chosen on the other two. `headers` read the C++
headers of torch and `perl` the modules of Perl for 400 steps of 4,096 tokens, every other kept: nothing was
chosen on them. Each layer is replayed as
training plans it: looked at every 10 steps, taken 2 steps later, the average's decay after the measured drift
(`balance/drift`). Balance (mean over fullest rank) is that of all steps behind the first 40, with the split
that training runs; `copies` are new replicas a plan, the first plan left out. `later` are both in the second
half of a run: the loads of its first steps change faster than plans can follow.

Prices are those of a rank with 262,144 rows a step (131,072 on 16 ranks), where replicas cost little; with
fewer rows planners rightly leave some balance to save gradients (`small batch`: an eighth of them).

Where balance is lost is told by four ways that no run has: `average alone` plans for the average and for no
load that may come (`balance/futures`), `free moves` pays nothing for them and needs no gain, `told` plans
from the mean loads of the very steps for which the plan will hold, `known steps` pours each of them where the
planner pours loads that may come, `known, free` pays nothing for moves besides, and `solver` polishes each
plan with the exact program, moves free as well. What lies between `known steps` and the last way is the price
of not knowing the loads, what `known, free` lacks is that of the slots, the interval and the search.

`of known` is the part of what the exact solver reaches that knows each measured step and moves for nothing,
`of held` that of one that knows the ten steps for which a plan holds (`bench/_placement_held.py`), where that
ends in time. No planner can know either. The loads are those of young models, which drift fast: `tv` is
the part of the rows that has another expert 10 steps later, and no trend says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _placement_held import held_balance, one_table

from moeclipse.balance.config import PlacementConfig, padded
from moeclipse.balance.drift import Drift
from moeclipse.balance.load import Load, LoadAverage, LoadTrace
from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, answer, plan
from moeclipse.balance.problem import PlanProblem
from moeclipse.balance.replicate import plan_wrap_fill
from moeclipse.balance.split import ReplicaTable, split_rows

FOLDER = Path(__file__).parent / "loads"

SHAPES = ((8, 5), (16, 3))
YOUNG = 40
"""Steps that are not measured."""
MICROBATCHES = 64
SMALL = 8
SOLVER_S = 0.5
WHOLE = 40
"""Steps, spread over a run, that one table is sought for with hindsight."""
FREE = ("free moves", "solver", "known, free")
TOLD = ("told", "known steps", "known, free")
WAYS: dict[str, dict[str, Any]] = {
    "static": {"planner": "static"},
    "every 50, decay 0.9": {"planner": "incremental", "every": 50, "decay": 0.9},
    "every 10, decay 0.9": {"planner": "incremental", "decay": 0.9},
    "small batch": {"planner": "incremental"},
    "every 5, taken after 2": {"planner": "incremental", "every": 5, "start_step": 5, "commit_after": 2},
    "average alone": {"planner": "incremental"},
    "free moves": {"planner": "incremental", "max_moved": 1.0},
    "told": {"planner": "incremental"},
    "known steps": {"planner": "incremental"},
    "known, free": {"planner": "incremental", "max_moved": 1.0},
    "solver": {"planner": "exact", "max_moved": 1.0},
    "every 10, decay auto": {"planner": "incremental"},
}
"""The last one is what training does."""


@dataclass(frozen=True, kw_only=True)
class Bed:
    """How much of it is run."""

    samples: int = 6
    loads: int = 3
    shapes: int = 2
    layers: int = 3
    steps: int = 1 << 20
    ways: tuple[str, ...] = tuple(WAYS)
    held_s: float = 15.0
    """For the solver that knows the steps of a plan."""
    tries: int = 6000
    """To find one table for a whole run."""


FEW = ("static", "every 10, decay 0.9", "every 10, decay auto")
SHORT = Bed(samples=2, loads=1, shapes=1, layers=1, steps=300, ways=FEW, held_s=5.0, tries=1000)
BEDS = {
    "long": Bed(),
    "short": SHORT,
    "smoke": replace(SHORT, samples=1, steps=60, ways=FEW[::2], held_s=0.2, tries=20),
}


def costs(lifetime: int, calls: int = MICROBATCHES) -> PlacementCosts:
    """Of the preset's own experts, with so many times the recorded rows."""
    found = PlacementCosts.from_shapes(d_model=512, d_ff=512, every=lifetime)
    return replace(found, row_seconds=calls * found.row_seconds, row_bytes=calls * found.row_bytes)


def from_all(rows_E: np.ndarray, num_ranks: int) -> np.ndarray:
    """[P, E]: each rank sends as many, but for what is left over."""
    rank_P = np.arange(num_ranks)[:, None]
    return rows_E // num_ranks + ((rank_P + np.arange(len(rows_E))) % num_ranks < rows_E % num_ranks)


def replay(
    rows_NE: np.ndarray,
    apart: int,
    config: PlacementConfig,
    ranks: int,
    slots: int,
    way: str = "",
) -> dict[str, Any]:
    """One layer; rows were recorded so many steps `apart`."""
    calls = SMALL if way == "small batch" else MICROBATCHES
    current = padded(Placement.contiguous(rows_NE.shape[1], ranks), slots)
    table, pending = ReplicaTable.of(current), None
    trace = (
        LoadTrace(drift=Drift())
        if config.decay == "auto"
        else LoadTrace(average=LoadAverage(decay=config.decay))
    )
    balance, copies = [], []
    for number, rows_E in enumerate(rows_NE):
        counts_PE = from_all(rows_E, ranks)
        balance.append(split_rows(counts_PE, table).balance)
        trace.add(number, counts_PE[None])
        if pending is not None and number >= pending[0]:
            _, new, expected_E = pending
            copies.append(sum(move.weights for move in current.moves(new)))
            current, table, pending = new, ReplicaTable.of(new, expected_E), None
        due = any(config.due(apart * number + more) for more in range(apart))
        if config.moves and (due or trace.jumped):
            taken = number + -(-config.delay // apart)
            seen_PE = trace.average.rows_LPE[0]
            coming_NE = rows_NE[taken + 1 : taken + 1 + config.every // apart]
            if way in TOLD and len(coming_NE):
                seen_PE = from_all(np.rint(coming_NE.mean(0)), ranks)
            asked = asked_of(
                config, way, 0.0 if way == "average alone" else trace.error(config.ahead / apart)
            )
            prices = costs(config.lifetime, calls)
            if way in FREE:
                prices = replace(prices, weight_bytes=0.0, gradient_bytes=0.0, state_bytes=0.0)
            problem = PlanProblem(
                counts_PE=seen_PE,
                slots_P=(slots,) * ranks,
                current=current,
                costs=prices,
                noise=asked.noise,
                turnover=asked.turnover,
            )
            if way in TOLD[1:] and len(coming_NE):
                scale_N = seen_PE.sum() / coming_NE.sum(1)
                vars(problem)["futures"] = (scale_N[:, None] * coming_NE).tolist()  # as if found there
            found = answer(asked, problem)
            pending = (taken, found, seen_PE.sum(0))
    return {"balance": balance[YOUNG // apart :], "copies": copies[1:], "first": copies[:1]}


def second_halves(found: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Balance, and copies a plan, behind the middle of the run."""
    balance, copies = (
        [value for each in found for value in each[key][len(each[key]) // 2 :]]
        for key in ("balance", "copies")
    )
    return float(np.mean(balance)), float(np.mean(copies)) if copies else 0.0


def asked_of(config: PlacementConfig, way: str, noise: float) -> PlanConfig:
    asked = PlanConfig(planner=config.planner, max_moved=config.max_moved, noise=noise, time_limit=SOLVER_S)
    return replace(asked, min_gain=0.0, turnover=0.0) if way in FREE else asked


def known(rows_NE: np.ndarray, ranks: int, slots: int) -> list[float]:
    """What the solver reaches for some steps that it is shown; without one, the best clean table."""
    free = replace(costs(1), weight_bytes=0.0, gradient_bytes=0.0, state_bytes=0.0, row_bytes=0.0)
    found = []
    for rows_E in rows_NE:
        counts_PE = from_all(rows_E, ranks)
        current = padded(Placement.contiguous(len(rows_E), ranks), slots)
        config = PlanConfig(
            planner="exact", noise=0.0, min_gain=0.0, turnover=0.0, max_moved=1.0, time_limit=2.0
        )
        table = plan(config, counts_PE.astype(float), (slots,) * ranks, current, free)
        found.append(split_rows(counts_PE, ReplicaTable.of(table, rows_E)).balance)
    return found


def held(layers: list[np.ndarray], steps: int, ranks: int, slots: int, samples: int, seconds: float) -> float:
    """The same for windows of steps; not a number where the solver does not end."""
    if ranks > 8:
        return float("nan")
    found = [
        held_balance(rows_NE[at : at + steps].astype(float), ranks, slots, seconds)
        for rows_NE in layers
        for at in np.linspace(YOUNG, len(rows_NE) - steps, samples).astype(int)
    ]
    return float(np.mean([value for value in found if value is not None] or [np.nan]))


def clean(rows_NE: np.ndarray) -> list[list[int]]:
    ranks, slots = SHAPES[0]
    return [list(row) for row in plan_wrap_fill(rows_NE.mean(0), (slots,) * ranks).slots]


def drift_of(rows_NLE: np.ndarray, apart: int) -> float:
    part_NLE = rows_NLE / rows_NLE.sum(-1, keepdims=True)
    lag = 10 // apart
    return float(np.abs(part_NLE[lag:] - part_NLE[:-lag]).sum(-1).mean() / 2)


def run(size: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    bed, rows = BEDS[size], []
    checks: dict[str, float] = {}
    print(
        f"{'loads':<8}{'ranks x slots':<15}{'way':<22}{'balance':>8}{'p5':>7}{'copies':>8}"
        f"{'later':>7}{'copies':>8}{'of known':>10}{'of held':>9}"
    )
    for path in sorted(FOLDER.glob("*.npz"))[-bed.loads :]:
        load = Load.read(path)
        layers = [load.rows_NLE[: bed.steps, layer] for layer in range(load.num_layers)][: bed.layers]
        for ranks, slots in SHAPES[: bed.shapes]:
            at = np.linspace(YOUNG // load.every, len(layers[0]) - 1, bed.samples).astype(int)
            best = float(np.mean([known(layer[at], ranks, slots) for layer in layers]))
            told = held(layers, 10 // load.every, ranks, slots, max(bed.samples // 3, 1), bed.held_s)
            for name in bed.ways:
                if name == "solver" and ranks > 8:
                    continue  # it would not end in time
                config = PlacementConfig(**WAYS[name])
                replayed = partial(replay, apart=load.every, config=config, way=name)
                found = [replayed(layer, ranks=ranks, slots=slots) for layer in layers]
                balance = np.concatenate([each["balance"] for each in found])
                copies = [count for each in found for count in each["copies"]]
                later, later_copies = second_halves(found)
                row = {
                    "loads": path.stem,
                    "tv": drift_of(load.rows_NLE, load.every),
                    "shape": f"{ranks} x {slots}",
                    "way": name,
                    "balance": float(balance.mean()),
                    "p5": float(np.quantile(balance, 0.05)),
                    "copies": float(np.mean(copies)) if copies else 0.0,
                    "later": later,
                    "later_copies": later_copies,
                    "of_known": float(balance.mean()) / best,
                    "of_held": float(balance.mean()) / told,
                }
                rows.append(row)
                print(
                    f"{row['loads']:<8}{row['shape']:<15}{name:<22}{row['balance']:>8.3f}{row['p5']:>7.3f}"
                    f"{row['copies']:>8.2f}{later:>7.3f}{later_copies:>8.2f}"
                    f"{row['of_known']:>10.3f}{row['of_held']:>9.3f}",
                    flush=True,
                )
            checks[f"replay_{path.stem}_{ranks}_{slots}"] = rows[-1]["balance"]
            checks[f"replay_later_{path.stem}_{ranks}_{slots}"] = rows[-1]["later"]
        at = np.linspace(YOUNG // load.every, len(layers[0]) - 1, WHOLE).astype(int)
        whole = [one_table(rows_NE[at], clean(rows_NE[at]), bed.tries) for rows_NE in layers]
        print(f"{path.stem}: one table for {WHOLE} steps of the whole run, 8 x 5: {min(whole):.3f} at least")
        print(f"{path.stem}: tv {drift_of(load.rows_NLE, load.every):.3f}")
    return rows, checks
