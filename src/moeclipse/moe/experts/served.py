"""Shadows that serve other ranks: a rank computes with its own experts and with some that it is lent.

    forward    owner ---- parameters ----> guest      before all rows; guests are slots behind the rank's own
    backward   owner <--- gradients ------ guest      behind all weight gradients, added in rank order

Which rank is lent what for this step, `balance/serving` decides; rows then travel to a guest's slot as to any
replica's. A unit's pairs come sorted by slot, so those of guests stand behind the rank's own, and both parts
go through the experts one after the other: with their own weights, and with those that came.

Contract. Plain experts whose rows are one vector each (`serves`). What forward keeps of guests holds their
weights; nothing of them is ever a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moeclipse.comm.async_ops.lane import InFlight
from moeclipse.comm.transports.transport import Transport
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.protocols import ExpertSet
from moeclipse.moe.experts.shadow import RankShadows
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.ops.precision import WIDE
from moeclipse.tensor.weight_grad import Grads


def serves(pairs: PairwiseExperts | None) -> bool:
    """Whether what computes a call's rows can be lent to ranks that serve others with it."""
    if pairs is None or len(pairs.like) > 1:
        return False
    return isinstance(pairs.experts, Experts) and not pairs.experts.frozen


def with_guests(pairs: PairwiseExperts, dispatcher: Dispatcher) -> PairwiseExperts:
    """With places for what this rank is lent behind its own slots."""
    own = len(dispatcher.placement.slots[dispatcher.group.index])
    return replace(pairs, experts=ServedExperts(pairs.experts, own))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of this rank's own experts, and of its guests (None where it has none)."""

    own: Any
    guests: Any
    rows: int
    """Pairs of its own experts."""


class ServedExperts:
    """An `ExpertSet` with guests behind its own slots."""

    def __init__(self, experts: ExpertSet, num_own: int) -> None:
        self.experts, self.num_own, self.ids = experts, num_own, experts.ids
        self.lent: InFlight[torch.Tensor] | None = None

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return self.experts.weights

    @property
    def out_width(self) -> int:
        return self.experts.out_width

    def forward(
        self, x: torch.Tensor, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Parts]:
        assert shadows is None, "guests are slots of their own"
        assert self.lent is not None, "weights have been sent for"
        own, others = list(counts[: self.num_own]), list(counts[self.num_own :])
        rows = sum(own)
        y, saved = self.experts.forward(x[:rows], own)
        if not others:
            return y, Parts(own=saved, guests=None, rows=rows)
        z, guests = self.experts.forward(x[rows:], others, self.lent.get())
        return torch.cat([y, z]), Parts(own=saved, guests=guests, rows=rows)

    def dgrad(self, dy: torch.Tensor, saved: Parts) -> tuple[torch.Tensor, Parts]:
        dx, own = self.experts.dgrad(dy[: saved.rows], saved.own)
        if saved.guests is None:
            return dx, Parts(own=own, guests=None, rows=saved.rows)
        dz, guests = self.experts.dgrad(dy[saved.rows :], saved.guests)
        return torch.cat([dx, dz]), Parts(own=own, guests=guests, rows=saved.rows)

    def wgrad(
        self, pending: Sequence[Parts], begun: Grads = (), wanted: Sequence[bool] | None = None
    ) -> Grads:
        """Of its own; those of guests are `ServedGrads`'."""
        return self.experts.wgrad([parts.own for parts in pending], begun, wanted)

    def flatten(self, slots: Sequence[int]) -> torch.Tensor:
        return self.experts.flatten(slots)

    def shadow_wgrad(self, pending: Any, rows: torch.Tensor) -> None:
        self.experts.shadow_wgrad(pending, rows)

    def add_shadow_grads(
        self, slots: Sequence[int], rows: torch.Tensor, weight_grads: Sequence[torch.Tensor | None]
    ) -> None:
        self.experts.add_shadow_grads(slots, rows, weight_grads)


@dataclass(frozen=True, kw_only=True)
class ServedKept:
    """What backward needs of a forward with guests, beside what units keep."""

    shadows: RankShadows
    transport: Transport
    where: str
    shape: torch.Size
    """Of the guests' weights, a row each."""
    dtype: torch.dtype


class Guests:
    """The guests of one forward pass on this rank: what `ShadowExperts` is to shadows."""

    def __init__(
        self, shadows: RankShadows, experts: ServedExperts, transport: Transport, *, where: str
    ) -> None:
        self.shadows, self.experts, self.transport, self.where = shadows, experts, transport, where

    def bind(self, inputs: Sequence[torch.Tensor], scores_TK: torch.Tensor) -> None:
        """Rows of guests travel with all others."""

    def send_weights(self) -> InFlight[torch.Tensor]:
        shadows, label = self.shadows, f"shadow weights, {self.where}"
        rows = self.experts.flatten(shadows.send_slots)
        lent = self.transport.all_to_all(rows, shadows.send_counts, shadows.receive_counts, label)
        self.experts.lent = lent
        self.shape, self.dtype = torch.Size((sum(shadows.receive_counts), rows.shape[1])), rows.dtype
        return lent

    @property
    def kept(self) -> ServedKept:
        """After the last unit, which was the last to ask for weights."""
        self.experts.lent = None
        return ServedKept(
            shadows=self.shadows,
            transport=self.transport,
            where=self.where,
            shape=self.shape,
            dtype=self.dtype,
        )


class ServedGrads:
    """The guests of one backward pass."""

    def __init__(self, kept: ServedKept, pairs: Any) -> None:
        self.kept, self.shadows = kept, kept.shadows
        self.experts: ServedExperts = pairs.experts  # those that forward had
        self.grads: torch.Tensor | None = None

    def collect(self, pending: Sequence[Parts], like: torch.Tensor) -> None:
        """Weight gradients of some units' guests."""
        if self.grads is None:
            self.grads = like.new_zeros(self.kept.shape, dtype=WIDE[self.kept.dtype])
        for parts in pending:
            if parts.guests is not None:
                self.experts.shadow_wgrad(parts.guests, self.grads)

    def return_grads(self) -> InFlight[torch.Tensor]:
        shadows, label = self.shadows, f"shadow gradients, {self.kept.where}"
        counts = (shadows.receive_counts, shadows.send_counts)
        assert self.grads is not None, "the last weight gradients stand before this"
        self.returned: InFlight[torch.Tensor] = self.kept.transport.all_to_all(self.grads, *counts, label)
        return self.returned

    def add_grads(self, weight_grads: Sequence[torch.Tensor | None]) -> None:
        self.experts.add_shadow_grads(self.shadows.send_slots, self.returned.get(), weight_grads)
