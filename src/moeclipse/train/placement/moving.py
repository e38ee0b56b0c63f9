"""Experts move house: weights, master weights, both moments and step counts, one exchange per layer.

    old homes, new homes -> parcels (`balance/homes`) -> one exchange (`moe/migrate`) -> everything into place

Contract. `relocate` is collective over the ranks of the layer's buckets. Nothing is overwritten before all
that arrives has been checked, so an error leaves this rank as it was. What a rank keeps is copied, not sent.
Between two steps all replicas are equal, so weights may come from any of them.

Staging: one layer at a time, beside it the new state of that layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moeclipse.balance.homes import Homes, Parcel
from moeclipse.balance.placement import EMPTY
from moeclipse.moe.migrate import ship
from moeclipse.ops.raw_bytes import as_bytes
from moeclipse.train.optim import STATES, ShardState
from moeclipse.train.placement.expert_buckets import ExpertBucket


class House:
    """One layer's experts on this rank: the bucket of each parameter, and the optimizer's state of it."""

    def __init__(self, buckets: Sequence[ExpertBucket], states: Sequence[ShardState]) -> None:
        self.buckets, self.states = buckets, states
        self.layer = buckets[0].layer
        self.expected_E: np.ndarray | None = None
        """The loads that the placement was planned for."""

    @property
    def homes(self) -> Homes:
        return self.buckets[0].homes

    @torch.no_grad()
    def relocate(self, new: Homes, updates: int, expected_E: np.ndarray | None = None) -> int:
        """Make `new` hold; returns the number of parcels that travelled. Collective."""
        old, group = self.homes, self.buckets[0].group
        parcels = old.parcels(new)
        arrived = ship(
            parcels,
            self._pack,
            self._length,
            group=group,
            lane=self.buckets[0].mesh.grads,
            layer=self.layer.layer,
            updates=updates,
        )
        weights = {parcel.expert: data for parcel, data in arrived.items() if not parcel.state}
        states = {parcel.expert: data for parcel, data in arrived.items() if parcel.state}
        rows = self._new_rows(new, weights)
        fresh = self._new_states(new, states)
        for bucket, kept, state, after in zip(self.buckets, rows, self.states, fresh, strict=True):
            bucket.rows.copy_(kept)
            for kind in STATES:
                setattr(state, kind, getattr(after, kind))
            bucket.settle(new)
        self._route(new, expected_E)
        return len(parcels)

    def _route(self, new: Homes, expected_E: np.ndarray | None) -> None:
        self.expected_E = expected_E
        self.layer.move_to(new.placement, expected_E)

    def lay_out(self, new: Homes, expected_E: np.ndarray | None = None) -> None:
        """Make `new` hold without weights and state: they are about to be read from a checkpoint."""
        for bucket, state in zip(self.buckets, self.states, strict=True):
            bucket.settle(new)
            size = len(bucket.here) * bucket.size
            for kind in STATES:
                setattr(state, kind, torch.zeros(size, dtype=bucket.grads.dtype, device=bucket.grads.device))
        self._route(new, expected_E)

    # What one expert is made of, in bytes: parameter by parameter, and of each state by state.

    def _length(self, parcel: Parcel) -> int:
        if parcel.state:
            return sum(len(STATES) * bucket.size * bucket.grads.element_size() for bucket in self.buckets)
        return sum(bucket.size * bucket.params.element_size() for bucket in self.buckets)

    def _pack(self, parcel: Parcel) -> torch.Tensor:
        me = self.buckets[0].group.index
        if not parcel.state:
            slot = self.homes.slot_of[me % self.homes.placement.num_ranks, parcel.expert]
            return torch.cat([as_bytes(bucket.rows[slot]) for bucket in self.buckets])
        place = [home.expert for home in self.buckets[0].here].index(parcel.expert)
        return torch.cat(
            [
                as_bytes(getattr(state, kind)[place * bucket.size : (place + 1) * bucket.size])
                for bucket, state in zip(self.buckets, self.states, strict=True)
                for kind in STATES
            ]
        )

    def _new_rows(self, new: Homes, weights: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        me = self.buckets[0].group.index % new.placement.num_ranks
        found, start = [], 0
        for bucket in self.buckets:
            rows = bucket.rows.clone()
            stop = start + bucket.size * bucket.params.element_size()
            for slot, expert in enumerate(new.placement.slots[me]):
                if expert in weights:
                    rows[slot] = weights[expert][start:stop].clone().view(rows.dtype)
                elif expert != EMPTY:
                    rows[slot] = bucket.rows[self.homes.slot_of[me, expert]]
            start = stop
            found.append(rows)
        return found

    def _new_states(self, new: Homes, states: dict[int, torch.Tensor]) -> list[ShardState]:
        me = self.buckets[0].group.index
        before = {home.expert: place for place, home in enumerate(self.buckets[0].here)}
        owned, found, start = new.owned(me), [], 0
        for bucket, state in zip(self.buckets, self.states, strict=True):
            fresh = {}
            for kind in STATES:
                old = getattr(state, kind).view(-1, bucket.size)
                after = old.new_empty(len(owned), bucket.size)
                stop = start + bucket.size * old.element_size()
                for place, home in enumerate(owned):
                    if home.expert in states:
                        after[place] = states[home.expert][start:stop].clone().view(old.dtype)
                    else:
                        after[place] = old[before[home.expert]]
                start = stop
                fresh[kind] = after.flatten()
            found.append(ShardState(**fresh))
        return found
