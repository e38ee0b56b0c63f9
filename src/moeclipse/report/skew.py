"""What uneven ranks cost a run, what was done about it, and what it won or would have won.

    skew = skew_of(run)              # None on one rank
    for line in skew.in_words(): ...

    cost        rows of the fullest rank above the mean, times what a row was measured to cost: at least, as
                rows of all layers are added up first, and another rank may be the fullest in each
    gain        of plans that were taken (`report/gain`)
    would       the objective's word on a plan for these loads, with the costs that the run has measured

Contract. Pure: files of a run are all that is read. What cannot be known is None and is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.objective import PlacementCosts, rows_per_pair
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.balance.problem import PlanProblem
from moeclipse.core.errors import ConfigError
from moeclipse.report.gain import Gain, cost_of_a_row, gain_of, short
from moeclipse.report.run import RunData, number

PLANNER: Literal["auto"] = "auto"
MOST_LAYERS = 16
"""That are planned to see what would be won: the most uneven ones."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a planner would have won."""

    planner: str
    gain_ms: float
    """Of a step."""
    faster: float
    """Step time now over that of a planned step."""
    balance: float
    """Mean over fullest rank under the plan, on average over layers."""


@dataclass(frozen=True, kw_only=True)
class Skew:
    balance: float
    """Mean over fullest rank, on average over layers and steps."""
    cost_ms: float | None
    """Of a step, spent waiting for the fullest rank; None: not known."""
    share: float | None
    """The same as a part of the step."""
    gain: Gain | None
    """None: no plan changed anything."""
    would: Outlook | None
    """None: a planner is on, costs are not known, or nothing would be won."""

    def in_words(self) -> list[str]:
        gain = "" if self.gain is None else self.gain.in_words()
        return [text for text in (self._cost(), gain, self._would()) if text]

    def _cost(self) -> str:
        ranks = f"ranks at {self.balance:.2f}"
        if self.cost_ms is None or self.share is None:
            return f"{ranks}; what that cost is not known"
        cost = f"at least {short(self.cost_ms)} ms of waiting a step ({100 * self.share:.0f} %)"
        return f"{ranks}, which cost {cost}"

    def _would(self) -> str:
        if self.would is None:
            return ""
        return (
            f"planned placement predicts ranks at {self.would.balance:.2f} and a step "
            f"{self.would.faster:.2f} x faster"
        )


def skew_of(run: RunData) -> Skew | None:
    balance, step = run.steps.column("balance")[run.window], run.steps.column("step_ms")[run.window]
    balance, step = balance[np.isfinite(balance)], step[np.isfinite(step)]
    if not len(balance) or not len(step):
        return None
    step_ms = float(step.mean())
    cost = skew_ms(run)
    return Skew(
        balance=float(balance.mean()),
        cost_ms=cost,
        share=None if cost is None else cost / max(step_ms, 1e-9),
        gain=gain_of(run),
        would=outlook(run),
    )


# --- what it cost ----------------------------------------------------------------------------------------


def skew_ms(run: RunData) -> float | None:
    """Of a step: rows above the mean, at what a row costs, at most what ranks really waited."""
    straggle, cost = run.steps.column("straggle_ms")[run.window], cost_of_a_row(run)
    straggle = straggle[np.isfinite(straggle)]
    if cost is None or not len(straggle):
        return None
    rows = run.steps.ranks["rows"][np.isin(run.steps.rank_step, run.steps.step[run.window])]
    rows = rows[np.isfinite(rows).all(1)]
    above = float((rows.max(1) - rows.mean(1)).mean())
    return min(cost * above, float(straggle.mean()))


# --- what would have helped ------------------------------------------------------------------------------


def outlook(run: RunData) -> Outlook | None:
    """What a planner predicts for the average loads of a run that used none; planned once."""
    if "outlook" not in run.kept:
        try:
            run.kept["outlook"] = _outlook(run)
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
            run.kept["outlook"] = None  # files of another version, or of somebody else's making
    found: Outlook | None = run.kept["outlook"]
    return found


def _outlook(run: RunData) -> Outlook | None:
    if run.config.get("placement.planner", "static") != "static":
        return None
    step = run.steps.column("step_ms")[run.window]
    problems = list(problems_of(run))
    if not problems or not np.isfinite(step).any():
        return None
    step_s = 1e-3 * float(np.nanmean(step))
    now = [problem.judge(problem.current) for problem in problems]
    then = list(now)
    for layer in np.argsort([score.balance for score in now], kind="stable")[:MOST_LAYERS].tolist():
        then[layer] = problems[layer].judge(planned(problems[layer]))
    before, after = (sum(score.total for score in scores) for scores in (now, then))
    # Costs are measured apart from steps: what a plan saves is never more than its part of a real step, nor
    # more than ranks waited there for each other and for rows.
    waited = [run.steps.column(f"{part}_ms")[run.window] for part in ("straggle", "exposed")]
    most = 1e-3 * float(sum(np.nanmean(part) for part in waited if np.isfinite(part).any()))
    saved = min((before - after) * min(1.0, step_s / before), most) if before > 0 else 0.0
    if saved <= 0:
        return None
    return Outlook(
        planner=PLANNER,
        gain_ms=1e3 * saved,
        faster=step_s / max(step_s - saved, 1e-3 * step_s),
        balance=sum(score.balance for score in then) / len(then),
    )


def problems_of(run: RunData) -> Iterator[PlanProblem]:
    """What a planner would have been asked for each layer; nothing where costs or loads are not known."""
    probe, num_ranks = probe_of(run.choices), sharers(run.choices, run.config.get("moe.expert_tp"))
    if run.load is None or probe is None or num_ranks is None or num_ranks < 2:
        return
    copies = max(run.load.average_LPE.shape[1] // num_ranks, 1)
    node_P = tuple(run.choices.get("hosts") or [0] * num_ranks)
    lifetime = int(number(run.config.get("placement.lifetime"), PlacementConfig().lifetime))
    saved = rows_per_pair(number(run.config.get("gate.top_k"), 1), num_ranks)
    costs = PlacementCosts.from_measured(probe, lifetime, max(map(node_P.count, node_P)), saved)
    start = PlacementConfig(
        slots_per_rank=run.config.get("placement.slots_per_rank", "auto"), planner=PLANNER
    )
    for layer in range(run.load.num_layers):
        current = start.start(run.load.num_experts, num_ranks, layer)
        yield PlanProblem(
            counts_PE=run.load.counts(layer, num_ranks) / copies,
            slots_P=tuple(len(row) for row in current.slots),
            current=current,
            costs=costs,
            node_P=node_P,
        )


def planned(problem: PlanProblem) -> Placement:
    how = PlanConfig(planner=PLANNER)
    return plan(how, problem.counts_PE, problem.slots_P, problem.current, problem.costs, problem.node_P)


def probe_of(choices: dict[str, Any]) -> dict[str, Any] | None:
    """What ranks measured for planners, or in their first layer; None: nothing."""
    layers = choices.get("layers") or {}
    found = choices.get("placement") or next((one.get("probe") for one in layers.values()), None)
    return found if isinstance(found, dict) else None


def sharers(choices: dict[str, Any], expert_tp: Any) -> int | None:
    """Ranks that share the experts of a layer; None: not known."""
    axes = choices.get("ranks")
    if not isinstance(axes, list) or len(axes) != 4:
        return None
    _, ep, tp, _ = map(int, axes)
    return ep if expert_tp == "sharded" else ep * tp
