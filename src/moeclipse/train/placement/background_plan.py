"""Plans made in a background thread, and the vote that lets all ranks take one at the same step.

    request   a thread on the first rank of the stage plans from a copy of the average loads
    poll      a fixed number of steps later the plan is due: who is early waits for it, and that is counted
    vote      that rank's plan goes to all; each checks it and answers with its checksum
    commit    only if all agree; otherwise nobody moves, and the reason is in the step's notes

Stages of a pipeline plan apart and take their plans together: where one has none, no rank votes.

When a plan is taken depends on step numbers alone, never on how long planning took: two runs that plan alike
train alike, bit by bit. A plan that is under way when a checkpoint is saved is saved with it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np

from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, answer
from moeclipse.balance.policy import Policy
from moeclipse.balance.problem import PlanProblem, fitted
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import parse_json
from moeclipse.core.steps import nth

SOON_S = 5e-5


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a planner needs to know of one layer."""

    config: PlanConfig
    counts_PE: np.ndarray
    current: Placement
    costs: PlacementCosts
    node_P: tuple[int, ...]
    lends: bool = False
    calls: int = 1
    policy: Policy | None = None
    """A planner of the user's own."""

    @cached_property
    def problem(self) -> PlanProblem:
        return PlanProblem(
            counts_PE=self.counts_PE,
            slots_P=tuple(len(row) for row in self.current.slots),
            current=self.current,
            costs=self.costs,
            node_P=self.node_P,
            noise=self.config.noise,
            turnover=self.config.turnover,
            lends=self.lends,
            calls=self.calls,
        )

    def plan(self) -> Placement:
        if self.policy is None:
            return answer(self.config, self.problem)
        found = self.policy(self.problem)
        if not isinstance(found, Placement):
            raise ConfigError(f"placement.policy returned {type(found).__name__}, and no Placement")
        return fitted(found, self.problem.slots_P).arranged_like(self.current)

    @property
    def avoidable_s(self) -> float:
        """Of a step of this layer: what the best of all placements might win with these loads."""
        problem = replace(self.problem, noise=0.0, lends=False)
        return max(problem.judge(problem.start).total - problem.bound, 0.0)

    def seconds(self, new: Placement) -> tuple[float, float, float]:
        """Of a step of this layer, as predicted: as it is placed now, and under another placement.

        And what the first of them may be off by.
        """
        problem = self.problem
        try:
            now = problem.judge(self.current)
            return now.total, problem.judge(new).total, self.costs.unsure_seconds(now)
        except Exception:  # a plan that does not fit has no price: the vote refuses it, and says why
            return 0.0, 0.0, 0.0


Picked = Callable[[int, Sequence[PlanRequest]], Collection[int]]
"""From a step and what is asked for each layer to the layers that are planned."""


def all_layers(_step: int, requests: Sequence[PlanRequest]) -> Collection[int]:
    return range(len(requests))


class SavedPlan(TypedDict):
    """In a checkpoint: when the planner was asked, and what the first rank of each stage has of it."""

    asked: int
    plans: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan for all layers of a stage, as it travels."""

    step: int
    placements: tuple[Placement, ...]
    expected: tuple[tuple[float, ...], ...]
    """The loads that each layer was planned for."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """Of a step of all these layers, as predicted: as they were placed, and under this plan."""

    def to_json(self) -> str:
        tables = [{"slots": p.slots, "primary": p.primary} for p in self.placements]
        told = {"step": self.step, "placements": tables, "expected": self.expected, "seconds": self.seconds}
        return json.dumps(told)

    @classmethod
    def parse(cls, text: str, current: Sequence[Placement]) -> Proposal:
        """Checked against the placements that hold now: a plan that does not fit is refused."""
        value = parse_json(text)
        if len(value["placements"]) != len(current):
            raise ConfigError(
                f"the plan has {len(value['placements'])} layers, but this rank holds {len(current)}"
            )
        found = []
        for number, (table, now) in enumerate(zip(value["placements"], current, strict=True)):
            new = Placement.parse(table, num_experts=now.num_experts, num_ranks=now.num_ranks)
            if [len(row) for row in new.slots] != [len(row) for row in now.slots]:
                raise ConfigError(
                    f"the plan of layer {number} has {[len(row) for row in new.slots]} slots on its ranks, "
                    f"but there are {[len(row) for row in now.slots]}"
                )
            found.append(new)
        now, then = value.get("seconds", (0.0, 0.0))
        return cls(
            step=value["step"],
            placements=tuple(found),
            expected=tuple(map(tuple, value["expected"])),
            seconds=(float(now), float(then)),
        )


def propose(
    step: int,
    requests: Sequence[PlanRequest],
    picked: Picked = all_layers,
    least_s: float = 0.0,
) -> Proposal:
    """Layers that are not picked stay as they are.

    So do all where `least_s` is given and they win less together, or less than prices may be off by.
    """
    searched = picked(step, requests)
    now_held = tuple(request.current for request in requests)
    placements = tuple(r.plan() if i in searched else r.current for i, r in enumerate(requests))
    loads = tuple(tuple(request.counts_PE.sum(0).tolist()) for request in requests)
    pairs = [r.seconds(new) for r, new in zip(requests, placements, strict=True)]
    now, then, unsure = (sum(each[column] for each in pairs) for column in range(3))
    # What somebody asked for is done, even if it loses.
    if least_s > 0 and now - then < max(least_s, unsure):
        placements, then = now_held, now
    return Proposal(step=step, placements=placements, expected=loads, seconds=(now, then))


@contextmanager
def giving_way() -> Iterator[None]:
    """This thread computes, and hands the interpreter to others as soon as they ask for it.

    By default it would keep them waiting for 5 ms whenever they come back from an operation of torch, a
    hundred times in a step: training was seen to stand still while plans are made.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SOON_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class PlanThread:
    """One plan at a time. Where making it fails, its result is the error."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._ready.set()
        self._found: str | Exception | None = None

    def start(self, work: Callable[[], str], then: Callable[[], None] = lambda: None) -> None:
        """`then`: what is done behind it, and waited for only by the next plan."""
        assert self._found is None, "one plan at a time"
        self.join()

        def run() -> None:
            with giving_way():
                try:
                    self._found = work()
                except Exception as error:  # whatever a solver does, training goes on
                    self._found = error
                finally:
                    self._ready.set()
                with suppress(Exception):
                    then()

        self._ready.clear()
        self._thread = threading.Thread(target=run, name="planner", daemon=True)
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def found(self) -> str | Exception:
        """The result, waited for; it stays until it is taken."""
        self._ready.wait()
        assert self._found is not None, "nothing was asked for"
        return self._found

    def take(self) -> str | Exception:
        """The result, waited for; another plan may be started."""
        found, self._found = self.found(), None
        return found

    def put(self, found: str | Exception) -> None:
        """A result that was found earlier, by a run that this one goes on with."""
        self._found = found
        self._ready.set()


class BackgroundPlanner:
    """The plans of one stage: made by the first of its ranks, agreed on by all."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.leads = mesh.rank == mesh.stage.ranks[0]
        self.thread = PlanThread()
        self.pending: int | None = None
        """The step at which a plan was asked for, until it is taken."""
        self.left_out = 0
        """Plans that were due while an earlier one was pending."""
        self.waited_s = 0.0
        """How long training has waited for plans."""
        self._search_s: float | None = None

    def request(
        self,
        step: int,
        requests: Sequence[PlanRequest],
        picked: Picked = all_layers,
        least_s: float = 0.0,
        timed: Callable[[PlanRequest], float] | None = None,
    ) -> None:
        """On all ranks, at the same step. `timed` times a search behind the plan; the rest: `propose`."""
        if self.pending is not None:
            self.left_out += 1
            return
        self.pending = step

        def time_search() -> None:
            self._search_s = None if timed is None else timed(requests[0])

        if self.leads:
            self.thread.start(lambda: propose(step, requests, picked, least_s).to_json(), time_search)

    def drop(self) -> None:
        """Forget a plan that is under way: it was asked for with loads that are no longer. On all ranks."""
        self.pending, self.thread = None, PlanThread()

    @property
    def search_s(self) -> float | None:
        """Of one search, if it was timed on this rank; waited for."""
        self.thread.join()
        return self._search_s

    def poll(
        self, step: int, delay: int, current: Sequence[Placement], patience_s: float | None = None
    ) -> tuple[Proposal | None, str]:
        """(the plan that all ranks take now, or None; what is to be said about it). Collective."""
        if self.pending is None or step < self.pending + delay:
            return None, ""
        asked, self.pending = self.pending, None
        begun = time.perf_counter()
        told = _told(self.thread.take()) if self.leads else {}
        everyone = self.mesh.gather_objects(told, patience_s)
        self.waited_s += time.perf_counter() - begun
        if errors := list(dict.fromkeys(one["error"] for one in everyone if "error" in one)):
            return None, f"the planner asked at step {nth(asked)} failed: {'; '.join(errors)}; experts stay"
        return self._vote(everyone[self.mesh.stage.ranks[0]]["plan"], current)

    def state(self) -> SavedPlan | None:
        """For a checkpoint: the plans under way, waited for, by the first rank of their stage. Collective."""
        if self.pending is None:
            return None
        told = self.mesh.gather_objects(_told(self.thread.found()) if self.leads else {})
        plans = {str(rank): plan for rank, plan in enumerate(told) if plan}
        return {"asked": self.pending, "plans": plans}

    def load_state(self, saved: SavedPlan | None) -> None:
        """Go on with a plan that was under way; one that was made for other ranks is refused by the vote."""
        self.pending = None if saved is None else int(saved["asked"])
        self.thread = PlanThread()  # what another one still plans is nobody's any more
        if saved is not None and self.leads:
            told = saved["plans"].get(str(self.mesh.rank), {"error": "it was made for other ranks"})
            self.thread.put(told["plan"] if "plan" in told else RuntimeError(told["error"]))

    def _vote(self, text: str, current: Sequence[Placement]) -> tuple[Proposal | None, str]:
        proposal, problem = None, ""
        try:
            proposal = Proposal.parse(text, current)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            problem = f"rank {self.mesh.rank}: {error}"
        held = json.dumps([[p.slots, p.primary] for p in current])
        votes = self.mesh.gather_objects((zlib.crc32(f"{text}{held}".encode()), problem))
        problems = [problem for _, problem in votes if problem]
        stage = [votes[rank][0] for rank in self.mesh.stage.ranks]
        differs = [len(set(stage)) > 1]
        if any(flag for (flag,) in self.mesh.gather_objects(differs)):
            problems.append("ranks disagree about the plan, or about what holds now")
        if problems:
            return None, f"a plan was refused, experts stay: {'; '.join(problems)}"
        return proposal, ""


def _told(result: str | Exception) -> dict[str, str]:
    return {"plan": result} if isinstance(result, str) else {"error": f"{result}"}
