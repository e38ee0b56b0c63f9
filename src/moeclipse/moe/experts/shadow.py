"""Shadows: for one step, other ranks hold copies of busy experts and compute their own rows of them.

    forward    owner ---- parameters ----> shadow       rows stay where they are
    backward   owner <--- gradients ------ shadow       added to the owner's, in rank order

Which rank shadows what is decided by a pure policy from the count matrix (`balance/shadow`), so every rank
knows all of it and one uneven exchange carries all parameters: no group is made for it. The weights of
shadows live in a buffer of their own, from forward to backward, and never in an expert's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow import Shadows
from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.comm.transports.transport import Transport
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.ops.precision import WIDE


@dataclass(frozen=True, kw_only=True)
class RankShadows:
    """One rank's part in a step's shadows."""

    experts: tuple[int, ...]
    """Experts of others that this rank computes for itself, by owner."""
    send_slots: tuple[int, ...]
    """Slots of this rank whose weights leave, by receiver."""
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    rank: int = 0

    @classmethod
    def of(cls, shadows: Shadows, placement: Placement, me: int) -> RankShadows:
        sends: list[list[int]] = [[] for _ in range(placement.num_ranks)]
        receives: list[list[int]] = [[] for _ in range(placement.num_ranks)]
        for expert, ranks in shadows:
            owner = placement.primary[expert]
            if me in ranks:
                receives[owner].append(expert)
            if me == owner:
                for rank in ranks:
                    sends[rank].append(placement.slots[me].index(expert))
        return cls(
            experts=tuple(expert for experts in receives for expert in experts),
            send_slots=tuple(slot for slots in sends for slot in slots),
            send_counts=tuple(map(len, sends)),
            receive_counts=tuple(map(len, receives)),
            rank=me,
        )


def keep_shadowed(
    expert_ids_TK: torch.Tensor, shadows: RankShadows, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(choices that travel, with -1 for those that stay; places of those that stay, by shadowed expert)."""
    order_E = torch.full((num_experts + 1,), len(shadows.experts), device=expert_ids_TK.device)
    order_E[list(shadows.experts)] = torch.arange(len(shadows.experts), device=expert_ids_TK.device)
    number = order_E[expert_ids_TK]  # -1 picks the last entry, which is nobody's
    stays = number < len(shadows.experts)
    place = number.flatten().argsort(stable=True)
    return torch.where(stays, -1, expert_ids_TK), place


@dataclass(frozen=True, kw_only=True)
class ShadowKept:
    """What backward needs of a forward with shadows."""

    shadows: RankShadows
    experts: PairwiseExperts
    transport: Transport
    where: str
    place_m: torch.Tensor
    saved: Any
    shape: torch.Size
    """Of the shadows' weights, a row each."""
    dtype: torch.dtype


class ShadowExperts:
    """The shadows of one forward pass on this rank."""

    def __init__(
        self,
        shadows: RankShadows,
        experts: PairwiseExperts,
        transport: Transport,
        *,
        place_m: torch.Tensor,
        counts: Sequence[int],
        where: str,
    ) -> None:
        """The rows that stay here: `place_m` in the flattened choice table, `counts` for each expert."""
        self.shadows, self.experts, self.transport, self.where = shadows, experts, transport, where
        self.place_m, self.counts = place_m, list(counts)

    def bind(self, inputs: Sequence[torch.Tensor], scores_TK: torch.Tensor) -> None:
        self.token_m = self.place_m // scores_TK.shape[1]
        self.score_m = scores_TK.flatten()[self.place_m]
        self.inputs = inputs

    def send_weights(self) -> InFlight[torch.Tensor]:
        shadows, label = self.shadows, f"shadow weights, {self.where}"
        rows = self.experts.experts.flatten(shadows.send_slots)
        self.weights = self.transport.all_to_all(rows, shadows.send_counts, shadows.receive_counts, label)
        return self.weights

    def forward(self) -> torch.Tensor:
        """What the shadows add to the output."""
        weights = self.weights.get()
        given = (self.inputs, self.token_m, self.counts, self.score_m)
        out_TO, saved = self.experts.forward(*given, weights)
        self.kept = ShadowKept(
            shadows=self.shadows,
            experts=self.experts,
            transport=self.transport,
            where=self.where,
            place_m=self.place_m,
            saved=saved,
            shape=weights.shape,
            dtype=weights.dtype,
        )
        del self.inputs, self.weights
        return out_TO


class ShadowGrads:
    """The shadows of one backward pass."""

    def __init__(self, kept: ShadowKept) -> None:
        self.kept, self.shadows, self.experts = kept, kept.shadows, kept.experts
        self.place_m = kept.place_m

    def dgrad(self, d_out_TO: torch.Tensor) -> None:
        self.d_inputs, self.d_score_m, self.pending = self.experts.dgrad(d_out_TO, self.kept.saved)

    def wgrad(self) -> None:
        self.grads = self.place_m.new_zeros(self.kept.shape, dtype=WIDE[self.kept.dtype])
        self.experts.experts.shadow_wgrad(self.pending, self.grads)

    def return_grads(self) -> InFlight[torch.Tensor]:
        shadows, label = self.shadows, f"shadow gradients, {self.kept.where}"
        counts = (shadows.receive_counts, shadows.send_counts)
        self.returned = self.kept.transport.all_to_all(self.grads, *counts, label)
        return self.returned

    def add_grads(self, weight_grads: Sequence[torch.Tensor | None]) -> None:
        """To main_grad, or to what autograd is about to get, in the order of the ranks that return them."""
        slots, returned = self.shadows.send_slots, self.returned.get()
        self.experts.experts.add_shadow_grads(slots, returned, weight_grads)
