"""Causal self-attention: grouped-query, and multi-head latent (DeepSeek-V3).

Shapes: T tokens, B samples, S positions, D model width, H heads of this rank, d head width.
Both rotate pairs of query and key components by an angle that grows with the position (RoPE).

Under tensor parallelism each rank computes some heads for all tokens. Grouped-query attention gathers the
input once for queries, keys and values. Latent attention computes its narrow latents where the tokens are
and gathers those, not the wide input.

With `model.memory` both also attend to what they saw in the segment before (`model/memory`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.model.blocks import Linear, RMSNorm, Settings
from moeclipse.model.config import ModelConfig
from moeclipse.model.memory import LayerMemory, Past
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.precision import wide_of
from moeclipse.tensor.linear import column_linear
from moeclipse.tensor.parallel import move


def rope_table(seq_len: int, width: int, base: float, device: torch.device, first: int = 0) -> torch.Tensor:
    """cos and sin for each (position, pair): [2, S, width / 2], in float64: every dtype rounds once."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    position = torch.arange(first, first + seq_len, dtype=torch.float64, device=device)
    angle = position[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x_BHSd: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn each (first half, second half) pair of components by its position's angle."""
    wide = wide_of(x_BHSd.dtype)
    cos, sin = table.to(wide)
    first, second = x_BHSd.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BHSd.dtype)


class Attention(nn.Module):
    """What both kinds share: the memory of the segment before."""

    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__()
        self.tp, self.rope = settings.tp, (config.rope_width, config.rope_base)
        self.memory = LayerMemory(config.memory, settings.layer, settings.tp) if config.memory else None

    def recall(self, x_TD: torch.Tensor, positions: int, tokens: Tokens | None) -> Past | None:
        """What the segment before left for these tokens; and keep what they leave for the next."""
        if self.memory is None:
            return None
        samples = len(x_TD) * (self.tp.size if self.tp.parts_tokens else 1) // positions
        if not samples:  # nothing to remember, and its place is that of the samples behind it
            return None
        place = (0, 0) if tokens is None else (tokens.microbatch, tokens.first // positions)
        past = self.memory.read(place, samples)
        if self.training:
            self.memory.write(place, x_TD, positions, past)
        return past

    def past_table(self, past: Past) -> torch.Tensor:
        """Positions before the segment's first, which is 0."""
        return rope_table(past.positions, *self.rope, past.x_TD.device, first=-past.positions)


class GroupedQueryAttention(Attention):
    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__(config, settings)
        self.head_dim = config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        self.label = f"queries, keys and values, layer {settings.layer}"
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        unit = self.group * config.head_dim  # query heads stay with their key-value head
        self.q = settings.column(config.d_model, width, "q", unit=unit)
        self.k = settings.column(config.d_model, kv_width, "k", unit=config.head_dim)
        self.v = settings.column(config.d_model, kv_width, "v", unit=config.head_dim)
        self.o = settings.row(width, config.d_model, "o", unit=unit)

    def forward(self, x_TD: torch.Tensor, table: torch.Tensor, tokens: Tokens | None = None) -> torch.Tensor:
        weights = [self.q.weight, self.k.weight, self.v.weight]
        q, k, v = (
            heads(part_TD, table.shape[1], self.head_dim)
            for part_TD in column_linear(x_TD, weights, self.tp, label=self.label)
        )
        q, k = rotate(q, table), rotate(k, table)
        past = self.recall(x_TD, table.shape[1], tokens)
        if past is not None:
            label = f"{self.label}, memory"
            past_k, past_v = (
                heads(part_TD, past.positions, self.head_dim)
                for part_TD in column_linear(past.x_TD, weights[1:], self.tp, label=label)
            )
            past_k = rotate(past_k, self.past_table(past))
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        out = attend(q, k, v, self.group)
        return self.o(out.transpose(1, 2).flatten(2).flatten(0, 1))


class LatentAttention(Attention):
    """Keys and values are rebuilt from a narrow latent; position travels in a small separate part."""

    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__(config, settings)
        self.nope, self.rope_width = config.qk_nope_head_dim, config.rope_width
        self.v_head_dim, self.kv_rank = config.v_head_dim, config.kv_lora_rank
        self.qk = self.nope + self.rope_width
        self.q_down: nn.Module = nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        q_in = config.d_model
        if config.q_lora_rank:
            q_in = config.q_lora_rank
            self.q_down = Linear(config.d_model, q_in, settings, "q_down")
            self.q_norm = RMSNorm(q_in, settings, config.norm_eps)
        self.q_up = settings.column(q_in, config.num_heads * self.qk, "q_up", unit=self.qk)
        self.kv_down = Linear(config.d_model, self.kv_rank + self.rope_width, settings, "kv_down")
        self.kv_norm = RMSNorm(self.kv_rank, settings, config.norm_eps)
        kv_head = self.nope + self.v_head_dim
        self.kv_up = settings.column(self.kv_rank, config.num_heads * kv_head, "kv_up", unit=kv_head)
        self.o = settings.row(config.num_heads * self.v_head_dim, config.d_model, "o", unit=self.v_head_dim)
        self.label = f"rotary keys, layer {settings.layer}"

    def forward(self, x_TD: torch.Tensor, table: torch.Tensor, tokens: Tokens | None = None) -> torch.Tensor:
        positions = table.shape[1]
        q = heads(self.q_up(self.q_norm(self.q_down(x_TD))), positions, self.qk)
        q_nope, q_rope = q.split([self.nope, self.rope_width], dim=-1)
        k, v = self._keys_and_values(x_TD, table)
        past = self.recall(x_TD, table.shape[1], tokens)
        if past is not None:
            past_k, past_v = self._keys_and_values(past.x_TD, self.past_table(past))
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        q = torch.cat([q_nope, rotate(q_rope, table)], dim=-1)
        return self.o(attend(q, k, v, 1).transpose(1, 2).flatten(2).flatten(0, 1))

    def _keys_and_values(self, x_TD: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = table.shape[1]
        latent, k_rope = self.kv_down(x_TD).split([self.kv_rank, self.rope_width], dim=-1)
        kv = heads(self.kv_up(self.kv_norm(latent)), positions, self.nope + self.v_head_dim)
        k_nope, v = kv.split([self.nope, self.v_head_dim], dim=-1)
        # One for all heads, so each rank's heads give a share of its gradient.
        if self.tp.parts_tokens:
            k_rope = move(k_rope, self.tp, "gather", "sum_scatter", self.label)
        else:
            k_rope = move(k_rope, self.tp, "same", "sum", self.label)
        k_rope = rotate(heads(k_rope, positions, self.rope_width), table).expand(-1, k_nope.shape[1], -1, -1)
        return torch.cat([k_nope, k_rope], dim=-1), v


def heads(x_TD: torch.Tensor, positions: int, width: int) -> torch.Tensor:
    """[B, H, S, d] from the flattened tokens of whole samples."""
    return x_TD.view(-1, positions, x_TD.shape[1] // width, width).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: int) -> torch.Tensor:
    """Causal attention; each key-value head serves `group` query heads.

    Keys that are more than queries come before the first query, which sees all of these.
    """
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    before = k.shape[2] - q.shape[2]
    if not before:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
