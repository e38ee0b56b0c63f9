"""A decoder transformer whose feed-forward blocks are Mixtures of Experts.

    h = embed(ids)
    for each layer:  h = h + attention(norm(h));  h = h + moe(norm(h))
    loss = cross-entropy(head(norm(h)), targets)

The model returns sums, not means: the caller divides by the number of tokens of the whole step, so that
gradients summed over ranks and microbatches are those of the one-process model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.model.attention import GroupedQueryAttention, LatentAttention, rope_table
from moeclipse.model.blocks import DenseMLP, Linear, RMSNorm, Settings
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.layer import MoE, MoEReport
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal, key_of


@dataclass(frozen=True, kw_only=True)
class Output:
    """Of one microbatch on this rank."""

    loss_sum: torch.Tensor
    """Cross-entropy summed over this rank's tokens."""
    aux_loss: torch.Tensor
    """This rank's share of the balance and z losses, summed over layers."""
    reports: list[MoEReport]


class Layer(nn.Module):
    def __init__(
        self,
        index: int,
        config: ModelConfig,
        moe: MoEConfig,
        gate: GateConfig,
        mesh: Mesh,
        settings: Settings,
    ) -> None:
        super().__init__()
        attention = LatentAttention if config.attention == "mla" else GroupedQueryAttention
        self.attention_norm = RMSNorm(config.d_model, settings, config.norm_eps)
        self.attention = attention(config, settings)
        self.mlp_norm = RMSNorm(config.d_model, settings, config.norm_eps)
        self.dense: DenseMLP | None = None
        self.moe: MoE | None = None
        if index < config.num_dense_layers:
            self.dense = DenseMLP(config.d_model, config.d_ff, settings)
        else:
            self.moe = MoE(
                config.d_model,
                moe.d_ff,
                moe.num_experts,
                gate.top_k,
                gate=gate,
                num_shared_experts=moe.num_shared_experts,
                mesh=mesh,
                layer=index,
                seed=settings.seed,
                init_std=config.init_std,
                down_std=settings.residual_std,
                device=settings.device,
                dtype=settings.dtype,
            )

    def forward(
        self, h_BSD: torch.Tensor, table: torch.Tensor, tokens: Tokens
    ) -> tuple[torch.Tensor, MoEReport | None]:
        h_BSD = h_BSD + self.attention(self.attention_norm(h_BSD), table)
        x_BSD = self.mlp_norm(h_BSD)
        if self.dense is not None:
            return h_BSD + self.dense(x_BSD), None
        assert self.moe is not None
        y_TD, report = self.moe.run(x_BSD.flatten(0, 1), tokens)
        return h_BSD + y_TD.view_as(h_BSD), report


class Transformer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        gate: GateConfig,
        *,
        mesh: Mesh,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh

        def settings(layer: int) -> Settings:
            return Settings(
                layer=layer,
                num_layers=config.num_layers,
                seed=seed,
                init_std=config.init_std,
                device=mesh.device,
                dtype=dtype,
            )

        outside = settings(-1)
        self.embedding = nn.Parameter(
            torch.empty(config.vocab_size, config.d_model, device=mesh.device, dtype=dtype)
        )
        fill_normal(self.embedding.data, key_of(seed, "embedding"), config.init_std)
        self.layers = nn.ModuleList(
            Layer(index, config, moe, gate, mesh, settings(index)) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.d_model, outside, config.norm_eps)
        self.head = (
            None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, outside, "head")
        )

    def forward(self, ids_BS: torch.Tensor, targets_BS: torch.Tensor, tokens: Tokens) -> Output:
        h_BSD = F.embedding(ids_BS, self.embedding)
        table = rope_table(ids_BS.shape[1], self.config.rope_width, self.config.rope_base, h_BSD.device)
        reports: list[MoEReport] = []
        for layer in self.layers:
            h_BSD, report = layer(h_BSD, table, tokens)
            if report is not None:
                reports.append(report)
        weight = self.embedding if self.head is None else self.head.weight
        logits = F.linear(self.norm(h_BSD), weight).flatten(0, 1)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        loss_sum = F.cross_entropy(logits.to(wide), targets_BS.flatten(), reduction="sum")
        shares = [report.aux_loss for report in reports]
        aux_loss = torch.stack(shares).sum() if shares else loss_sum.new_zeros(())
        return Output(loss_sum=loss_sum, aux_loss=aux_loss, reports=reports)


def count_parameters(config: ModelConfig, moe: MoEConfig, gate: GateConfig) -> tuple[int, int]:
    """(all parameters, those one token uses), from the shapes alone."""
    d = config.d_model
    if config.attention == "gqa":
        attention = 2 * d * config.head_dim * (config.num_heads + config.num_kv_heads)
    else:
        qk = config.qk_nope_head_dim + config.qk_rope_head_dim
        q_in = config.q_lora_rank or d
        attention = q_in * config.num_heads * qk + (d + 1) * config.q_lora_rank
        attention += d * (config.kv_lora_rank + config.qk_rope_head_dim) + config.kv_lora_rank
        attention += config.kv_lora_rank * config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
        attention += config.num_heads * config.v_head_dim * d
    expert = 3 * d * moe.d_ff
    num_moe = config.num_layers - config.num_dense_layers
    routers = (2 if gate.kind == "noisy" else 1) * d * moe.num_experts
    always = config.vocab_size * d * (1 if config.tie_embeddings else 2) + d
    always += config.num_layers * (attention + 2 * d) + config.num_dense_layers * 3 * d * config.d_ff
    always += num_moe * (routers + moe.num_shared_experts * expert)
    return always + num_moe * moe.num_experts * expert, always + num_moe * gate.top_k * expert
