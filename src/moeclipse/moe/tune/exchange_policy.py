"""Which programs a layer's exchange runs: how ranks are grouped, how rows are cut, what has shadows.

"blocking" is one group of all ranks and one chunk: send all, compute all, return all. "smart" cuts the
exchange into units (step, chunk). Ranks that are close form a group: those of one host, where there are
several hosts; otherwise each rank for itself. Rows that stay in the group are computed first and last, while
the first of the others arrive and the last of them return. Where chunks or group size are "auto", they are
chosen once, from costs measured after the first step and the counts of the second: the programs are
simulated, and the best of them tried (`moe/tune/granularity`). "auto" begins as blocking, tries that beside
the best of the others, and leaves it only for what was seen to be faster; how many calls that takes may be
limited. Where trials cannot tell what rows and wires cost, nothing is cut and nothing is lent.

How rows are cut and what is lent changes the last bits of results. Where equal runs must have equal bits
(`by_the_book`), nothing is timed: prices are fixed (`moe/tune/fixed_prices`), the simulator's first is taken
where cuts were asked for, and "auto" stays blocking.

Programs are built and verified once for each granularity and kept. Everything is decided from what all ranks
know, so all decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from moeclipse.balance.shadow import ShadowPlan
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import MoEConfig
from moeclipse.moe.exchange.dispatch import Dispatcher, DispatchPlan
from moeclipse.moe.exchange.dispatch_combine import Programs
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.served import serves
from moeclipse.moe.experts.shadow import RankShadows
from moeclipse.moe.gate.routing import Routing
from moeclipse.moe.tune.fixed_prices import fixed_prices
from moeclipse.moe.tune.granularity import (
    CALLS,
    CHUNKS,
    Granularity,
    Stopwatch,
    Trials,
    affordable,
    granularity_of,
    partitions_to_try,
    rank_by_simulation,
    start_groups,
    worth_a_try,
)
from moeclipse.moe.tune.probe import Probe
from moeclipse.moe.tune.shadow_choice import NOBODY, ShadowChoice, gather_counts
from moeclipse.moe.tune.shadow_price import measured
from moeclipse.moe.tune.stopwatch import tell
from moeclipse.ops.sending import MOST_CHOICES
from moeclipse.schedule.check import verify
from moeclipse.schedule.shape import ExchangeShape, Shadow
from moeclipse.schedule.smart import backward_of, end_units, exchange_shape, smart

SOME_SHADOW = (Shadow(expert=0, owner=0, ranks=(1,)),)
"""Programs depend on whether there are shadows, not on which."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What was decided for one call beside what follows from its rows."""

    use: Granularity
    probe: Probe | None
    asks: bool
    """For counts, to choose shadows from."""


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


class ExchangeSchedule:
    """The granularity in use, its verified programs, and the shadows of each step."""

    def __init__(self, config: MoEConfig, hosts: tuple[int, ...]) -> None:
        self.config, self.num_ranks, self.hosts = config, len(hosts), hosts
        self.careful = config.schedule == "auto"
        groups = start_groups("smart" if config.schedule == "smart" else "blocking", config.group_size, hosts)
        chunks = 1 if self._auto_chunks or config.schedule != "smart" else int(config.chunks)
        units = end_units(len(groups), chunks) if len(groups) > 1 else None
        self.use = Granularity(groups=groups, chunks=chunks, units=units)
        self.probe: Probe | None = None
        self.shadows = ShadowChoice(config, hosts)
        self.watch: Stopwatch | None = None
        self.trials: Trials | None = None
        self._shapes: dict[tuple[Any, ...], ExchangeShape] = {}
        self._programs: dict[ExchangeShape, Programs] = {}
        self.on_choice: Callable[[dict[str, Any]], None] = lambda _: None
        """Told, before it acts, what was decided from times."""
        self.ranked: list[Granularity] = []
        """What may be chosen, the fastest by simulation first, once costs are known."""
        self.trial_calls: int | None = None
        """Calls that "auto" may spend on trials; None: as many as they want."""
        self.by_the_book = False
        """Whether equal runs must choose alike: nothing is timed, and prices are fixed."""
        self._taken: dict[str, Any] | None = None
        self.over_plain: float | None = None
        self.scatter: float | None = None
        self._calls = self._rows = self._tried = 0
        self._computed: list[int] = []

    @property
    def _auto_chunks(self) -> bool:
        return self.config.chunks == "auto"

    @property
    def _chooses(self) -> bool:
        auto = self._auto_chunks or self.config.group_size == "auto"
        return self.num_ranks > 1 and (self.careful or (self.config.schedule == "smart" and auto))

    @property
    def _tunes(self) -> bool:
        """Whether there is something to choose, and calls to spend on it.

        "auto" leaves the blocking exchange only for what was seen to be faster: never without trials.
        """
        tries = affordable(self.trial_calls)[0] > 0 and not self.by_the_book
        return self._chooses and (tries or not self.careful)

    @property
    def _wants_costs(self) -> bool:
        return self._tunes or self.shadows.automatic or self._taken is not None

    def shape(
        self, shadows: bool = False, use: Granularity | None = None, serving: bool = False
    ) -> ExchangeShape:
        use = use or self.use
        key = (use.groups, use.chunks, use.units, shadows, serving)
        if key not in self._shapes:
            self._shapes[key] = exchange_shape(
                self.num_ranks,
                groups=use.groups,
                chunks=use.chunks,
                units=use.units,
                shadows=SOME_SHADOW if shadows else (),
                serving=serving,
            )
        return self._shapes[key]

    def programs(self, shape: ExchangeShape) -> Programs:
        if shape not in self._programs:
            shapes = shape, backward_of(shape), backward_of(shape, own_weights=0)
            forward, backward, pieces = (verify(smart(wanted)) for wanted in shapes)
            self._programs[shape] = Programs(forward=forward, backward=backward, pieces=pieces)
        return self._programs[shape]

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

        `plain`: what computes the rows, where the call runs in one go and no kernels take it: its shadows may
        serve other ranks, too.
        `learns`: the call may be timed and counted. `decided`: what an earlier call decided that is now
        repeated; nothing is learned from it.
        """
        ids_TK = routing.expert_ids_TK
        if learns:
            self._measure(ids_TK, dispatcher, experts, mesh, where)
        watch = self.watch if decided is None else None
        decided = decided or Decided(use=self.use, probe=self.probe, asks=self.shadows.asks)
        costs, mine, counts_PE = None, None, NOBODY
        if self.shadows.wanted != "off" or self.shadows.policy is not None:
            costs = self._shadow_costs(decided)
            asked = (ids_TK, dispatcher, where, costs, decided.asks, serves(plain))
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
            watch=watch,
        )

    def learn(self, decision: Decision, plan: DispatchPlan) -> None:
        """After sizes have travelled: how many rows this rank computes, and whether to ask for shadows."""
        probe = decision.decided.probe
        if decision.costs is not None and probe is not None and self.shadows.automatic:
            self.shadows.learn(plan, decision.costs, probe)
        shadowed = decision.shadowed if decision.shadows else []
        self._count(plan, sum(shadowed), guests=decision.guests is not None)

    def _measure(
        self, ids_TK: torch.Tensor, dispatcher: Dispatcher, experts: PairwiseExperts, mesh: Mesh, where: str
    ) -> None:
        """The second call measures costs; the best granularities by simulation are then tried in turn."""
        self._calls += 1
        if self._calls == 2 and self.probe is None and self._wants_costs:
            if self._taken is not None:
                self._repeat(self._taken, cuda=ids_TK.is_cuda)
            else:
                with mesh.recorder.apart("costs of an exchange"):
                    if self.by_the_book:
                        self.probe = fixed_prices(experts, dispatcher, mesh)
                    else:
                        self.probe = measured(self.shadows, experts, dispatcher, ids_TK, mesh)
            probe = self.probe
            # By the book nobody writes down how rows are cut: who repeats it finds it again.
            if probe is not None and (self._taken is None or probe.fixed):
                if self._tunes and probe.prices_rows:
                    with mesh.recorder.apart("costs of an exchange"):
                        self._rank_and_try(ids_TK, dispatcher, where, probe)
                self.on_choice(self._choice())
        if self.trials is None:
            return
        if self.trials.over:
            if self._taken is not None and (known := self._taken["chosen"]) is not None:
                self.use, self.over_plain = granularity_of(known), self._taken.get("over_plain")
                self.scatter = self._taken.get("scatter")
            else:
                with mesh.recorder.apart("trials of granularities"):
                    self.use = self.trials.choose(lambda numbers: tell(mesh, numbers))
                    self.over_plain, self.scatter = self.trials.over_plain, self.trials.scatter
                self.on_choice(self._choice(self.use))
            self._tried = len(self.trials.candidates)
            self.watch, self.trials = Stopwatch(cuda=ids_TK.is_cuda), None
        else:
            self.use, self.watch = self.trials.next()

    def _rank_and_try(self, ids_TK: torch.Tensor, dispatcher: Dispatcher, where: str, probe: Probe) -> None:
        """By the book there are no trials: what is predicted to be best is taken."""
        self.ranked = self._rank(gather_counts(ids_TK, dispatcher, where), dispatcher, probe)
        if probe.fixed:
            self.use, self.watch = self.ranked[0], Stopwatch(cuda=ids_TK.is_cuda)
            return
        tried = worth_a_try(self.ranked) if self.careful else self.ranked
        calls = affordable(self.trial_calls if self.careful else None)
        self.trials = Trials(tried, ids_TK.is_cuda, self.careful, *calls)

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
        one_go = self.config.schedule == "blocking" or (self.careful and decided.use.plain)
        return decided.probe.shadow_costs(overlap=0.0 if one_go else 1.0)

    def take_rows(self) -> int:
        """Rows that this rank computed in training since this was last asked."""
        rows, self._rows = self._rows, 0
        return rows

    def take_computed(self) -> list[int]:
        """Rows that the slots of this rank computed in training since this was last asked."""
        computed, self._computed = self._computed, []
        return computed

    def _rank(self, counts_PE: np.ndarray, dispatcher: Dispatcher, probe: Probe) -> list[Granularity]:
        """The allowed granularities, the fastest by simulation first."""
        table = dispatcher.table or ReplicaTable.of(dispatcher.placement)
        rows_PR = split_rows(counts_PE, table, self.hosts).rows_PR
        per_rank = dispatcher.placement.max_slots
        padded = np.zeros((self.num_ranks, per_rank * self.num_ranks), dtype=np.int64)
        for rank, (first, stop) in enumerate(pairwise(dispatcher.slot_bounds)):
            padded[:, rank * per_rank : rank * per_rank + stop - first] = rows_PR[:, first:stop]
        chunks = CHUNKS if self._auto_chunks else (int(self.config.chunks),)
        partitions = dict.fromkeys(partitions_to_try(self.config.group_size, self.hosts))
        if self.careful:
            partitions[start_groups("blocking", "auto", self.hosts)] = None
        numbers = sorted({1, *chunks}) if self.careful else chunks
        ranked = rank_by_simulation(list(partitions), numbers, padded, probe.exchange_costs())
        return [one for one in ranked if one.chunks in chunks or (self.careful and one.plain)]

    def report(self) -> dict[str, Any]:
        """The choice, what was predicted of it, and how long forward exchanges took since."""
        measured = self.watch.seconds() if self.watch is not None else None
        return {
            "steps": len(self.use.groups),
            "chunks": self.use.chunks,
            "rule": self.use.rule,
            "predicted_ms": 1e3 * self.use.predicted_s,
            "blocking_ms": 1e3 * self.use.blocking_s,
            "measured_ms": None if measured is None else 1e3 * measured,
            "over_plain": self.over_plain,
            "scatter": self.scatter,
            "tried": self._tried,
        }

    @property
    def has_chosen(self) -> bool:
        """Whether this run has decided how rows are cut, and times that."""
        return self.trials is None and self.watch is not None

    def _choice(self, chosen: Granularity | None = None) -> dict[str, Any]:
        assert self.probe is not None
        tried = [] if self.trials is None else [asdict(one) for one in self.trials.candidates]
        return {
            "probe": asdict(self.probe),
            "tried": tried,
            "calls": 0 if self.trials is None else self.trials.calls,
            "chosen": None if chosen is None else asdict(chosen),
            "over_plain": self.over_plain,
            "scatter": self.scatter,
        }

    def take_choice(self, choice: dict[str, Any] | None) -> None:
        """What an equal run chose is taken when this one would measure; what was tuned, at once."""
        self._taken = choice
        if choice is not None and choice["chosen"] is not None and not choice["tried"] and self._chooses:
            self.use = granularity_of(choice["chosen"])

    def _repeat(self, choice: dict[str, Any], cuda: bool, calls: int = 0) -> None:
        """Go on behind so many calls of trials."""
        self.probe = Probe(**choice["probe"])
        if self._chooses and choice["tried"]:
            tried = [replace(granularity_of(one), rule="resumed") for one in choice["tried"]]
            given = (len(tried), choice.get("calls", CALLS))
            self.trials = Trials(tried, cuda, self.careful, *given)
            self.trials.skip(calls)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to cut rows as this one does, JSON-able."""
        use = self.use if self.trials is None else self.trials.unseen
        cut = {"groups": use.groups, "chunks": use.chunks, "units": use.units}
        return {**cut, "calls": self._calls, "shadows": self.shadows.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a choice, unless it was made for other ranks."""
        calls = state.get("calls", 0)
        if "shadows" in state:
            self.shadows.load_state(state["shadows"])
        if self._taken is not None and calls >= 2:
            self._calls = calls
            self._repeat(self._taken, cuda=False, calls=calls - 1)
            if self.trials is not None and not self.trials.over:
                return
            self.trials = None
        groups = tuple(tuple(members) for members in state["groups"])
        if sum(map(len, groups)) != self.num_ranks or not self._chooses:
            return
        units = tuple((step, chunk) for step, chunk in state["units"]) if state["units"] else None
        self.use = Granularity(groups=groups, chunks=state["chunks"], units=units, rule="resumed")
        self._calls = max(calls, 2)
