"""Which layers `planner = "auto"` searches, so that looking for plans costs next to nothing.

Idea. A plan is searched by a thread of one rank, and every search takes its time from that rank: the
interpreter runs one thread at a time, and on CPU no core may be idle. In a small model all layers together
take longer to plan than to train. So both are measured once, a search behind the first plan, and a layer is
searched

    in the first round                                              all of them
    where it surely pays     what could be won until the next round is PAYS times what the search takes
    in turn otherwise        searches take SHARE of all steps' time, those first that could win most

Contract: what is due follows from the number of the step, and the rest from loads and from two times that are
kept (`train/run/choices`): equal choices search alike. Runs that promise equal bits time neither of both: a
step takes what its products do at a fixed rate, and a search what searches of such tables were seen to take.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from moeclipse.balance.config import usual_slots
from moeclipse.balance.planner import NODES, SMALL
from moeclipse.comm.mesh import Mesh
from moeclipse.model.flops import LeastWork
from moeclipse.moe.tune.fixed_prices import rate
from moeclipse.moe.validate import expert_group
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.background_plan import PlanRequest

SHARE = 0.005
PAYS = 4.0
RECENT = 9
"""Steps whose median counts."""
SLOT_S, SEARCHED_S = 3e-3, 0.03
"""Seconds that a search takes for each slot of a small table, and for all of a large one; seen on x86."""
UNEVEN, DRIFTING = 3.0, 0.5
"""What a search is timed with: the busiest expert over the idlest one, and how far loads may drift."""


@dataclass(frozen=True, kw_only=True)
class SearchBudget:
    search_s: float
    """Of one layer."""
    step_s: float
    every: int
    """Steps between rounds."""
    first: int
    """Steps before the first round."""

    def picked(self, step: int, requests: Sequence[PlanRequest]) -> list[int]:
        """The layers that are searched after this step."""
        return self.worth(step, [request.avoidable_s for request in requests])

    def worth(self, step: int, avoidable_s: Sequence[float]) -> list[int]:
        """The same from what could be won of a step of each layer, at best."""
        done = step + 1
        if done <= self.first:
            return list(range(len(avoidable_s)))
        due = self._due_until(done) - self._due_until(done - self.every)
        order = sorted(range(len(avoidable_s)), key=lambda layer: (-avoidable_s[layer], layer))
        pays = PAYS * self.search_s / self.every
        return sorted(layer for turn, layer in enumerate(order) if turn < due or avoidable_s[layer] >= pays)

    def _due_until(self, done: int) -> int:
        return int(SHARE * self.step_s * max(done, 0) / self.search_s)


def search_seconds(request: PlanRequest) -> float:
    """Of a search that has something to find, whatever the loads are now."""
    num_experts = request.counts_PE.shape[1]
    counts_PE = (1.0 + request.counts_PE.mean()) * np.ones_like(request.counts_PE, dtype=float)
    uneven = replace(
        request,
        counts_PE=counts_PE * np.linspace(1.0, UNEVEN, num_experts),
        config=replace(request.config, noise=DRIFTING),
    )
    begun = time.thread_time()  # others may compute beside it
    uneven.plan()
    return max(time.thread_time() - begun, 1e-6)


def counted_times(config: TrainConfig, mesh: Mesh) -> dict[str, float]:
    """Both times by the book, the same in every run."""
    data, parts = config.data, (config.model, config.moe, config.gate)
    work = LeastWork.of(*parts, tokens=data.batch_size * data.seq_len, seq_len=data.seq_len)
    experts, ranks = config.moe.num_experts, expert_group(mesh, config.moe).size
    slots = ranks * usual_slots(experts, ranks)
    search_s = SEARCHED_S if slots > SMALL else SLOT_S * slots
    search_s *= NODES if len(set(mesh.hosts)) > 1 else 1
    return {"step_s": work.flops / (rate(mesh) * mesh.num_ranks), "search_s": search_s}


class StepClock:
    """How long steps take; what a run does between them does not count."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self._took.append(seconds)

    @property
    def median_s(self) -> float:
        """Of the last steps; a run that has just begun counts as if a step took no time."""
        return median(self._took or [0.0])
