"""Plans made beside training, and the vote that lets all ranks take one at the same step.

    request   a thread on the first rank of the stage plans from a copy of the average loads
    poll      while a plan is pending, all ranks learn after each step whether it is there: one number
    vote      that rank's plan goes to all; each checks it and answers with its checksum
    commit    only if all agree; otherwise nobody moves, and the reason is in the step's notes

Training never waits for a planner: a plan that takes long is taken later, and the plans that would have been
due in between are left out (and counted).
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig, plan
from moeclipse.comm.flight.exchange import gather_to_host
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a planner needs to know of one layer."""

    config: PlanConfig
    counts_PE: np.ndarray
    current: Placement
    costs: PlacementCosts
    node_P: tuple[int, ...]

    def plan(self) -> Placement:
        slots_P = [len(row) for row in self.current.slots]
        return plan(self.config, self.counts_PE, slots_P, self.current, self.costs, self.node_P)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan for all layers of a stage, as it travels."""

    step: int
    placements: tuple[Placement, ...]
    expected: tuple[tuple[float, ...], ...]
    """The loads that each layer was planned for."""

    def to_json(self) -> str:
        tables = [{"slots": p.slots, "primary": p.primary} for p in self.placements]
        return json.dumps({"step": self.step, "placements": tables, "expected": self.expected})

    @classmethod
    def parse(cls, text: str, current: Sequence[Placement]) -> Proposal:
        """Checked against the placements that hold now: a plan that does not fit is refused."""
        value = json.loads(text)
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
        return cls(step=value["step"], placements=tuple(found), expected=tuple(map(tuple, value["expected"])))


class PlanThread:
    """One plan at a time. Where making it fails, its result is the error."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._found: str | Exception | None = None

    def start(self, work: Callable[[], str]) -> None:
        assert self._thread is None, "one plan at a time"

        def run() -> None:
            try:
                self._found = work()
            except Exception as error:  # whatever a solver does, training goes on
                self._found = error

        self._found = None
        self._thread = threading.Thread(target=run, name="planner", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> None:
        """Wait until nothing is being planned."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> str | Exception:
        """The result, once it is ready."""
        assert self.ready
        assert self._found is not None
        self._thread = None
        return self._found


class BackgroundPlanner:
    """The plans of one stage: made by the first of its ranks, agreed on by all."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.leads = mesh.rank == mesh.stage.ranks[0]
        self.thread = PlanThread()
        self.pending: int | None = None
        """The step at which a plan was asked for, while it is not there."""
        self.left_out = 0
        """Plans that were due while an earlier one was not there yet."""

    def request(self, step: int, requests: Sequence[PlanRequest]) -> None:
        """On all ranks, at the same step."""
        if self.pending is not None:
            self.left_out += 1
            return
        self.pending = step
        if self.leads:

            def work() -> str:
                placements = tuple(request.plan() for request in requests)
                loads = tuple(tuple(request.counts_PE.sum(0).tolist()) for request in requests)
                return Proposal(step=step, placements=placements, expected=loads).to_json()

            self.thread.start(work)

    def poll(self, current: Sequence[Placement]) -> tuple[Proposal | None, str]:
        """(the plan that all ranks take now, or None; what is to be said about it). Collective."""
        if self.pending is None:
            return None, ""
        ready = torch.tensor([int(self.thread.ready or not self.leads)], device=self.mesh.device)
        everyone = gather_to_host(self.mesh.grads, self.mesh.world, ready, "is the plan ready").get()
        if not all(flag for (flag,) in everyone):
            return None, ""
        asked, self.pending = self.pending, None
        result = self.thread.take() if self.leads else ""
        told = {"plan": result} if isinstance(result, str) else {"error": f"{result}"}
        leader = self.mesh.gather_objects(told)[self.mesh.stage.ranks[0]]
        if "error" in leader:
            return None, f"the planner asked at step {asked} failed: {leader['error']}; experts stay"
        return self._vote(leader["plan"], current)

    def _vote(self, text: str, current: Sequence[Placement]) -> tuple[Proposal | None, str]:
        proposal, problem = None, ""
        try:
            proposal = Proposal.parse(text, current)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            problem = f"rank {self.mesh.rank}: {error}"
        held = json.dumps([[p.slots, p.primary] for p in current])
        mine = {"checksum": zlib.crc32(f"{text}{held}".encode()), "problem": problem}
        votes = self.mesh.gather_objects(mine)
        problems = [vote["problem"] for vote in votes if vote["problem"]]
        stage = [votes[rank]["checksum"] for rank in self.mesh.stage.ranks]
        differs = [len(set(stage)) > 1]
        if any(flag for (flag,) in self.mesh.gather_objects(differs)):
            problems.append("ranks disagree about the plan, or about what holds now")
        if problems:
            return None, f"a plan was refused, experts stay: {'; '.join(problems)}"
        return proposal, ""
