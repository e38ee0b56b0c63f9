"""Keys and values that are kept, so that a text is read once while it grows.

Idea. Row b of a cache is a text. A call reads some more tokens of each: it puts their keys and values at
their places and lets them see what lies before. A token sees only places up to its own, and each of these
has been filled by then; so rows of unequal length are read together, padded behind their ends, and what
stands in the padding is overwritten before anybody sees it.

    gqa       keys, turned by their positions, and values                       [B, G, L, d]
    mla       the turned key that all heads share, and the latent behind it     [B, 1, L, rope + rank]

Latent attention thus keeps what makes it narrow, and its heads read the latent itself (`model/attention`).

A mixer with a state (`model/delta_mixers`) keeps that instead, one for each row: it must not take padding
in, so a call says how many tokens of a row are new.

Contract. Logits are those of a forward over the whole text, in float64 within 1e-12. A cache holds this
rank's heads; under tensor parallelism every rank of a group has one for the same rows.

Shapes: B rows of text, S new places, L places of the cache, G key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from moeclipse.ops.attention import mask_at

UNIT = 16
"""Places of a cache are a multiple of this: kernels read so many at once."""


class KeyValueCache:
    """Of all layers; memory is taken when a layer first calls."""

    def __init__(self, length: int) -> None:
        """At least so many places."""
        self.length = -(-length // UNIT) * UNIT
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def clear(self) -> None:
        """In place: what was kept may be in sight of a mask, and be no number."""
        for kept in self._kept.values():
            kept.zero_()

    def put(
        self, layer: int, number: int, new_BGSd: torch.Tensor, place_BS: torch.Tensor, row_B1: torch.Tensor
    ) -> torch.Tensor:
        """All that is kept under (layer, number), with these at their places of their rows: [B, G, L, d]."""
        key = (layer, number)
        if key not in self._kept:
            rows, groups, _, width = new_BGSd.shape
            # Zeros: a weight of 0 does not make a number of what was never written.
            self._kept[key] = new_BGSd.new_zeros(rows, groups, self.length, width)
        kept = self._kept[key]
        kept[row_B1, :, place_BS] = new_BGSd.transpose(1, 2).to(kept.dtype)
        return kept

    def state(self, layer: int, number: int) -> torch.Tensor | None:
        """What was kept last under (layer, number); None: nothing yet."""
        return self._kept.get((layer, number))

    def keep(self, layer: int, number: int, new: torch.Tensor) -> None:
        """In the memory of what was kept before: a graph reads it there."""
        kept = self._kept.get((layer, number))
        if kept is None:
            self._kept[layer, number] = new.clone()
        else:
            kept.copy_(new)


@dataclass(frozen=True, kw_only=True)
class CacheCall:
    """One reading of new tokens."""

    cache: KeyValueCache
    place_BS: torch.Tensor
    """Where each new token stands in its row."""
    num_keys: int
    """Places that any of them may see; those behind need not be read."""
    begins: bool
    """All rows are read from their first token on, in this call."""
    count_B: torch.Tensor
    """New tokens of each row; what stands behind them is padding."""
    segment: int = 0
    """Length of a segment, for models with memory (`model/segment_memory`)."""
    masks: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)
    """Those that layers have asked for."""

    def keys(self, layer: int, new_BGSd: torch.Tensor) -> torch.Tensor:
        """All so far, these included."""
        return self.cache.put(layer, 0, new_BGSd, self.place_BS, self.numbers)[:, :, : self.num_keys]

    def values(self, layer: int, new_BGSe: torch.Tensor) -> torch.Tensor:
        return self.cache.put(layer, 1, new_BGSe, self.place_BS, self.numbers)[:, :, : self.num_keys]

    @cached_property
    def numbers(self) -> torch.Tensor:
        """Of the rows, [B, 1]."""
        return torch.arange(len(self.place_BS), device=self.place_BS.device)[:, None]

    @property
    def is_new(self) -> torch.Tensor:
        """Which tokens are new, and no padding."""
        index_S = torch.arange(self.place_BS.shape[1], device=self.place_BS.device)
        return index_S < self.count_B[:, None]

    def plain(self, memory: int) -> bool:
        """Whether this is attention within samples, as in training."""
        return self.begins and not (memory and self.place_BS.shape[1] > self.segment)

    def mask(
        self, window: int, memory: int, chunk: int, *, keys: int, share: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """What attention adds to scores (`ops/attention`), made once for all layers that see alike."""
        key = (window, memory, chunk, keys, share, dtype)
        if key not in self.masks:
            first_BS = self.first_seen(window, memory, chunk)
            self.masks[key] = mask_at(self.place_BS, first_BS, keys, share, dtype)
        return self.masks[key]

    def first_seen(self, window: int, memory: int, chunk: int = 0) -> torch.Tensor | None:
        """The first place that each token sees; None: all of them begin with 0."""
        if chunk:
            return self.place_BS - self.place_BS % chunk
        if window:
            return self.place_BS - (window - 1)
        if memory:
            return self.place_BS - self.place_BS % self.segment - memory
        return None
