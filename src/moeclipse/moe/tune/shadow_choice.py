"""Which experts have shadows in a call of a layer: whether to ask, what to ask for, and the answer.

    call n        rows travel; everyone knows how many went where: could shadows have saved time?
    call n + 1    if so: the counts of this call are exchanged first, and `balance/shadow` chooses from them

Idea. The exact answer needs an exchange of its own, and a search, in every call of every layer. A bound needs
neither: it is read off the sizes that travel anyway (`balance/shadow.most_gain`). So a layer asks where the
call before could have gained more than asking takes; loads that are even, or whose shadows would cost what
they save, are left in peace for LOOK calls. Where an answer gains less than asking takes, the layer rests for
one call, then for two, four, ... Experts that were named have shadows in every call.

Contract. All ranks of the layer's group know the same sizes and prices, so all of them ask, or none. Whether
the next call asks is part of a checkpoint: a resumed run lends as the first one would have.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TypedDict

import numpy as np
import torch

from moeclipse.balance.serving import with_guests
from moeclipse.balance.shadow import ShadowPlan, forced_shadows, most_gain
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.balance.shadow_policy import FREE, ShadowPolicy, ShadowQuestion
from moeclipse.comm.async_ops.lane import gather_to_host
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import MoEConfig
from moeclipse.moe.exchange.dispatch import Dispatcher, DispatchPlan
from moeclipse.moe.experts.shadow import RankShadows
from moeclipse.moe.gate.routing import count_experts, pairs_and_rows
from moeclipse.moe.tune.probe import Probe

NOBODY = np.empty((0, 0))
LONGEST_REST = 64
"""Calls between two answers that were not worth asking for."""
LOOK = 8
"""Calls between two looks at the sizes that travelled, where nothing was to be gained."""


class ShadowState(TypedDict):
    asks: bool
    rest: int
    left: int


class ShadowChoice:
    """Of one layer."""

    def __init__(self, config: MoEConfig, hosts: tuple[int, ...]) -> None:
        wanted = config.shadow if len(hosts) > 1 else "off"
        self.wanted = "off" if wanted == () else wanted
        self.hosts = hosts
        self.asks = True
        """Whether the next call does, where shadows are chosen from costs."""
        self.rest = self.left = 0
        """Calls that it rests after an answer that was not worth it; calls that are left until it looks."""
        self.plan: ShadowPlan | None = None
        """Of the last call; None where it did not ask."""
        self.policy: ShadowPolicy | None = None
        """Of one's own: asked in every call, in place of all others."""

    @property
    def automatic(self) -> bool:
        return self.wanted == "auto" and self.policy is None

    def choose(
        self,
        ids_TK: torch.Tensor,
        dispatcher: Dispatcher,
        where: str,
        costs: ShadowCosts | None,
        asks: bool,
        serves: bool = False,
    ) -> tuple[RankShadows | None, np.ndarray]:
        """(what this rank shadows in this call, None where no rank does; pairs of each rank, if asked for).

        `costs`: None as long as nobody knows them. `serves`: whether shadows may compute rows of others.
        """
        self.plan = None
        if self.wanted == "off" and self.policy is None:
            return None, NOBODY
        if self.automatic and (costs is None or not asks):
            pass_over(dispatcher, where)
            return None, NOBODY
        counts_PE, rows_PE = self.counts_and_rows(ids_TK, dispatcher, where)
        if self.policy is not None or isinstance(self.wanted, str):
            question = self.question(counts_PE, rows_PE, dispatcher, costs, serves)
            self.plan = (
                question.best() if self.policy is None else self.own(self.policy, question, dispatcher, where)
            )
        else:
            self.plan = forced_shadows(counts_PE, dispatcher.placement, FREE, self.wanted)
        shadows = self.plan.shadows
        if not shadows:
            return None, counts_PE
        return RankShadows.of(shadows, dispatcher.placement, dispatcher.group.index), counts_PE

    def question(
        self,
        counts_PE: np.ndarray,
        rows_PE: np.ndarray,
        dispatcher: Dispatcher,
        costs: ShadowCosts | None,
        serves: bool = False,
    ) -> ShadowQuestion:
        """Shadows are priced per row that travels, which several experts of its rank compute."""
        pairs = float(counts_PE.sum()) / max(float(rows_PE.sum()), 1.0)
        if costs is not None:
            forward, backward = pairs * costs.row_forward, pairs * costs.row_backward
            costs = replace(costs, row_forward=forward, row_backward=backward)
        return ShadowQuestion(
            counts_PE=counts_PE,
            rows_PE=rows_PE,
            placement=dispatcher.placement,
            costs=costs,
            node_P=self.hosts,
            table=dispatcher.table,
            may_serve=serves,
        )

    def own(
        self, policy: ShadowPolicy, question: ShadowQuestion, dispatcher: Dispatcher, where: str
    ) -> ShadowPlan:
        """What a policy of one's own says, the same on all ranks. Collective."""
        plan = policy(question)
        if not isinstance(plan, ShadowPlan):
            raise ConfigError(
                f"a shadow policy returned {type(plan).__name__}; return what call.lend(...) makes"
            )
        if dispatcher.lane.recorder.ledger is not None:
            return plan  # which compares what ranks launch, and knows nothing of another message
        mine = torch.tensor([zlib.crc32(repr((plan.shadows, plan.serving)).encode())])
        label = f"exchange of a policy's answers, {where}"
        told = gather_to_host(dispatcher.lane, dispatcher.group, mine.to(dispatcher.rank_of_E.device), label)
        if len({answer for (answer,) in told.get()}) > 1:
            raise ConfigError("a shadow policy must say the same on all ranks, from the question alone")
        return plan

    def guests(self, dispatcher: Dispatcher) -> Dispatcher | None:
        """With the shadows of this call as slots of their own, where they serve others."""
        if self.plan is None or not self.plan.serving:
            return None
        placement = with_guests(dispatcher.placement, self.plan.shadows)
        given = (dispatcher.group, dispatcher.lane, dispatcher.rank_of_E.device, dispatcher.transport)
        return Dispatcher.of(placement, *given)

    def counts_and_rows(
        self, ids_TK: torch.Tensor, dispatcher: Dispatcher, where: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of each rank for each expert, and the rows that travel for them."""
        mine = pairs_and_rows(ids_TK, dispatcher.rank_of_E, dispatcher.placement.num_experts)
        table = np.array(gather_to_host(dispatcher.lane, dispatcher.group, mine, label_of(where)).get())
        return table[:, 0], table[:, 1]

    def learn(self, plan: DispatchPlan, costs: ShadowCosts, probe: Probe) -> None:
        """After a call whose rows travelled like this: does the next one ask?"""
        if self.plan is not None:  # it has asked
            pays = self.plan.gain > probe.look
            self.rest = 0 if pays else min(max(2 * self.rest, 1), LONGEST_REST)
            self.left, self.asks = self.rest, pays
            return
        self.left = max(self.left - 1, 0)
        if self.left:
            return
        load_P, most_sent = loads_of(plan.sizes.pairs_by_slot(), plan.dispatcher)
        pace = float(load_P.max()) * (costs.row_forward + costs.row_backward)
        self.asks = most_gain(load_P, most_sent, costs) > probe.look + costs.min_gain * pace
        if not self.asks:
            self.left = LOOK

    def state(self) -> ShadowState:
        """What a resumed run needs to ask as this one does."""
        return {"asks": self.asks, "rest": self.rest, "left": self.left}

    def load_state(self, state: ShadowState) -> None:
        self.asks, self.rest, self.left = state["asks"], state["rest"], state["left"]


def loads_of(pairs_PR: np.ndarray, dispatcher: Dispatcher) -> tuple[np.ndarray, int]:
    """(pairs that each rank computes, most pairs of one rank for one expert that leave it)."""
    ranks = np.arange(dispatcher.group.size)
    rank_R = np.repeat(ranks, np.diff(dispatcher.slot_bounds))
    load_P = np.bincount(rank_R, pairs_PR.sum(0), len(ranks))
    experts_R = np.array([expert for row in dispatcher.placement.slots for expert in row], dtype=np.int64)
    sent_EP = np.zeros((dispatcher.placement.num_experts + 1, len(ranks)), dtype=np.int64)
    leaving_PR = np.where(rank_R == ranks[:, None], 0, pairs_PR)
    np.add.at(sent_EP, experts_R, leaving_PR.T)  # an empty slot, -1, adds zeros at the end
    return load_P, int(sent_EP.max(initial=0))


def gather_counts(ids_TK: torch.Tensor, dispatcher: Dispatcher, where: str) -> np.ndarray:
    """Pairs of each rank for each expert."""
    mine = count_experts(ids_TK, dispatcher.placement.num_experts)
    table = gather_to_host(dispatcher.lane, dispatcher.group, mine, label_of(where)).get()
    return np.array(table, dtype=np.int64)


def label_of(where: str) -> str:
    return f"exchange of counts, {where}"


def pass_over(dispatcher: Dispatcher, where: str) -> None:
    """The exchange of counts is in the program of a step; a call that does without says so."""
    ledger = dispatcher.lane.recorder.ledger
    if ledger is not None:
        ledger.pass_over(dispatcher.lane.name, dispatcher.group.name, label_of(where))
