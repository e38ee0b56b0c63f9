"""Frozen matrices on a CUDA device: the bytes and the bits of a CPU, decoded by kernels."""

from __future__ import annotations

from math import prod

import pytest
import torch

from moeclipse.ops.block_floats import Fp8Blocks, Mxfp4
from moeclipse.ops.nf4 import BLOCK, quantise
from moeclipse.ops.quantised import Quantised

HAS_GPU = torch.cuda.device_count() > 0  # through NVML: asking CUDA itself would spoil forked ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def assert_decoded_alike(frozen: Quantised, rows: slice = slice(None), *, by_kernel: bool = True) -> None:
    """The kernels' bits, those of the references on the device, and those of a CPU."""
    here, first = frozen.to("cuda"), rows.indices(frozen.shape[-2])[0]
    for dtype, bits in BITS.items():
        shape = (*frozen.shape[:-2], len(range(frozen.shape[-2])[rows]), frozen.shape[-1])
        expected = frozen.decode(torch.empty(shape, dtype=dtype), rows)
        found = [torch.full(shape, 7, dtype=dtype, device="cuda") for _ in range(2)]
        assert here.launch(found[0], first) == by_kernel
        here.decode_reference(found[1], first)
        found.append(here.decode(torch.full(shape, 7, dtype=dtype, device="cuda"), rows))
        for decoded in found[0 if by_kernel else 1 :]:
            some = decoded.cpu()
            assert torch.equal(some.isnan(), expected.isnan())
            number = ~expected.isnan()
            assert torch.equal(some.view(bits)[number], expected.view(bits)[number])


@pytest.mark.parametrize("shape", [(64, 64), (300, 128), (5, 33, 192), (4, 1536, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nf4(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spread = torch.logspace(-3, 1, shape[-2])[:, None]
    values = (torch.randn(shape) * spread).to(dtype)
    frozen = quantise(values)
    for name, kept in quantise(values.cuda()).tensors.items():
        assert torch.equal(kept.cpu(), frozen.tensors[name]), f"{name} of what is quantised on the device"
    assert_decoded_alike(frozen)
    assert_decoded_alike(frozen, slice(7, 29))
    if len(shape) == 3:
        assert_decoded_alike(frozen.experts(1, 3), slice(1, None))


def test_nf4_that_the_kernel_does_not_take() -> None:
    assert_decoded_alike(quantise(torch.randn(3, 10)), by_kernel=False)
    assert_decoded_alike(quantise(torch.randn(64, 96)), slice(1, 3), by_kernel=False)
    assert_decoded_alike(quantise(torch.randn(2, 64, 192), entries=6), slice(0, BLOCK))


def test_mxfp4_with_every_scale() -> None:
    torch.manual_seed(1)
    codes = torch.randint(0, 256, (4, 64, 90, 16), dtype=torch.uint8)
    frozen = Mxfp4.of(codes, torch.arange(4 * 64 * 90).to(torch.uint8).view(4, 64, 90))
    assert_decoded_alike(frozen)
    assert_decoded_alike(frozen.experts(1, 3), slice(5, 60))
    assert_decoded_alike(Mxfp4.of(codes[0, :3], frozen.scales[0, :3]), slice(1, 2))


@pytest.mark.parametrize("shape", [(256, 512), (3, 130, 144), (2, 1536, 7168)])
def test_fp8_with_every_code(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    codes = torch.arange(prod(shape)).to(torch.uint8).view(torch.float8_e4m3fn).view(shape)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    frozen = Fp8Blocks.of(codes, torch.rand(blocks) * torch.logspace(-5, 5, blocks[-1]))
    assert_decoded_alike(frozen)
    assert_decoded_alike(frozen, slice(5, 129))


def test_fp8_that_the_kernel_does_not_take() -> None:
    codes = torch.randn(40, 24).to(torch.float8_e4m3fn)
    assert_decoded_alike(Fp8Blocks.of(codes, torch.rand(1, 1)), by_kernel=False)
    assert_decoded_alike(Fp8Blocks.of(codes[:, :16], torch.rand(5, 2), block=(8, 8)), by_kernel=False)


def test_nothing_waits_for_the_device() -> None:
    frozen = quantise(torch.randn(4, 64, 128, device="cuda").bfloat16())
    scratch = torch.empty(4, 64, 128, dtype=torch.bfloat16, device="cuda")
    expected = frozen.decode(scratch).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        frozen.decode(scratch)
    scratch.zero_()
    graph.replay()
    assert torch.equal(scratch, expected)
