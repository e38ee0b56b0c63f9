"""One layer of the decoder: attention or another mixer of tokens, then a dense block or experts.

h = h + scale * out_norm(attention(norm(h)))         `model.norms` says which of the norms there are
h = h + scale * out_norm(block(norm(h)))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.core.shares import even_bounds
from moeclipse.model.attention import GroupedQueryAttention
from moeclipse.model.blocks import DenseMLP, RMSNorm, Settings, freeze_linears
from moeclipse.model.config import ModelConfig
from moeclipse.model.conv_mixer import ConvMixer
from moeclipse.model.delta_mixers import GatedDelta, KimiDelta
from moeclipse.model.latent_attention import LatentAttention
from moeclipse.model.lora_config import NO_LORA, LoraConfig
from moeclipse.model.recompute import Again, Elsewhere, Visiting, forget, run_again
from moeclipse.model.rotary import Positions
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.experts.lora_experts import LoraExperts
from moeclipse.moe.experts.shared import GatedShared
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.layer import MoE
from moeclipse.moe.losses import MoEReport
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.parallel import MoveKind, move


def mixer_of(config: ModelConfig, settings: Settings, lora: LoraConfig) -> nn.Module:
    """What mixes the tokens of a layer; adapters stand beside attention alone."""
    kind = config.mixer_of(settings.layer)
    if kind == "gated_delta":
        return GatedDelta(config, settings)
    if kind == "kimi_delta":
        return KimiDelta(config, settings)
    if kind == "short_conv":
        return ConvMixer(config, settings)
    if config.attention == "mla":
        return LatentAttention(config, settings, lora)
    return GroupedQueryAttention(config, settings, lora)


def add_adapters(moe: MoE, lora: LoraConfig) -> None:
    """Inside the layer's experts, where these have some."""
    if lora.has("experts"):
        assert isinstance(moe.experts, Experts)
        moe.experts = LoraExperts(moe.experts, lora.rank, lora.scale, lora.projections)


class TransformerLayer(nn.Module):
    again: Again = "off"
    """Which of its parts are recomputed in backward, where autograd runs it."""
    input_elsewhere: Elsewhere | None = None
    """Where its input lies until it is recomputed whole (`train/step/host_inputs`)."""
    weights_elsewhere: Visiting | None = None
    """Brings the weights of its experts, where they do not stay (`train/step/host_weights`)."""
    front: Callable[[torch.Tensor, Positions, Tokens], tuple[torch.Tensor, MoEReport | None]] | None = None
    """Runs the layer in training, where that is not left to itself (`model/front`)."""

    def __init__(
        self,
        index: int,
        config: ModelConfig,
        moe: MoEConfig,
        gate: GateConfig,
        mesh: Mesh,
        settings: Settings,
        placement: Placement | None = None,
        lora: LoraConfig = NO_LORA,
    ) -> None:
        super().__init__()
        self.index, self.tp, self.scratch = index, settings.tp, settings.scratch
        self.residual_scale = config.residual_scale

        def norm(here: bool) -> nn.Module:
            given = (config.d_model, settings, config.norm_eps, config.norm_shift)
            return RMSNorm(*given) if here else nn.Identity()

        before, after = config.norms != "after", config.norms in ("after", "both")
        self.attention_norm = norm(before)
        self.attention = mixer_of(config, settings, lora)
        self.attention_out_norm = norm(after)
        self.mlp_norm = norm(before)
        self.mlp_out_norm = norm(after or (config.norms == "experts" and not config.is_dense(index)))
        self.dense: DenseMLP | None = None
        self.moe: MoE | None = None
        if config.is_dense(index):
            self.dense = DenseMLP(config.d_model, config.d_ff, settings)
            self._freeze(config)
            return
        self.moe = MoE(
            config.d_model,
            moe.d_ff,
            moe.num_experts,
            gate.top_k,
            gate=gate,
            num_shared_experts=moe.num_shared_experts,
            shared_d_ff=moe.shared_d_ff,
            shared_gate=moe.shared_gate,
            activation=moe.activation,
            expert_bias=moe.expert_bias,
            score_input=moe.score_input,
            exchange=moe.exchange,
            expert_tp=moe.expert_tp,
            mesh=mesh,
            placement=placement,
            layer=index,
            seed=settings.seed,
            init_std=config.init_std,
            down_std=settings.residual_std,
            device=settings.device,
            dtype=settings.dtype,
        )
        self.moe.schedule.cuts.most_calls = 0  # who trains the model says how many may be trials
        add_adapters(self.moe, lora)
        self._freeze(config)
        for experts in (self.moe.experts, self.moe.shared):
            if isinstance(experts, Experts | GatedShared):
                experts.wgrads = settings.tp.wgrads

    def _freeze(self, config: ModelConfig) -> None:
        """Keep the base in few bits, where the configuration says so; the gate and norms stay as they are."""
        for name, cut in (
            ("base", self.moe is not None and self.moe.sharded),
            ("dense_base", self.tp.size > 1),
        ):
            if (kind := getattr(config, name)) and cut:
                raise ConfigError(
                    f"model.{name} ({kind!r}) keeps whole matrices, and tp would cut them; set tp to 1"
                )
        if self.moe is not None and config.base:
            assert isinstance(self.moe.experts, Experts)
            self.moe.experts.freeze(config.base, self.scratch)
        if config.dense_base:
            for part in (self.attention, self.dense):
                if part is not None:
                    freeze_linears(part, config.dense_base, self.scratch)
            shared = None if self.moe is None else self.moe.shared
            if shared is not None:
                inner = shared.experts if isinstance(shared, GatedShared) else shared
                inner.freeze(config.dense_base, self.scratch)

    def forward(
        self, h_TD: torch.Tensor, positions: Positions, tokens: Tokens
    ) -> tuple[torch.Tensor, MoEReport | None]:
        if self.weights_elsewhere is None:
            return self._forward(h_TD, positions, tokens)
        self.weights_elsewhere.come(tokens.microbatch, again=False)
        found = self._forward(h_TD, positions, tokens)
        self.weights_elsewhere.gone(again=False)
        return found

    def _forward(
        self, h_TD: torch.Tensor, positions: Positions, tokens: Tokens
    ) -> tuple[torch.Tensor, MoEReport | None]:
        def whole(h_TD: torch.Tensor, output: bool = True) -> tuple[torch.Tensor, ...]:
            return self._told(self._run(h_TD, positions, tokens, output))

        if self.front is not None and torch.is_grad_enabled():
            return self.front(h_TD, positions, tokens)
        if self.again != "full":
            return self._run(h_TD, positions, tokens)
        kept = None if self.input_elsewhere is None else (self.input_elsewhere, tokens.microbatch)
        visit = None if self.weights_elsewhere is None else (self.weights_elsewhere, tokens.microbatch)
        return self._heard(run_again(whole, h_TD, self.scratch, partial(whole, output=False), kept, visit))

    def _run(
        self, h_TD: torch.Tensor, positions: Positions, tokens: Tokens, output: bool = True
    ) -> tuple[torch.Tensor, MoEReport | None]:
        """Without `output` nobody reads it: for gradients alone."""

        def attend(h_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.attend(h_TD, positions, tokens)

        def block(x_TD: torch.Tensor, output: bool = True) -> tuple[torch.Tensor, ...]:
            return self._told(self._block(x_TD, tokens, output))

        h_TD, x_TD = run_again(attend, h_TD, self.scratch) if self.again == "attn" else attend(h_TD)
        if self.again in ("mlp", "moe"):  # on one rank no row travels, and the gate is the least of it
            y_TD, report = self._heard(run_again(block, x_TD, self.scratch, partial(block, output=False)))
        else:
            y_TD, report = self._block(x_TD, tokens, output)
        if self.again == "norms":
            self._forget_norm(self.mlp_norm, h_TD, x_TD, until=y_TD)
        return h_TD + y_TD, report

    def _block(
        self, x_TD: torch.Tensor, tokens: Tokens, output: bool
    ) -> tuple[torch.Tensor, MoEReport | None]:
        """What dense block or experts add to the residual stream."""
        if self.dense is not None:
            return self.dense_block(x_TD), None
        assert self.moe is not None
        part_TD, tokens = self.to_experts(x_TD, tokens)
        read = output or not self.adds_experts_as_they_are
        y_TD, report = self.moe.run(part_TD, tokens, output=read)
        return self.from_experts(y_TD, len(x_TD)), report

    @staticmethod
    def _told(found: tuple[torch.Tensor, MoEReport | None]) -> tuple[torch.Tensor, ...]:
        """As tensors: a recomputed part returns nothing else."""
        out, report = found
        return (out,) if report is None else (out, report.aux_loss, report.load_E, report.num_dropped)

    @staticmethod
    def _heard(found: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, MoEReport | None]:
        out, *told = found
        if not told:
            return out, None
        return out, MoEReport(aux_loss=told[0], load_E=told[1], num_dropped=told[2])

    @staticmethod
    def _forget_norm(norm: nn.Module, h_TD: torch.Tensor, x_TD: torch.Tensor, until: torch.Tensor) -> None:
        """x = norm(h) lies idle from here to the gradient of `until`."""
        if isinstance(norm, RMSNorm):
            h_TD = h_TD.detach()
            forget(x_TD, lambda: norm(h_TD), until)

    def attend(
        self, h_TD: torch.Tensor, positions: Positions, tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the residual stream behind attention, what the feed-forward block reads of it)."""
        x_TD = h_TD
        if isinstance(self.attention_norm, RMSNorm):
            h_TD, x_TD = self.attention_norm(h_TD, beside=True)
        y_TD = self.attention(x_TD, positions, tokens)
        if self.again == "norms":
            self._forget_norm(self.attention_norm, h_TD, x_TD, until=y_TD)
        y_TD = self._scaled(self.attention_out_norm(y_TD))
        if isinstance(self.mlp_norm, RMSNorm):
            h_TD, x_TD = self.mlp_norm(h_TD, y_TD)
            return h_TD, x_TD
        h_TD = h_TD + y_TD
        return h_TD, self.mlp_norm(h_TD)

    def dense_block(self, x_TD: torch.Tensor) -> torch.Tensor:
        """What a layer without experts adds to the residual stream."""
        assert self.dense is not None
        return self._scaled(self.mlp_out_norm(self.dense(x_TD)))

    def _scaled(self, y_TD: torch.Tensor) -> torch.Tensor:
        return y_TD if self.residual_scale == 1 else y_TD * self.residual_scale

    def to_experts(self, x_TD: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, Tokens]:
        """From tokens as linears hold them to those this rank's MoE layer takes, and where they lie."""
        moe, tp = self.moe, self.tp
        assert moe is not None
        if moe.sharded:
            there: tuple[MoveKind, MoveKind] = (
                ("gather", "sum_scatter") if tp.parts_tokens else ("same", "sum")
            )
            return move(x_TD, tp, *there, self._label), tokens
        if tp.size == 1:
            group = moe.token_group
            return x_TD, tokens if tokens.group is group else replace(tokens, group=group)
        num_tokens = len(x_TD) * (tp.size if tp.parts_tokens else 1)
        bounds = even_bounds(num_tokens, tp.size)
        mine = replace(tokens, first=tokens.first + bounds[tp.index], group=moe.token_group)
        if tp.parts_tokens:
            return x_TD, mine
        return move(x_TD, tp, "slice", "gather", self._label, bounds=bounds), mine

    def from_experts(self, y_TD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """And back, as it is added to the residual stream; `num_tokens` as linears hold them."""
        return self._scaled(self.mlp_out_norm(self._returned(y_TD, num_tokens)))

    @property
    def adds_experts_as_they_are(self) -> bool:
        """Whether nothing happens to what experts gave before it is added: its gradient needs no value."""
        here = self.tp.size == 1 or self.tp.parts_tokens
        plain = isinstance(self.mlp_out_norm, torch.nn.Identity) and self.residual_scale == 1
        return self.moe is not None and not self.moe.sharded and here and plain

    def _returned(self, y_TD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        moe, tp = self.moe, self.tp
        assert moe is not None
        if moe.sharded:
            back: tuple[MoveKind, MoveKind] = (
                ("sum_scatter", "gather") if tp.parts_tokens else ("sum", "same")
            )
            return move(y_TD, tp, *back, self._label)
        if tp.size == 1 or tp.parts_tokens:
            return y_TD
        return move(y_TD, tp, "gather", "slice", self._label, bounds=even_bounds(num_tokens, tp.size))

    @property
    def _label(self) -> str:
        return f"tokens of experts, layer {self.index}"
