"""Frozen matrices from few bits to bf16, in one pass: codes and factors are read once, numbers written once.

Of a matrix of a stack `count` numbers are decoded, some of its rows; matrices lie `pitch` numbers apart.
Numbers of 4 bits come eight in a word of 32 bits: a thread that has a word writes 16 bytes.

Contract. The bits of the references: products and sums are rounded each on its own, so kernels are compiled
without fused operations (`enable_fp_fusion=False`), and numbers below 2^-126 are kept.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def write_words(words, table, factor, FIRST_HIGH: tl.constexpr, out, word, count):
    """The eight numbers of each of `words`, which have these factors and places, if those are below `count`.

    A row for each word: all of it lies in one thread, from the load to the store. (Rows of whole blocks,
    whose factor is found once, made threads exchange numbers: that took two thirds of the time.)
    """
    eight = tl.arange(0, 8)
    shift = (4 * eight) ^ 4 if FIRST_HIGH else 4 * eight
    codes = (words[:, None] >> shift[None, :]) & 0xF
    numbers = tl.load(table + codes) * factor[:, None]
    place = word[:, None] * 8 + eight[None, :]
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=place < count)


@triton.jit
def decode_nf4(
    codes, factors, scales, offsets, table, dynamic_map, out, first, pitch, count, blocks, groups, spans,
    GROUP: tl.constexpr, SMALL: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """`blocks` of 64 numbers and `groups` of factors in an entry; a program has WORDS of a matrix.

    SMALL: entries may be so small that a program has more than two of them.
    """
    matrix, start = (tl.program_id(0) // spans).to(tl.int64), tl.program_id(0) % spans * WORDS
    block = (first + matrix * pitch + start * 8) // 64
    entry, rest = block // blocks, (block % blocks).to(tl.int32)
    local = tl.arange(0, WORDS)
    inside = (start + local) * 8 < count
    place = rest + local // 8
    if SMALL:
        entry += place // blocks
        place = place % blocks
    else:
        entry += tl.where(place < blocks, 0, 1)
        place = tl.where(place < blocks, place, place - blocks)
    byte = tl.load(factors + block + local // 8, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + entry * groups + place // GROUP, mask=inside, other=0.0)
    offset = tl.load(offsets + entry, mask=inside, other=0.0)
    words = tl.load(codes + block * 8 + local, mask=inside, other=0)
    factor = tl.load(dynamic_map + byte) * scale + offset
    write_words(words, table, factor, True, out + matrix * count, start + local, count)


@triton.jit
def decode_mxfp4(codes, scales, table, out, first, pitch, count, spans, WORDS: tl.constexpr):
    """A program has WORDS of a matrix, four in a block of 32 numbers."""
    matrix, start = (tl.program_id(0) // spans).to(tl.int64), tl.program_id(0) % spans * WORDS
    block = (first + matrix * pitch + start * 8) // 32
    local = tl.arange(0, WORDS)
    inside = (start + local) * 8 < count
    power = tl.load(scales + block + local // 4, mask=inside, other=0).to(tl.int32)
    # 2^-127 has no exponent of its own in fp32, and 255 stands for no number.
    bits = tl.where(power == 0, 0x00400000, tl.where(power == 255, 0x7FC00000, power << 23))
    words = tl.load(codes + block * 4 + local, mask=inside, other=0)
    factor = bits.to(tl.float32, bitcast=True)
    write_words(words, table, factor, False, out + matrix * count, start + local, count)


@triton.jit
def decode_fp8(
    codes, scales, out, first, stop, height, width, scale_rows, scale_columns, down, across,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """e4m3: a program has ROWS x COLUMNS under one factor; a matrix has `down` x `across` such tiles."""
    program = tl.program_id(0)
    matrix = (program // (down * across)).to(tl.int64)
    top = (first // ROWS + program // across % down) * ROWS
    left = program % across * COLUMNS
    factor = tl.load(
        scales + (matrix * scale_rows + top // BLOCK_ROWS) * scale_columns + left // BLOCK_COLUMNS
    )
    row, column = top + tl.arange(0, ROWS)[:, None], left + tl.arange(0, COLUMNS)[None, :]
    inside = (row >= first) & (row < stop) & (column < width)
    byte = tl.load(codes + (matrix * height + row) * width + column, mask=inside, other=0).to(tl.int32)
    # The bits of an fp32 number that is 2^-120 times as large; 0x7F is NaN.
    bits = (byte & 0x80) << 24 | (byte & 0x7F) << 20
    number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    number = tl.where((byte & 0x7F) == 0x7F, float("nan"), number) * factor
    place = (matrix * (stop - first) + row - first) * width + column
    tl.store(out + place, number.to(out.dtype.element_ty), mask=inside)
