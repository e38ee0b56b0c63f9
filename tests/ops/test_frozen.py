"""Weights in few bits: their parts, their one scratch, and products with them."""

from __future__ import annotations

import pytest
import torch

from moeclipse.ops.block_floats import Fp8Blocks, Mxfp4
from moeclipse.ops.frozen import KINDS, Frozen, Scratch, decode, decoded, encode, in_type
from moeclipse.ops.grouped_experts import grouped_experts
from moeclipse.ops.random import fill_normal
from moeclipse.testing.compare import difference

BITS = {"bf16": 16, "nf4": 4.5, "mxfp4": 4.25, "fp8": 8.01}
FAR = {"bf16": 0.004, "nf4": 0.15, "mxfp4": 0.26, "fp8": 0.07}


def normal(*shape: int, key: int = 1) -> torch.Tensor:
    return fill_normal(torch.empty(shape, dtype=torch.float32), key, 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_each_matrix_alone_and_near_what_was_written(kind: str) -> None:
    values, scratch = normal(3, 128, 256), Scratch()
    frozen = Frozen.of(kind, values, scratch)
    assert 8 * frozen.nbytes <= BITS[kind] * values.numel()
    assert not any(part.requires_grad for part in frozen.parameters())
    whole = frozen.numbers(torch.float32).clone()
    assert 0 < difference(whole, values) < FAR[kind]
    for matrix in range(3):
        parts = encode(kind, values[matrix])
        assert {name: getattr(frozen, name)[matrix].shape for name in parts} == {
            name: part.shape for name, part in parts.items()
        }
        assert all(torch.equal(getattr(frozen, name)[matrix], part) for name, part in parts.items())
        assert torch.equal(decode(kind, (128, 256), parts), whole[matrix])
    assert torch.equal(frozen.numbers(torch.float64), whole.double())


def test_all_share_one_memory_and_none_moves() -> None:
    scratch = Scratch()
    first = Frozen.of("nf4", normal(2, 8, 64), scratch)
    second = Frozen.of("fp8", normal(4, 64), scratch)
    place = second.numbers(torch.float32).data_ptr()
    assert first.numbers(torch.float32).data_ptr() == place
    assert next(iter(scratch.memory.values())).numel() == 2 * 8 * 64
    first.numbers(torch.bfloat16)
    assert len(scratch.memory) == 2
    with pytest.raises(AssertionError, match="a graph may have the address"):
        Frozen.of("nf4", normal(4, 8, 64), scratch)


def test_memory_taken_beforehand_serves_weights_however_the_device_was_named() -> None:
    """A mesh may say "cuda" where a tensor says "cuda:0": large models had every scratch twice."""
    scratch = Scratch()
    weight = Frozen.of("bf16", torch.randn(2, 4, 32), scratch)
    scratch.allocate(torch.float32, torch.device("cpu:0"))
    weight.numbers(torch.float32)
    assert len(scratch.memory) == 1


def test_numbers_are_reused_inside_a_scope_alone_and_until_others_of_their_role_come() -> None:
    scratch = Scratch()
    up, other, down = (Frozen.of("nf4", normal(8, 64, key=k), scratch, r) for k, r in enumerate("uud"))
    truth = [weight.numbers(torch.float32).clone() for weight in (up, other, down)]

    def spoiled(weight: Frozen) -> bool:
        """Whether what was written over its numbers is still there."""
        weight.numbers(torch.float32).fill_(7.0)
        return bool((weight.numbers(torch.float32) == 7).all())

    assert not spoiled(up), "a graph may have been replayed"
    with scratch.reusing():
        assert torch.equal(up.numbers(torch.float32), truth[0]), "what was there before counts for nothing"
        assert spoiled(up)
        assert torch.equal(up.numbers(torch.float64), truth[0].double()), "another type is other memory"
        assert torch.equal(up.numbers(torch.float32), truth[0])
        assert torch.equal(down.numbers(torch.float32), truth[2])
        assert torch.equal(other.numbers(torch.float32), truth[1])
        assert torch.equal(up.numbers(torch.float32), truth[0]), "the other has taken its place"
        with scratch.reusing():
            assert torch.equal(other.numbers(torch.float32), truth[1])
        assert torch.equal(up.numbers(torch.float32), truth[0]), "what was decoded inside is there"
        assert spoiled(down)
    assert torch.equal(down.numbers(torch.float32), truth[2])
    with pytest.raises(KeyError), scratch.reusing():
        raise KeyError
    assert not spoiled(up)


def test_nowhere_it_has_shapes_alone() -> None:
    frozen = Frozen.of("nf4", torch.empty(2, 8, 64, device="meta"), Scratch())
    assert frozen.numbers(torch.float32).shape == (2, 8, 64)
    assert decoded(frozen, torch.float32).is_meta
    assert in_type(frozen, torch.float64) is frozen


def test_what_is_not_finite_is_refused() -> None:
    values = normal(8, 64)
    values[3, 5] = torch.nan
    for kind in KINDS:
        with pytest.raises(ValueError, match="has NaN or infinity"):
            Frozen.of(kind, values, Scratch())


def test_mxfp4_takes_the_nearest_number_of_its_block_and_ties_to_even() -> None:
    row = torch.zeros(1, 32)
    row[0, :10] = torch.tensor([6.0, 0.25, 0.75, -1.25, 1.75, 2.5, 3.5, 5.0, 4.9, -0.26])
    expected = row.clone()
    expected[0, :10] = torch.tensor([6.0, 0.0, 1.0, -1.0, 2.0, 2.0, 4.0, 4.0, 4.0, -0.5])
    for power in (-20, 0, 9):
        made = Mxfp4.quantise(row * 2.0**power)
        assert torch.equal(made.decode(torch.empty(1, 32)), expected * 2.0**power)
    again = Mxfp4.quantise(expected)
    assert torch.equal(again.decode(torch.empty(1, 32)), expected)
    assert torch.equal(Mxfp4.quantise(torch.zeros(1, 32)).decode(torch.empty(1, 32)), torch.zeros(1, 32))


def test_fp8_has_a_factor_for_each_block_and_keeps_the_largest() -> None:
    values = normal(130, 140)
    values[:128, 128:] *= 100
    made = Fp8Blocks.quantise(values)
    assert made.scales.shape == (2, 2)
    found = made.decode(torch.empty(130, 140))
    for rows in (slice(0, 128), slice(128, 130)):
        for columns in (slice(0, 128), slice(128, 140)):
            block, kept = values[rows, columns], found[rows, columns]
            assert difference(kept, block) < FAR["fp8"]
            assert float(kept.abs().max()) == pytest.approx(float(block.abs().max()), rel=1e-6)
    assert torch.equal(Fp8Blocks.quantise(torch.zeros(2, 3)).decode(torch.empty(2, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_decoded_weights(kind: str) -> None:
    """Of the operation that kernels compute, by their references; nothing decoded is kept for backward."""
    scratch = Scratch()
    up, down = (
        Frozen.of(kind, normal(3, *shape, key=k), scratch) for k, shape in ((1, (64, 32)), (2, (32, 32)))
    )
    plain = [weight.numbers(torch.float64).clone() for weight in (up, down)]
    shapes = ((3, 4, 32), (3, 64, 4), (3, 4, 32), (3, 32, 4))
    adapters = [normal(*shape, key=9 + n).double().requires_grad_() for n, shape in enumerate(shapes)]
    x, scores = normal(6, 32, key=5).double().requires_grad_(), normal(6, 2, key=6).double().requires_grad_()
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0], [2, 1]])
    found = []
    for weights in ((up, down), plain):
        y = grouped_experts(x, scores, ids, *weights, adapters=adapters, scale=0.5)
        up.numbers(torch.float64).fill_(torch.nan)  # whoever comes in between
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, scores, *adapters])])
    assert max(difference(mine, theirs) for mine, theirs in zip(*found, strict=True)) <= 1e-12
