"""States that tokens write to and read, in place of attention: the gated delta rule (`ops/delta_rule`).

    q, k, v = silu(conv(projections of the input))              a short convolution of each channel
    beta = sigmoid(a projection)                                how much is written, for each state
    log decay = -exp(rate) softplus(a projection + shift)       how much is forgotten
    y = out(norm(what is read) * f(gate))                       the norm goes over each head

    gated_delta    one decay for a state; several heads of values for one of keys; f = silu (Qwen3-Next)
    kimi_delta     a decay for each component of a key; narrow matrices before decay and gate; f = sigmoid

Under tensor parallelism each rank has some heads of keys with their heads of values, for all tokens. With a
cache a row keeps its state and the last inputs of the convolutions; both are as large after a million tokens
as after one. Documents begin with an empty state.

Shapes: B samples, S positions, H heads of values, G of keys, K and V their widths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.model.blocks import Linear, Settings
from moeclipse.model.config import ModelConfig
from moeclipse.model.conv_mixer import ShortConv
from moeclipse.model.qk_norm import HeadNorm
from moeclipse.model.rotary import Positions
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.delta_rule import delta_rule, states_read
from moeclipse.ops.precision import WIDE
from moeclipse.ops.random import uniform
from moeclipse.tensor.cut import cut_of
from moeclipse.tensor.linear import ColumnParallelLinear, column_linear

FASTEST = 16.0
"""States forget at first by exp(-A softplus(...)), with A below this."""
STATE = 3
"""Of what is kept in a cache: behind the inputs of three convolutions."""


class DeltaMixer(nn.Module):
    """What both kinds share."""

    def __init__(
        self, config: ModelConfig, settings: Settings, keys: tuple[int, int], values: tuple[int, int]
    ) -> None:
        """`keys`, `values`: (heads, width of one)."""
        super().__init__()
        d, (G, K), (H, V) = config.d_model, keys, values
        self.layer, self.tp, self.key_width, self.value_width = settings.layer, settings.tp, K, V
        self.label = f"queries, keys and values of a state, layer {settings.layer}"
        share = H // G * V  # heads of values stay with their head of keys
        self.query = settings.column(d, G * K, "query", unit=K)
        self.key = settings.column(d, G * K, "key", unit=K)
        self.value = settings.column(d, H * V, "value", unit=share)
        self.write = settings.column(d, H, "write", unit=H // G)
        width = config.conv_width
        self.conv_query = ShortConv(G * K, width, K, settings, "query", 0)
        self.conv_key = ShortConv(G * K, width, K, settings, "key", 1)
        self.conv_value = ShortConv(H * V, width, share, settings, "value", 2)
        self.rate = settings.cut((H,), "rate", unit=H // G)
        cut = cut_of(self.rate)
        assert cut is not None
        if not self.rate.is_meta:
            index = torch.arange(cut.start, cut.stop, device=settings.device)
            speed = (FASTEST * uniform(settings.key("rate"), index)).clamp(min=0.01)
            self.rate.data.copy_(speed.log())
        self.norm = HeadNorm(V, settings, config.norm_eps)
        self.out = settings.row(H * V, d, "out", unit=share)

    def forward(self, x_TD: torch.Tensor, positions: Positions, _: Tokens | None = None) -> torch.Tensor:
        wide = self.wide_linears()
        q_TD, k_TD, v_TD, beta_TH, *others = column_linear(
            x_TD, [part.weight for part in wide], self.tp, label=self.label
        )
        q, k, v = (
            F.silu(conv(x, positions)).unflatten(2, (-1, width))
            for conv, x, width in (
                (self.conv_query, q_TD, self.key_width),
                (self.conv_key, k_TD, self.key_width),
                (self.conv_value, v_TD, self.value_width),
            )
        )
        shape = v.shape[:2]
        decay_T, gate_TD = self.decay_and_gate(x_TD, others)
        beta_BSH = beta_TH.to(WIDE[beta_TH.dtype]).sigmoid().unflatten(0, shape)
        read = self._read(q, k, v, decay_T.unflatten(0, shape), beta_BSH, positions)
        gate = gate_TD.unflatten(1, (-1, self.value_width))
        y = self.norm(read.flatten(0, 1)).to(WIDE[gate.dtype]) * self.opened(gate.to(WIDE[gate.dtype]))
        out_TD: torch.Tensor = self.out(y.to(gate.dtype).flatten(1))
        return out_TD

    def _read(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta_BSH: torch.Tensor,
        positions: Positions,
    ) -> torch.Tensor:
        call = positions.cache
        if call is None:
            return states_read(q, k, v, log_decay, beta_BSH, positions.begins)
        new_BS = call.is_new
        beta_BSH = beta_BSH * call.is_new[..., None]  # padding neither writes nor makes anybody forget
        log_decay = log_decay * new_BS.view(*new_BS.shape, *[1] * (log_decay.dim() - 2))
        before = call.cache.state(self.layer, STATE)
        begins_BS = positions.begins
        assert begins_BS is not None
        read, state = delta_rule(
            q, k, v, log_decay, beta_BSH, state_BHKV=before, begins_BS=begins_BS & new_BS
        )
        call.cache.keep(self.layer, STATE, state)
        return read

    def wide_linears(self) -> list[ColumnParallelLinear]:
        """That read the input itself, the first four of them alike in all kinds."""
        return [self.query, self.key, self.value, self.write]

    def decay_and_gate(
        self, x_TD: torch.Tensor, others: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log decay of each token, what opens the result), from the input and further linears of it."""
        raise NotImplementedError

    def opened(self, gate: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class GatedDelta(DeltaMixer):
    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        H, G, V = config.delta_value_heads, config.delta_key_heads, config.delta_value_dim
        super().__init__(config, settings, (G, config.delta_key_dim), (H, V))
        self.gate = settings.column(config.d_model, H * V, "gate", unit=H // G * V)
        self.decay = settings.column(config.d_model, H, "decay", unit=H // G)
        self.shift = settings.cut((H,), "shift", unit=H // G)
        self.shift.data.fill_(1.0)

    def wide_linears(self) -> list[ColumnParallelLinear]:
        return [*super().wide_linears(), self.gate, self.decay]

    def decay_and_gate(
        self, x_TD: torch.Tensor, others: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate_TD, decay_TH = others
        wide = WIDE[x_TD.dtype]
        return -self.rate.to(wide).exp() * F.softplus(decay_TH.to(wide) + self.shift.to(wide)), gate_TD

    def opened(self, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(gate)


class KimiDelta(DeltaMixer):
    def __init__(self, config: ModelConfig, settings: Settings) -> None:
        H, K = config.delta_key_heads, config.delta_key_dim
        super().__init__(config, settings, (H, K), (H, K))
        d = config.d_model
        self.gate_down = Linear(d, K, settings, "gate_down")
        self.gate = settings.column(K, H * K, "gate", unit=K)
        self.decay_down = Linear(d, K, settings, "decay_down")
        self.decay = settings.column(K, H * K, "decay", unit=K)
        self.shift = settings.cut((H * K,), "shift", unit=K)

    def decay_and_gate(self, x_TD: torch.Tensor, _: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        wide = WIDE[x_TD.dtype]
        decay_TD = self.decay(self.decay_down(x_TD)).to(wide) + self.shift.to(wide)
        decay_THK = F.softplus(decay_TD.unflatten(1, (-1, self.key_width)))
        return -self.rate.to(wide).exp()[:, None] * decay_THK, self.gate(self.gate_down(x_TD))

    def opened(self, gate: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(gate)
