"""NF4 has the bytes that bitsandbytes makes: recorded ones, and its own where it is installed."""

from __future__ import annotations

import hashlib

import pytest
import torch

from moeclipse.ops import nf4
from moeclipse.ops.nf4 import (
    BLOCK,
    GROUP,
    Nf4,
    Pieces,
    dynamic_map,
    midpoints,
    quantise,
    quantise_factors,
    table,
)

CPU = torch.device("cpu")


def sample(rows: int, columns: int) -> torch.Tensor:
    """Multiples of 2^-7 below 4: sums of them are exact in any order, so their mean is the same anywhere."""
    place = torch.arange(rows * columns)
    size = (place * 7919 % 499 + place // 64 * 37 % 13) * (1 + place // 64 % 5) % 512
    return (torch.where(place * 31 % 7 < 3, -size, size).float() / 128).view(rows, columns)


def ties() -> torch.Tensor:
    """In the middle of two numbers of the table, just above and just below, and the numbers themselves."""
    middle = midpoints(table(CPU))
    beside = [torch.nextafter(middle, torch.tensor(towards)) for towards in (2.0, -2.0)]
    ends = torch.tensor([1.0, -1.0, 0.0, -0.0])
    return torch.cat([ends, middle, *beside, table(CPU)[:-1]]).view(1, 64)


def near_ties(largest: float, count: int) -> torch.Tensor:
    """A block: its largest number, and some a few units of their last place beside ties."""
    middle = (midpoints(table(CPU)) * largest).view(torch.int32)
    beside = (middle + torch.arange(-2, 3, dtype=torch.int32)[:, None]).view(torch.float32)
    return torch.cat([torch.tensor([largest]), beside.flatten()])[:count]


# codes, factors, scales, offset, and the digest of what is decoded, as bitsandbytes 0.50.2 makes them.
RECORDED = {
    "bf16": (
        sample(4, 64).bfloat16(),
        "7fe1c3a6fe1d3b58f1e2c4970e1c3a80f1d3b96f1e2ca570e1db580f1dc496f1b80d481da7e2a0ec5f1c5fd380d38e2a"
        "7e2af1c5f1c90d380db6e2a7ed4f1c5f71a1c7ea0d6e4fd5e3f29e371a0c81b0d5eb0d5e3fd5e371af281b0d91b0d5ec"
        "0c0c0cf3e4e4ea1a1828d6d0c0cf3f3e4ea1a1a18d6d6d0cf3f3f3ea1a1a1ae6",
        "2fff00cf",
        0.0234375,
        3.7734375,
        "50e0a4904c038c32",
    ),
    "fp16, the last block short": (
        sample(1, 160).half(),
        "7fe1c3a6fe1d3b58f1e2c4970e1c3a80e1d3b96f1e2ca570e1db580f1dc496f1b80d481da7e2a0ec5f1c5fd380d38e2a"
        "7e2af1c5f1c90d380db6e2a7ed4f1c5f71a0c7ea0d6e4fd5e3f29e371a0c81b0",
        "c8ee00",
        0.05729174613952637,
        3.7526042461395264,
        "2f4f70653d7d919f",
    ),
    "fp32, no whole block": (
        sample(3, 10),
        "7fe1c3a6ff1d3b58f1e2c4970e1d3a",
        "00",
        0.0,
        3.734375,
        "0fa1bbb1f2b4b4d6",
    ),
    "ties": (
        ties(),
        "f0770123456789abcde123456789abcdef0123456789abcde0123456789abcde",
        "00",
        0.0,
        1.0,
        "207b9b2be73f4737",
    ),
    "times 1 / largest in a whole block, divided in a short one": (
        torch.cat([near_ties(1.1, 64), near_ties(0.37, 62)]).view(1, -1),
        "f1234567789abcde1234567789abcde0133456789abcde0123456899bbdee012f1234567789abcde1234567789abcde0"
        "123456789abcdf012345689abcdef0",
        "ff00",
        0.36500000953674316,
        0.7350000143051147,
        "21bfef2cb93425ea",
    ),
    "zeros": (torch.zeros(2, 64), "77" * 64, "0000", 0.0, 0.0, "076a27c79e5ace2a"),
}


def as_bytes(values: torch.Tensor) -> bytes:
    return bytes(values.contiguous().view(torch.uint8).flatten().tolist())


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(as_bytes(values)).hexdigest()[:16]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_bytes(name: str) -> None:
    values, codes, factors, scale, offset, decoded = RECORDED[name]
    frozen = quantise(values)
    assert as_bytes(frozen.codes).hex() == codes
    assert as_bytes(frozen.factors).hex() == factors
    assert frozen.scales.tolist() == [scale]
    assert frozen.offsets.tolist() == [offset]
    assert digest(frozen.decode()) == decoded
    assert frozen.decode().dtype == values.dtype


def test_recorded_bytes_of_several_groups_of_factors() -> None:
    frozen = quantise(sample(300, 128).bfloat16())
    assert len(frozen.scales) == 3
    assert {name: digest(kept) for name, kept in frozen.tensors.items()} == {
        "codes": "8f25763a47123b36",
        "factors": "1434ae521b399687",
        "scales": "9dc2d224027dd359",
        "offsets": "237febfdf07cae76",
    }
    assert digest(frozen.decode()) == "99cb80d68787e09c"
    assert digest(dynamic_map(CPU)) == "e732639a65f497b4"


def test_recorded_bytes_of_factors_between_places() -> None:
    """By one rounding, and by another place of 2^16, some of these would be others: 7f, c0, d4."""
    some = torch.tensor([1 << 23, 0, 1074704, 3434036, 1 << 18]) / (1 << 23)
    factors, scales, offset = quantise_factors(torch.cat([some, -some])[None])
    assert as_bytes(factors).hex() == "ff83c1d5a600833e2a58"
    assert (scales.tolist(), offset.tolist()) == ([1.0], [0.0])


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return as_bytes(ours) == as_bytes(theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bytes_of_bitsandbytes(dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    spread = torch.logspace(-4, 1, 96)[:, None]
    near = midpoints(table(CPU))[torch.randint(0, 15, (64, 192))] * (torch.rand(64, 1) + 0.5)
    cases = [torch.randn(shape) for shape in ((64, 64), (300, 128), (3, 10), (40, 80), (1, 64 * 257 + 10))]
    for values in (*cases, torch.randn(96, 256) * spread, near, torch.zeros(64, 64), ties()):
        values = values.to(dtype)
        codes, state = theirs.quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
        frozen = quantise(values)
        assert same(frozen.codes, codes)
        assert same(frozen.factors, state.absmax)
        assert same(frozen.scales, state.state2.absmax)
        assert same(frozen.offsets, state.offset[None])
        if values.shape[1] % BLOCK:  # its decoder for AVX-512 takes factors of other blocks there
            state.shape = torch.Size((1, values.numel()))
        assert same(frozen.decode(), theirs.dequantize_4bit(codes, state).view(values.shape))
    assert same(dynamic_map(CPU), theirs.create_dynamic_map())


def test_a_number_is_table_times_factor() -> None:
    torch.manual_seed(1)
    values = torch.randn(3, 5, 128)
    frozen = quantise(values)
    decoded = frozen.decode().view(-1)
    for place in range(0, values.numel(), 7):
        byte = int(frozen.codes[place // 2])
        block, entry = place // BLOCK, place // 640
        factor = dynamic_map(CPU)[int(frozen.factors[block])] * frozen.scales[entry] + frozen.offsets[entry]
        assert decoded[place] == table(CPU)[byte & 15 if place % 2 else byte >> 4] * factor
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert ((decoded - values.view(-1)).view(-1, BLOCK).abs() <= 0.16 * largest).all(), "half a step at most"


def test_each_matrix_of_a_stack_is_quantised_on_its_own() -> None:
    torch.manual_seed(2)
    values = (torch.randn(3, 2, 70, 256) * torch.logspace(-2, 2, 3)[:, None, None, None]).bfloat16()
    frozen = quantise(values)
    assert len(frozen.offsets) == 6
    assert len(frozen.scales) == 12, "a matrix begins a group of factors"
    for i in range(3):
        part = frozen.experts(i, i + 1)
        assert part.shape == (1, 2, 70, 256)
        for name, kept in part.tensors.items():
            alone = [quantise(matrix).tensors[name] for matrix in values[i]]
            assert torch.equal(kept, torch.cat(alone)), name
            assert kept.untyped_storage().data_ptr() == frozen.tensors[name].untyped_storage().data_ptr()
    assert torch.equal(frozen.experts(1, 3).decode(), frozen.decode()[1:3])
    whole = quantise(values, entries=1)
    assert torch.equal(whole.codes, quantise(values.view(-1, 256)).codes)
    assert torch.equal(whole.offsets, quantise(values.view(-1, 256)).offsets)
    halves = quantise(values[0, :1], entries=2)
    assert torch.equal(
        halves.decode()[0], torch.cat([quantise(half).decode() for half in values[0, 0].chunk(2)])
    )
    with pytest.raises(ValueError, match="1 entries are not those of 6 matrices"):
        whole.experts(0, 1)


def test_pieces_in_any_order_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    values = torch.randn(2, 130, 96)  # rows are one and a half blocks
    whole = quantise(values)
    monkeypatch.setattr(nf4, "CHUNK", 3 * BLOCK)
    pieces = Pieces((2, 130, 96), torch.float32, CPU)
    for row in torch.randperm(130).tolist():
        pieces.write(values.view(130, 2, 96)[row], at=row * 192)
    for name, kept in pieces.finish().tensors.items():
        assert torch.equal(kept, whole.tensors[name]), name
    last = torch.randn(5, 30)
    pieces = Pieces((5, 30), torch.float32, CPU)
    pieces.write(last.view(-1)[64:], at=64)
    pieces.write(last.view(-1)[:64])
    assert torch.equal(pieces.finish().decode(), quantise(last).decode())


def test_what_cannot_be_quantised_is_refused() -> None:
    pieces = Pieces((4, 64), torch.bfloat16, CPU)
    pieces.write(torch.ones(2, 64, dtype=torch.bfloat16), at=64)
    with pytest.raises(ValueError, match="NaN or infinity in it, or a piece was not written"):
        pieces.finish()
    for at, length in ((32, 64), (0, 32), (192, 128)):
        with pytest.raises(
            ValueError, match=f"numbers {at} to {at + length} of 256 are not whole blocks of 64"
        ):
            pieces.write(torch.ones(length, dtype=torch.bfloat16), at=at)
    with pytest.raises(ValueError, match=r"a piece is torch\.float32, but the tensor torch\.bfloat16"):
        pieces.write(torch.ones(64))
    for bad in (torch.nan, torch.inf, -torch.inf):
        values = torch.ones(2, 64)
        values[1, 3] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantise(values)
    for values in (torch.ones(64), torch.ones(2, 64, dtype=torch.float64), torch.ones(0, 64)):
        with pytest.raises(ValueError, match="nf4 keeps matrices of bf16, fp16 or fp32"):
            quantise(values)
    with pytest.raises(ValueError, match=r"3 entries of \[3, 2, 16\] are not whole blocks"):
        quantise(torch.ones(3, 2, 16))


def test_rows_may_begin_anywhere() -> None:
    values = torch.randn(90, 15)
    frozen = quantise(values)
    for first in range(88):
        rows = slice(first, first + 3)
        assert torch.equal(frozen.decode(rows=rows), frozen.decode()[rows])


def test_bytes_kept() -> None:
    frozen = quantise(torch.randn(2, 128, 256))
    blocks = 2 * 128 * 256 // BLOCK
    assert frozen.nbytes == 2 * 128 * 256 // 2 + blocks + 4 * blocks // GROUP + 4 * 2
    assert isinstance(frozen, Nf4)


def test_another_default_type_changes_nothing() -> None:
    values = sample(8, 64)
    expected = quantise(values)
    for cached in (table, dynamic_map):
        cached.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        found = quantise(values)
        assert torch.equal(found.decode(), expected.decode())
        assert found.scales.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
        for cached in (table, dynamic_map):
            cached.cache_clear()
