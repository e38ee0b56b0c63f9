"""AdamW and its norm in one pass on a CUDA device: errors against float64 beside plain torch's, no host."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moeclipse.ops.adam import BLOCK, AdamStep, adam, adam_reference, sum_of_squares
from moeclipse.ops.eight_bits import EightBits
from moeclipse.ops.low_bits import LowBits, join, split
from moeclipse.ops.rounding import Stretch, Stretches

HAS_GPU = torch.cuda.device_count() > 0  # through NVML: asking CUDA itself would spoil forked ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

LENGTHS = [1, 2047, 1_000_003]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def given(length: int) -> list[torch.Tensor]:
    torch.manual_seed(length)
    weight, m, grad = torch.randn(3, length, device="cuda")
    return [weight, m, torch.rand(length, device="cuda"), grad, torch.tensor(0.3, device="cuda").double()]


def after(update, tensors: list[torch.Tensor], updates: int = 3) -> list[torch.Tensor]:
    weight, m, v, grad, factor = (tensor.clone() for tensor in tensors)
    for number in range(1, updates + 1):
        step = AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.3, number=number)
        update(weight, m, v, grad, factor, step)
    return [weight, m, v]


@pytest.mark.parametrize("length", LENGTHS)
def test_errors_are_those_of_plain_torch(length: int) -> None:
    tensors = given(length)
    exact = after(adam_reference, [tensor.double() for tensor in tensors])
    plain, ours = after(adam_reference, tensors), after(adam, tensors)
    for truth, beside, got in zip(exact, plain, ours, strict=True):
        allowed = 1.1 * (beside.double() - truth).norm() + 1e-7 * truth.norm()
        assert (got.double() - truth).norm() <= allowed
    assert all(torch.equal(a, b) for a, b in zip(ours, after(adam, tensors), strict=True))


def test_rounded_weights_are_those_of_torch() -> None:
    *tensors, factor = given(4099)
    step = AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.3, number=1)
    rounded = torch.empty(4099, dtype=torch.bfloat16, device="cuda")
    with no_waiting():
        adam(*tensors, factor, step, rounded)
        sum_of_squares(tensors)
    assert torch.equal(rounded, tensors[0].bfloat16())


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_factor_that_is_not_finite_changes_nothing(factor: float) -> None:
    tensors = given(5000)
    tensors[-1].fill_(factor)
    assert all(torch.equal(a, b) for a, b in zip(after(adam, tensors), tensors, strict=False))


def test_where_a_tensor_is_cut_does_not_show_in_bits() -> None:
    whole, parts = given(5000), given(5000)
    step = AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.3, number=1)
    adam(*whole, step)
    for part in (slice(0, 1), slice(1, 2050), slice(2050, 5000)):
        adam(*(tensor[part] for tensor in parts[:4]), parts[4], step)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_squares_are_added_in_float64_and_in_one_order() -> None:
    parts = [torch.randn(length, device="cuda") for length in (3_000_001, 0, 7)]
    exact = sum(part.double().square().sum() for part in parts)
    first, second = sum_of_squares(parts), sum_of_squares(parts)
    assert torch.equal(first, second)
    assert abs(float(first / exact) - 1) < 1e-13


def test_weights_without_a_master_are_rounded_as_on_the_cpu() -> None:
    length = 100_003
    cuts = [(0, 50_000, 2**63 + 7, 11, 100, 0), (50_000, 50_000, 5, 0, 64, 128)]
    names = ("offset", "length", "key", "start", "columns", "left")
    parts = [Stretch(**dict(zip(names, cut, strict=True))) for cut in cuts]
    step = AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.3, number=1)
    *tensors, factor = given(length)
    narrow = [tensor.bfloat16() for tensor in tensors]
    found = []
    for device, update in (("cuda", adam), ("cpu", adam_reference)):
        stretches = Stretches(parts, length, torch.device(device), BLOCK)
        state = [tensor.to(device).clone() for tensor in narrow]
        for key in (2**64 - 3, 12):
            update(*state, factor.to(device), step, by_chance=(stretches, key))
        found.append([tensor.cpu() for tensor in state])
    for ours, expected in zip(*found, strict=True):
        assert (ours != expected).float().mean() < 1e-3, "the last bit of fp32 may tip a few over"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("factor", [0.3, math.nan])
def test_low_bits_are_an_fp32_master(length: int, factor: float) -> None:
    """Every bit, over ten updates, without a word to the host."""
    weight, *moments, grad, scale = given(length)
    scale.fill_(factor)
    kept = [tensor.clone() for tensor in moments]
    rounded, bits = torch.empty_like(weight, dtype=torch.bfloat16), LowBits.zeros(length, weight.device)
    split(weight, rounded, bits)
    sent = rounded.clone()
    with no_waiting():
        for number in range(1, 11):
            step = AdamStep(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.3, number=number)
            adam(bits, *moments, grad, scale, step, rounded)
            adam(weight, *kept, grad, scale, step, sent)
    assert torch.equal(join(rounded, bits).view(torch.int32), weight.view(torch.int32))
    assert torch.equal(rounded, sent)
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))


def test_ties_stay_on_their_side() -> None:
    """A rate of 0 and no decay change nothing."""
    upper = torch.arange(-(1 << 15), 1 << 15, device="cuda")
    weight = (upper[(upper >> 7 & 0xFF) < 0xFF] * (1 << 16) + 0x8000).to(torch.int32).view(torch.float32)
    rounded, bits = torch.empty_like(weight, dtype=torch.bfloat16), LowBits.zeros(len(weight), weight.device)
    split(weight, rounded, bits)
    assert bits.ties.any()
    step = AdamStep(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.0, number=1)
    moments = [torch.rand_like(weight), torch.rand_like(weight)]
    one = torch.ones((), dtype=torch.float64, device="cuda")
    adam(bits, *moments, torch.rand_like(weight), one, step, rounded)
    normal = weight.abs() >= torch.finfo(torch.float32).tiny  # subnormal weights may be flushed to zero
    assert torch.equal(join(rounded, bits)[normal], weight[normal])


@pytest.mark.parametrize(("group", "length"), [(16, 16), (64, 4288), (256, 1_000_192)])
@pytest.mark.parametrize("master", ["fp32", "low-bits", "none"])
def test_moments_in_eight_bits_are_those_of_the_cpu(group: int, length: int, master: str) -> None:
    """Every code of a gradient and its square; nearly every one after updates, whose last bits may differ."""
    generator = torch.Generator().manual_seed(length)
    grad = torch.randn(length, generator=generator) * 10 ** (4 * torch.rand(length, generator=generator) - 6)
    found = []
    for device, update in (("cuda", adam), ("cpu", adam_reference)):
        one = torch.ones((), dtype=torch.float64, device=device)
        stretch = Stretch(offset=0, length=length, key=77, start=5, columns=group)
        stretches = Stretches([stretch], length, torch.device(device), BLOCK)
        m, v = (EightBits.zeros(length, group, fraction, torch.device(device)) for fraction in (3, 4))
        weight = torch.ones(length, device=device)
        rounded = weight.bfloat16()
        kept = {"fp32": weight, "low-bits": LowBits.zeros(length, weight.device), "none": rounded}[master]
        published = rounded if master == "low-bits" else None
        begun: list[torch.Tensor] = []
        for number, beta in ((1, 0.0), (2, 0.9), (3, 0.95)):
            step = AdamStep(lr=1e-2, beta1=beta, beta2=beta, eps=1e-8, decay=0.3, number=number)
            update(kept, m, v, grad.to(device), one, step, published, (stretches, 2**64 - number))
            begun = begun or [each.cpu().clone() for each in (m.codes, m.tops, v.codes, v.tops)]
        update(kept, m, v, grad.to(device), one * math.nan, step, published, (stretches, 5))
        found.append((begun, [each.cpu() for each in (m.codes, m.tops, v.codes, v.tops)]))
    (begun, codes), (begun_too, expected) = found
    assert all(torch.equal(a, b) for a, b in zip(begun, begun_too, strict=True))
    assert all((a != b).float().mean() < 2e-3 for a, b in zip(codes, expected, strict=True))
