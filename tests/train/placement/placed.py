"""One layer whose experts are placed on ranks, for tests: every number says which expert it belongs to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from moeclipse.balance.ownership import Owner, Ownership
from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.train.config import OptimConfig
from moeclipse.train.optim.adamw import STATES, AdamW
from moeclipse.train.optim.buckets import Buckets
from moeclipse.train.placement.expert_buckets import ExpertBucket
from moeclipse.train.placement.placed_layer import PlacedLayer

GRAIN = 4
"""Parameters of experts have 12 and 6 elements: of those, three replicas own 4, 2 and none."""


def build(
    mesh: Mesh,
    placement: Placement,
    reduce: Any = "sum",
    dtype: torch.dtype = torch.float32,
    grain: int = GRAIN,
) -> PlacedLayer:
    """One layer and its optimizer; every expert's weights and state are numbers that name it."""
    gate = GateConfig(top_k=1)
    moe = MoE(2, 3, placement.num_experts, gate=gate, mesh=mesh, placement=placement, layer=3, dtype=dtype)
    ownership = Ownership.of(placement, mesh.dp, reduce=reduce, layer=3, grain=grain)

    def place(parameter: Any, name: str, layer: MoE, key: str) -> ExpertBucket:
        return ExpertBucket(parameter, name, layer, key, ownership, mesh)

    optim = AdamW(Buckets(moe, mesh, 1.0, "off", place), OptimConfig())
    pairs = [(b, s) for b, s in zip(optim.buckets, optim.states, strict=True) if isinstance(b, ExpertBucket)]
    placed = PlacedLayer([bucket for bucket, _ in pairs], [state for _, state in pairs])
    for bucket, state in pairs:
        for slot, expert in enumerate(placement.slots[mesh.ep_index]):
            bucket.rows[slot] = numbers(bucket, expert, 0)
        for number, kind in enumerate(STATES):
            for owner, part in owned(bucket, getattr(state, kind)):
                part.copy_(numbers(bucket, owner.expert, number)[slice(*bucket.stretch(owner))])
    return placed


def owned(bucket: ExpertBucket, shard: torch.Tensor) -> list[tuple[Owner, torch.Tensor]]:
    """What this rank owns of each expert."""
    assert len(shard) == bucket.starts[-1]
    stretches = zip(bucket.owners_here, pairwise(bucket.starts), strict=True)
    return [(owner, shard[first:last]) for owner, (first, last) in stretches]


def numbers(bucket: ExpertBucket, expert: int, kind: int) -> torch.Tensor:
    salt = sum(map(ord, bucket.key))
    return torch.arange(bucket.size) + 64.0 * (expert + 8 * kind) + salt % 7
