"""Whether a call of a layer asks for shadows, from what travelled in the call before.

    call n        rows travel; everyone knows how many went where: could shadows have saved time?
    call n + 1    if so: the counts of this call are exchanged first, and `balance/shadow` chooses from them

Idea. The exact answer needs an exchange of its own, and a search, in every call of every layer. A bound needs
neither: it is read off the sizes that travel anyway (`most_gain`). So a layer asks where the call before
could have gained more than asking takes; loads that are even, or whose shadows would cost what they save, are
left in peace for LOOK calls. Where an answer gains less than asking takes, the layer rests for one call, then
for two, four, ... Loads that jump (`balance/drift`) end every rest: what was seen before says nothing. And a
call whose own sizes are a surprise is planned anew: it asks itself, not the next one.

Contract. Pure but for the three numbers of `Asking`, which follow from what all ranks know: all of them ask,
or none.

Shapes: P ranks, R slots, E experts, H hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow_model import ShadowCosts, Work, latency

LONGEST_REST = 64
"""Calls between two answers that were not worth asking for."""
LOOK = 8
"""Calls between two looks at the sizes that travelled, where nothing was to be gained."""
SURPRISE = 1.1
"""The fullest rank has so many times the rows that it had in the call before."""


@dataclass(frozen=True, kw_only=True)
class CallLoads:
    """Of one call, in (token, expert) pairs."""

    rows_P: np.ndarray
    """Computed by each rank."""
    sent_PP: np.ndarray
    """That leave a rank for another, in near ones (`ShadowCosts.far`); none stay on their rank."""
    most_sent: float
    """Of one rank, or where far ones cost more of one host, for one expert: at most so many leave it."""

    @classmethod
    def of(cls, pairs_PR: np.ndarray, placement: Placement, hosts: Sequence[int], far: float) -> CallLoads:
        """Of pairs by source rank and slot."""
        ranks, (_, host_P) = np.arange(len(pairs_PR)), np.unique(hosts, return_inverse=True)
        near_PP = np.where(host_P[:, None] == host_P, 1.0, far)
        np.fill_diagonal(near_PP, 0)
        rank_R = np.repeat(ranks, [len(row) for row in placement.slots])
        travel_PR = pairs_PR * near_PP[:, rank_R]
        sent_PP = np.zeros_like(near_PP)
        np.add.at(sent_PP.T, rank_R, travel_PR.T)
        # A copy keeps rows of its rank at home; one that serves, where far ones cost more, those of its host.
        home_P = host_P if far > 1 else ranks
        expert_R = np.array([expert for row in placement.slots for expert in row], dtype=np.int64)
        sent_EH = np.zeros((placement.num_experts + 1, len(ranks)))
        # An empty slot, -1, adds zeros at the end.
        np.add.at(sent_EH, (expert_R[:, None], home_P), travel_PR.T)
        rows_P = np.bincount(rank_R, pairs_PR.sum(0), len(ranks))
        return cls(rows_P=rows_P, sent_PP=sent_PP, most_sent=float(sent_EH.max(initial=0)))

    @property
    def work(self) -> Work:
        none = np.zeros(len(self.rows_P))
        return Work(
            rows=self.rows_P.astype(np.float64),
            rows_in=self.sent_PP.sum(0),
            rows_out=self.sent_PP.sum(1),
            copies_in=none,
            copies_out=none,
        )


def most_gain(loads: CallLoads, costs: ShadowCosts, serves: bool) -> float:
    """No shadows can save more seconds of a call than this.

    Ranks cannot become more even than even. A copy keeps at most `most_sent` rows at home; where that does
    not pay by itself, one copy at least is paid for. Shadows that serve others also even out the wires: where
    what one copy keeps at home pays for no copy, wires carry as much as before, at best each the same.
    """
    copy = costs.parameter_seconds + costs.gradient_seconds
    saved = 4 * costs.row_send * loads.most_sent
    if saved >= copy:
        return np.inf
    even = float(loads.rows_P.max() - loads.rows_P.mean()) * (costs.row_forward + costs.row_backward)
    if serves and not costs.shared_wire:
        busiest = max(loads.sent_PP.sum(0).max(), loads.sent_PP.sum(1).max())
        even += 4 * costs.row_send * float(busiest - loads.sent_PP.sum() / len(loads.rows_P))
    return even - (1 - costs.overlap) * (copy - saved)


class AskingState(TypedDict):
    asks: bool
    rest: int
    left: int
    usual: NotRequired[float]


class Asking:
    """Of one layer."""

    def __init__(self) -> None:
        self.asks = True
        """Whether the next call does, where shadows are chosen from costs."""
        self.rest = self.left = 0
        """Calls that it rests after an answer that was not worth it; calls that are left until it looks."""
        self.usual = np.inf
        """Rows of the fullest rank in the last call, in means."""

    def surprised(self, rows_P: np.ndarray) -> bool:
        """Whether a call that has not asked is far less even than the one before."""
        fullest = float(rows_P.max() / max(rows_P.mean(), 1e-300))
        usual, self.usual = self.usual, fullest
        return fullest > SURPRISE * usual

    def wanted(self, loads: CallLoads, costs: ShadowCosts, look: float, serves: bool) -> bool:
        """Whether asking could have won more than it takes."""
        worth = look + costs.worthwhile(latency(loads.work, costs))
        return most_gain(loads, costs, serves) > worth

    def after_answer(self, gain: float, look: float) -> None:
        """`look`: seconds that asking takes."""
        pays = gain > look
        self.rest = 0 if pays else min(max(2 * self.rest, 1), LONGEST_REST)
        self.left, self.asks = self.rest, pays

    @property
    def looks(self) -> bool:
        """Whether the sizes of the call that ends are to be looked at."""
        return self.left <= 1

    def after_call(self, loads: CallLoads | None, costs: ShadowCosts, look: float, serves: bool) -> None:
        """After a call that has not asked; `loads`: of a call that is looked at."""
        self.left = max(self.left - 1, 0)
        if loads is None:
            return
        self.asks = self.wanted(loads, costs, look, serves)
        if not self.asks:
            self.left = LOOK

    def look_again(self) -> None:
        """Loads have jumped: the next call asks, whatever was seen before."""
        self.asks, self.rest, self.left = True, 0, 0

    def state(self) -> AskingState:
        """What a resumed run needs to ask as this one does."""
        found: AskingState = {"asks": self.asks, "rest": self.rest, "left": self.left}
        return found if self.usual == np.inf else {**found, "usual": self.usual}

    def load_state(self, state: AskingState) -> None:
        self.asks, self.rest, self.left = state["asks"], state["rest"], state["left"]
        self.usual = state.get("usual", np.inf)
