"""Causal self-attention: grouped-query, and multi-head latent (DeepSeek-V3).

Shapes: B samples, S positions, D model width, H heads, d head width.
Both rotate pairs of query and key components by an angle that grows with the position (RoPE).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.model.blocks import Linear, RMSNorm, Settings
from moeclipse.model.config import ModelConfig


def rope_table(seq_len: int, width: int, base: float, device: torch.device) -> torch.Tensor:
    """cos and sin for each (position, pair): [2, S, width / 2], in float64: every dtype rounds once."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angle = torch.arange(seq_len, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x_BHSd: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn each (first half, second half) pair of components by its position's angle."""
    wide = torch.float64 if x_BHSd.dtype == torch.float64 else torch.float32
    cos, sin = table.to(wide)
    first, second = x_BHSd.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BHSd.dtype)


class GroupedQueryAttention(nn.Module):
    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.q = Linear(config.d_model, config.num_heads * config.head_dim, settings, "q")
        self.k = Linear(config.d_model, config.num_kv_heads * config.head_dim, settings, "k")
        self.v = Linear(config.d_model, config.num_kv_heads * config.head_dim, settings, "v")
        self.o = Linear(config.num_heads * config.head_dim, config.d_model, settings, "o", residual=True)

    def forward(self, x_BSD: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q = self.q(x_BSD).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k(x_BSD).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        v = self.v(x_BSD).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        q, k = rotate(q, table), rotate(k, table)
        out = attend(q, k, v, self.num_heads // self.num_kv_heads)
        return self.o(out.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Keys and values are rebuilt from a narrow latent; position travels in a small separate part."""

    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.nope, self.rope_width = config.qk_nope_head_dim, config.rope_width
        self.v_head_dim, self.kv_rank = config.v_head_dim, config.kv_lora_rank
        q_width = config.num_heads * (self.nope + self.rope_width)
        self.q_down: nn.Module = nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        q_in = config.d_model
        if config.q_lora_rank:
            q_in = config.q_lora_rank
            self.q_down = Linear(config.d_model, q_in, settings, "q_down")
            self.q_norm = RMSNorm(q_in, settings, config.norm_eps)
        self.q_up = Linear(q_in, q_width, settings, "q_up")
        self.kv_down = Linear(config.d_model, self.kv_rank + self.rope_width, settings, "kv_down")
        self.kv_norm = RMSNorm(self.kv_rank, settings, config.norm_eps)
        kv_width = config.num_heads * (self.nope + self.v_head_dim)
        self.kv_up = Linear(self.kv_rank, kv_width, settings, "kv_up")
        self.o = Linear(config.num_heads * self.v_head_dim, config.d_model, settings, "o", residual=True)

    def forward(self, x_BSD: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        q = self.q_up(self.q_norm(self.q_down(x_BSD))).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope_width], dim=-1)
        latent, k_rope = self.kv_down(x_BSD).split([self.kv_rank, self.rope_width], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v_head_dim], dim=-1)
        k_rope = rotate(k_rope[:, None], table).expand(-1, self.num_heads, -1, -1)  # one for all heads
        q = torch.cat([q_nope, rotate(q_rope, table)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        return self.o(attend(q, k, v, 1).transpose(1, 2).flatten(2))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: int) -> torch.Tensor:
    """Causal attention; each key-value head serves `group` query heads."""
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
