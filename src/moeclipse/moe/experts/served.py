"""Shadows that serve other ranks: a rank computes with its own experts and with some that it is lent.

    forward    owner ---- parameters ----> guest      before all rows; guests are slots behind the rank's own
    backward   owner <--- gradients ------ guest      behind all weight gradients, added in rank order

Which rank is lent what for this step, `balance/serving` decides; rows then travel to a guest's slot as to any
replica's. A unit's pairs come sorted by slot, so those of guests stand behind the rank's own, and both parts
go through the experts one after the other: with their own weights, and with those that came.

By kernels (`FusedWithGuests`) both parts read the same rows, and their sums for each row are added.

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
from moeclipse.moe.experts.fused import FusedExperts
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.protocols import ExpertSet, PairExperts, WrappedExperts
from moeclipse.moe.experts.shadow import RankShadows
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.ops.precision import WIDE
from moeclipse.tensor.weight_grad import Grads


def serves(pairs: PairwiseExperts | None) -> bool:
    """Whether what computes a call's rows can be lent to ranks that serve others with it."""
    if pairs is None or len(pairs.like) > 1:
        return False
    return isinstance(pairs.experts, Experts) and not pairs.experts.frozen


def with_guests(
    pairs: PairwiseExperts, computes: PairExperts, dispatcher: Dispatcher
) -> tuple[PairwiseExperts, PairExperts]:
    """Both with places for what this rank is lent behind its own slots; `computes` may be kernels."""
    served = ServedExperts(pairs.experts, len(dispatcher.placement.slots[dispatcher.group.index]))
    pairs = replace(pairs, experts=served)
    return pairs, FusedWithGuests(computes, served) if isinstance(computes, FusedExperts) else pairs


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Of this rank's own experts, and of its guests (None where it has none)."""

    own: Any
    guests: Any
    rows: int
    """Pairs of its own experts."""


class ServedExperts(WrappedExperts):
    """An `ExpertSet` with guests behind its own slots."""

    def __init__(self, experts: ExpertSet[torch.Tensor], num_own: int) -> None:
        super().__init__(experts)
        self.num_own = num_own
        self.lent: InFlight[torch.Tensor] | None = None
        self._pieces: list[torch.Tensor] = []

    def cut(self, counts: Sequence[int]) -> tuple[list[int], list[int], int]:
        """(pairs of each own expert, of each guest, of all own ones)."""
        own, others = list(counts[: self.num_own]), list(counts[self.num_own :])
        return own, others, sum(own)

    def weights_lent(self) -> torch.Tensor:
        """Of the guests, a row each, once they are here."""
        assert self.lent is not None, "weights have been sent for"
        return self.lent.get()

    def pieces_lent(self, experts: Experts) -> list[torch.Tensor]:
        """The same, each weight in one piece as kernels read it; made once for all units of a call."""
        if not self._pieces:
            self._pieces = [weight.contiguous() for weight in experts.unflatten(self.weights_lent())]
        return self._pieces

    def let_go(self) -> None:
        """Of what is lent: units keep what backward needs."""
        self.lent, self._pieces = None, []

    def forward(
        self, x: torch.Tensor, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Parts]:
        assert shadows is None, "guests are slots of their own"
        own, others, rows = self.cut(counts)
        y, saved = self.experts.forward(x[:rows], own)
        if not others:
            return y, Parts(own=saved, guests=None, rows=rows)
        z, guests = self.experts.forward(x[rows:], others, self.weights_lent())
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


class FusedWithGuests:
    """`PairExperts` by kernels, with guests behind a rank's own slots."""

    def __init__(self, fused: FusedExperts, served: ServedExperts) -> None:
        self.fused, self.experts = fused, served

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return self.fused.weights

    def forward(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
    ) -> tuple[torch.Tensor, Parts]:
        own, others, pairs = self.experts.cut(counts)
        sums, saved = self.fused.forward(rows, index_M[:pairs], own, score_M[:pairs])
        if not others:
            return sums, Parts(own=saved, guests=None, rows=pairs)
        lent = self.experts.pieces_lent(self.fused.experts)
        visiting = FusedExperts(self.fused.experts, self.fused.top_k, lent)
        more, guests = visiting.forward(rows, index_M[pairs:], others, score_M[pairs:])
        return sums + more, Parts(own=saved, guests=guests, rows=pairs)

    def recompute(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
    ) -> Parts:
        """The whole of forward: pipelines, which ask for it, have no guests."""
        return self.forward(rows, index_M, counts, score_M)[1]

    def dgrad(
        self, d_partial_RO: torch.Tensor, saved: Parts
    ) -> tuple[list[torch.Tensor | None], torch.Tensor, Parts]:
        (d_rows_RD,), d_score_M, own = self.fused.dgrad(d_partial_RO, saved.own)
        if saved.guests is None:
            return [d_rows_RD], d_score_M, Parts(own=own, guests=None, rows=saved.rows)
        (more_RD,), scores_M, guests = self.fused.dgrad(d_partial_RO, saved.guests)
        assert d_rows_RD is not None
        assert more_RD is not None
        pending = Parts(own=own, guests=guests, rows=saved.rows)
        return [d_rows_RD + more_RD], torch.cat([d_score_M, scores_M]), pending

    def wgrad(
        self, pending: Sequence[Parts], begun: Grads = (), wanted: Sequence[bool] | None = None
    ) -> Grads:
        return self.experts.wgrad(pending, begun, wanted)


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
        self.experts.let_go()
        return ServedKept(
            shadows=self.shadows,
            transport=self.transport,
            where=self.where,
            shape=self.shape,
            dtype=self.dtype,
        )


class ServedGrads:
    """The guests of one backward pass."""

    def __init__(self, kept: ServedKept, pairs: PairExperts) -> None:
        self.kept, self.shadows = kept, kept.shadows
        assert isinstance(pairs, PairwiseExperts | FusedWithGuests)
        assert isinstance(pairs.experts, ServedExperts), "those that forward had"
        self.experts = pairs.experts
        self.grads: list[torch.Tensor] | None = None
        """Of each weight all guests' in one piece: kernels add to no other."""

    def collect(self, pending: Sequence[Parts], like: torch.Tensor) -> None:
        """Weight gradients of some units' guests."""
        if self.grads is None:
            wide, num = WIDE[self.kept.dtype], self.kept.shape[0]
            self.grads = [like.new_zeros((num, *w.shape[1:]), dtype=wide) for w in self.experts.weights]
        wanted = [weight.requires_grad for weight in self.experts.weights]
        for parts in pending:
            if parts.guests is not None:
                into = zip(self.grads, wanted, strict=True)
                parts.guests.add_to(*(grad if asked else None for grad, asked in into))

    def return_grads(self) -> InFlight[torch.Tensor]:
        shadows, label = self.shadows, f"shadow gradients, {self.kept.where}"
        counts = (shadows.receive_counts, shadows.send_counts)
        assert self.grads is not None, "the last weight gradients stand before this"
        rows = torch.cat([grad.flatten(1) for grad in self.grads], dim=1)
        self.returned: InFlight[torch.Tensor] = self.kept.transport.all_to_all(rows, *counts, label)
        return self.returned

    def add_grads(self, weight_grads: Sequence[torch.Tensor | None]) -> None:
        self.experts.add_shadow_grads(self.shadows.send_slots, self.returned.get(), weight_grads)
