"""Rotary position: pairs of components of a query or key, turned by an angle that grows with the position.

    angle(p, i) = p f_i,   f_i = base^(-2i / width)          pair i of width / 2

Longer texts than a model was trained on turn by smaller angles; which, `scaling` says:

    linear    f_i / factor
    dynamic   a larger base, once the text (with documents: the document) is longer than original_len
    yarn      f_i where a pair turns often within original_len (beta_fast times), f_i / factor where it turns
              seldom (beta_slow), a ramp between; cos and sin are multiplied by 0.1 ln(factor) + 1
    llama3    the same idea by wavelengths: below original_len / high_freq, above original_len / low_freq

Contract. Tables are float64, so that every type rounds once. A query and a key that are turned by the same
table see their distance alone. `pairs` says which components belong together: component i of the first and
of the second half, or neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from moeclipse.model.cache import CacheCall
from moeclipse.model.config import ModelConfig, Pairs, Scaling, yarn_magnitude
from moeclipse.ops import rotary as turning
from moeclipse.ops.attention import restarting_positions


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """What turns, and by how much."""

    width: int
    base: float
    scaling: Scaling = "none"
    factor: float = 1.0
    original_len: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq: float = 1.0
    high_freq: float = 4.0
    magnitude: float = 0.0
    """Factor on cos and sin; 0: that of the scaling."""
    pairs: Pairs = "halves"

    @classmethod
    def of(cls, config: ModelConfig, window: int = 0) -> Rotary:
        """That of layers which see all positions, or so many."""
        if window and config.window_rope_base:
            width = config.window_rope_dim or config.head_dim
            return cls(width=width, base=config.window_rope_base, pairs=config.rope_pairs)
        return cls(
            width=config.rope_width,
            base=config.rope_base,
            scaling=config.rope_scaling,
            factor=config.rope_factor,
            original_len=config.rope_original_len,
            beta_fast=config.rope_beta_fast,
            beta_slow=config.rope_beta_slow,
            truncate=config.rope_truncate,
            low_freq=config.rope_low_freq,
            high_freq=config.rope_high_freq,
            magnitude=config.rope_magnitude,
            pairs=config.rope_pairs,
        )

    def frequencies(self, length: int | torch.Tensor, device: torch.device) -> torch.Tensor:
        """[width / 2] for texts of `length` tokens, float64; [..., width / 2] for many of them."""
        base: float | torch.Tensor = self.base
        if self.scaling == "dynamic":
            many = length if isinstance(length, torch.Tensor) else torch.full((), length, device=device)
            longest = many.to(torch.float64).clamp(min=self.original_len)
            stretch = self.factor * longest / self.original_len - (self.factor - 1)
            base = self.base * stretch[..., None] ** (self.width / (self.width - 2))
        plain: torch.Tensor = base ** (
            -torch.arange(0, self.width, 2, dtype=torch.float64, device=device) / self.width
        )
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == "yarn":
            keep = 1 - self._ramp(device)
            return plain / self.factor * (1 - keep) + plain * keep
        if self.scaling == "llama3":
            turns = self.original_len * plain / (2 * math.pi)
            keep = ((turns - self.low_freq) / (self.high_freq - self.low_freq)).clamp(0, 1)
            return plain / self.factor * (1 - keep) + plain * keep
        return plain

    def _ramp(self, device: torch.device) -> torch.Tensor:
        """Of yarn: 0 for pairs that turn often, 1 for those that turn seldom."""

        def pair_that_turns(times: float) -> float:
            reach = math.log(self.original_len / (times * 2 * math.pi))
            return self.width * reach / (2 * math.log(self.base))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.width - 1)
        pair = torch.arange(self.width // 2, dtype=torch.float64, device=device)
        return ((pair - low) / (high - low or 0.001)).clamp(0, 1)

    @property
    def factor_on_table(self) -> float:
        if self.magnitude:
            return self.magnitude
        return yarn_magnitude(self.factor) if self.scaling == "yarn" else 1.0

    def table(self, position: torch.Tensor, length: int | torch.Tensor) -> torch.Tensor:
        """cos and sin for each (position, pair): [2, *position.shape, width / 2], float64.

        `length`: of the text, or of each position's own.
        """
        angle = position.to(torch.float64)[..., None] * self.frequencies(length, position.device)
        table = torch.stack([angle.cos(), angle.sin()])
        magnitude = self.factor_on_table
        return table if magnitude == 1 else table * magnitude


def near_rotary(config: ModelConfig) -> Rotary | None:
    """Of layers with a window; None: they turn as all others."""
    return Rotary.of(config, max(config.windows)) if config.window_rope_base else None


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Where the tokens of some samples of one length stand."""

    table: torch.Tensor
    """cos and sin, [2, S, pairs]; with documents or a cache [2, B, 1, S, pairs]."""
    length: int
    place: torch.Tensor
    """Where each token stands in its text, [S]; with documents or a cache [B, S]."""
    documents_BS: torch.Tensor | None = None
    """Numbers of documents, which begin anew at position 0 and do not see each other; None: one a sample."""
    cache: CacheCall | None = None
    """Keys and values of what was read before; samples may stand at different places."""
    near: Positions | None = None
    """The same, as layers with a window turn; None: by the same table."""

    @classmethod
    def of(
        cls,
        rotary: Rotary,
        length: int,
        device: torch.device,
        *,
        first: int = 0,
        documents_BS: torch.Tensor | None = None,
        near: Rotary | None = None,
    ) -> Positions:
        """`near`: of layers with a window, where these turn otherwise."""
        if documents_BS is None:
            return _of_whole_samples(rotary, length, device, first, near)
        place_BS = restarting_positions(documents_BS)
        found = [
            cls(
                table=each.table(place_BS[:, None], lengths_of(place_BS)[:, None]),
                length=length,
                place=place_BS,
                documents_BS=documents_BS,
            )
            for each in (rotary, *([near] if near else []))
        ]
        return replace(found[0], near=found[1]) if near else found[0]

    def seen(self, window: int) -> Positions:
        """By a layer with such a window; 0: with none."""
        return self.near if window and self.near is not None else self

    @cached_property
    def begins(self) -> torch.Tensor | None:
        """Before which tokens there is nothing; None: before the first of each sample alone."""
        return self.place == 0 if self.place.dim() == 2 else None

    def pieces(self, size: int) -> torch.Tensor | None:
        """Documents, cut into pieces of so many positions; None: nothing is cut."""
        if size >= self.length or not size:
            return self.documents_BS
        number = (self.place % size == 0).cumsum(-1)
        return number if number.dim() == 2 else number[None]

    @cached_property
    def rows(self) -> torch.Tensor:
        """The table for each position, or with documents for each token: [2, R, pairs], float64."""
        return self.table.reshape(2, -1, self.table.shape[-1])

    @cached_property
    def narrow_rows(self) -> torch.Tensor:
        """The same in fp32: what narrower types turn by."""
        return self.rows.to(torch.float32)


def lengths_of(place_BS: torch.Tensor) -> torch.Tensor:
    """Of each token's document, by positions in them: [[0, 1, 2, 0, 1]] -> [[3, 3, 3, 2, 2]]."""
    number_BS = (place_BS == 0).cumsum(1) - 1
    counts_BS = torch.zeros_like(place_BS).scatter_add_(1, number_BS, torch.ones_like(place_BS))
    return counts_BS.gather(1, number_BS)


@lru_cache(maxsize=16)
def _of_whole_samples(
    rotary: Rotary, length: int, device: torch.device, first: int, near: Rotary | None
) -> Positions:
    """Every layer of every microbatch turns by the same table, or by one of two."""
    place_S = torch.arange(first, first + length, device=device)
    by_near = None if near is None else _of_whole_samples(near, length, device, first, None)
    return Positions(table=rotary.table(place_S, length), length=length, place=place_S, near=by_near)


def rotate(x: torch.Tensor, table: torch.Tensor, pairs: Pairs = "halves") -> torch.Tensor:
    """Turn pairs of components by their positions' angles; components behind the table's width stay."""
    return turning.rotate(x, table, pairs == "neighbours")
