"""Causal self-attention: what all kinds share, and grouped-query (latent: `model/latent_attention`).

Shapes: T tokens, B samples, S positions, D model width, H heads of this rank, d head width.
Both kinds turn pairs of query and key components by their position (`model/rotary`) and differ in how
queries, keys and values are made; who sees whom, and what is taken from it, is `ops/attention`'s.

Under tensor parallelism each rank computes some heads for all tokens. Grouped-query attention gathers the
input once for queries, keys and values.

With `model.memory` both also attend to what they saw in the segment before (`model/segment_memory`). Where a
text is read piece by piece, keys and values of earlier pieces come from a cache (`model/cache`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.core.errors import ConfigError
from moeclipse.model.blocks import Settings
from moeclipse.model.cache import CacheCall
from moeclipse.model.config import ModelConfig
from moeclipse.model.lora import LoraColumn, LoraRow
from moeclipse.model.lora_config import ADAPTER, NO_LORA, LoraConfig
from moeclipse.model.qk_norm import HeadNorm, UnitNorm, WholeNorm
from moeclipse.model.rotary import Positions, Rotary
from moeclipse.model.segment_memory import LayerMemory, Past
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.attention import attend, attend_at
from moeclipse.ops.norm import rms_norm
from moeclipse.ops.precision import WIDE
from moeclipse.ops.rotary import turn
from moeclipse.tensor.cut import Cut, mark
from moeclipse.tensor.linear import column_linear
from moeclipse.tensor.weight_grad import place_of


class Attention(nn.Module):
    """What both kinds share: rotary position, who sees whom, sinks, and the memory of the segment before."""

    sinks: nn.Parameter | None
    """A logit of each head that takes weight and gives nothing."""
    adapters: nn.ModuleDict
    """By the name of the projection that each stands beside."""

    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__()
        layer = settings.layer
        self.layer, self.tp, self.rotary, self.turns = (
            layer,
            settings.tp,
            Rotary.of(config, config.window_of(layer)),
            config.turns(layer),
        )
        self.scale, self.softcap = config.attention_scale or None, config.attention_softcap
        self.window, self.chunk = config.window_of(layer), config.chunk_of(layer)
        self.growth = (config.growth, config.growth_first, config.growth_len) if config.grows(layer) else None
        self.memory = LayerMemory(config.memory, settings.layer, settings.tp) if config.memory else None

    def add_sinks(self, config: ModelConfig, settings: Settings, unit: int) -> None:
        """`unit` neighbouring heads stay on one rank."""
        self.sinks = None
        if config.attention_sinks:
            tp = settings.tp
            cut = Cut.of((config.num_heads,), 0, index=tp.index, parts=tp.size, unit=unit, what="heads")
            empty = torch.empty(cut.local_shape, device=settings.device, dtype=settings.dtype)
            self.sinks = mark(nn.Parameter(empty), cut)
            cut.fill(self.sinks.data, settings.key("sinks"), settings.init_std)

    def _adapted(self, y: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
        key = f"{ADAPTER}{name}"
        return y + self.adapters[key](x) if key in self.adapters else y

    def mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: Positions,
        chosen_BSL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What each token takes from those it sees, or the chosen of them: [T, heads x width of a value]."""
        out = attend(
            q,
            k,
            v,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks_H=self.sinks,
            documents_BS=self._documents(q, positions),
            chosen_BSL=chosen_BSL,
        )
        return joined(out)

    def _documents(self, q: torch.Tensor, positions: Positions) -> torch.Tensor | None:
        """Those that do not see each other; pieces of a text are like documents."""
        documents = positions.pieces(self.chunk) if self.chunk else positions.documents_BS
        return documents if documents is None else documents.expand(len(q), -1)

    def grown(self, q_BHSd: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Queries of far positions are larger, where the model says so."""
        if self.growth is None:
            return q_BHSd
        rate, first, length = self.growth
        factor = 1 + rate * ((positions.place + first) // length).to(WIDE[q_BHSd.dtype]).log1p()
        factor = factor[:, None] if factor.dim() == 1 else factor[:, None, :, None]
        return (q_BHSd * factor).to(q_BHSd.dtype)

    def mix_kept(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: CacheCall,
        scale: float | None,
        chosen_BSL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same from all keys of a cache, as heads."""
        memory = 0 if self.memory is None else self.memory.size
        share = q.shape[1] // k.shape[1]
        mask = call.mask(self.window, memory, self.chunk, keys=k.shape[2], share=share, dtype=q.dtype)
        given: dict[str, Any] = {"scale": scale, "softcap": self.softcap, "sinks_H": self.sinks}
        return attend_at(q, k, v, call.place_BS, mask=mask, chosen_BSL=chosen_BSL, **given)

    def is_plain(self, call: CacheCall | None) -> bool:
        """Whether tokens see those of their own call alone."""
        return call is None or call.plain(0 if self.memory is None else self.memory.size)

    def turn_both(
        self,
        q_BSHd: torch.Tensor,
        k_BSGd: torch.Tensor,
        positions: Positions,
        norms: tuple[nn.Parameter, nn.Parameter] | None = None,
        eps: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys by their positions, as heads."""
        if not self.turns:
            if norms is not None:
                q_BSHd = rms_norm(q_BSHd, norms[0], eps, place_of(norms[0]))
                k_BSGd = rms_norm(k_BSGd, norms[1], eps, place_of(norms[1]))
            return q_BSHd.transpose(1, 2), k_BSGd.transpose(1, 2)
        at = positions.seen(self.window) if self.window else positions
        table = at.rows if q_BSHd.dtype == torch.float64 else at.narrow_rows
        places = (None, None) if norms is None else (place_of(norms[0]), place_of(norms[1]))
        q, k = turn(q_BSHd, k_BSGd, table, self.rotary.pairs == "neighbours", norms, eps, places)
        return q.transpose(1, 2), k.transpose(1, 2)

    def turn(self, x_BHSd: torch.Tensor, positions: Positions) -> torch.Tensor:
        """One alone."""
        if not self.turns:
            return x_BHSd
        x_BSHd = x_BHSd.transpose(1, 2)
        return self.turn_both(x_BSHd, x_BSHd[:, :, :0], positions)[0]

    def recall(self, x_TD: torch.Tensor, positions: Positions, tokens: Tokens | None) -> Past | None:
        """What the segment before left for these tokens; and keep what they leave for the next."""
        if self.memory is None or positions.cache is not None:  # a cache goes back further
            return None
        if positions.documents_BS is not None:
            raise ConfigError(
                "model.memory cannot go with documents in a sample: a segment goes on with the text "
                "before it; set model.memory = 0, or leave the documents out"
            )
        length = positions.length
        samples = len(x_TD) * (self.tp.size if self.tp.parts_tokens else 1) // length
        if not samples:  # nothing to remember, and its place is that of the samples behind it
            return None
        place = (0, 0) if tokens is None else (tokens.microbatch, tokens.first // length)
        past = self.memory.read(place, samples)
        if self.training:
            self.memory.write(place, x_TD, length, past)
        return past

    def past_positions(self, past: Past) -> Positions:
        """Before the segment's first, which is 0."""
        return Positions.of(self.rotary, past.positions, past.x_TD.device, first=-past.positions)


class GroupedQueryAttention(Attention):
    def __init__(self, config: ModelConfig, settings: Settings, lora: LoraConfig = NO_LORA) -> None:
        super().__init__(config, settings)
        self.head_dim, self.clip, self.norm_eps = config.head_dim, config.clip_qkv, config.norm_eps
        group = config.num_heads // config.num_kv_heads
        self.label = f"queries, keys and values, layer {settings.layer}"
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        unit = group * config.head_dim  # query heads stay with their key-value head
        bias = config.attention_bias != "none"
        self.q = settings.column(config.d_model, width, "q", unit=unit, bias=bias)
        self.k = settings.column(config.d_model, kv_width, "k", unit=config.head_dim, bias=bias)
        self.v = settings.column(config.d_model, kv_width, "v", unit=config.head_dim, bias=bias)
        self.o = settings.row(width, config.d_model, "o", unit=unit, bias=config.attention_bias == "all")
        self.norms = config.qk_norm
        self.gate_kind, self.gate = config.attention_gate, None
        if self.gate_kind != "none":
            by_head = self.gate_kind.startswith("head")
            gates, together = (config.num_heads, group) if by_head else (width, unit)
            self.gate = settings.column(config.d_model, gates, "gate", unit=together, bias=bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        eps, shift = config.norm_eps, config.norm_shift
        if self.norms == "whole":
            self.q_norm = WholeNorm(width, unit, settings, eps, "queries", shift)
            self.k_norm = WholeNorm(kv_width, self.head_dim, settings, eps, "keys", shift)
        elif self.norms in ("head", "turned"):
            self.q_norm = HeadNorm(self.head_dim, settings, eps, shift)
            self.k_norm = HeadNorm(self.head_dim, settings, eps, shift)
        elif self.norms == "unit" and self.turns:
            self.q_norm = self.k_norm = UnitNorm(eps)
        self.add_sinks(config, settings, group)
        units = {"q": (width, unit), "k": (kv_width, self.head_dim), "v": (kv_width, self.head_dim)}
        self.adapters = nn.ModuleDict(
            {
                f"{ADAPTER}{name}": LoraColumn(config.d_model, wide, name, settings, lora, together)
                for name, (wide, together) in units.items()
                if lora.has(name)
            }
        )
        if lora.has("o"):
            self.adapters[f"{ADAPTER}o"] = LoraRow(width, config.d_model, "o", settings, lora, unit)

    def forward(self, x_TD: torch.Tensor, positions: Positions, tokens: Tokens | None = None) -> torch.Tensor:
        linears = [self.q, self.k, self.v] + ([] if self.gate is None else [self.gate])
        q_TD, k_TD, v_TD, *gate = column_linear(
            x_TD,
            [part.weight for part in linears],
            self.tp,
            [part.bias for part in linears],
            label=self.label,
        )
        if self.adapters:
            q_TD, k_TD = self._adapted(q_TD, x_TD, "q"), self._adapted(k_TD, x_TD, "k")
            v_TD = self._adapted(v_TD, x_TD, "v")
        q, k = self._split(q_TD, positions, self.q_norm), self._split(k_TD, positions, self.k_norm)
        q, k = self._turned(q, k, positions, self.q_norm, self.k_norm)
        q = q if self.growth is None else self.grown(q, positions)
        v = heads(self._clipped(v_TD), positions.length, self.head_dim)
        call = positions.cache
        if call is not None:
            k, v = call.keys(self.layer, k), call.values(self.layer, v)
            if not self.is_plain(call):
                return self._out(joined(self.mix_kept(q, k, v, call, self.scale)), gate)
        past = self.recall(x_TD, positions, tokens)
        if past is not None:
            k_TD, v_TD = column_linear(
                past.x_TD,
                [part.weight for part in linears[1:3]],
                self.tp,
                [part.bias for part in linears[1:3]],
                label=f"{self.label}, memory",
            )
            before = self.past_positions(past)
            past_k = self._split(k_TD, before, self.k_norm)
            past_k, _ = self._turned(past_k, past_k[:, :, :0], before, self.k_norm, self.k_norm)
            past_v = heads(self._clipped(v_TD), past.positions, self.head_dim)
            k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
        return self._out(self.mix(q, k, v, positions), gate)

    def _out(self, mixed_TD: torch.Tensor, gate: list[torch.Tensor]) -> torch.Tensor:
        if gate:
            opened = F.softplus if self.gate_kind.endswith("softplus") else torch.sigmoid
            factor_TD = opened(gate[0].to(WIDE[gate[0].dtype])).to(mixed_TD.dtype)
            mixed_THd = mixed_TD.unflatten(1, (factor_TD.shape[1], -1))
            mixed_TD = (mixed_THd * factor_TD[..., None]).flatten(1)
        out_TD = self.o(mixed_TD)
        return self._adapted(out_TD, mixed_TD, "o") if self.adapters else out_TD

    def _split(self, x_TD: torch.Tensor, positions: Positions, norm: nn.Module | None) -> torch.Tensor:
        """[B, S, heads, d], normed over all heads and clipped."""
        x_TD = self._clipped(norm(x_TD) if isinstance(norm, WholeNorm) else x_TD)
        return x_TD.view(-1, positions.length, x_TD.shape[1] // self.head_dim, self.head_dim)

    def _turned(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: Positions,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By their positions, with the norms of heads before or behind that."""
        if q_norm is None or k_norm is None or self.norms == "whole":
            return self.turn_both(q, k, positions)
        if self.norms != "head":
            q, k = self.turn_both(q, k, positions)
            return q_norm(q), k_norm(k)
        assert isinstance(q_norm, HeadNorm)
        assert isinstance(k_norm, HeadNorm)
        if q_norm.shift:
            return self.turn_both(q_norm(q), k_norm(k), positions)
        return self.turn_both(q, k, positions, (q_norm.weight, k_norm.weight), self.norm_eps)

    def _clipped(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD.clamp(-self.clip, self.clip) if self.clip else x_TD


def joined(out_BHSd: torch.Tensor) -> torch.Tensor:
    """The heads of each token side by side: [T, heads x d]."""
    return out_BHSd.transpose(1, 2).flatten(2).flatten(0, 1)


def heads(x_TD: torch.Tensor, positions: int, width: int) -> torch.Tensor:
    """[B, H, S, d] from the flattened tokens of whole samples."""
    return x_TD.view(-1, positions, x_TD.shape[1] // width, width).transpose(1, 2)
