"""Runs of unequal length beside each other: where each stood after as many steps, and as many tokens.

    equal(runs)["step"]      # {"at": 70, "same": False, "runs": [{"loss": 2.4, "seconds": 31.0, ...}, ...]}

The place is the furthest that all runs have reached. The loss there is the mean of the last tenth of the
steps before it, as in the numbers of a run; the held-out loss is the last one before it, and says of where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moeclipse.report.measures import maybe, over
from moeclipse.report.run import RunData

AXES = ("step", "tokens", "seconds")


def equal(runs: Sequence[RunData]) -> dict[str, Any]:
    """By `step` and `tokens`; an axis that some run did not measure is left out, and so are single runs."""
    places = [positions(run) | {"step": run.steps.step + 1.0} for run in runs]
    found: dict[str, Any] = {}
    for axis in ("step", "tokens"):
        ends = [place[axis][-1] if len(place.get(axis, ())) else 0.0 for place in places]
        if len(runs) > 1 and min(ends) > 0:
            at = float(min(ends))
            rows = [standing(run, place, axis, at) for run, place in zip(runs, places, strict=True)]
            found[axis] = {"at": at, "same": bool(min(ends) == max(ends)), "runs": rows}
    return found


def positions(run: RunData) -> dict[str, np.ndarray]:
    """Tokens and seconds up to the end of each row of steps, where the run measured them in every row."""
    steps, found = run.steps, {}
    for name, column, unit in (("tokens", "num_tokens", 1.0), ("seconds", "step_ms", 1e-3)):
        each = steps.total(column)
        if len(each) and np.isfinite(each).all():
            found[name] = np.cumsum(each) * unit
    return found


def standing(run: RunData, place: dict[str, np.ndarray], axis: str, at: float) -> dict[str, float | None]:
    """How far a run was when it had come to `at` of an axis."""
    where = place[axis]
    last = int(np.searchsorted(where, at * (1 + 1e-9), side="right"))  # rows that end before or there
    last = max(last, 1)
    loss, held_out = run.steps.column("loss")[:last], run.steps.column("eval_loss")[:last]
    known = np.flatnonzero(np.isfinite(held_out))
    told = {name: maybe(float(place[name][last - 1])) if name in place else None for name in AXES}
    return {
        **told,
        "loss": over(np.mean, loss[-max(last // 10, 1) :]),
        "eval_loss": float(held_out[known[-1]]) if len(known) else None,
        "eval_at": float(where[known[-1]]) if len(known) else None,
    }
