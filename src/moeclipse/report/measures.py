"""A run in a few numbers with names: what `--json` prints, `--fail-if` compares and a page shows first.

Times are means over the steps of the summary's window, as a terminal tells them at the end of a run: parts
add up to a step, and a number has one name in both places. Shares are of a step, but for `hidden`, which is a
share of communication. What a run did not measure is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from moeclipse.report.run import RunData, number
from moeclipse.report.skew import skew_ms

PARTS = ("compute", "exposed", "straggle", "idle")
"""Of a step; they add up to it."""
ABOUT = {
    "steps": "steps done",
    "loss": "loss, mean of the last tenth of the steps",
    "loss_first": "loss of the first step",
    "loss_last": "loss of the last step",
    "eval_loss": "last loss on text that is held out",
    "eval_best": "lowest loss on text that is held out",
    "tokens_per_s": "tokens a second",
    "step_ms": "milliseconds of a step",
    "median_step_ms": "the median of them, which one slow step does not move",
    "compute_ms": "of these in compute",
    "exposed_ms": "in communication that nothing hid",
    "straggle_ms": "waiting for a rank that was late",
    "idle_ms": "in nothing of these",
    "comm_ms": "communication, hidden or not",
    "hidden_ms": "communication under compute",
    "compute": "compute, share of a step",
    "exposed": "exposed communication, share of a step",
    "straggle": "straggle, share of a step",
    "idle": "idle, share of a step",
    "hidden": "share of communication that was hidden",
    "mfu": "share of the device's peak",
    "of_limit": "share of what the work allows",
    "balance": "rows of the mean rank over those of the fullest, on average over layers",
    "skew_ms": "milliseconds of a step that ranks wait for the one with most rows",
    "grad_norm": "norm of the gradient",
    "dropped": "rows over capacity",
    "skipped": "steps without an update",
    "incidents": "incidents",
}
SHARES = ("compute", "exposed", "straggle", "idle", "hidden", "mfu", "of_limit")
LESS_IS_BETTER = (
    *("loss", "loss_last", "eval_loss", "eval_best", "step_ms", "exposed_ms", "straggle_ms", "idle_ms"),
    *("median_step_ms", "skew_ms", "exposed", "straggle", "idle", "dropped", "skipped", "incidents"),
)
MORE_IS_BETTER = ("tokens_per_s", "hidden", "mfu", "of_limit", "balance")


def measures_of(run: RunData) -> dict[str, float | None]:
    """By name, in the order of ABOUT."""
    found: dict[str, float | None] = {"steps": float(run.steps.num_steps)}
    found |= losses(run)
    for name in ("step_ms", "comm_ms", "hidden_ms", "balance", "grad_norm"):
        found[name] = mean(run, name)
    for name in ("tokens_per_s", "mfu", "of_limit"):
        found[name] = rate(run, name)
    step, comm = found["step_ms"], found["comm_ms"]
    found["median_step_ms"] = over(np.median, run.steps.column("step_ms")[run.window])
    for part in PARTS:
        found[f"{part}_ms"] = mean(run, f"{part}_ms")
        found[part] = ratio(found[f"{part}_ms"], step)
    found["hidden"] = ratio(found["hidden_ms"], comm)
    found["skew_ms"] = skew_ms(run)
    found["dropped"] = total(run, "dropped")
    found["skipped"] = total(run, "skipped")
    found["incidents"] = float(len(run.incidents))
    if step is None:  # no line of metrics is left: the summary knows the means
        keys = ("tokens_per_s", "step_ms", "comm_ms", "hidden_ms", "mfu", "of_limit", "balance", "loss_last")
        for name in (*keys, *(f"{part}_ms" for part in PARTS)):
            found[name] = maybe(number(run.summary.get(name), math.nan))
        for part in PARTS:
            found[part] = ratio(found[f"{part}_ms"], found["step_ms"])
        found["hidden"] = maybe(number(run.summary.get("hidden_fraction"), math.nan))
    return {name: found.get(name) for name in ABOUT}


def losses(run: RunData) -> dict[str, float | None]:
    loss, held_out = run.steps.column("loss"), run.steps.column("eval_loss")
    held_out = held_out[np.isfinite(held_out)]
    late = loss[-max(len(loss) // 10, 1) :]
    return {
        "loss": over(np.mean, late),
        "loss_first": maybe(float(loss[0])) if len(loss) else None,
        "loss_last": maybe(float(loss[-1])) if len(loss) else None,
        "eval_loss": float(held_out[-1]) if len(held_out) else None,
        "eval_best": over(np.min, held_out),
    }


def mean(run: RunData, name: str) -> float | None:
    return over(np.mean, run.steps.column(name)[run.window])


def rate(run: RunData, name: str) -> float | None:
    """What is counted by time: the rate of all steps together, not the mean of theirs."""
    rates, times = run.steps.column(name)[run.window], run.steps.column("step_ms")[run.window]
    known = np.isfinite(rates) & np.isfinite(times)
    return ratio(over(np.sum, (rates * times)[known]), over(np.sum, times[known]))


def total(run: RunData, name: str) -> float | None:
    return over(np.sum, run.steps.total(name))


def over(what: Callable[[np.ndarray], float], values: np.ndarray) -> float | None:
    """Of the numbers among the values; None where there are none."""
    finite = values[np.isfinite(values)]
    return float(what(finite)) if len(finite) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def maybe(value: float) -> float | None:
    return value if math.isfinite(value) else None


def in_words(name: str, value: float | None) -> str:
    """As people read it: shares in per cent, times with their unit."""
    if value is None:
        return "not measured"
    if name in SHARES:
        return f"{100 * value:.1f} %"
    if name.endswith("_ms"):
        return f"{value:,.1f} ms"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
