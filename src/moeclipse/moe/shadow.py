"""Shadows: for one step, ranks borrow busy experts and compute their own rows of them.

    forward    owner ---- parameters ----> borrower     rows stay where they are
    backward   owner <--- gradients ------ borrower     added to the owner's, in rank order

Who borrows what is decided by a pure policy from the count matrix (`balance/shadow`), so every rank knows
all of it and one uneven exchange carries all parameters: no group is made for it. Borrowed weights live in a
buffer of their own, from forward to backward, and never in an expert's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow import Shadows
from moeclipse.comm.flight.in_flight import InFlight
from moeclipse.comm.wires.transport import Transport
from moeclipse.moe.structure import Structure
from moeclipse.ops.combine import sum_rows
from moeclipse.ops.precision import wide_of


@dataclass(frozen=True, kw_only=True)
class Lending:
    """One rank's part in a step's shadows."""

    borrowed: tuple[int, ...]
    """Experts this rank computes for itself, by owner."""
    send_slots: tuple[int, ...]
    """Slots of this rank whose weights leave, by borrower."""
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]

    @classmethod
    def of(cls, shadows: Shadows, placement: Placement, me: int) -> Lending:
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
            borrowed=tuple(expert for experts in receives for expert in experts),
            send_slots=tuple(slot for slots in sends for slot in slots),
            send_counts=tuple(map(len, sends)),
            receive_counts=tuple(map(len, receives)),
        )


def keep_borrowed(
    expert_ids_TK: torch.Tensor, lending: Lending, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(choices that travel, with -1 for those that stay; places of those that stay, by borrowed expert)."""
    order_E = torch.full((num_experts + 1,), len(lending.borrowed), device=expert_ids_TK.device)
    order_E[list(lending.borrowed)] = torch.arange(len(lending.borrowed), device=expert_ids_TK.device)
    number = order_E[expert_ids_TK]  # -1 picks the last entry, which is nobody's
    stays = number < len(lending.borrowed)
    place = number.flatten().argsort(stable=True)
    return torch.where(stays, -1, expert_ids_TK), place


class Shadowed:
    """The borrowed experts of one forward pass, and its backward."""

    def __init__(
        self,
        lending: Lending,
        experts: Any,
        transport: Transport,
        *,
        place_m: torch.Tensor,
        counts: Sequence[int],
        where: str,
    ) -> None:
        """The rows that stay here: `place_m` in the flattened choice table, `counts` for each expert."""
        self.lending, self.experts, self.transport, self.where = lending, experts, transport, where
        self.place_m, self.counts = place_m, list(counts)

    def bind(self, inputs: Sequence[torch.Tensor], structure: Structure, scores_TK: torch.Tensor) -> None:
        self.token_m = self.place_m // scores_TK.shape[1]
        self.score_m = scores_TK.flatten()[self.place_m]
        self.structure = structure
        self.rows_m = structure.put_together([tensor[self.token_m] for tensor in inputs])
        self.num_tokens = len(scores_TK)

    def send_weights(self) -> InFlight[torch.Tensor]:
        lending = self.lending
        rows = self.experts.flatten(lending.send_slots)
        label = f"shadow weights, {self.where}"
        self.weights = self.transport.all_to_all(rows, lending.send_counts, lending.receive_counts, label)
        return self.weights

    def forward(self) -> torch.Tensor:
        """What the borrowed experts add to the output."""
        self.y_mO, self.saved = self.experts.forward(self.rows_m, self.counts, self.weights.get())
        return sum_rows(self.y_mO, self.token_m, self.num_tokens, self.score_m)

    def dgrad(self, d_out_TO: torch.Tensor) -> None:
        wide = self.score_m.dtype
        d_pair_mO = d_out_TO[self.token_m]
        self.d_score_m = (d_pair_mO.to(wide) * self.y_mO.to(wide)).sum(-1)
        d_y_mO = (d_pair_mO * self.score_m[:, None]).to(self.y_mO.dtype)
        d_rows, self.pending = self.experts.dgrad(d_y_mO, self.saved, self.weights.get())
        self.d_inputs = [
            sum_rows(grad, self.token_m, self.num_tokens) if grad.is_floating_point() else None
            for grad in self.structure.flatten(d_rows)
        ]

    def wgrad(self) -> None:
        weights = self.weights.get()
        self.grads = torch.zeros_like(weights, dtype=wide_of(weights.dtype))
        self.experts.lent_wgrad(self.pending, self.grads)

    def return_grads(self) -> InFlight[torch.Tensor]:
        lending, label = self.lending, f"shadow gradients, {self.where}"
        counts = (lending.receive_counts, lending.send_counts)
        self.returned = self.transport.all_to_all(self.grads, *counts, label)
        return self.returned

    def add_grads(self, weight_grads: Sequence[torch.Tensor | None]) -> None:
        """To main_grad, or to what autograd is about to get, in the order of the borrowers."""
        self.experts.add_lent(self.lending.send_slots, self.returned.get(), weight_grads)
