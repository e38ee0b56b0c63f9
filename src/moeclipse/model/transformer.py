"""A decoder transformer whose feed-forward blocks are Mixtures of Experts.

    h = embed(ids)
    for each layer:  h = h + attention(norm(h));  h = h + moe(norm(h))
    loss = cross-entropy(head(norm(h)), targets)

The model returns sums, not means: the caller divides by the number of tokens of the whole step, so that
gradients summed over ranks and microbatches are those of the one-process model.

Tokens are flattened, sample by sample. The tp ranks of a group read the same T of them; between linears
each holds all of them, or with sequence parallelism its contiguous T / tp. Experts see each token once:
folded over tp, every tp rank sends its part of the tokens to experts of the whole group; sharded, every tp
rank computes a part of each expert's width for all tokens, and the parts are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from moeclipse.balance.placement import even_bounds
from moeclipse.comm.mesh import Mesh
from moeclipse.model.attention import GroupedQueryAttention, LatentAttention, rope_table
from moeclipse.model.blocks import DenseMLP, RMSNorm, Settings
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import EXCHANGE_KEYS, GateConfig, MoEConfig
from moeclipse.moe.layer import MoE, MoEReport
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import key_of
from moeclipse.tensor.cut import Cut, mark
from moeclipse.tensor.linear import column_linear
from moeclipse.tensor.parallel import MoveKind, TensorParallel, move
from moeclipse.tensor.vocab import cross_entropy, embed


@dataclass(frozen=True, kw_only=True)
class Output:
    """Of one microbatch on this rank."""

    loss_sum: torch.Tensor
    """Cross-entropy summed over this rank's tokens; the same on all tp ranks, which read the same ones."""
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
        self.tp = settings.tp
        self.attention_norm = RMSNorm(config.d_model, settings, config.norm_eps)
        self.attention = attention(config, settings)
        self.mlp_norm = RMSNorm(config.d_model, settings, config.norm_eps)
        self.dense: DenseMLP | None = None
        self.moe: MoE | None = None
        if index < config.num_dense_layers:
            self.dense = DenseMLP(config.d_model, config.d_ff, settings)
            return
        self.moe = MoE(
            config.d_model,
            moe.d_ff,
            moe.num_experts,
            gate.top_k,
            gate=gate,
            num_shared_experts=moe.num_shared_experts,
            exchange={name: getattr(moe, name) for name in EXCHANGE_KEYS},
            expert_tp=moe.expert_tp,
            mesh=mesh,
            layer=index,
            seed=settings.seed,
            init_std=config.init_std,
            down_std=settings.residual_std,
            device=settings.device,
            dtype=settings.dtype,
        )
        self.moe.experts.wgrads = settings.tp.wgrads
        if self.moe.shared is not None:
            self.moe.shared.wgrads = settings.tp.wgrads

    def forward(
        self, h_TD: torch.Tensor, table: torch.Tensor, tokens: Tokens
    ) -> tuple[torch.Tensor, MoEReport | None]:
        h_TD = h_TD + self.attention(self.attention_norm(h_TD), table)
        x_TD = self.mlp_norm(h_TD)
        if self.dense is not None:
            return h_TD + self.dense(x_TD), None
        y_TD, report = self.mix(x_TD, tokens)
        return h_TD + y_TD, report

    def mix(self, x_TD: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, MoEReport]:
        """The MoE layer between tokens as linears hold them; `tokens` are those of the data index."""
        moe, tp = self.moe, self.tp
        assert moe is not None
        label = f"tokens of experts, layer {moe.layer}"
        if moe.sharded:
            there: tuple[MoveKind, MoveKind] = (
                ("gather", "sum_scatter") if tp.parts_tokens else ("same", "sum")
            )
            y_TD, report = moe.run(move(x_TD, tp, *there, label), tokens)
            back: tuple[MoveKind, MoveKind] = (
                ("sum_scatter", "gather") if tp.parts_tokens else ("sum", "same")
            )
            return move(y_TD, tp, *back, label), report
        num_tokens = len(x_TD) * (tp.size if tp.parts_tokens else 1)
        bounds = even_bounds(num_tokens, tp.size)
        mine = replace(tokens, first=tokens.first + bounds[tp.index], group=moe.token_group)
        if tp.parts_tokens:
            return moe.run(x_TD, mine)
        part_TD = move(x_TD, tp, "slice", "gather", label, bounds=bounds)
        y_TD, report = moe.run(part_TD, mine)
        return move(y_TD, tp, "gather", "slice", label, bounds=bounds), report


class Transformer(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        gate: GateConfig,
        *,
        mesh: Mesh,
        tp: TensorParallel | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.tp = tp or TensorParallel.of(mesh)

        def settings(layer: int) -> Settings:
            return Settings(
                layer=layer,
                num_layers=config.num_layers,
                seed=seed,
                init_std=config.init_std,
                device=mesh.device,
                dtype=dtype,
                tp=self.tp,
            )

        outside = settings(-1)
        self.vocab = Cut.of(
            (config.vocab_size, config.d_model),
            0,
            index=self.tp.index,
            parts=self.tp.size,
            what="model.vocab_size",
        )
        self.embedding = nn.Parameter(torch.empty(self.vocab.local_shape, device=mesh.device, dtype=dtype))
        mark(self.embedding, self.vocab)
        self.vocab.fill(self.embedding.data, key_of(seed, "embedding"), config.init_std)
        self.layers = nn.ModuleList(
            Layer(index, config, moe, gate, mesh, settings(index)) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.d_model, outside, config.norm_eps)
        self.head = (
            None if config.tie_embeddings else outside.column(config.d_model, config.vocab_size, "head")
        )

    def forward(self, ids_BS: torch.Tensor, targets_BS: torch.Tensor, tokens: Tokens) -> Output:
        """`tokens`: where this rank's tokens lie among those of all ranks that read others."""
        h_TD = embed(ids_BS, self.embedding, self.vocab, self.tp)
        table = rope_table(ids_BS.shape[1], self.config.rope_width, self.config.rope_base, h_TD.device)
        reports: list[MoEReport] = []
        tokens = replace(tokens, group=self.mesh.data)
        for layer in self.layers:
            h_TD, report = layer(h_TD, table, tokens)
            if report is not None:
                reports.append(report)
        weight = self.embedding if self.head is None else self.head.weight
        (logits_TV,) = column_linear(self.norm(h_TD), [weight], self.tp, label="head")
        loss_sum = cross_entropy(logits_TV, targets_BS.flatten(), self.vocab, self.tp)
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
