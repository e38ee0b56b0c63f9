"""AdamW over flat tensors in one pass over memory, and the sum of squares that clipping asks for.

    g = factor * grad
    m = m + (1 - b1) (g - m)        v = b2 v + (1 - b2) g^2
    w = (1 - lr decay) w - lr / (1 - b1^n) * m / (sqrt(v / (1 - b2^n)) + eps)

Idea. One step reads weight, moments and gradient once, and writes weight, moments and the rounded weight
once: 30 bytes a parameter for fp32 state and bf16 weights. The norm is one read before it.

State may be narrower than fp32: it is widened, updated and rounded, bf16 to the nearest, 8 bits by chance
(`ops/eight_bits`). Weights without a master are bf16 and rounded by chance (`ops/rounding`); an fp32 master
may be kept as the bf16 weights and what their rounding left over (`ops/low_bits`).

Contract. `factor` (clipping, loss scale) is a number on the device, so nobody has to know the norm on the
host; a factor that is not finite changes nothing: the step is skipped. All tensors are flat and of one
length, and an element's update depends on that element alone (in 8 bits: on its block), wherever a shard
begins. Sums of squares are
taken in fp64, over stretches of fixed length that are added in their order: two runs give the same bits.

Hazard. The reference reads the factor on the host. Kernels compute in fp32; fp64 takes the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moeclipse.ops.eight_bits import EightBits, decode, encode
from moeclipse.ops.low_bits import LowBits, join, split
from moeclipse.ops.precision import WIDE
from moeclipse.ops.random import signed
from moeclipse.ops.rounding import Stretches, random_bytes, round_stochastically

ByChance = tuple[Stretches, int]
"""What lies where in a shard, and the key of the step."""
BLOCK = 2048
STRETCH = 1 << 16
"""Numbers of a sum that are wide at once where no kernel adds."""
SQUARES_BLOCKS = 16
"""Blocks of one program of the sum of squares."""


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The numbers of one update; `number` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    number: int
    kept: float = field(init=False)
    """What decay leaves of a weight."""
    rate: float = field(init=False)
    """The learning rate, with the first moment's start at zero made good."""
    filled: float = field(init=False)
    """How much of its weights the second moment has seen."""

    def __post_init__(self) -> None:
        rate, filled = self.lr / (1 - self.beta1**self.number), 1 - self.beta2**self.number
        vars(self).update(kept=1 - self.lr * self.decay, rate=rate, filled=filled)


def adam_reference(
    weight: torch.Tensor | LowBits,
    adam_m: torch.Tensor | EightBits,
    adam_v: torch.Tensor | EightBits,
    grad: torch.Tensor,
    factor: torch.Tensor,
    step: AdamStep,
    rounded: torch.Tensor | None = None,
    by_chance: ByChance | None = None,
) -> None:
    number = float(factor)
    if not math.isfinite(number):
        return
    assert by_chance is not None or not isinstance(adam_m, EightBits), "8 bits are rounded by chance"
    if isinstance(weight, LowBits):
        assert rounded is not None, "low bits are those of rounded weights"
        wide, w = torch.float32, join(rounded, weight)
    else:
        wide = WIDE[weight.dtype]
        w = weight.to(wide)
    # Where state has the wide type these are the tensors themselves.
    m = decode(adam_m) if isinstance(adam_m, EightBits) else adam_m.to(wide)
    v = decode(adam_v) if isinstance(adam_v, EightBits) else adam_v.to(wide)
    grad = grad.to(wide)
    if number != 1:
        grad = grad * number
    m.lerp_(grad, 1 - step.beta1)
    v.mul_(step.beta2).addcmul_(grad, grad, value=1 - step.beta2)
    spread = (v / step.filled).sqrt_().add_(step.eps)
    w.mul_(step.kept).addcdiv_(m, spread, value=-step.rate)
    chances = random_bytes(*by_chance) if isinstance(adam_m, EightBits) and by_chance is not None else (0, 0)
    for kept, new, chance in ((adam_m, m, chances[0]), (adam_v, v, chances[1])):
        if isinstance(kept, EightBits):
            encode(new, kept, chance)
        elif kept is not new:
            kept.copy_(new)
    if isinstance(weight, LowBits):
        assert rounded is not None
        split(w, rounded, weight)
    elif by_chance is not None and weight.dtype == torch.bfloat16:
        weight.copy_(round_stochastically(w, *by_chance))
    elif rounded is not None:
        rounded.copy_(w)


def adam(
    weight: torch.Tensor | LowBits,
    adam_m: torch.Tensor | EightBits,
    adam_v: torch.Tensor | EightBits,
    grad: torch.Tensor,
    factor: torch.Tensor,
    step: AdamStep,
    rounded: torch.Tensor | None = None,
    by_chance: ByChance | None = None,
) -> None:
    """One update in place; `rounded` gets the new weights in its own type.

    Where `weight` is low bits, `rounded` has been left as the last update made it, and is read, too.
    `by_chance` is needed where weights are bf16 and there are no wider ones, and by moments in 8 bits.
    """
    fits = grad.is_cuda and grad.dtype != torch.float64
    picked = adam_kernel if fits else adam_reference
    picked(weight, adam_m, adam_v, grad, factor, step, rounded, by_chance)


def adam_kernel(
    weight: torch.Tensor | LowBits,
    adam_m: torch.Tensor | EightBits,
    adam_v: torch.Tensor | EightBits,
    grad: torch.Tensor,
    factor: torch.Tensor,
    step: AdamStep,
    rounded: torch.Tensor | None = None,
    by_chance: ByChance | None = None,
) -> None:
    if not len(grad):
        return
    from moeclipse.ops.triton import adam as kernels

    stretches, step_key = by_chance or (None, 0)
    tables = (None, None) if stretches is None else (stretches.table, stretches.of_blocks)
    low = isinstance(weight, LowBits)
    kept = (weight.low, weight.ties) if isinstance(weight, LowBits) else (weight, None)
    moments: list[torch.Tensor | None] = []
    group = 0
    for moment in (adam_m, adam_v):
        moments += [moment.codes, moment.tops] if isinstance(moment, EightBits) else [moment, None]
        group = moment.block if isinstance(moment, EightBits) else 0
    kernels.adam[(-(-len(grad) // BLOCK),)](
        *kept, *moments, grad, rounded, factor, *tables, signed(step_key), len(grad),
        1 - step.beta1, step.beta2, 1 - step.beta2, step.eps, step.kept, step.rate, step.filled,
        ROUND=rounded is not None, LOW_BITS=low, BY_CHANCE=kept[0].dtype == torch.bfloat16, GROUP=group,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


def squares_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stretch by stretch: a whole copy in fp64 would take twice the gradients' memory."""
    sums = []
    for part in parts:
        for stretch in part.split(STRETCH):
            wide = stretch.to(torch.float64, copy=True)
            sums.append(wide.mul_(wide).sum())
    return torch.stack(sums)


def sum_of_squares(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all elements of flat tensors, some of which there are: one fp64 number on their device."""
    return squares(parts).sum()


def squares(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same stretch by stretch: those of one tensor after the other add up to the same bits."""
    fits = all(part.is_cuda and part.dtype != torch.float64 for part in parts)
    return (squares_kernel if fits else squares_reference)(parts)


def squares_kernel(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    from moeclipse.ops.triton import adam as kernels

    programs = [-(-len(part) // (BLOCK * SQUARES_BLOCKS)) for part in parts]
    sums = torch.empty(sum(programs), dtype=torch.float64, device=parts[0].device)
    for part, place in zip(parts, sums.split(programs), strict=True):
        if len(part):
            kernels.sum_of_squares[(len(place),)](
                part, place, len(part), BLOCKS=SQUARES_BLOCKS, BLOCK=BLOCK, num_warps=8
            )
    return sums
