"""mxfp4 and fp8 blocks are decoded by their definitions, exactly."""

from __future__ import annotations

import math

import pytest
import torch

from moeclipse.ops.block_floats import E2M1, Fp8Blocks, Mxfp4, expand_fp8, expand_mxfp4, powers_of_two


def e4m3(byte: int) -> float:
    """By its definition: sign, 4 bits of exponent, 3 of fraction; no infinity."""
    sign, exponent, fraction = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9))


def test_mxfp4_by_its_definition() -> None:
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (1, 256, 16), dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256)
    frozen = Mxfp4.of(codes, scales)
    assert frozen.shape == (1, 256 * 32)
    for dtype in (torch.bfloat16, torch.float32):
        found = frozen.decode(torch.empty(frozen.shape, dtype=dtype)).view(256, 32).double()
        for scale in range(255):
            for place in range(32):
                code = int(codes[0, scale, place // 2]) >> (4 if place % 2 else 0) & 15
                size = math.ldexp(E2M1[code & 7], scale - 127)
                expected = math.inf if size >= 2.0**128 else size
                assert found[scale, place] == (-expected if code & 8 else expected), (scale, place)
        assert found[255].isnan().all(), "no number"


def test_signs_of_zeros_and_smallest_powers() -> None:
    codes = torch.tensor([[0x80, *([0x19] * 15)]], dtype=torch.uint8)
    numbers = expand_mxfp4(codes, torch.tensor([0], dtype=torch.uint8))
    assert numbers[:4].tolist() == [0.0, -0.0, -0.5 * 2.0**-127, 0.5 * 2.0**-127]
    assert torch.signbit(numbers[:2]).tolist() == [False, True]
    assert powers_of_two(torch.tensor([0, 1, 127, 254], dtype=torch.uint8)).tolist() == [
        2.0**-127,
        2.0**-126,
        1.0,
        2.0**127,
    ]


def test_every_number_of_e4m3_and_factors_of_blocks() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(10).view(10, 256)
    scales = torch.rand(3, 16) + 0.25  # blocks of 4 x 16, the last of a column cut short
    frozen = Fp8Blocks.of(codes.view(torch.float8_e4m3fn), scales, torch.float32, (4, 16))
    found = frozen.decode()
    for row in range(10):
        for column in range(256):
            value = e4m3(column)
            expected = torch.tensor(value) * scales[row // 4, column // 16]
            assert found[row, column] == expected or (math.isnan(value) and found[row, column].isnan())
    some = expand_fp8(frozen.codes[3:9, 10:40], scales[0:3, 0:3], (4, 16), (3, 10))
    assert torch.equal(some, found[3:9, 10:40])
    assert torch.equal(frozen.decode(rows=slice(5, 10)).nan_to_num(), found[5:10].nan_to_num())


def test_fp8_is_rounded_once() -> None:
    torch.manual_seed(1)
    codes, scales = torch.randn(130, 200).to(torch.float8_e4m3fn), torch.rand(2, 2)
    frozen = Fp8Blocks.of(codes, scales)
    factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    assert torch.equal(frozen.decode(), (codes.float() * factors).bfloat16())
    assert frozen.nbytes == 130 * 200 + 4 * 4


def test_what_does_not_fit_together_is_refused() -> None:
    bytes_ = torch.zeros(2, 4, 3, 16, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"codes \[2, 4, 3, 16\] and scales \[2, 4, 2\] are not those of mxfp4"
    ):
        Mxfp4.of(bytes_, bytes_[:, :, :2, 0])
    with pytest.raises(ValueError, match="uint8, and 16 codes for each scale"):
        Mxfp4.of(bytes_, bytes_[..., 0].float())
    with pytest.raises(ValueError, match="are not those of mxfp4"):
        Mxfp4.of(bytes_[0, 0, 0], bytes_[0, 0, 0, 0])
    codes = torch.zeros(130, 200).to(torch.float8_e4m3fn)
    for wrong in (torch.ones(2, 1), torch.ones(2, 2).bfloat16()):
        with pytest.raises(ValueError, match=r"fp32 scale for each block of \(128, 128\): \[2, 2\]"):
            Fp8Blocks.of(codes, wrong)
    with pytest.raises(ValueError, match="are not e4m3"):
        Fp8Blocks.of(codes.float(), torch.ones(2, 2))


def test_experts_share_memory_and_kernels_leave_out_what_they_cannot_write() -> None:
    mx = Mxfp4.of(torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8), torch.full((3, 4, 2), 120).byte())
    fp8 = Fp8Blocks.of(torch.randn(3, 4, 24).to(torch.float8_e4m3fn), torch.rand(3, 1, 1))
    for frozen in (mx, fp8):
        part = frozen.experts(1, 3)
        assert torch.equal(part.decode(), frozen.decode()[1:3])
        for name, kept in part.tensors.items():
            assert kept.data_ptr() == frozen.tensors[name][1].data_ptr()
        assert not frozen.launch(torch.empty(frozen.shape, dtype=torch.float64), 0)
    assert not fp8.launch(torch.empty(fp8.shape, dtype=torch.bfloat16), 0), "24 is not a multiple of 16"
