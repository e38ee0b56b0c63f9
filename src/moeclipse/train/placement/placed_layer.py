"""One layer's experts on this rank, and how they move: weights, master weights, both moments, step counts.

    old, new owners -> transfers (`balance/ownership`) -> one exchange (`moe/own_loop/migrate`) -> all of it
    into place

Of an expert's elements each owner has a part. Where the ranks of an expert change, its parts do, too, and of
its state what is another's from now on travels, in the order of elements.

Contract. `migrate` is collective over the ranks of the layer's buckets. Nothing is overwritten before all
that arrives has been checked, so an error leaves this rank as it was. What a rank keeps is copied, not sent.
Between two steps all replicas are equal, so weights may come from any of them.

Staging: one layer at a time, beside it the new state of that layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moeclipse.balance.ownership import ExpertTransfer, Owner, Ownership
from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.moe.own_loop.migrate import exchange_experts
from moeclipse.ops.raw_bytes import as_bytes
from moeclipse.train.optim.shard_state import STATES, ShardState
from moeclipse.train.placement.expert_buckets import ExpertBucket


class PlacedLayer:
    """The bucket of each parameter of a layer's experts, and the optimizer's state of it: None if frozen."""

    def __init__(self, buckets: Sequence[ExpertBucket], states: Sequence[ShardState | None]) -> None:
        self.buckets, self.states = buckets, states
        self.layer = buckets[0].layer
        self.expected_E: np.ndarray | None = None
        """The loads that the placement was planned for."""

    @property
    def trained(self) -> list[tuple[ExpertBucket, ShardState]]:
        """Buckets that have state."""
        pairs = zip(self.buckets, self.states, strict=True)
        return [(bucket, state) for bucket, state in pairs if state is not None]

    @property
    def number(self) -> int:
        """Of the layer in the model."""
        return self.layer.layer

    @property
    def ownership(self) -> Ownership:
        return self.buckets[0].ownership

    @property
    def placement(self) -> Placement:
        return self.ownership.placement

    @torch.no_grad()
    def migrate(self, new: Ownership, updates: int, expected_E: np.ndarray | None = None) -> int:
        """Make `new` hold; returns the number of transfers. Collective."""
        transfers = self.ownership.transfers(new, [bucket.size for bucket, _ in self.trained])
        arrived = exchange_experts(
            transfers,
            self._pack,
            self._length,
            group=self.buckets[0].group,
            lane=self.buckets[0].mesh.grads,
            layer=self.number,
            updates=updates,
        )
        weights = {transfer.expert: data for transfer, data in arrived.items() if not transfer.state}
        states = {(t.expert, t.source): data for t, data in arrived.items() if t.state}
        rows = self._new_rows(new, weights)
        fresh = self._new_states(new, states)
        for bucket, kept, state, after in zip(self.buckets, rows, self.states, fresh, strict=True):
            bucket.rows.copy_(kept)
            bucket.set_ownership(new)
            if state is not None and after is not None:
                for kind in STATES:
                    state.put(kind, after[kind])
                state.stretches = None
        self._set_route(new, expected_E)
        return len(transfers)

    def _set_route(self, new: Ownership, expected_E: np.ndarray | None) -> None:
        self.expected_E = expected_E
        self.layer.move_to(new.placement, expected_E)

    def reset(self, new: Ownership, expected_E: np.ndarray | None = None) -> None:
        """Make `new` hold without weights and state: they are about to be read from a checkpoint."""
        for bucket, state in zip(self.buckets, self.states, strict=True):
            bucket.set_ownership(new)
            if state is None:
                continue
            for kind in STATES:
                zeros = torch.zeros(bucket.starts[-1], dtype=state.type_of(kind), device=bucket.params.device)
                state.put(kind, zeros)
            state.stretches = None
        self._set_route(new, expected_E)

    # What one expert is made of, in bytes: parameter by parameter, and of each state by state.

    def _length(self, transfer: ExpertTransfer) -> int:
        if transfer.owners is None:
            return sum(bucket.size * bucket.params.element_size() for bucket in self.buckets)
        total = 0
        for bucket, state in self.trained:
            first, last = both(*transfer.owners, bucket)
            total += (last - first) * sum(state.type_of(kind).itemsize for kind in STATES)
        return total

    def _pack(self, transfer: ExpertTransfer) -> torch.Tensor:
        if transfer.owners is None:
            slot = self.buckets[0].slots.index(transfer.expert)
            return torch.cat([as_bytes(bucket.rows[slot]) for bucket in self.buckets])
        parts = []
        for bucket, state in self.trained:
            here = self._within(bucket, transfer.owners[0], both(*transfer.owners, bucket))
            parts += [as_bytes(state.values(kind, *here)) for kind in STATES]
        return torch.cat(parts)

    @staticmethod
    def _within(bucket: ExpertBucket, owner: Owner, elements: tuple[int, int]) -> tuple[int, int]:
        """Elements of an expert, counted inside what this rank owns now."""
        shift = bucket.starts[bucket.owners_here.index(owner)] - bucket.stretch(owner)[0]
        return elements[0] + shift, elements[1] + shift

    def _new_rows(self, new: Ownership, weights: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        rank = self.buckets[0].group.index % new.placement.num_ranks
        found, start = [], 0
        for bucket in self.buckets:
            rows = bucket.rows.clone()
            stop = start + bucket.size * bucket.params.element_size()
            for slot, expert in enumerate(new.placement.slots[rank]):
                if expert in weights:
                    rows[slot] = weights[expert][start:stop].clone().view(rows.dtype)
                elif expert != EMPTY:
                    rows[slot] = bucket.rows[bucket.slots.index(expert)]
            start = stop
            found.append(rows)
        return found

    def _new_states(
        self, new: Ownership, states: dict[tuple[int, int], torch.Tensor]
    ) -> list[dict[str, torch.Tensor] | None]:
        """Values of each kind; `states`: what arrived, by expert and where it comes from."""
        me = self.buckets[0].group.index
        read = dict.fromkeys(states, 0)
        found: list[dict[str, torch.Tensor] | None] = []
        for bucket, state in zip(self.buckets, self.states, strict=True):
            if state is None:
                found.append(None)
                continue
            parts: dict[str, list[torch.Tensor]] = {kind: [state.values(kind, 0, 0)] for kind in STATES}
            for owner in new.owned_by(me):
                for old in self.ownership.sources(owner):
                    first, last = both(old, owner, bucket)
                    key = (owner.expert, self.ownership.index_of(old))
                    if first == last:
                        continue
                    for kind, pieces in parts.items():
                        dtype = state.type_of(kind)
                        if key[1] == me:
                            pieces.append(state.values(kind, *self._within(bucket, old, (first, last))))
                            continue
                        stop = read[key] + (last - first) * dtype.itemsize
                        pieces.append(states[key][read[key] : stop].clone().view(dtype))
                        read[key] = stop
            found.append({kind: torch.cat(parts[kind]) for kind in STATES})
        return found


def both(old: Owner, new: Owner, bucket: ExpertBucket) -> tuple[int, int]:
    """The elements that two owners have in common, in this bucket."""
    first, last = old.overlap(new, bucket.size)
    return first, max(first, last)
