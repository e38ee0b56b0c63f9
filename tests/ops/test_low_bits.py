"""Low bits beside bf16 weights: every finite fp32 number comes back, and torch rounded the upper half."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.low_bits import LowBits, join, pack, split, unpack

CPU = torch.device("cpu")


def there_and_back(bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, LowBits]:
    wide = bits.to(torch.int32).view(torch.float32)
    rounded, rest = torch.empty(len(wide), dtype=torch.bfloat16), LowBits.zeros(len(wide), CPU)
    split(wide, rounded, rest)
    assert torch.equal(rounded.view(torch.int16), wide.bfloat16().view(torch.int16))
    return wide, join(rounded, rest), rest


def assert_back(bits: torch.Tensor) -> None:
    wide, back, _ = there_and_back(bits)
    assert torch.equal(back.view(torch.int32), wide.view(torch.int32))


@pytest.mark.parametrize("upper", [0x0000, 0x0001, 0x007F, 0x3F80, 0x3F81, 0x3FFF, 0x7F7E, 0x7F7F])
@pytest.mark.parametrize("sign", [0, -(1 << 31)])
def test_every_lower_half_comes_back(upper: int, sign: int) -> None:
    """Beside zero and subnormals, even and odd, across an exponent, and where rounding leads to infinity."""
    assert_back((upper << 16) + torch.arange(1 << 16) + sign)


def test_every_upper_half_comes_back() -> None:
    """With the lower halves beside its two ties, and infinities."""
    upper = torch.arange(1 << 16) << 16
    upper = upper[(upper >> 23 & 0xFF) < 0xFF]
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        assert_back(upper + lower)
    assert_back(torch.tensor([0x7F800000, -0x00800000]))


def test_random_numbers_come_back() -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(0))
    assert_back(bits[(bits >> 23 & 0xFF) < 0xFF])


def test_both_ties_of_an_even_number_are_told_apart() -> None:
    """The reason for a 17th bit: they have the same upper half and the same low 16 bits."""
    wide, back, rest = there_and_back(torch.tensor([0x3F7F8000, 0x3F808000]))
    assert wide.bfloat16().tolist() == [1.0, 1.0]
    assert rest.low.tolist() == [-(1 << 15)] * 2
    assert rest.ties.tolist() == [2]
    assert torch.equal(back, wide)


def test_nan_stays_nan() -> None:
    _, back, _ = there_and_back(torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF]))
    assert back.isnan().all()


def test_parts_are_those_of_the_whole() -> None:
    wide, back, rest = there_and_back(0x3F7F8000 + torch.arange(45) * 0x8000)
    rounded = wide.bfloat16()
    for start, stop in ((0, 0), (0, 45), (3, 4), (7, 17), (8, 45), (44, 45)):
        assert torch.equal(join(rounded, rest, start, stop), back[start:stop])
        assert torch.equal(join(rounded, rest, start, stop), wide[start:stop])


@pytest.mark.parametrize("length", [0, 1, 8, 21])
def test_flags_are_packed(length: int) -> None:
    flags = torch.arange(length) % 3 == 1
    packed = pack(flags)
    assert len(packed) == -(-length // 8)
    assert torch.equal(unpack(packed, 0, length).bool(), flags)


def test_what_it_takes() -> None:
    assert LowBits.zeros(64, CPU).num_bytes == 64 * 17 // 8
