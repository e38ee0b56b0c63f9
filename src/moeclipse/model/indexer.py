"""Which keys a token takes from: the best by a narrow score of their own (sparse attention of DeepSeek-V3.2).

    score(i, j) = sum over heads of weight_ih relu(q_ih . k_j) / sqrt(width heads)
    q = W_q (latent of queries), k = LayerNorm(W_k x), both turned by their positions in front; weight = W x

Contract. A choice has no gradient, so nothing here is trained: weights are buffers, which keep their bits.
(DeepSeek trains its indexer against the attention of all keys; transformers does not, and we do not.) Every
tp rank chooses for all tokens. Up to `index_topk` keys there is nothing to choose.
Hazard. Two keys that all heads turn away from score 0 both, which is common with few heads: of equal ones the
first is chosen (`moe/gate/ties`), or a text read piece by piece would differ from itself. `torch.topk`, which
transformers asks, does not say which one it takes. Scores are computed in fp32 (fp64 for fp64).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.model.blocks import Settings
from moeclipse.model.config import ModelConfig, Pairs
from moeclipse.model.rotary import Positions, rotate
from moeclipse.moe.gate.routing import best_of
from moeclipse.ops.attention import seen_keys
from moeclipse.ops.precision import WIDE
from moeclipse.ops.random import fill_normal

NORM_EPS = 1e-6
KEYS = 2
"""Of what is kept in a cache."""


class Indexer(nn.Module):
    query: torch.Tensor
    key: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    weights: torch.Tensor

    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        super().__init__()
        self.layer, self.tp = settings.layer, settings.tp
        self.pairs: Pairs = config.index_pairs
        self.heads, self.width, self.topk = config.index_heads, config.index_dim, config.index_topk
        self.turns = config.turns(settings.layer)
        inner, d = config.q_lora_rank or config.d_model, config.d_model
        for name, shape in (
            ("query", (self.heads * self.width, inner)),
            ("key", (self.width, d)),
            ("weights", (self.heads, d)),
        ):
            tensor = torch.empty(shape, device=settings.device, dtype=settings.dtype)
            self.register_buffer(name, fill_normal(tensor, settings.key(f"index {name}"), settings.init_std))
        for name, value in (("norm_weight", 1.0), ("norm_bias", 0.0)):
            full = torch.full((self.width,), value, device=settings.device, dtype=settings.dtype)
            self.register_buffer(name, full)

    @torch.no_grad()
    def forward(
        self, x_TD: torch.Tensor, latent_TR: torch.Tensor, positions: Positions
    ) -> torch.Tensor | None:
        """[B, S, L]: whether a token takes from a key; None: from all that it sees."""
        if self.tp.parts_tokens:
            x_TD = self.tp.gather_rows(x_TD.contiguous(), f"inputs of the indexer, layer {self.layer}").get()
            latent_TR = self.tp.gather_rows(latent_TR, f"latents of the indexer, layer {self.layer}").get()
        call, length = positions.cache, positions.length
        k = F.linear(x_TD, self.key)
        k = F.layer_norm(k, (self.width,), self.norm_weight, self.norm_bias, NORM_EPS)
        k_B1Ld = self._turned(k.view(-1, length, 1, self.width).transpose(1, 2), positions)
        if call is not None:
            kept = call.cache.put(self.layer, KEYS, k_B1Ld, call.place_BS, call.numbers)
            k_B1Ld = kept[:, :, : call.num_keys]
        keys = k_B1Ld.shape[2]
        if keys <= self.topk:
            return None
        q = F.linear(latent_TR, self.query).view(-1, length, self.heads, self.width).transpose(1, 2)
        q_BHSd, wide = self._turned(q, positions), WIDE[x_TD.dtype]
        scores = F.relu(q_BHSd.to(wide) @ k_B1Ld.to(wide).transpose(2, 3) * self.width**-0.5)
        weight_BSH = F.linear(x_TD, self.weights).to(wide).view(-1, length, self.heads) * self.heads**-0.5
        scores_BSL = (weight_BSH.transpose(1, 2)[..., None] * scores).sum(1)
        scores_BSL = scores_BSL.masked_fill(~self._sees(positions, keys, x_TD.device), float("-inf"))
        best = best_of(scores_BSL.flatten(0, 1), self.topk).view(*scores_BSL.shape[:2], self.topk)
        return torch.zeros_like(scores_BSL, dtype=torch.bool).scatter(-1, best, True)

    def _turned(self, x_BHSd: torch.Tensor, positions: Positions) -> torch.Tensor:
        table = positions.table
        return rotate(x_BHSd, table, self.pairs) if self.turns else x_BHSd

    def _sees(self, positions: Positions, keys: int, device: torch.device) -> torch.Tensor:
        if positions.cache is not None:
            return torch.arange(keys, device=device) <= positions.cache.place_BS[..., None]
        sees = seen_keys(positions.length, keys, 0, positions.documents_BS, device)
        return sees[:, 0] if sees.dim() == 4 else sees
