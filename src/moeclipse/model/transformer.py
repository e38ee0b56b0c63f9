"""A decoder transformer whose feed-forward blocks are Mixtures of Experts.

    h = embed(ids)
    for each layer:  h = h + attention(norm(h));  h = h + moe(norm(h))
    loss = cross-entropy(head(norm(h)), targets)

Factors, caps and other places of norms are keys of the configuration (`model/config`).

The model returns sums, not means: the caller divides by the number of tokens of the whole step, so that
gradients summed over ranks and microbatches are those of the one-process model.

Tokens are flattened, sample by sample. The tp ranks of a group read the same T of them; between linears
each holds all of them, or with sequence parallelism its contiguous T / tp. Experts see each token once:
folded over tp, every tp rank sends its part of the tokens to experts of the whole group; sharded, every tp
rank computes a part of each expert's width for all tokens, and the parts are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.model.blocks import RMSNorm, Settings
from moeclipse.model.config import ModelConfig
from moeclipse.model.layer import TransformerLayer
from moeclipse.model.lora_config import NO_LORA, LoraConfig
from moeclipse.model.passes import LayerParts, MicrobatchLoads, MicrobatchState, ModelStage
from moeclipse.model.rotary import Positions, Rotary, near_rotary
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.losses import MoEReport
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.frozen import Scratch
from moeclipse.ops.precision import WIDE
from moeclipse.ops.random import key_of
from moeclipse.tensor.cut import Cut, mark
from moeclipse.tensor.linear import ColumnParallelLinear, column_linear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.vocab import embed, head_losses, token_losses


@dataclass(frozen=True, kw_only=True)
class Output:
    """Of one microbatch on this rank."""

    loss_sum: torch.Tensor
    """Cross-entropy summed over this rank's tokens; the same on all tp ranks, which read the same ones."""
    aux_loss: torch.Tensor
    """This rank's share of the balance and z losses, summed over layers."""
    reports: list[MoEReport]
    loss_T: torch.Tensor
    """Of each token, without a gradient; 0 where there is nothing to predict."""


def wants_gradient(h_TD: torch.Tensor) -> torch.Tensor:
    return h_TD if h_TD.requires_grad or not torch.is_grad_enabled() else h_TD.requires_grad_()


def nothing() -> None:
    return


class Transformer(nn.Module):
    begin_forward: Callable[[], None] = staticmethod(nothing)
    """Who still has something to do before weights are read (`train/optim/deferred`)."""

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
        held: Sequence[int] | None = None,
        placement_of: Callable[[int], Placement | None] = lambda _: None,
        lora: LoraConfig = NO_LORA,
        built: Callable[[TransformerLayer], TransformerLayer] = lambda layer: layer,
    ) -> None:
        """`held`: the layers of this rank in a pipeline; left out: all. Names and weights never depend on it.

        The embedding belongs to the first layer, norm and head to the last. Tied to it, the head has a copy
        of the embedding where another rank holds the first layer. `built`: of each layer, before the next.
        """
        super().__init__()
        self.config, self.mesh = config, mesh
        self.rotary, self.near = Rotary.of(config), near_rotary(config)
        held = range(config.num_layers) if held is None else held
        self.begins, self.ends = 0 in held, config.num_layers - 1 in held
        self.tp = tp or TensorParallel.of(mesh)
        self.dtype, self.scratch = dtype, Scratch()

        def settings(layer: int) -> Settings:
            return Settings(
                scratch=self.scratch,
                layer=layer,
                num_layers=config.num_layers,
                seed=seed,
                init_std=config.init_std,
                device=mesh.device,
                dtype=dtype,
                tp=self.tp,
            )

        outside, table = settings(-1), (config.vocab_size, config.d_model)
        self.vocab = Cut.of(table, 0, index=self.tp.index, parts=self.tp.size, what="model.vocab_size")
        if self.begins or (self.ends and config.tie_embeddings):
            empty = torch.empty(self.vocab.local_shape, device=mesh.device, dtype=dtype)
            self.embedding = nn.Parameter(empty)
            mark(self.embedding, self.vocab)
            self.vocab.fill(self.embedding.data, key_of(seed, "embedding"), config.init_std)
            self.embedding.is_copy = not self.begins  # type: ignore[attr-defined]

        def layer(index: int) -> TransformerLayer:
            given = (config, moe, gate, mesh, settings(index), placement_of(index), lora)
            return TransformerLayer(index, *given)

        self.layers = nn.ModuleDict({str(index): built(layer(index)) for index in held})
        self.scratch.allocate(dtype, mesh.device)
        self.head: ColumnParallelLinear | None = None
        if self.ends:
            self.norm = RMSNorm(config.d_model, outside, config.norm_eps, config.norm_shift)
            if not config.tie_embeddings:
                self.head = outside.column(config.d_model, config.vocab_size, "head")

    def forward(
        self,
        ids_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        tokens: Tokens,
        documents_BS: torch.Tensor | None = None,
    ) -> Output:
        """`tokens`: where this rank's tokens lie among those of all ranks that read others.

        `documents_BS`: the number of the document each token is in; attention does not cross from one to the
        next, and positions begin anew. Left out: a sample is one document.
        """
        h_TD, reports = self.hidden(ids_BS, tokens, documents_BS)
        loss_sum, loss_T = self.losses(h_TD, targets_BS)
        shares = [report.aux_loss for report in reports]
        aux_loss = torch.stack(shares).sum() if shares else loss_sum.new_zeros(())
        return Output(loss_sum=loss_sum, aux_loss=aux_loss, reports=reports, loss_T=loss_T)

    def hidden(
        self, ids_BS: torch.Tensor, tokens: Tokens, documents_BS: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, list[MoEReport]]:
        """Behind the last layer, before the norm; for a model that is whole on this rank's stage."""
        h_TD = self.embed(ids_BS, frozen=self.mesh.num_ranks == 1)
        positions = self.positions(ids_BS, documents_BS)
        reports: list[MoEReport] = []
        tokens = replace(tokens, group=self.mesh.data)
        for layer in self.layers.values():
            # What lies below the first trained parameter has no backward.
            if not h_TD.requires_grad and any(p.requires_grad for p in layer.parameters()):
                h_TD = wants_gradient(h_TD)
            h_TD, report = layer(h_TD, positions, tokens)
            if report is not None:
                reports.append(report)
        return h_TD, reports

    def embed(self, ids_BS: torch.Tensor, *, frozen: bool = False) -> torch.Tensor:
        """`frozen`: it may come without a gradient; ranks exchange that of a layer's input in any case.

        Every forward begins here.
        """
        self.begin_forward()
        h_TD = embed(ids_BS, self.embedding, self.vocab, self.tp)
        scale = self.config.embedding_scale
        h_TD = h_TD if scale == 1 else h_TD * scale
        return h_TD if frozen else wants_gradient(h_TD)

    def positions(self, ids_BS: torch.Tensor, documents_BS: torch.Tensor | None = None) -> Positions:
        length, device = ids_BS.shape[1], self.mesh.device
        return Positions.of(self.rotary, length, device, documents_BS=documents_BS, near=self.near)

    def logits(self, h_TD: torch.Tensor) -> torch.Tensor:
        """Of this rank's part of the vocabulary, for all tokens of the tp ranks."""
        weight = self.embedding if self.head is None else self.head.weight
        (logits_TV,) = column_linear(self.norm(h_TD), [weight], self.tp, label="head")
        if self.config.logit_scale != 1:
            logits_TV = logits_TV * self.config.logit_scale
        cap = self.config.logit_softcap
        return cap * torch.tanh(logits_TV / cap) if cap else logits_TV

    def loss(self, h_TD: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Norm, head and cross-entropy, summed over this rank's tokens."""
        return self.losses(h_TD, targets_BS)[0]

    def losses(self, h_TD: torch.Tensor, targets_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(their sum, that of each token, which has no gradient)."""
        targets_T = targets_BS.flatten()
        if self.config.logit_scale != 1 or self.config.logit_softcap:
            return token_losses(self.logits(h_TD), targets_T, self.vocab, self.tp)
        weight = self.embedding if self.head is None else self.head.weight
        return head_losses(self.norm(h_TD), weight, targets_T, self.vocab, self.tp)

    # For the pipeline (`pipeline/stage`).

    def layer(self, index: int) -> TransformerLayer:
        found = self.layers[str(index)]
        assert isinstance(found, TransformerLayer)
        return found

    @property
    def all_layers(self) -> list[TransformerLayer]:
        """Those of this rank."""
        return [self.layer(int(index)) for index in self.layers]

    def microbatch(
        self,
        ids_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        tokens: Tokens,
        loads: MicrobatchLoads,
        aux_scale: float,
        documents_BS: torch.Tensor | None = None,
    ) -> MicrobatchState:
        """One chunk of a microbatch, for `stage`; all chunks of one share `loads`."""
        return MicrobatchState(
            ids_BS=ids_BS,
            targets_BS=targets_BS,
            positions=self.positions(ids_BS, documents_BS),
            tokens=replace(tokens, group=self.mesh.data),
            rows=ids_BS.numel() // (self.tp.size if self.tp.parts_tokens else 1),
            loads=loads,
            aux_scale=torch.full((), aux_scale, dtype=WIDE[self.dtype], device=self.mesh.device),
        )

    def stage(self, layers: Sequence[int]) -> ModelStage:
        """Some of this rank's layers, with the embedding and the head where they belong."""

        def enter(microbatch: MicrobatchState) -> torch.Tensor:
            return self.embed(microbatch.ids_BS)

        def leave(h_TD: torch.Tensor, microbatch: MicrobatchState) -> torch.Tensor:
            loss_sum, microbatch.loss_T = self.losses(h_TD, microbatch.targets_BS)
            microbatch.loss_sum = loss_sum.detach()
            return loss_sum

        return ModelStage(
            layers=[LayerParts(self.layer(index)) for index in layers],
            embed=enter if 0 in layers else None,
            head=leave if self.config.num_layers - 1 in layers else None,
        )
