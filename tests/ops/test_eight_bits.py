"""Moments in 8 bits: one rounding errs by a step at most and by nothing on average, and codes come back."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.eight_bits import (
    LOWEST_TOP,
    M_FRACTION,
    V_FRACTION,
    EightBits,
    decode,
    encode,
)

CPU = torch.device("cpu")
FRACTIONS = [M_FRACTION, V_FRACTION]


def coded(
    values: torch.Tensor, fraction: int, block: int = 256, chance: torch.Tensor | int = 128
) -> EightBits:
    moment = EightBits.zeros(len(values), block, fraction, CPU)
    encode(values, moment, chance)
    return moment


def drawn(length: int, fraction: int, seed: int = 0) -> torch.Tensor:
    """Over twelve orders of magnitude from block to block, and five within one."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (5 * torch.rand(length, generator=generator) - 5)
    size *= 10 ** (12 * torch.rand(length // 256, generator=generator) - 9).repeat_interleave(256)
    sign = torch.randn(length, generator=generator).sign() if fraction == M_FRACTION else 1
    return size * sign


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("chance", [0, 128, 255])
def test_the_error_is_below_one_step(fraction: int, chance: int) -> None:
    values = drawn(256 * 40, fraction)
    found = decode(coded(values, fraction, chance=chance))
    largest = values.abs().view(-1, 256).amax(1).repeat_interleave(256)
    step = torch.maximum(values.abs(), largest * 2.0**-13) * 2.0**-fraction
    assert ((found - values).abs() <= step).all()
    assert (found * values >= 0).all(), "signs stay"
    if chance == 128:
        assert ((found - values).abs() <= step / 2 + largest * 2.0**-18 * (fraction == V_FRACTION)).all()


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_on_average_nothing_is_lost(fraction: int) -> None:
    """Over all chances there are, the mean is the number itself, but for bits that chance does not see."""
    values = drawn(256, fraction).repeat_interleave(256)
    found = decode(coded(values, fraction, chance=torch.arange(256).repeat(256)))
    means, exact = found.view(256, 256).mean(1), values.view(256, 256)[:, 0]
    step = torch.maximum(exact.abs(), exact.abs().max() * 2.0**-13) * 2.0**-fraction
    seen = exact.abs() > exact.abs().max() * 2.0**-18
    assert ((means - exact).abs() <= step / 128)[seen].all()


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_codes_come_back(fraction: int) -> None:
    """Whatever the chance: a value that the code has stays. Every value is a bf16 number."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (512 * 16,), generator=generator, dtype=torch.uint8)
    codes[codes == 128] = 0  # minus zero
    tops = torch.randint(LOWEST_TOP, 200, (512,), generator=generator, dtype=torch.uint8)
    values = decode(EightBits(codes, tops, 16, fraction))
    assert torch.equal(values.bfloat16().float(), values)
    for chance in (0, 77, 255):
        assert torch.equal(decode(coded(values, fraction, 16, chance)), values)


def test_steps_are_what_they_should_be() -> None:
    """By hand: 1 has exponent 15, and the smallest number of its block is 2^-17 or 2^-18."""
    values = torch.tensor([1.0, -1.0, 1.125, 2.0**-14, 2.0**-17, -(2.0**-17), 0.0, 2.0**-30] * 2)
    m = coded(values, M_FRACTION, 16)
    assert m.tops.tolist() == [127]
    assert m.codes[:8].tolist() == [0x78, 0xF8, 0x79, 0x08, 0x01, 0x81, 0, 0]
    v = coded(values.abs(), V_FRACTION, 16)
    assert v.codes[:8].tolist() == [0xF0, 0xF0, 0xF2, 0x10, 0x02, 0x02, 0, 1], "above zero stays above zero"


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_largest_is_not_cut(fraction: int) -> None:
    """Just below a power of two it may be rounded up."""
    values = torch.full((16,), 2.0 - 2.0**-20)
    assert decode(coded(values, fraction, 16, 255)).tolist() == [2.0] * 16


def test_what_is_not_finite_or_tiny_stays_within_the_code() -> None:
    values = torch.tensor([0.0, 1e-45, 1e-40, 1e-38, 1e-30, 3e38, torch.inf, 1.0] * 2)
    for fraction in FRACTIONS:
        assert decode(coded(values, fraction, 16)).isfinite().all()
        assert not decode(coded(torch.full((16,), 1e-40), fraction, 16)).any()


def test_a_second_moment_falls() -> None:
    """Rounded to the nearest it would stay where it is; the reason for chance."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in ("nearest", "chance"):
        moment = coded(torch.full((4096,), 1.0625), V_FRACTION)
        for _ in range(30):
            chance = torch.randint(0, 256, (4096,), generator=generator) if name == "chance" else 128
            encode(decode(moment) * 0.98, moment, chance)
        found[name] = float(decode(moment).mean())
    assert found["nearest"] == 1.0625
    assert found["chance"] == pytest.approx(1.0625 * 0.98**30, rel=0.03)


def test_parts_are_those_of_the_whole() -> None:
    values = drawn(512, M_FRACTION)
    moment = coded(values, M_FRACTION, 32)
    whole = decode(moment)
    for start, stop in ((0, 0), (0, 512), (31, 33), (40, 50), (64, 96), (511, 512)):
        assert torch.equal(decode(moment, start, stop), whole[start:stop])


def test_what_it_takes() -> None:
    assert EightBits.zeros(1024, 256, M_FRACTION, CPU).num_bytes == 1024 + 4
