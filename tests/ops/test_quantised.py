"""What all frozen matrices have in common: parts are those of the whole, gradients those of the numbers."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from moeclipse.ops import quantised
from moeclipse.ops.block_floats import Fp8Blocks, Mxfp4
from moeclipse.ops.nf4 import quantise
from moeclipse.ops.quantised import Quantised, fits, span_of

SHAPE = (3, 20, 96)


def frozen_as(kind: str) -> Quantised:
    torch.manual_seed(0)
    if kind == "nf4":
        return quantise(torch.randn(SHAPE).bfloat16())
    if kind == "mxfp4":
        codes = torch.randint(0, 256, (3, 20, 3, 16), dtype=torch.uint8)
        return Mxfp4.of(codes, torch.randint(118, 126, (3, 20, 3), dtype=torch.uint8))
    codes = torch.randn(SHAPE).to(torch.float8_e4m3fn)
    return Fp8Blocks.of(codes, torch.rand(3, 3, 6) + 0.1, block=(8, 16))


KINDS = pytest.mark.parametrize("kind", ["nf4", "mxfp4", "fp8"])


@KINDS
def test_parts_have_the_bits_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = frozen_as(kind)
    whole = frozen.decode()
    assert whole.shape == SHAPE
    assert whole.dtype == torch.bfloat16
    monkeypatch.setattr(quantised, "CHUNK", 250)  # two rows at a time
    assert torch.equal(frozen.decode(), whole)
    for (first, stop), rows in product(((0, 1), (1, 3), (2, 2)), (slice(None), slice(3, 8), slice(19, 4))):
        part = frozen.experts(first, stop)
        assert torch.equal(part.decode(rows=rows), whole[first:stop, rows])
        assert part.nbytes * 3 == frozen.nbytes * (stop - first)
    exact = frozen.decode(torch.empty(SHAPE, dtype=torch.float32))
    assert torch.equal(exact.bfloat16(), whole), "rounded once"
    assert torch.equal(frozen.decode(torch.empty(SHAPE, dtype=torch.float64)).float(), exact)


@KINDS
def test_decodes_into_what_is_given(kind: str) -> None:
    frozen = frozen_as(kind)
    scratch = torch.full((4, 20, 96), torch.nan, dtype=torch.bfloat16)
    assert frozen.decode(scratch[:3]).data_ptr() == scratch.data_ptr()
    assert torch.equal(scratch[:3], frozen.decode())
    assert scratch[3].isnan().all()
    gap = torch.empty(3, 20, 192, dtype=torch.bfloat16)[..., ::2]
    assert torch.equal(frozen.decode(gap), frozen.decode())
    with pytest.raises(
        ValueError, match=r"into is \[4, 20, 96\] on cpu, but what is decoded is \[3, 20, 96\]"
    ):
        frozen.decode(scratch)
    with pytest.raises(ValueError, match="on meta, but what is decoded"):
        frozen.decode(torch.empty(SHAPE, device="meta"))
    with pytest.raises(ValueError, match="the step is 2"):
        frozen.decode(rows=slice(0, 8, 2))
    for first, stop in ((2, 1), (0, 4), (-1, 1)):
        with pytest.raises(ValueError, match="are not matrices of a stack of shape"):
            frozen.experts(first, stop)


@KINDS
def test_gradients_are_those_of_the_decoded_numbers(kind: str) -> None:
    """d_x = d_y W, with W from numbers that are decoded one by one."""
    frozen = frozen_as(kind)
    weight = frozen.decode(torch.empty(SHAPE, dtype=torch.float64))[1]
    alone = torch.stack([frozen.numbers(1, row, row + 1)[0] for row in range(20)]).double()
    x, d_y = torch.randn(7, 96, dtype=torch.float64), torch.randn(7, 20, dtype=torch.float64)
    x.requires_grad_()
    y = torch.nn.functional.linear(x, weight)
    y.backward(d_y)
    assert x.grad is not None
    assert not weight.requires_grad
    for found, expected in ((y, x.detach() @ alone.T), (x.grad, d_y @ alone)):
        assert (found - expected).norm() <= 1e-12 * expected.norm()


def test_a_leaf_can_be_decoded_into() -> None:
    leaf = torch.zeros(SHAPE, dtype=torch.bfloat16, requires_grad=True)
    frozen = frozen_as("nf4")
    assert frozen.decode(leaf).requires_grad
    assert torch.equal(leaf, frozen.decode())


@KINDS
def test_tensors_move_and_are_counted(kind: str) -> None:
    frozen = frozen_as(kind)
    moved = frozen.to("cpu")
    assert torch.equal(moved.decode(), frozen.decode())
    assert frozen.to("meta").device.type == "meta"
    assert (moved.shape, moved.dtype, moved.num_matrices) == (SHAPE, torch.bfloat16, 3)
    assert frozen.nbytes == sum(kept.numel() * kept.element_size() for kept in frozen.tensors.values())
    assert {"codes", "scales"} <= set(frozen.tensors)


def test_spans_and_what_kernels_write() -> None:
    assert span_of((5, 2, 3, 4), 1, 4) == (2, 6, (3, 2, 3, 4))
    with pytest.raises(ValueError, match=r"not matrices of a stack of shape \[3, 4\]"):
        span_of((3, 4), 0, 1)
    assert fits(torch.empty(2, 16, dtype=torch.bfloat16))
    assert not fits(torch.empty(2, 16, dtype=torch.float64))
    assert not fits(torch.empty(2, 32, dtype=torch.bfloat16)[:, ::2])
    assert not fits(torch.empty(33, dtype=torch.bfloat16)[1:].view(2, 16)), "not at a multiple of 16 bytes"
    assert not fits(torch.empty(1 << 16, 1 << 15, dtype=torch.bfloat16, device="meta"))
