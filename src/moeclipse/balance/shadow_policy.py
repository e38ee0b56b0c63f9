"""A shadow policy of one's own: a function of what all ranks know in a call to who is lent what in it.

    def hottest_to_all(call: ShadowQuestion) -> ShadowPlan:
        hottest = int(call.counts_PE.sum(0).argmax())
        return call.lend({hottest: range(call.placement.num_ranks)})

    moe.schedule.shadows.policy = hottest_to_all                # in a loop of one's own

Idea. The question holds the counts of this call, who holds which expert, and what things cost where that is
known; `call.lend(...)` makes a checked answer of a table, `call.best()` is what "auto" would say.

Contract. Every rank calls it with the same question and must get the same answer: a pure function, no clock,
no state that differs. Ranks compare their answers before anything is lent, and a difference is an error.

Shapes: P ranks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeclipse.balance.placement import Placement
from moeclipse.balance.serving import choose_serving, time_of, with_guests
from moeclipse.balance.shadow import ShadowPlan, Shadows, choose_shadows, predict
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.core.errors import ConfigError

FREE = ShadowCosts(
    row_forward=0,
    row_backward=0,
    row_send=0,
    parameter_bytes=0,
    gradient_bytes=0,
    parameter_byte=0,
    gradient_byte=0,
)
"""Where nobody knows what things cost: nothing is decided from costs."""


@dataclass(frozen=True, kw_only=True)
class ShadowQuestion:
    counts_PE: np.ndarray
    """Pairs of each rank for each expert in this call."""
    rows_PE: np.ndarray
    """Rows that travel for them: a token's vector goes to a rank once."""
    placement: Placement
    costs: ShadowCosts | None = None
    """Seconds per row that travels; None: not known yet, or nothing that can be told."""
    node_P: tuple[int, ...] = ()
    table: ReplicaTable | None = None
    may_serve: bool = False
    """Whether shadows of this call may compute rows of other ranks, too."""

    def lend(self, wanted: Mapping[int, Iterable[int]], serving: bool = False) -> ShadowPlan:
        """These experts to these ranks; who holds one needs no copy. `serving`: for rows of all ranks."""
        shadows = self._checked(wanted)
        costs, node_P = self.costs or FREE, self.node_P or None
        before = predict(self.rows_PE, self.placement, costs, (), node_P=node_P)
        if not (serving and self.may_serve and shadows):
            after = predict(self.rows_PE, self.placement, costs, shadows, node_P=node_P)
            return ShadowPlan(shadows=shadows, before=before, after=after)
        guests = ReplicaTable.of(with_guests(self.placement, shadows))
        split = split_rows(self.rows_PE, guests, node_P)
        after = time_of(split, self.placement, shadows, costs, node_P)
        return ShadowPlan(shadows=shadows, before=before, after=after, serving=True)

    def lend_where_wanted(self, experts: Iterable[int]) -> ShadowPlan:
        """These experts to all ranks that have rows for them."""
        known = range(self.placement.num_experts)
        return self.lend(
            {e: np.flatnonzero(self.counts_PE[:, e]).tolist() if e in known else () for e in experts}
        )

    def best(self) -> ShadowPlan:
        """What predicts least seconds: none, for a rank's own rows, or for those of others, too."""
        if self.costs is None:
            return self.lend({})
        told: dict[str, Any] = {"table": self.table, "node_P": self.node_P or None}
        alone = choose_shadows(self.rows_PE, self.placement, self.costs, **told)
        if not self.may_serve:
            return alone
        serving = choose_serving(self.rows_PE, self.placement, self.costs, **told)
        return serving if serving.after.total < alone.after.total else alone

    def _checked(self, wanted: Mapping[int, Iterable[int]]) -> Shadows:
        experts, ranks = self.placement.num_experts, self.placement.num_ranks
        found, problems = {}, []
        for expert, borrowers in wanted.items():
            if not 0 <= expert < experts:
                problems.append(f"expert {expert} cannot be lent; experts are 0 to {experts - 1}")
                continue
            found[int(expert)] = sorted(
                {int(rank) for rank in borrowers} - set(self.placement.holders[expert])
            )
            problems += [
                f"expert {expert} cannot be lent to rank {rank}; ranks are 0 to {ranks - 1}"
                for rank in found[int(expert)]
                if not 0 <= rank < ranks
            ]
        if problems:
            raise ConfigError(problems)
        return tuple((expert, tuple(found[expert])) for expert in sorted(found) if found[expert])


ShadowPolicy = Callable[[ShadowQuestion], ShadowPlan]
