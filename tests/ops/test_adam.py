"""AdamW over flat tensors: torch's own in float64, and a step that is skipped changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from moeclipse.ops.adam import AdamStep, adam, sum_of_squares
from moeclipse.ops.eight_bits import EightBits, decode
from moeclipse.ops.low_bits import LowBits, join, split
from moeclipse.ops.rounding import Stretch, Stretches
from moeclipse.testing.compare import difference

STEP = AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.3, number=1)


def tensors(length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Weight, both moments, gradient."""
    generator = torch.Generator().manual_seed(length)
    weight, m, v, grad = torch.randn(4, length, generator=generator, dtype=torch.float64)
    return [tensor.to(dtype) for tensor in (weight, m, v.abs(), grad)]


@pytest.mark.parametrize("length", [1, 7, 5003])
def test_three_updates_are_those_of_torch(length: int) -> None:
    weight, _, _, grad = tensors(length)
    theirs = weight.clone().requires_grad_()
    optim = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for number in (1, 2, 3):
        step = AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.3, number=number)
        adam(weight, m, v, number * grad, torch.tensor(0.25), step)
        theirs.grad = 0.25 * number * grad
        optim.step()
    assert difference(weight, theirs.detach()) < 1e-14


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_a_factor_that_is_not_finite_changes_nothing(factor: float) -> None:
    given = tensors(9, torch.float32)
    rounded = torch.full((9,), 3.0, dtype=torch.bfloat16)
    kept = [tensor.clone() for tensor in given]
    adam(*given, torch.tensor(factor, dtype=torch.float64), STEP, rounded)
    assert all(torch.equal(now, before) for now, before in zip(given, kept, strict=True))
    assert torch.equal(rounded, torch.full_like(rounded, 3.0))


def test_weights_are_rounded_where_they_are_wanted() -> None:
    given = tensors(505, torch.float32)
    rounded = torch.empty(505, dtype=torch.bfloat16)
    adam(*given, torch.ones((), dtype=torch.float64), STEP, rounded)
    assert torch.equal(rounded, given[0].to(torch.bfloat16))


@pytest.mark.parametrize("factor", [1.0, 0.3, math.nan])
def test_low_bits_are_an_fp32_master(factor: float) -> None:
    """Every bit of weights and moments, also of what is sent out."""
    weight, *given = tensors(5003, torch.float32)
    kept = [tensor.clone() for tensor in given]
    bits, rounded = LowBits.zeros(5003, weight.device), torch.empty(5003, dtype=torch.bfloat16)
    split(weight, rounded, bits)
    sent = rounded.clone()
    for _ in range(20):
        adam(bits, *given, torch.tensor(factor, dtype=torch.float64), STEP, rounded)
        adam(weight, *kept, torch.tensor(factor, dtype=torch.float64), STEP, sent)
    assert torch.equal(join(rounded, bits).view(torch.int32), weight.view(torch.int32))
    assert torch.equal(rounded, sent)
    assert all(torch.equal(now, before) for now, before in zip(given, kept, strict=True))


@pytest.mark.parametrize("cuts", [(0, 512), (0, 64, 512), (0, 192, 256, 512)])
def test_moments_in_eight_bits_follow_those_of_fp32(cuts: tuple[int, ...]) -> None:
    """Twenty updates in shards that are cut between blocks: the bits of one shard, near those of fp32."""
    weight, _, _, grad = tensors(512, torch.float32)
    exact = [weight.clone(), torch.zeros(512), torch.zeros(512)]
    found = []
    for bounds in (cuts, (0, 512)):
        codes, wide = [], weight.clone()
        for first, last in pairwise(bounds):
            m, v = (EightBits.zeros(last - first, 64, fraction, weight.device) for fraction in (3, 4))
            stretch = Stretch(offset=0, length=last - first, key=5, start=first, columns=64)
            stretches = Stretches([stretch], last - first, weight.device, 64)
            for number in range(1, 21):
                step = replace(STEP, number=number)
                part = (wide[first:last], m, v, number % 3 * grad[first:last], torch.tensor(0.5))
                adam(*part, step, by_chance=(stretches, number))
            codes.append([m.codes, v.codes, decode(m), decode(v), wide[first:last]])
        found.append([torch.cat(parts) for parts in zip(*codes, strict=True)])
    for number in range(1, 21):
        adam(*exact, number % 3 * grad, torch.tensor(0.5), replace(STEP, number=number))
    assert all(torch.equal(ours, whole) for ours, whole in zip(*found, strict=True))
    way = exact[0] - weight
    assert (found[0][4] - exact[0]).norm() < 0.1 * way.norm()
    assert (found[0][2] - exact[1]).norm() < 0.15 * exact[1].norm()
    assert (found[0][3] - exact[2]).norm() < 0.1 * exact[2].norm()


def test_where_a_tensor_is_cut_does_not_show_in_bits() -> None:
    """Shards begin anywhere: an element's update depends on that element alone."""
    whole, parts = tensors(1000, torch.float32), tensors(1000, torch.float32)
    factor = torch.tensor(0.3, dtype=torch.float64)
    adam(*whole, factor, STEP)
    for part in (slice(0, 1), slice(1, 334), slice(334, 1000)):
        adam(*(tensor[part] for tensor in parts), factor, STEP)
    for together, apart in zip(whole, parts, strict=True):
        assert torch.equal(together, apart)


def test_squares_are_added_in_float64() -> None:
    """A sum in fp32 would lose the small ones."""
    parts = [torch.full((1,), 1e4), torch.full((65537,), 1e-2), torch.zeros(0)]
    exact = math.fsum(float(x) ** 2 for part in parts for x in part.double())
    assert float(sum_of_squares(parts)) == pytest.approx(exact, rel=1e-14)
    assert sum_of_squares(parts).dtype == torch.float64
    assert float(sum_of_squares([torch.zeros(0)])) == 0
    assert math.isnan(float(sum_of_squares([torch.tensor([1.0, math.nan])])))
