"""Which programs a layer's exchange runs: how ranks are grouped, how rows are cut, what has shadows.

"blocking" is one group of all ranks and one chunk: send all, compute all, return all. "smart" cuts the
exchange into units (step, chunk). Ranks that are close form a group: at first those of one host, where there
are several hosts; otherwise each rank for itself. Rows that stay in the group are computed first and last,
while the first of the others arrive and the last of them return. Where chunks or group size are "auto", they
are chosen once, from costs measured after the first step and the counts of the second: the programs are
simulated, and the best of them tried (`moe/tune/granularity`). "auto" begins as blocking, tries that beside
the best of the others, and leaves it only for what was seen to be faster; how many calls that takes may be
limited. Where trials cannot tell what rows and wires cost, nothing is cut and nothing is lent.

How rows are cut and what is lent changes the last bits of results. Where equal runs must have equal bits
(`by_the_book`), nothing is timed: prices are fixed (`moe/tune/fixed_prices`), the simulator's first is taken
where cuts were asked for, and "auto" stays blocking.

Programs are built and verified once for each granularity, for all layers alike. Everything is decided from
what all ranks know, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NotRequired

import numpy as np
import torch

from moeclipse.balance.asking import AskingState
from moeclipse.balance.shadow import ShadowPlan
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.balance.shadow_policy import ShadowPolicy
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import MoEConfig
from moeclipse.moe.exchange.dispatch import Dispatcher, DispatchPlan
from moeclipse.moe.exchange.dispatch_combine import Programs
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.served import serves
from moeclipse.moe.experts.shadow import RankShadows
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.tune.cut_choice import CutChoice, CutState, LayerChoice
from moeclipse.moe.tune.fixed_prices import fixed_prices
from moeclipse.moe.tune.granularity import Granularity, Groups
from moeclipse.moe.tune.probe import Probe
from moeclipse.moe.tune.shadow_choice import NOBODY, ShadowChoice, gather_counts
from moeclipse.moe.tune.shadow_price import measured
from moeclipse.moe.tune.stopwatch import Stopwatch, tell
from moeclipse.ops.sending import MOST_CHOICES
from moeclipse.schedule.check import verify
from moeclipse.schedule.shape import ExchangeShape, Shadow
from moeclipse.schedule.smart import backward_of, exchange_shape, smart

SOME_SHADOW = (Shadow(expert=0, owner=0, ranks=(1,)),)
"""Programs depend on whether there are shadows, not on which."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What was decided for one call beside what follows from its rows."""

    use: Granularity
    probe: Probe | None
    asks: bool
    """For counts, to choose shadows from."""
    policy: ShadowPolicy | None = None
    """Of one's own, for shadows."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What one call of a layer does, before sizes travel."""

    shape: ExchangeShape
    programs: Programs
    decided: Decided
    shadows: RankShadows | None
    """What this rank shadows in this call; None where no rank does."""
    plan: ShadowPlan | None
    """Which experts have shadows where; None where nobody asked."""
    guests: Dispatcher | None
    """With shadows that serve other ranks as slots of their own; None where none does."""
    counts_PE: np.ndarray
    """Pairs of each rank for each expert, where shadows were asked for; else empty."""
    costs: ShadowCosts | None
    serves: bool
    """Whether shadows of this call may compute rows of other ranks."""
    watch: Stopwatch | None
    """Times the call, while that is wanted."""

    @property
    def shadowed(self) -> list[int]:
        """Pairs of this rank for each expert that it shadows."""
        assert self.shadows is not None
        if self.guests is not None:
            return []  # counted with all rows that arrive
        return [int(self.counts_PE[self.shadows.rank, expert]) for expert in self.shadows.experts]


def plans_on_device(scores_TK: torch.Tensor) -> bool:
    """Whether `moe/exchange/dispatch_on_device` says who sends what to whom: alike on all ranks."""
    return scores_TK.is_cuda and scores_TK.dtype == torch.float32 and scores_TK.shape[1] <= MOST_CHOICES


@cache
def shape_of(
    num_ranks: int,
    groups: Groups,
    chunks: int,
    units: tuple[tuple[int, int], ...] | None,
    shadows: bool,
    serving: bool,
) -> ExchangeShape:
    cut: dict[str, Any] = {"groups": groups, "chunks": chunks, "units": units}
    return exchange_shape(num_ranks, **cut, shadows=SOME_SHADOW if shadows else (), serving=serving)


@cache
def programs_of(shape: ExchangeShape) -> Programs:
    shapes = shape, backward_of(shape), backward_of(shape, own_weights=0)
    forward, backward, pieces = (verify(smart(wanted)) for wanted in shapes)
    return Programs(forward=forward, backward=backward, pieces=pieces)


class PolicyState(CutState):
    """Of a layer's policy in a checkpoint; the first ones lack what may be left out."""

    calls: NotRequired[int]
    shadows: NotRequired[AskingState]


class ExchangeSchedule:
    """The granularity in use, and the shadows of each step."""

    def __init__(self, config: MoEConfig, hosts: tuple[int, ...]) -> None:
        self.config, self.num_ranks, self.hosts = config, len(hosts), hosts
        self.cuts, self.shadows = CutChoice(config, hosts), ShadowChoice(config, hosts)
        self.probe: Probe | None = None
        self.on_choice: Callable[[LayerChoice], None] = lambda _: None
        """Told, before it acts, what was decided from times."""
        self.by_the_book = False
        """Whether equal runs must choose alike: nothing is timed, and prices are fixed."""
        self._known: LayerChoice | None = None
        """What an equal run chose."""
        self._calls = self._rows = 0
        self._computed: list[int] = []

    @property
    def _wants_costs(self) -> bool:
        return self.cuts.tries(self.by_the_book) or self.shadows.automatic or self._known is not None

    def shape(
        self, shadows: bool = False, use: Granularity | None = None, serving: bool = False
    ) -> ExchangeShape:
        use = use or self.cuts.use
        return shape_of(self.num_ranks, use.groups, use.chunks, use.units, shadows, serving)

    def programs(self, shape: ExchangeShape) -> Programs:
        return programs_of(shape)

    def decide(
        self,
        routing: Routing,
        dispatcher: Dispatcher,
        experts: PairwiseExperts,
        mesh: Mesh,
        where: str,
        *,
        learns: bool,
        decided: Decided | None = None,
        plain: PairwiseExperts | None = None,
    ) -> Decision:
        """How the rows of one call travel, and which experts have shadows.

        `plain`: what computes the rows, where the call runs in one go: its shadows may serve others, too.
        `learns`: the call may be timed and counted. `decided`: what an earlier call decided that is now
        repeated; nothing is learned from it.
        """
        ids_TK = routing.expert_ids_TK
        if learns:
            self._measure(ids_TK, dispatcher, experts, mesh, where)
        watch = self.cuts.watch if decided is None else None
        asks, policy = self.shadows.asking.asks, self.shadows.here.policy or self.shadows.policy
        decided = decided or Decided(use=self.cuts.use, probe=self.probe, asks=asks, policy=policy)
        costs, mine, counts_PE, may_serve = None, None, NOBODY, False
        self.shadows.plan = None
        if self.shadows.wanted != "off" or decided.policy is not None:
            if decided.policy is not None and getattr(experts.experts, "joint", False):
                raise ConfigError("one module for all experts cannot lend one; give a module for each expert")
            costs, may_serve = self._shadow_costs(decided), serves(plain)
            asked = (ids_TK, dispatcher, where, costs, decided.asks, may_serve, decided.policy)
            mine, counts_PE = self.shadows.choose(*asked)
        guests = self.shadows.guests(dispatcher) if mine is not None else None
        shape = self.shape(shadows=mine is not None, use=decided.use, serving=guests is not None)
        return Decision(
            shape=shape,
            programs=self.programs(shape),
            decided=decided,
            shadows=mine,
            plan=self.shadows.plan,
            guests=guests,
            counts_PE=counts_PE,
            costs=costs,
            serves=may_serve,
            watch=watch,
        )

    def surprised(self, decision: Decision, plan: DispatchPlan) -> Decided | None:
        """After sizes have travelled: what is decided for a call that should have asked; None for most.

        Not where calls are cut into pieces, nor where launches are compared with a program.
        """
        given, costs = decision.decided, decision.costs
        if not decision.serves or costs is None or given.probe is None or not self.shadows.automatic:
            return None
        if plan.dispatcher.lane.recorder.ledger is not None:
            return None
        asks = self.shadows.surprised(plan, costs, given.probe)
        return replace(given, asks=True) if asks else None

    def learn(self, decision: Decision, plan: DispatchPlan) -> None:
        """After sizes have travelled: how many rows this rank computes, and whether to ask for shadows."""
        probe = decision.decided.probe
        if decision.costs is not None and probe is not None and self.shadows.automatic:
            self.shadows.learn(plan, decision.costs, probe, decision.serves)
        shadowed = decision.shadowed if decision.shadows else []
        self._count(plan, sum(shadowed), guests=decision.guests is not None)

    def _measure(
        self, ids_TK: torch.Tensor, dispatcher: Dispatcher, experts: PairwiseExperts, mesh: Mesh, where: str
    ) -> None:
        """The second call measures costs; the best granularities by simulation are then tried in turn."""
        self._calls += 1
        cuda, known = ids_TK.is_cuda, self._known
        if self._calls == 2 and self.probe is None and self._wants_costs:
            with mesh.recorder.apart("costs of an exchange"):
                if known is not None:
                    self._repeat(known, cuda)
                elif self.by_the_book:
                    self.probe = fixed_prices(experts, dispatcher, mesh)
                else:
                    self.probe = measured(self.shadows, experts, dispatcher, ids_TK, mesh)
                probe = self.probe
                # By the book nobody writes down how rows are cut: who repeats it finds it again.
                if probe is not None and (known is None or probe.fixed):
                    if self.cuts.tries(self.by_the_book) and probe.prices_rows:
                        self.cuts.begin(gather_counts(ids_TK, dispatcher, where), dispatcher, probe, cuda)
                    self._keep()
        if self.cuts.trials is not None:
            with mesh.recorder.apart("trials of granularities"):
                self.cuts.take_turn(known, partial(tell, mesh), self._keep)

    def _keep(self, chosen: Granularity | None = None) -> None:
        assert self.probe is not None
        self.on_choice(self.cuts.record(self.probe, chosen))

    def take_choice(self, choice: LayerChoice | None) -> None:
        """What an equal run chose is taken when this one would measure; what was tuned, at once."""
        self._known = choice
        if choice is not None:
            self.cuts.take_tuned(choice)

    def _repeat(self, known: LayerChoice, cuda: bool, calls: int = 0) -> None:
        self.probe = known.probe
        self.cuts.repeat(known, cuda, calls)

    def state(self) -> PolicyState:
        """What a resumed run needs to cut rows and to lend as this one does, JSON-able."""
        return {**self.cuts.state(), "calls": self._calls, "shadows": self.shadows.asking.state()}

    def load_state(self, state: PolicyState) -> None:
        calls = state.get("calls", 0)
        if "shadows" in state:
            self.shadows.asking.load_state(state["shadows"])
        if self._known is not None and calls >= 2:
            self._calls = calls
            self._repeat(self._known, cuda=False, calls=calls - 1)
        if self.cuts.load_state(state):
            self._calls = max(calls, 2)

    def _count(self, plan: DispatchPlan, shadowed: int, guests: bool) -> None:
        """Remember how many rows this rank computes, and each of its slots, where nothing is lent."""
        if self.num_ranks > 1:  # one rank computes all there are, and its host may not know how many
            self._rows += int(shadowed) + sum(sum(unit.counts) for unit in plan.units.values())
        if plan.dispatcher.table is None or guests:
            return
        for unit in plan.units.values():
            before = self._computed or [0] * len(unit.counts)
            self._computed = [a + b for a, b in zip(before, unit.counts, strict=True)]

    @property
    def shadow_plan(self) -> ShadowPlan | None:
        """Of the last call."""
        return self.shadows.plan

    def _shadow_costs(self, decided: Decided) -> ShadowCosts | None:
        if decided.probe is None or not decided.probe.prices_rows:
            return None
        one_go = self.config.schedule == "blocking" or (self.cuts.careful and decided.use.plain)
        return decided.probe.shadow_costs(overlap=0.0 if one_go else 1.0)

    def take_rows(self) -> int:
        """Rows that this rank computed in training since this was last asked."""
        rows, self._rows = self._rows, 0
        return rows

    def take_computed(self) -> list[int]:
        """Rows that the slots of this rank computed in training since this was last asked."""
        computed, self._computed = self._computed, []
        return computed
