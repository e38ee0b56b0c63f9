"""What ranks hold in pieces, put together as one process holds it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from moeclipse.train.optim.column_shards import ColumnShard
from moeclipse.train.step.learner import Learner

Pieces = list[tuple[str, int, list[int], torch.Tensor]]
"""(name, first element, shape of the whole, flat values) of each."""


def gradient_pieces(learner: Learner, shards: Iterable[torch.Tensor]) -> Pieces:
    """This rank's shards of the summed gradient, one of each bucket, by parameter."""
    pieces: Pieces = []
    for bucket, shard in zip(learner.buckets, shards, strict=True):
        for segment in bucket.segments():
            values = shard[segment.offset : segment.offset + segment.length].to("cpu", copy=True)
            pieces.append((segment.entry.name, segment.start, list(segment.entry.shape), values))
    return pieces


def reduced(learner: Learner) -> Pieces:
    """The same, waited for after a backward; the optimizer cannot have them any more."""
    return gradient_pieces(learner, [bucket.reduced() for bucket in learner.buckets])


def join(results: Sequence[Pieces]) -> dict[str, torch.Tensor]:
    """Logical tensors, after checking that every element was handed in exactly once."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    shapes: dict[str, list[int]] = {}
    for name, start, shape, values in itertools.chain(*results):
        parts.setdefault(name, []).append((start, values))
        shapes[name] = shape
    stored = {}
    for name, found in parts.items():
        found.sort(key=lambda item: item[0])
        lengths = [values.numel() for _, values in found]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        assert [start for start, _ in found] == starts, f"{name} is not covered exactly once"
        stored[name] = torch.cat([values for _, values in found]).view(shapes[name])
    joined = {name: value for name, value in stored.items() if ColumnShard.parse(name) is None}
    cut = (
        (column_shard, value) for name, value in stored.items() if (column_shard := ColumnShard.parse(name))
    )
    column_shards = sorted(cut, key=lambda item: item[0])
    for name, columns in itertools.groupby(column_shards, key=lambda item: item[0].name):
        assert name not in joined
        joined[name] = torch.cat([value for _, value in columns], dim=-1)
    return joined
