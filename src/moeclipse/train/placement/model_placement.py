"""Which ranks hold which experts during a run: the placement of each layer, its replicas, and its changes.

    before the model   placement_of(layer)     from placement.slots, or even shares and empty slots
    buckets            bucket(...)             one table of owners for each layer (`expert_buckets`)
    after each step    after_step(...)         average replicas, ask for plans, take one, move

Contract. Training with any sequence of placements equals training without: gates speak of experts, gradients
of replicas are summed, and state moves with its owner. All of it is collective and decided alike on all
ranks. Without a [placement] in the configuration nothing here runs.

A plan that is under way when a checkpoint is saved is part of it: a resumed run takes it at the step at which
the first one did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
from torch import nn

from moeclipse.balance.load import LoadTrace
from moeclipse.balance.objective import PlacementCosts, rows_per_pair
from moeclipse.balance.ownership import Ownership
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig
from moeclipse.balance.policy import load_policy
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.core.steps import nth
from moeclipse.moe.layer import MoE
from moeclipse.moe.tune.fixed_prices import fixed_prices
from moeclipse.moe.tune.probe import Probe
from moeclipse.pipeline.overlap import StageLayout
from moeclipse.train.config import TrainConfig, planner_problems
from moeclipse.train.optim.adamw import AdamW
from moeclipse.train.optim.buckets import Bucket, MainGrad
from moeclipse.train.optim.shard_state import ShardState
from moeclipse.train.placement.background_plan import BackgroundPlanner, PlanRequest, Proposal, all_layers
from moeclipse.train.placement.expert_buckets import ExpertBucket
from moeclipse.train.placement.fedavg import average_replicas
from moeclipse.train.placement.placed_layer import PlacedLayer
from moeclipse.train.placement.search_budget import (
    SearchBudget,
    StepClock,
    counted_times,
    search_seconds,
)
from moeclipse.train.run.choices import Choices
from moeclipse.train.step.dtype import repeats

PATIENCE_S = 60.0
LEAST_OF_STEP = 0.01
"""That a plan of auto has to win."""


class ModelPlacement:
    def __init__(self, config: TrainConfig, mesh: Mesh, layout: StageLayout | None = None) -> None:
        problems = list(planner_problems(config, layout))
        if problems:
            raise ConfigError(problems)
        self.config, self.mesh = config.placement, mesh
        sharded = config.moe.expert_tp == "sharded" and mesh.tp > 1
        self.group = mesh.shard_experts if sharded else mesh.experts
        self.num_experts, self.seed = config.moe.num_experts, config.run.seed
        self.main_grad: MainGrad = config.optim.main_grad
        self.lends, self.calls = config.moe.shadow == "auto", config.optim.accumulate
        self.rows_saved = rows_per_pair(config.gate.expected_experts, self.group.size)
        self.policy = load_policy(self.config.policy) if self.config.policy else None
        self.number_of = {layer: number for number, layer in enumerate(config.model.expert_layers)}
        self.layers: list[PlacedLayer] = []
        self.planner = BackgroundPlanner(mesh)
        self.choices = Choices(mesh)
        self.costs: PlacementCosts | None = None
        self.how_sure = ""
        self.unpriced = False
        """Whether trials could not tell what a planner must know: auto leaves experts where they are."""
        self.steps = StepClock()
        self.search: dict[str, float] | None = None
        """What steps and searches take by the book; None: they are timed."""
        if repeats(config.run.deterministic, mesh.device):
            self.search = counted_times(config, mesh)
        self.plans_taken = self.transfers = 0
        self.taken: dict[str, float] = {}
        """For the record of the last step: what the plan that was taken after it is predicted to win, behind
        which step it was asked for, and which was the first without trials: those take their time, too."""
        self._tried_until = 0

    @property
    def in_use(self) -> bool:
        return self.config.used_by(self.mesh.ep * self.mesh.tp)

    def placement_of(self, layer: int) -> Placement | None:
        """What layer `layer` of the model begins with; None: even shares, for good."""
        if not self.in_use or layer not in self.number_of:
            return None
        return self.config.start(self.num_experts, self.group.size, self.number_of[layer])

    def bucket(self, parameter: nn.Parameter, name: str, layer: MoE, key: str) -> Bucket | None:
        if not self.in_use:
            return None
        ownership = self._owners(layer.dispatcher.placement, layer)
        prefix = f"{name}." if name else ""
        return ExpertBucket(parameter, prefix, layer, key, ownership, self.mesh, self.main_grad)

    def _owners(self, placement: Placement, layer: MoE, old: Ownership | None = None) -> Ownership:
        dp = self.mesh.dp * (2 if self.mesh.mirrored else 1)  # owners are spread over both places
        return Ownership.of(placement, dp, reduce=self.config.reduce, layer=layer.layer, old=old)

    def bind(self, optim: AdamW) -> None:
        """After the optimizer has been made: find what belongs to each layer."""
        self.optim = optim
        found: dict[int, tuple[list[ExpertBucket], list[ShardState | None]]] = {}
        frozen = [(bucket, None) for bucket in optim.buckets.frozen]
        for bucket, state in (*zip(optim.buckets, optim.states, strict=True), *frozen):
            if isinstance(bucket, ExpertBucket):
                buckets, states = found.setdefault(bucket.layer.layer, ([], []))
                buckets.append(bucket)
                states.append(state)
        self.layers = [PlacedLayer(*found[number]) for number in sorted(found)]

    def after_step(self, step: int, loads: LoadTrace) -> list[str]:
        """What is to be done between two steps, where there are layers to place; returns what is to be said
        about it. Collective."""
        self.taken = {}
        self.steps.add(self.mesh.recorder.step_so_far_s)
        config, done = self.config, step + 1
        if any(placed.layer.schedule.cuts.trials is not None for placed in self.layers):
            self._tried_until = done
        if config.reduce == "fedavg" and done % config.average_every == 0:
            average_replicas(self.layers)
        return self._plan(step, loads) if config.moves else []

    def replicas_are_equal(self, step: int) -> bool:
        """Whether, before the update of `step`, replicas have to be: with fedavg only after an average."""
        return self.config.reduce == "sum" or step % self.config.average_every == 0

    def before_save(self) -> None:
        """A checkpoint holds one set of weights for each expert."""
        if self.layers and self.config.reduce == "fedavg":
            average_replicas(self.layers)

    def _plan(self, step: int, loads: LoadTrace) -> list[str]:
        current = [placed.placement for placed in self.layers]
        proposal, note = self.planner.poll(step, self.config.delay, current, self._patience_s)
        notes = [note] if note else []
        if proposal is not None:
            notes += self.move(proposal)
        if loads.jumped:
            self.planner.drop()
        if loads.asks(self.config, step, self.planner.pending is None):
            if self.costs is None and (told := self._price()):
                notes.append(told)
            if self.costs is not None:
                self._ask(step, self._requests(step, loads, self.costs))
        return notes

    def _price(self) -> str:
        """Costs for planners, or what is to be said, once, where they are not known. Collective."""
        if self.unpriced:
            return ""
        layer = self.layers[0].layer
        probe = self.choices.costs_for_planners(layer)
        # Stages measure apart, and plan together or not at all.
        everyone = self.mesh.gather_objects(probe.unknown) if self.config.at_ease else []
        if unknown := list(dict.fromkeys(name for names in everyone for name in names)):
            self.unpriced = True
            what = ", ".join(name.replace("_", " ") for name in unknown)
            return f"experts stay where they are: trials could not tell what they cost ({what})"
        if probe.unknown:  # who names a planner gets plans
            probe = layer.measure_costs(fixed_prices)
        per_node = max(Counter(layer.schedule.hosts).values())
        self.costs = costs_of(probe, self.config.lifetime, per_node, self.rows_saved)
        self.how_sure = (
            "by fixed prices"
            if probe.fixed
            else (f"rows give or take {100 * probe.row_doubt:.0f} %, wires {100 * probe.wire_doubt:.0f} %")
        )
        return ""

    def _ask(self, step: int, requests: Sequence[PlanRequest]) -> None:
        if not self.config.at_ease:
            self.planner.request(step, requests)
            return
        known = self.choices.search
        if known is None and self.search is not None:
            known = self._know(self.search)
        if known is None:
            # All layers are searched in the first round: how long that takes is asked in the second.
            self._know({"step_s": self._of_leader(self.steps.median_s)})
            given = (requests, all_layers, self._least_s, search_seconds)
            self.planner.request(step, *given)
            return
        if "search_s" not in known:
            mine = (self.planner.search_s or search_seconds(requests[0])) if self.planner.leads else 0.0
            known = self._know({**known, "search_s": self._of_leader(mine)})
        budget = SearchBudget(**known, every=self.config.every, first=self.config.start_step)
        self.planner.request(step, requests, budget.picked, self._least_s)

    def _of_leader(self, value: float) -> float:
        return float(self.mesh.gather_objects([value])[self.mesh.stage.ranks[0]][0])

    def _know(self, search: dict[str, float]) -> dict[str, float]:
        """What budgets of searches come from, and who repeats this run needs."""
        self.choices.search = search
        self.choices.write()
        return search

    @property
    def _least_s(self) -> float:
        """What a plan has to win of a step: with auto more than its moves and its vote may take of one."""
        search = self.choices.search
        return LEAST_OF_STEP * search["step_s"] if self.config.at_ease and search is not None else 0.0

    @property
    def _patience_s(self) -> float | None:
        """For a plan that is late: a solver may take its time for every layer."""
        per_layer = self.config.time_limit_s if self.config.planner == "exact" else 1.0
        return PATIENCE_S + len(self.layers) * per_layer

    def move(self, proposal: Proposal) -> list[str]:
        """Take a plan that all ranks agreed on."""
        changed = [
            (placed, new, load)
            for placed, new, load in zip(self.layers, proposal.placements, proposal.expected, strict=True)
            if new != placed.placement
        ]
        if changed and self.config.reduce == "fedavg":
            average_replicas(self.layers)
        transfers = 0
        for placed, new, load in changed:
            ownership = self._owners(new, placed.layer, placed.ownership)
            transfers += placed.migrate(ownership, self.optim.updates, np.array(load))
        if not changed:
            return []
        self.plans_taken += 1
        self.transfers += transfers
        now, then = proposal.seconds
        self.taken = {"plan_before_ms": 1e3 * now, "plan_after_ms": 1e3 * then}
        self.taken |= {"plan_step": proposal.step, "plan_since": self._tried_until}
        return [
            f"plan of step {nth(proposal.step)}: {len(changed)} of {len(self.layers)} layers changed, "
            f"{transfers} transfers; rows, replicas and moves are predicted to take {1e3 * then:.3g} ms "
            f"a step instead of {1e3 * now:.3g}" + (f" ({self.how_sure})" if self.how_sure else "")
        ]

    def _requests(self, step: int, loads: LoadTrace, costs: PlacementCosts) -> list[PlanRequest]:
        found = []
        costs = replace(costs, every=loads.lasting(self.config))
        for placed in self.layers:
            number = self.number_of[placed.number]
            planner = PlanConfig(
                planner="auto" if self.policy else self.config.planner,
                max_moved=self.config.max_moved,
                time_limit=self.config.time_limit_s,
                noise=loads.error(self.config.ahead),
                seed=(self.seed * 1_000_003 + step) * 1009 + placed.number,
            )
            # Copies hold the same experts and share out other tokens: their mean is a copy's load.
            counts_PE = loads.average.rows_LPE[number].reshape(self.mesh.dp, self.group.size, -1).mean(0)
            found.append(
                PlanRequest(
                    config=planner,
                    counts_PE=counts_PE,
                    current=placed.placement,
                    costs=costs,
                    node_P=placed.layer.schedule.hosts,
                    lends=self.lends,
                    calls=self.calls,
                    policy=self.policy,
                )
            )
        return found

    def summary(self) -> dict[str, float]:
        """For the summary of a run."""
        # Transfers keep the name under which the first release wrote them down.
        return {
            "plans": self.plans_taken,
            "parcels": self.transfers,
            "left_out": self.planner.left_out,
            "waited_ms": round(1e3 * self.planner.waited_s),
        }

    def state(self) -> list[dict[str, object]]:
        """For a checkpoint: who holds what, by layer of the whole model. Collective."""
        mine = [
            {
                "layer": placed.number,
                "slots": placed.placement.slots,
                "primary": placed.placement.primary,
                "expected": None if placed.expected_E is None else placed.expected_E.tolist(),
            }
            for placed in self.layers
        ]
        if not self.in_use or self.mesh.pp == 1:
            return mine
        everyone = self.mesh.gather_objects(mine)
        return list({entry["layer"]: entry for entries in everyone for entry in entries}.values())

    def load_state(self, saved: list[Mapping[str, object]] | None) -> None:
        """Before weights are read: hold what the checkpoint held, where that fits these ranks and slots.

        Without a planner the configuration counts: its table, or even shares.
        """
        by_layer = {entry["layer"]: entry for entry in saved or ()}
        for placed in self.layers:
            now, entry = placed.placement, by_layer.get(placed.number)
            if entry is None or not self.config.moves:
                continue
            try:
                found = Placement.parse(
                    {"slots": entry["slots"], "primary": entry["primary"]},
                    num_experts=now.num_experts,
                    num_ranks=now.num_ranks,
                )
            except ConfigError:
                continue
            if [len(row) for row in found.slots] == [len(row) for row in now.slots]:
                expected = entry.get("expected")
                loads = None if expected is None else np.array(expected)
                placed.reset(self._owners(found, placed.layer), loads)


def costs_of(probe: Probe, every: int, ranks_per_node: int = 1, rows_saved: float = 1.0) -> PlacementCosts:
    """What was measured, in the terms of planners."""
    return PlacementCosts.from_measured(asdict(probe), every, ranks_per_node, rows_saved)
