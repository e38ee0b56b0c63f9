"""Experts with low-rank adapters, computed together.

    h = x W_up^T + s (x A_up^T) B_up^T,  a = f(h),  y = a W_down^T + s (a A_down^T) B_down^T

The three calls of `moe/experts/two_projections`, with two more weights for each projection that has an
adapter; all products are grouped. Weights that want no gradient (the base, usually) cost none. Adapters
travel with their experts: to shadows, replicas and other ranks. Where kernels take the rows,
`moe/experts/fused` computes the same in them.

Where experts are sharded over tp, B_up is cut as W_up and A_down as W_down; A_up and B_down are whole on
every tp rank, and each has a share of their gradients (`train/optim/buckets` sums them).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moeclipse.moe.experts.two_projections import Experts, ExpertsPending, ExpertsSaved, spread
from moeclipse.moe.own_loop.shards import ExpertPlace
from moeclipse.ops import expert_passes
from moeclipse.ops.activation import activate_backward, activated
from moeclipse.ops.frozen import Weight, decoded, in_type
from moeclipse.ops.grouped_gemm import grouped_mm, grouped_mm_dgrad, grouped_mm_wgrad
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.tensor.cut import cut_of, mark

OPERANDS: dict[str, str] = dict(
    zip(("lora_up_a", "lora_up_b", "lora_down_a", "lora_down_b"), expert_passes.ADAPTERS, strict=True)
)
"""The adapters' parameters, and what kernels call them."""


@dataclass(frozen=True, kw_only=True)
class Inner:
    """One projection's adapter in one call."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    counts: Sequence[int]
    u_MR: torch.Tensor
    """scale x rows A^T"""

    def out(self) -> torch.Tensor:
        return grouped_mm(self.u_MR, self.b, self.counts)

    def back(self, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(d_u, what the gradient of the rows gets)."""
        d_u_MR = self.scale * grouped_mm_dgrad(dy, self.b, self.counts)
        return d_u_MR, grouped_mm_dgrad(d_u_MR, self.a, self.counts)


@dataclass(frozen=True, kw_only=True)
class LoraSaved(ExpertsSaved):
    up: Inner | None
    down: Inner | None


@dataclass(frozen=True, kw_only=True)
class LoraPending(ExpertsPending):
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """(dy, x) of each adapter's weights, in their order."""

    def add_to(self, *into: torch.Tensor | None) -> None:
        base = len(into) - len(self.pairs)
        super().add_to(*into[:base])
        for place, (dy, x) in zip(into[base:], self.pairs, strict=True):
            if place is not None:
                grouped_mm_wgrad(dy, x, self.counts, into=place, kernels=self.kernels)


class LoraExperts(Experts):
    """Made of experts, whose weights it takes over."""

    lora_up_a: nn.Parameter
    lora_up_b: nn.Parameter
    lora_down_a: nn.Parameter
    lora_down_b: nn.Parameter

    def __init__(
        self, base: Experts, rank: int, scale: float, projections: Iterable[str] = ("up", "down")
    ) -> None:
        nn.Module.__init__(self)
        self.ids, self.activation, self.kernels = base.ids, base.activation, base.kernels
        self.num_experts, self.wgrads, self.biased = base.num_experts, base.wgrads, base.biased
        self.init, self.cuts, self.scale = base.init, base.cuts, scale
        for name, parameter in base.named_parameters():
            self.register_parameter(name, parameter)
        (_, hidden, d_model), (_, _, d_ff) = self.up.shape, self.down.shape
        shapes = ((rank, d_model), (hidden, rank), (rank, d_ff), (d_model, rank))
        up, down = self.cuts
        self.adapter_cuts = {
            "lora_up_b": replace(up, shape=(up.shape[0], rank)),
            "lora_down_a": replace(down, shape=(rank, down.shape[1])),
        }
        self.adapters = tuple(name for name in OPERANDS if name.split("_")[1] in set(projections))
        for name, shape in zip(OPERANDS, shapes, strict=True):
            if name in self.adapters:
                parameter = nn.Parameter(self.init.empty(len(self.ids), *shape))
                self.register_parameter(name, parameter)
                cut = self.adapter_cuts.get(name)
                if cut is not None and cut.local_shape != cut.shape:
                    mark(parameter, cut)
        self.reset_adapters()

    @torch.no_grad()
    def reset_adapters(self) -> None:
        for name in self.adapters:
            for slot, expert in enumerate(self.ids):
                place = getattr(self, name).data[slot]
                if name.endswith("_b"):
                    place.zero_()
                else:
                    key = key_of(self.init.seed, self.init.layer, "expert", expert, name)
                    cut = self.adapter_cuts.get(name)
                    (fill_normal if cut is None else cut.fill)(place, key, self.init.std)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_adapters()

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return (*super().weights, *(getattr(self, name) for name in self.adapters))

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, *(OPERANDS[name] for name in self.adapters))

    @property
    def places(self) -> dict[str, ExpertPlace]:
        found = super().places
        cuts = {name: cut_of(getattr(self, name)) for name in found}
        return {name: replace(place, cut=cuts[name]) for name, place in found.items()}

    def _inner(
        self, projection: str, rows: torch.Tensor, weights: dict[str, Weight], counts: Sequence[int]
    ) -> Inner | None:
        if (a := weights.get(f"lora_{projection}_a")) is None:
            return None
        b = weights[f"lora_{projection}_b"]
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        u_MR = self.scale * grouped_mm(rows, a, counts)
        return Inner(a=a, b=b, scale=self.scale, counts=counts, u_MR=u_MR)

    def forward(
        self, x: torch.Tensor, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, LoraSaved]:
        given = self.operands if shadows is None else self.unflatten(shadows)
        weights = tuple(in_type(weight, x.dtype) for weight in given)
        base = len(weights) - len(self.adapters)
        up, down, *biases = weights[:base]
        named = dict(zip(self.adapters, weights[base:], strict=True))
        h = grouped_mm(x, decoded(up, x.dtype), counts)
        if (up_inner := self._inner("up", x, named, counts)) is not None:
            h += up_inner.out()
        if biases:
            h += spread(biases[0], counts)
        a = activated(h, self.activation)
        y = grouped_mm(a, decoded(down, x.dtype), counts)
        if (down_inner := self._inner("down", a, named, counts)) is not None:
            y += down_inner.out()
        if biases:
            y += spread(biases[1], counts)
        return y, LoraSaved(x=x, h=h, counts=counts, weights=weights, up=up_inner, down=down_inner)

    def recompute(
        self, x: torch.Tensor, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> LoraSaved:
        """The whole of forward: the adapter of the second product is behind a."""
        return self.forward(x, counts, shadows)[1]

    def dgrad(self, dy: torch.Tensor, saved: ExpertsSaved) -> tuple[torch.Tensor, LoraPending]:
        assert isinstance(saved, LoraSaved)
        counts, (up, down, *_), pairs = saved.counts, saved.weights, list[tuple[torch.Tensor, torch.Tensor]]()
        d_a = grouped_mm_dgrad(dy, decoded(down, dy.dtype), counts)
        if saved.down is not None:
            d_down_MR, more = saved.down.back(dy)
            d_a += more
        d_h, a = activate_backward(d_a, saved.h, self.activation)
        dx = grouped_mm_dgrad(d_h, decoded(up, dy.dtype), counts)
        if saved.up is not None:
            d_up_MR, more = saved.up.back(d_h)
            dx += more
            pairs += [(d_up_MR, saved.x), (d_h, saved.up.u_MR)]
        if saved.down is not None:
            pairs += [(d_down_MR, a), (dy, saved.down.u_MR)]
        given: dict[str, Any] = {"counts": counts, "kernels": self.kernels, "frozen": self.frozen}
        return dx, LoraPending(x=saved.x, d_h=d_h, a=a, dy=dy, pairs=pairs, **given)
