"""Which experts have shadows in a call of a layer: whether to ask, what to ask for, and the answer.

A layer asks where the call before could have gained more than asking takes (`balance/asking`): then the
counts of this call are exchanged first, and `balance/shadow` and `balance/serving` choose from them. Experts
that were named have shadows in every call, and a policy of one's own is asked in every call.

Contract. All ranks of the layer's group know the same sizes and prices, so all of them ask, or none. Whether
the next call asks is part of a checkpoint: a resumed run lends as the first one would have.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from moeclipse.balance.asking import Asking, CallLoads
from moeclipse.balance.serving import with_guests
from moeclipse.balance.shadow import ShadowPlan, forced_shadows
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
Lent = Mapping[int, Iterable[int]]
"""Experts, and the ranks that get a copy."""


class OfThread(threading.local):
    """What calls of one thread lend."""

    policy: ShadowPolicy | None = None


class ShadowChoice:
    """Of one layer."""

    def __init__(self, config: MoEConfig, hosts: tuple[int, ...]) -> None:
        wanted = config.shadow if len(hosts) > 1 else "off"
        self.wanted = "off" if wanted == () else wanted
        self.config = config
        self.hosts = hosts
        self.asking = Asking()
        """Whether the next call does, where shadows are chosen from costs."""
        self.plan: ShadowPlan | None = None
        """Of the last call; None where it did not ask."""
        self.policy: ShadowPolicy | None = None
        """Of one's own: asked in every call, in place of all others."""
        self.here = OfThread()

    @contextmanager
    def lending(self, wanted: Iterable[int] | Lent | ShadowPolicy) -> Iterator[None]:
        """Calls of this thread inside: what they lend, in place of everything else.

        Experts, each to all ranks that have rows for it; experts with the ranks that get them; or a policy.
        The same on all ranks, which compare their answers.
        """
        if self.config.schedule == "gathered":
            raise ConfigError("moe.schedule = 'gathered' lends nothing: all tokens are on every rank")
        before, self.here.policy = self.here.policy, policy_of(wanted)
        try:
            yield
        finally:
            self.here.policy = before

    @property
    def now(self) -> ShadowPolicy | None:
        """The policy of one's own that counts for a call of this thread."""
        return self.here.policy or self.policy

    @property
    def automatic(self) -> bool:
        return self.wanted == "auto" and self.now is None

    def choose(
        self,
        ids_TK: torch.Tensor,
        dispatcher: Dispatcher,
        where: str,
        costs: ShadowCosts | None,
        asks: bool,
        serves: bool = False,
        policy: ShadowPolicy | None = None,
    ) -> tuple[RankShadows | None, np.ndarray]:
        """(what this rank shadows in this call, None where no rank does; pairs of each rank, if asked for).

        `costs`: None as long as nobody knows them. `serves`: whether shadows may compute rows of others.
        `policy`: of one's own.
        """
        self.plan = None
        if self.wanted == "auto" and policy is None and (costs is None or not asks):
            pass_over(dispatcher, where)
            return None, NOBODY
        counts_PE, rows_PE = self.counts_and_rows(ids_TK, dispatcher, where)
        if policy is not None or isinstance(self.wanted, str):
            question = self.question(counts_PE, rows_PE, dispatcher, costs, serves)
            self.plan = question.best() if policy is None else self.own(policy, question, dispatcher, where)
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

    def surprised(self, plan: DispatchPlan, costs: ShadowCosts, probe: Probe) -> bool:
        """Whether a call that has not asked should have, by its own sizes."""
        if self.plan is not None or not self.asking.surprised(plan.sizes.rows_by_rank()):
            return False
        return self.asking.wanted(self._loads(plan, costs), costs, probe.look, serves=True)

    def _loads(self, plan: DispatchPlan, costs: ShadowCosts) -> CallLoads:
        given = (plan.sizes.pairs_by_slot(), plan.dispatcher.placement, self.hosts, costs.far)
        return CallLoads.of(*given)

    def learn(self, plan: DispatchPlan, costs: ShadowCosts, probe: Probe, serves: bool = False) -> None:
        """After a call whose rows travelled like this: does the next one ask?"""
        if self.plan is not None:  # it has asked
            self.asking.after_answer(self.plan.gain, probe.look)
            return
        loads = self._loads(plan, costs) if self.asking.looks else None
        self.asking.after_call(loads, costs, probe.look, serves)


def policy_of(wanted: Iterable[int] | Lent | ShadowPolicy) -> ShadowPolicy:
    if callable(wanted):
        return wanted
    if isinstance(wanted, Mapping):
        ranks_of = {expert: tuple(ranks) for expert, ranks in wanted.items()}
        return lambda call: call.lend(ranks_of)
    experts = tuple(wanted)
    return lambda call: call.lend_where_wanted(experts)


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
