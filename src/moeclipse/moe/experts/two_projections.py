"""Experts with two projections: the ones this rank holds, computed together.

    h = x W_up^T + b_up,  a = f(h),  y = a W_down^T + b_down       f: see `ops/activation`; biases on request

    forward   y, saved    = experts.forward(x, counts)
    dgrad     dx, pending = experts.dgrad(dy, saved)
    wgrad     grads       = experts.wgrad([pending])    adds into main_grad where there is one

Rows are grouped by expert, `counts` says how many each has; zero rows are legal everywhere. Products are in
the type of the rows: weights of a wider one (autocast) are rounded for them, and their gradients are not.

W_up and W_down may be `Frozen` (`freeze`): kept in few bits, decoded before each product, and no weights that
gradients or shadows know of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from moeclipse.moe.experts.protocols import ExpertSet, PendingWgrad, Unhooked, WrappedExperts
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.own_loop.shards import ExpertPlace, load_shards, save_shards, trust_shards
from moeclipse.ops.activation import GATED, Activation, activate_backward, activated, hidden_width
from moeclipse.ops.bias import group_sum
from moeclipse.ops.expert_passes import BIASES, WEIGHTS
from moeclipse.ops.frozen import Frozen, Scratch, Weight, freeze
from moeclipse.ops.grouped_gemm import grouped_mm, grouped_mm_dgrad, grouped_mm_wgrad
from moeclipse.ops.grouping import group_counts
from moeclipse.ops.random import key_of
from moeclipse.tensor.cut import Cut, mark
from moeclipse.tensor.weight_grad import Grad, Grads, WeightGrads, accumulator


@dataclass(frozen=True, kw_only=True)
class ExpertsSaved:
    x: torch.Tensor
    h: torch.Tensor
    counts: Sequence[int]
    weights: tuple[Weight, ...]
    """Those that forward computed with."""


@dataclass(frozen=True, kw_only=True)
class ExpertsPending:
    """Weight gradients to come, a `PendingWgrad`."""

    x: torch.Tensor
    d_h: torch.Tensor
    a: torch.Tensor
    dy: torch.Tensor
    counts: Sequence[int]
    kernels: bool = False
    frozen: bool = False
    """`into` has no places for up and down."""

    def add_to(self, *into: torch.Tensor | None) -> None:
        up, down, *biases = (None, None, *into) if self.frozen else into
        if up is not None:
            grouped_mm_wgrad(self.d_h, self.x, self.counts, into=up, kernels=self.kernels)
        if down is not None:
            grouped_mm_wgrad(self.dy, self.a, self.counts, into=down, kernels=self.kernels)
        asked = zip((self.d_h, self.dy), biases, strict=False)
        both = [(rows, bias) for rows, bias in asked if bias is not None]
        if len(self.counts) == 1:
            for rows, bias in both:
                bias += rows.sum(0, dtype=bias.dtype)
        elif both:
            counts_E = torch.tensor(list(self.counts), dtype=torch.int64, device=self.dy.device)
            grouping = group_counts(counts_E, len(self.dy))
            for rows, bias in both:
                group_sum(rows, grouping, bias)


class Experts(Unhooked):
    """An `ExpertSet`. `ids` are the logical experts in slot order; initial weights depend on those numbers.

    `shard` = (index, parts): this rank has its part of each expert's hidden width, and y is part of a sum.
    Biases begin at zero; experts that are sharded cannot have any.
    """

    up: nn.Parameter | Frozen
    down: nn.Parameter | Frozen
    up_bias: nn.Parameter
    down_bias: nn.Parameter
    frozen: bool = False
    """Whether up and down are."""
    _like: torch.Tensor
    loads: int = 0
    """How often a state was loaded."""
    scale: float = 1.0
    """Of adapters, which these have none of."""

    def __init__(
        self,
        ids: Sequence[int],
        *,
        d_model: int,
        d_ff: int,
        init: WeightInit = WeightInit(),  # noqa: B008  (frozen)
        shard: tuple[int, int] = (0, 1),
        activation: Activation = "swiglu",
        bias: bool = False,
        kernels: bool = False,
        num_experts: int | None = None,
    ) -> None:
        """`num_experts`: of the layer, where `ids` are some of them; left out: these are all there are."""
        super().__init__()
        self.ids, self.kernels = tuple(ids), kernels
        self.activation: Activation = activation
        self.num_experts = num_experts
        trust_shards()
        self.wgrads = WeightGrads()
        index, parts = shard
        what = "the hidden width of an expert"
        width, blocks = hidden_width(activation, d_ff), 2 if activation in GATED else 1
        up = Cut.of((width, d_model), 0, index=index, parts=parts, blocks=blocks, what=what)
        down = Cut.of((d_model, d_ff), 1, index=index, parts=parts, what=what)
        self.up = nn.Parameter(init.empty(len(ids), *up.local_shape))
        self.down = nn.Parameter(init.empty(len(ids), *down.local_shape))
        if parts > 1:
            mark(self.up, up)
            mark(self.down, down)
        self.biased = bias
        if bias:
            assert parts == 1, "each part of a sum would add the bias"
            self.up_bias = nn.Parameter(init.empty(len(ids), width))
            self.down_bias = nn.Parameter(init.empty(len(ids), d_model))
        self.init, self.cuts = init, (up, down)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The initial weights of the experts that are here now."""
        init, (up, down) = self.init, self.cuts
        parts = (("up", self.up, init.std, up), ("down", self.down, init.down_std or init.std, down))
        for name, weight, std, cut in parts:
            assert not isinstance(weight, Frozen), "what is frozen has no initial weights any more"
            for slot, expert in enumerate(self.ids):
                cut.fill(weight.data[slot], key_of(init.seed, init.layer, "expert", expert, name), std)
        if self.biased:
            self.up_bias.zero_()
            self.down_bias.zero_()

    def freeze(self, kind: str, scratch: Scratch) -> None:
        """Keep up and down in few bits from now on; all layers share a scratch."""
        self._like = self.weights[0].detach().new_empty(0)
        freeze(self, ("up", "down"), kind, scratch)
        self.frozen = True

    def forward(
        self, x: torch.Tensor, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ExpertsSaved]:
        saved = self.recompute(x, counts, shadows)
        _, down, *biases = saved.weights
        a = activated(saved.h, self.activation)
        y = grouped_mm(a, down if isinstance(down, torch.Tensor) else down.numbers(x.dtype), counts)
        if biases:
            y += spread(biases[1], counts)
        return y, saved

    def recompute(
        self, x: torch.Tensor, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> ExpertsSaved:
        """What backward needs, without y."""
        given = self.weights if shadows is None else self.unflatten(shadows)
        weights: list[Weight] = [weight.to(x.dtype) for weight in given]
        up, _, *biases = weights = [self.up, self.down, *weights] if self.frozen else weights
        h = grouped_mm(x, up if isinstance(up, torch.Tensor) else up.numbers(x.dtype), counts)
        if biases:
            h += spread(biases[0], counts)
        return ExpertsSaved(x=x, h=h, counts=counts, weights=tuple(weights))

    def dgrad(self, dy: torch.Tensor, saved: ExpertsSaved) -> tuple[torch.Tensor, ExpertsPending]:
        up, down, *_ = saved.weights
        down = down if isinstance(down, torch.Tensor) else down.numbers(dy.dtype)
        d_a = grouped_mm_dgrad(dy, down, saved.counts)
        d_h, a = activate_backward(d_a, saved.h, self.activation)
        up = up if isinstance(up, torch.Tensor) else up.numbers(dy.dtype)
        dx = grouped_mm_dgrad(d_h, up, saved.counts)
        given: dict[str, Any] = {"counts": saved.counts, "kernels": self.kernels, "frozen": self.frozen}
        return dx, ExpertsPending(x=saved.x, d_h=d_h, a=a, dy=dy, **given)

    def wgrad(
        self, pending: Sequence[PendingWgrad], begun: Grads = (), wanted: Sequence[bool] | None = None
    ) -> Grads:
        weights = self.weights
        return tuple(self.wgrads.submit(weights, partial(add_up, weights, pending, begun, wanted)))

    def flatten(self, slots: Sequence[int]) -> torch.Tensor:
        assert not self.frozen, "experts in few bits are not lent"
        picked = torch.tensor(list(slots), dtype=torch.int64, device=self.up.device)
        return torch.cat([weight.detach()[picked].flatten(1) for weight in self.weights], dim=1)

    def unflatten(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of the weights in rows made by `flatten`, in the same order."""
        shapes = [weight.shape[1:] for weight in self.weights]
        parts = rows.split([math.prod(shape) for shape in shapes], dim=1)
        return tuple(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))

    def shadow_wgrad(self, pending: PendingWgrad, rows: torch.Tensor) -> None:
        grads = zip(self.unflatten(rows), self.weights, strict=True)
        pending.add_to(*(grad if weight.requires_grad else None for grad, weight in grads))

    def add_shadow_grads(
        self, slots: Sequence[int], rows: torch.Tensor, weight_grads: Sequence[torch.Tensor | None]
    ) -> None:
        for parameter, fresh, grads in zip(self.weights, weight_grads, self.unflatten(rows), strict=True):
            if not parameter.requires_grad:
                continue
            into = accumulator(parameter)[0] if fresh is None else fresh
            for slot, grad in zip(slots, grads, strict=True):
                into[slot] += grad.to(into.dtype)

    # What is saved and loaded speaks of all experts (`moe/own_loop/shards`).

    @property
    def places(self) -> dict[str, ExpertPlace]:
        """Of each parameter, by name."""
        experts = tuple(range(len(self.ids))) if self.num_experts is None else self.ids
        total = self.num_experts or len(experts)
        named = zip(("up", "down"), self.cuts, strict=True)
        cuts = {name: cut for name, cut in named if cut.local_shape != cut.shape}
        return {
            name: ExpertPlace(experts=experts, num_experts=total, cut=cuts.get(name))
            for name, _ in self.named_parameters(recurse=False)
        }

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            save_shards(destination, prefix, self.places)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, object],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.loads += 1
        error_msgs += load_shards(state_dict, prefix, self.places)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The parameters that they compute with."""
        biases = (self.up_bias, self.down_bias) if self.biased else ()
        if isinstance(self.up, Frozen) or isinstance(self.down, Frozen):
            return biases
        return (self.up, self.down, *biases)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the weights, as `ops/expert_passes` has them."""
        return (*(() if self.frozen else WEIGHTS), *(BIASES if self.biased else ()))

    @property
    def operands(self) -> tuple[Weight, ...]:
        """All that they compute with."""
        return (self.up, self.down, *self.weights) if self.frozen else self.weights

    @property
    def operand_names(self) -> tuple[str, ...]:
        return (*WEIGHTS, *self.names) if self.frozen else self.names

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the type that they compute in."""
        return self._like if self.frozen else self.weights[0]

    @property
    def out_width(self) -> int:
        return self.down.shape[1]


def add_up(
    weights: Sequence[nn.Parameter],
    pending: Sequence[PendingWgrad],
    begun: Grads = (),
    wanted: Sequence[bool] | None = None,
) -> Grads:
    """All parts of the gradients that are wanted; see `Trainable.wgrad`."""
    wanted = [weight.requires_grad for weight in weights] if wanted is None else wanted
    if not any(wanted):
        return (None,) * len(weights)
    into, grads = list[Grad](), list[Grad]()
    for asked, weight, before in zip_longest(wanted, weights, begun):
        place, grad = accumulator(weight, before) if asked else (None, None)
        into.append(place)
        grads.append(grad)
    for part in pending:
        part.add_to(*into)
    return tuple(grads)


def spread(bias_EN: Weight, counts: Sequence[int]) -> torch.Tensor:
    """Of each row its expert's bias; of one expert the bias of all rows."""
    assert isinstance(bias_EN, torch.Tensor)
    if len(counts) == 1:
        return bias_EN.detach()
    repeats = torch.tensor(list(counts), dtype=torch.int64, device=bias_EN.device)
    return bias_EN.detach().repeat_interleave(repeats, dim=0, output_size=sum(counts))


class PadToCapacity(WrappedExperts):
    """An `ExpertSet` where every expert computes exactly `capacity` rows, zeros filling up. No shadows."""

    def __init__(self, experts: ExpertSet[torch.Tensor], capacity: int) -> None:
        super().__init__(experts)
        self.capacity = capacity

    def forward(
        self, x: torch.Tensor, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[object, torch.Tensor]]:
        assert shadows is None, "shadows run as they are, without padding"
        starts = [slot * self.capacity for slot in range(len(counts))]
        place = torch.cat(
            [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
            or [torch.empty(0, dtype=torch.int64)]
        ).to(x.device)
        y, saved = self.experts.forward(self._spread(x, place), [self.capacity] * len(counts))
        return y[place], (saved, place)

    def dgrad(self, dy: torch.Tensor, saved: tuple[object, torch.Tensor]) -> tuple[torch.Tensor, object]:
        inner, place = saved
        dx, pending = self.experts.dgrad(self._spread(dy, place), inner)
        return dx[place], pending

    def _spread(self, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        padded = rows.new_zeros(len(self.ids) * self.capacity, rows.shape[1])
        padded[place] = rows
        return padded
