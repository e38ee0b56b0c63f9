"""Multi-head latent attention (DeepSeek-V3): keys and values come from a narrow latent.

Under tensor parallelism its narrow latents are computed where the tokens are, and those are gathered, not the
wide input. With a cache it does not rebuild keys and values, but takes its queries and results to the latent:

    q . (W_k c) = (W_k^T q) . c          sum_j w_j (W_v c_j) = W_v (sum_j w_j c_j)

With `model.index_topk` a token takes from the keys that an indexer chose for it (`model/indexer`).
"""

from __future__ import annotations

import torch
from torch import nn

from moeclipse.model.attention import Attention, heads, joined
from moeclipse.model.blocks import Linear, RMSNorm, Settings
from moeclipse.model.cache import CacheCall
from moeclipse.model.config import ModelConfig
from moeclipse.model.indexer import Indexer
from moeclipse.model.lora import LoraColumn, LoraRow, LoraWhole
from moeclipse.model.lora_config import ADAPTER, NO_LORA, LoraConfig
from moeclipse.model.rotary import Positions
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.frozen import decoded, in_type
from moeclipse.tensor.parallel import move


class LatentAttention(Attention):
    """Keys and values are rebuilt from a narrow latent; position travels in a small separate part."""

    def __init__(self, config: ModelConfig, settings: Settings, lora: LoraConfig = NO_LORA) -> None:
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
            self.q_norm = RMSNorm(q_in, settings, config.latent_eps, config.norm_shift)
        self.q_up = settings.column(q_in, config.num_heads * self.qk, "q_up", unit=self.qk)
        self.kv_down = Linear(config.d_model, self.kv_rank + self.rope_width, settings, "kv_down")
        self.kv_norm = RMSNorm(self.kv_rank, settings, config.latent_eps, config.norm_shift)
        kv_head = self.nope + self.v_head_dim
        self.kv_up = settings.column(self.kv_rank, config.num_heads * kv_head, "kv_up", unit=kv_head)
        self.o = settings.row(config.num_heads * self.v_head_dim, config.d_model, "o", unit=self.v_head_dim)
        self.label = f"rotary keys, layer {settings.layer}"
        self.indexer = Indexer(config, settings) if config.index_topk else None
        self.add_sinks(config, settings, 1)
        self.adapters = nn.ModuleDict()
        narrow = {"kv_down": self.kv_rank + self.rope_width} | (
            {"q_down": q_in} if config.q_lora_rank else {}
        )
        for name, width in narrow.items():
            if lora.has(name):
                self.adapters[f"{ADAPTER}{name}"] = LoraWhole(config.d_model, width, name, settings, lora)
        for name, wide, unit in (("q_up", q_in, self.qk), ("kv_up", self.kv_rank, kv_head)):
            if lora.has(name):
                given = (wide, config.num_heads * unit, name, settings, lora, unit)
                self.adapters[f"{ADAPTER}{name}"] = LoraColumn(*given)
        if lora.has("o"):
            wide = config.num_heads * self.v_head_dim
            row = LoraRow(wide, config.d_model, "o", settings, lora, self.v_head_dim)
            self.adapters[f"{ADAPTER}o"] = row

    def forward(self, x_TD: torch.Tensor, positions: Positions, tokens: Tokens | None = None) -> torch.Tensor:
        q_in = x_TD if isinstance(self.q_down, nn.Identity) else self._project(x_TD, "q_down")
        q_in = self.q_norm(q_in)
        q = heads(self._project(q_in, "q_up"), positions.length, self.qk)
        chosen = None if self.indexer is None else self.indexer(x_TD, q_in, positions)
        q_nope, q_rope = self.grown(q, positions).split([self.nope, self.rope_width], dim=-1)
        if positions.cache is not None:
            kept = positions.cache.keys(self.layer, self._to_keep(x_TD, positions))
            if not self.is_plain(positions.cache):
                turned = self.turn(q_rope, positions)
                given = (q_nope, turned, kept, positions.cache, chosen)
                return self._project(self._read_latent(*given), "o")
        k, v = self._keys_and_values(x_TD, positions)
        past = self.recall(x_TD, positions, tokens)
        if past is not None:
            past_k, past_v = self._keys_and_values(past.x_TD, self.past_positions(past))
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        q = torch.cat([q_nope, self.turn(q_rope, positions)], dim=-1)
        return self._project(self.mix(q, k, v, positions, chosen), "o")

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """By the linear of this name and its adapter."""
        return self._adapted(getattr(self, name)(x), x, name)

    def _keys_and_values(self, x_TD: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        latent, k_rope = self._project(x_TD, "kv_down").split([self.kv_rank, self.rope_width], dim=-1)
        kv = heads(
            self._project(self.kv_norm(latent), "kv_up"), positions.length, self.nope + self.v_head_dim
        )
        k_nope, v = kv.split([self.nope, self.v_head_dim], dim=-1)
        # One for all heads, so each rank's heads give a share of its gradient.
        if self.tp.parts_tokens:
            k_rope = move(k_rope, self.tp, "gather", "sum_scatter", self.label)
        else:
            k_rope = move(k_rope, self.tp, "same", "sum", self.label)
        k_rope = self.turn(heads(k_rope, positions.length, self.rope_width), positions)
        return torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)], dim=-1), v

    def _to_keep(self, x_TD: torch.Tensor, positions: Positions) -> torch.Tensor:
        """The part of keys that all heads share, and behind it the latent of the others: [B, 1, S, d]."""
        latent, k_rope = self._project(x_TD, "kv_down").split([self.kv_rank, self.rope_width], dim=-1)
        both = torch.cat([k_rope, self.kv_norm(latent)], dim=-1)
        if self.tp.parts_tokens:
            both = move(both, self.tp, "gather", "sum_scatter", self.label)
        one_head = heads(both, positions.length, both.shape[1])
        k_rope, latent = one_head.split([self.rope_width, self.kv_rank], dim=-1)
        return torch.cat([self.turn(k_rope, positions), latent], dim=-1)

    def _read_latent(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        kept: torch.Tensor,
        call: CacheCall,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        """What each token takes, through the latent: one key-value head for all."""
        weight = decoded(in_type(self.kv_up.weight, q_nope.dtype), q_nope.dtype)
        if (key := f"{ADAPTER}kv_up") in self.adapters:
            adapter = self.adapters[key]
            assert isinstance(adapter, LoraColumn)
            weight = weight + (adapter.scale * adapter.b.weight @ adapter.a.weight).to(weight.dtype)
        weight_HdR = weight.unflatten(0, (-1, self.nope + self.v_head_dim))
        key_HdR, value_HdR = weight_HdR.split([self.nope, self.v_head_dim], dim=1)
        q = torch.cat([q_rope, q_nope @ key_HdR], dim=-1)
        scale = self.qk**-0.5 if self.scale is None else self.scale
        out_BHSR = self.mix_kept(q, kept, kept[..., self.rope_width :], call, scale, chosen)
        return joined(out_BHSR @ value_HdR.transpose(1, 2))
