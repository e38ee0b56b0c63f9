"""Which rank holds which expert.

A placement is immutable: `slots[p]` lists the experts that rank p of an expert group holds, in the order
of its slots. Any number of experts fits any number of ranks: the first ranks hold one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


def even_bounds(total: int, parts: int) -> list[int]:
    """Cut `total` into `parts` contiguous shares that differ by at most one; the first are larger."""
    share, more = divmod(total, parts)
    return [part * share + min(part, more) for part in range(parts + 1)]


def primary_bounds(num_experts: int, num_replicas: int, first: int) -> list[int]:
    """Who is primary for which of a rank's experts, spread evenly over the replicas.

    Returns bounds per replica: replica r is primary for experts bounds[r]:bounds[r+1] of the rank. The
    larger shares start at replica `first` (the layer's number), so that over layers they even out.
    """
    share, more = divmod(num_experts, num_replicas)
    sizes = [share + ((replica - first) % num_replicas < more) for replica in range(num_replicas)]
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


@dataclass(frozen=True)
class Placement:
    slots: tuple[tuple[int, ...], ...]

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        bounds = even_bounds(num_experts, num_ranks)
        return cls(tuple(tuple(range(bounds[p], bounds[p + 1])) for p in range(num_ranks)))

    @property
    def num_ranks(self) -> int:
        return len(self.slots)

    @cached_property
    def num_experts(self) -> int:
        return sum(len(experts) for experts in self.slots)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each expert."""
        where = {expert: rank for rank, experts in enumerate(self.slots) for expert in experts}
        return tuple(where[expert] for expert in range(self.num_experts))

    @cached_property
    def slot_of(self) -> tuple[int, ...]:
        """The place of each expert when slots are counted rank by rank."""
        flat = [expert for experts in self.slots for expert in experts]
        return tuple(flat.index(expert) for expert in range(self.num_experts))
