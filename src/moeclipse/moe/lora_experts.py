"""Experts with low-rank adapters, computed together.

    h = x W_up^T + s (x A_up^T) B_up^T,  a = f(h),  y = a W_down^T + s (a A_down^T) B_down^T

The three calls of `moe/experts`, with four more weights of each expert; all products are grouped. Weights
that want no gradient (the base, usually) cost none. Adapters travel with their experts: to shadows, replicas
and other ranks.

Hazard: the kernels of `moe/fused` know nothing of adapters; a layer with these experts must not take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moeclipse.moe.experts import Experts, ExpertsPending, ExpertsSaved, spread
from moeclipse.ops.activation import activate_backward, activated
from moeclipse.ops.grouped_gemm import grouped_mm, grouped_mm_dgrad, grouped_mm_wgrad
from moeclipse.ops.random import fill_normal, key_of

ADAPTERS = ("lora_up_a", "lora_up_b", "lora_down_a", "lora_down_b")


@dataclass(frozen=True, kw_only=True)
class LoraSaved(ExpertsSaved):
    up_MR: torch.Tensor
    """x A_up^T"""
    down_MR: torch.Tensor
    """a A_down^T"""


@dataclass(frozen=True, kw_only=True)
class LoraPending(ExpertsPending):
    up_MR: torch.Tensor
    down_MR: torch.Tensor
    d_up_MR: torch.Tensor
    d_down_MR: torch.Tensor
    scale: float

    def add_to(self, *into: torch.Tensor | None) -> None:
        super().add_to(*into[:-4])
        pairs = (
            (self.d_up_MR, self.x),
            (self.scale * self.d_h, self.up_MR),
            (self.d_down_MR, self.a),
            (self.scale * self.dy, self.down_MR),
        )
        for place, (dy, x) in zip(into[-4:], pairs, strict=True):
            if place is not None:
                grouped_mm_wgrad(dy, x, self.counts, into=place, kernels=self.kernels)


class LoraExperts(Experts):
    """Made of experts, whose weights it takes over."""

    lora_up_a: nn.Parameter
    lora_up_b: nn.Parameter
    lora_down_a: nn.Parameter
    lora_down_b: nn.Parameter

    def __init__(self, base: Experts, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.ids, self.activation, self.kernels = base.ids, base.activation, False
        self.num_experts, self.wgrads, self.biased = base.num_experts, base.wgrads, base.biased
        self.init, self.cuts, self.scale = base.init, base.cuts, scale
        for name, parameter in base.named_parameters():
            self.register_parameter(name, parameter)
        (_, hidden, d_model), (_, _, d_ff) = self.up.shape, self.down.shape
        shapes = ((rank, d_model), (hidden, rank), (rank, d_ff), (d_model, rank))
        for name, shape in zip(ADAPTERS, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(self.init.empty(len(self.ids), *shape)))
        self.reset_adapters()

    @torch.no_grad()
    def reset_adapters(self) -> None:
        for name in ADAPTERS:
            for slot, expert in enumerate(self.ids):
                place = getattr(self, name).data[slot]
                if name.endswith("_b"):
                    place.zero_()
                else:
                    key = key_of(self.init.seed, self.init.layer, "expert", expert, name)
                    fill_normal(place, key, self.init.std)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_adapters()

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return (*super().weights, *(getattr(self, name) for name in ADAPTERS))

    def forward(
        self, x: torch.Tensor, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, LoraSaved]:
        given = self.weights if shadows is None else self.unflatten(shadows)
        weights = tuple(weight.to(x.dtype) for weight in given)
        up, down, *biases = weights[:-4]
        up_a, up_b, down_a, down_b = weights[-4:]
        up_MR = grouped_mm(x, up_a, counts)
        h = grouped_mm(x, up, counts) + self.scale * grouped_mm(up_MR, up_b, counts)
        if biases:
            h += spread(biases[0], counts)
        a = activated(h, self.activation)
        down_MR = grouped_mm(a, down_a, counts)
        y = grouped_mm(a, down, counts) + self.scale * grouped_mm(down_MR, down_b, counts)
        if biases:
            y += spread(biases[1], counts)
        return y, LoraSaved(x=x, h=h, counts=counts, weights=weights, up_MR=up_MR, down_MR=down_MR)

    def dgrad(self, dy: torch.Tensor, saved: ExpertsSaved) -> tuple[torch.Tensor, LoraPending]:
        assert isinstance(saved, LoraSaved)
        counts, (up, down, *_) = saved.counts, saved.weights
        up_a, up_b, down_a, down_b = saved.weights[-4:]
        d_down_MR = self.scale * grouped_mm_dgrad(dy, down_b, counts)
        d_a = grouped_mm_dgrad(dy, down, counts) + grouped_mm_dgrad(d_down_MR, down_a, counts)
        d_h, a = activate_backward(d_a, saved.h, self.activation)
        d_up_MR = self.scale * grouped_mm_dgrad(d_h, up_b, counts)
        dx = grouped_mm_dgrad(d_h, up, counts) + grouped_mm_dgrad(d_up_MR, up_a, counts)
        return dx, LoraPending(
            x=saved.x,
            d_h=d_h,
            a=a,
            dy=dy,
            counts=counts,
            kernels=self.kernels,
            up_MR=saved.up_MR,
            down_MR=saved.down_MR,
            d_up_MR=d_up_MR,
            d_down_MR=d_down_MR,
            scale=self.scale,
        )
