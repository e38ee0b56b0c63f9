"""Small parts with initial weights that depend on (seed, layer, name) alone, never on the layout.

Under tensor parallelism `column` and `row` make linears that are cut over the tp ranks; a `Linear` is whole
on each. Parts between linears see replicated tokens, or this rank's tokens with sequence parallelism; what
that means for their gradients is marked on their parameters (`tensor/cut`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, overload

import torch
from torch import nn

from moeclipse.model.lora_config import is_adapter
from moeclipse.ops.activation import activated
from moeclipse.ops.frozen import Scratch, freeze
from moeclipse.ops.norm import add_norm, beside_norm, rms_norm
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.tensor.cut import Cut, mark
from moeclipse.tensor.linear import ColumnParallelLinear, RowParallelLinear, column_linear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.weight_grad import place_of


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every part of one layer is made with."""

    layer: int
    num_layers: int
    seed: int
    init_std: float
    device: torch.device
    dtype: torch.dtype
    tp: TensorParallel
    scratch: Scratch = field(default_factory=Scratch)
    """Where weights of all layers that are kept in few bits are decoded."""

    @property
    def residual_std(self) -> float:
        """Of weights that write to the residual stream: its variance must not grow with depth."""
        return self.init_std / math.sqrt(2 * max(self.num_layers, 1))

    def key(self, name: str) -> int:
        return key_of(self.seed, self.layer, name)

    def column(
        self, d_in: int, d_out: int, name: str, *, unit: int = 1, blocks: int = 1, bias: bool = False
    ) -> ColumnParallelLinear:
        """y = x W^T (+ b), cut along its outputs; `unit` of them (a head) stay together."""
        return ColumnParallelLinear(
            d_in,
            d_out,
            tp=self.tp,
            bias=bias,
            unit=unit,
            blocks=blocks,
            key=self.key(name),
            name=f"{name}, layer {self.layer}",
            init_std=self.init_std,
            device=self.device,
            dtype=self.dtype,
        )

    def row(
        self, d_in: int, d_out: int, name: str, *, unit: int = 1, bias: bool = False
    ) -> RowParallelLinear:
        """y = x W^T (+ b), cut along its inputs; it writes to the residual stream."""
        return RowParallelLinear(
            d_in,
            d_out,
            tp=self.tp,
            bias=bias,
            unit=unit,
            key=self.key(name),
            name=f"{name}, layer {self.layer}",
            init_std=self.residual_std,
            device=self.device,
            dtype=self.dtype,
        )

    def cut(
        self, shape: tuple[int, ...], what: str, *, unit: int = 1, blocks: int = 1, std: float = 0.0
    ) -> nn.Parameter:
        """A parameter of heads or channels, cut along its first dimension like what it works on."""
        tp = self.tp
        cut = Cut.of(shape, 0, index=tp.index, parts=tp.size, blocks=blocks, unit=unit, what=what)
        parameter = nn.Parameter(torch.zeros(cut.local_shape, device=self.device, dtype=self.dtype))
        if std:
            cut.fill(parameter.data, self.key(what), std)
        return mark(parameter, cut)


class Linear(nn.Module):
    """y = x W^T, no bias, whole on every rank: for narrow outputs that all ranks need."""

    def __init__(self, d_in: int, d_out: int, settings: Settings, name: str) -> None:
        super().__init__()
        self.alone = settings.tp.alone
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=settings.device, dtype=settings.dtype))
        mark(self.weight, settings.tp.whole_share)
        fill_normal(self.weight.data, settings.key(name), settings.init_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = column_linear(x, [self.weight], self.alone)
        return y


def freeze_linears(module: nn.Module, kind: str, scratch: Scratch) -> None:
    """Keep the matrices of all linears in it in few bits, but for those of adapters."""
    for name, part in module.named_modules():
        if isinstance(part, Linear | ColumnParallelLinear | RowParallelLinear) and not is_adapter(name):
            freeze(part, ("weight",), kind, scratch)


class RMSNorm(nn.Module):
    def __init__(self, width: int, settings: Settings, eps: float, shift: float = 0.0) -> None:
        """`shift`: added to the weights."""
        super().__init__()
        self.eps, self.shift = eps, shift
        first = torch.full((width,), 1 - shift, device=settings.device, dtype=settings.dtype)
        self.weight = nn.Parameter(first)
        mark(self.weight, settings.tp.whole_share)

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    @overload
    def forward(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def forward(self, x: torch.Tensor, *, beside: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...
    def forward(
        self, x: torch.Tensor, added: torch.Tensor | None = None, *, beside: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Of x; with `added` (x + added, the norm of that), `beside` it (x, its norm)."""
        given = (self.weight, self.eps, place_of(self.weight), self.shift)
        if added is not None:
            return add_norm(x, added, *given)
        return beside_norm(x, *given) if beside else rms_norm(x, *given)


class DenseMLP(nn.Module):
    """SwiGLU without experts, for the first layers of models that have them."""

    def __init__(self, d_model: int, d_ff: int, settings: Settings) -> None:
        super().__init__()
        self.up = settings.column(d_model, 2 * d_ff, "up", blocks=2)
        self.down = settings.row(d_ff, d_model, "down")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(activated(self.up(x)))
