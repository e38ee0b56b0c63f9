"""AdamW and the sum of squares, each one pass over flat tensors.

Every element is read once and written once by one program. Divisions and roots are those of IEEE, so the
result is the reference's but for the rounding of sums. A factor that is not finite masks every access:
nothing is read, nothing is written.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def random_bits(table, of_blocks, step_key, at):
    """32 for each element of a block, by its place in its logical matrix (`ops/rounding`)."""
    bits = tl.zeros(at.shape, dtype=tl.int32)
    block = tl.program_id(0)
    for number in range(tl.load(of_blocks + 2 * block), tl.load(of_blocks + 2 * block + 1)):
        words = table + number * 6
        begin = tl.load(words)
        inside = (at >= begin) & (at < tl.load(words + 1))
        place = tl.where(inside, at - begin + tl.load(words + 3), 0).to(tl.int32)
        columns = tl.load(words + 4).to(tl.int32)
        index = ((place // columns).to(tl.int64) << 32) + place % columns + tl.load(words + 5)
        x = index.to(tl.uint64) * 0x9E3779B97F4A7C15 + (tl.load(words + 2) ^ step_key).to(tl.uint64)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
        bits = tl.where(inside, (x >> 32).to(tl.int32), bits)
    return bits


@triton.jit
def joined(rounded, low, ties, at, inside):
    """fp32 weights from bf16 ones and their low bits (`ops/low_bits`)."""
    high = tl.load(rounded + at, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
    tie = tl.load(ties + at // 8, mask=inside, other=0).to(tl.int32) >> (at % 8).to(tl.int32) & 1
    bits = high + tl.load(low + at, mask=inside, other=0).to(tl.int32) + (tie << 16)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_split(w, rounded, low, ties, at, inside, numel, BLOCK: tl.constexpr):
    """The way back; rounding is done in integers, so that the interpreter rounds as a device does."""
    bits = w.to(tl.int32, bitcast=True)
    high = (bits + 0x7FFF + (bits >> 16 & 1)) & -65536
    rest = bits - high
    tl.store(rounded + at, (high >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    tl.store(low + at, rest.to(tl.int16), mask=inside)
    tie = tl.where(inside & (rest == 32768), 1 << (at % 8).to(tl.int32), 0)
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    packed = tl.sum(tl.reshape(tie, (BLOCK // 8, 8)), axis=1)
    tl.store(ties + byte, packed.to(tl.uint8), mask=byte * 8 < numel)


@triton.jit
def decoded(codes, tops, at, inside, GROUP: tl.constexpr, FRACTION: tl.constexpr):
    """A moment in 8 bits as fp32 (`ops/eight_bits`); 15 is the exponent of a block's largest."""
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    top = tl.load(tops + at // GROUP, mask=inside, other=32).to(tl.int32)
    magnitude = code & ((16 << FRACTION) - 1)
    above = tl.maximum(magnitude >> FRACTION, 1) - 1
    unit = ((top - 14 - FRACTION + above) << 23).to(tl.float32, bitcast=True)
    value = (magnitude - (above << FRACTION)).to(tl.float32) * unit
    if FRACTION == 3:
        value = tl.where(code > 127, -value, value)
    return value


@triton.jit
def store_encoded(
    value, chance, codes, tops, at, inside, numel,
    GROUP: tl.constexpr, FRACTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The way back; `chance`: 8 random bits for each element."""
    whole = value.to(tl.int32, bitcast=True)
    bits = whole & 0x7FFFFFFF
    bits = tl.where(inside & (bits >= 1 << 23), bits, 0)
    largest = tl.max(tl.reshape(bits, (BLOCK // GROUP, GROUP)), axis=1)
    top = (largest + ((1 << (23 - FRACTION)) - 1)) >> 23
    top = tl.minimum(tl.maximum(top, 32), 254)
    number = tl.program_id(0).to(tl.int64) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    tl.store(tops + number, top.to(tl.uint8), mask=number * GROUP < numel)
    spread = tl.reshape(tl.broadcast_to(top[:, None], (BLOCK // GROUP, GROUP)), (BLOCK,))
    field = (bits >> 23) - (spread - 15)
    fraction = bits & 0x7FFFFF
    mantissa = tl.where(bits == 0, 0, fraction | (1 << 23))
    small = mantissa >> tl.minimum(tl.maximum(1 - field, 0), 24)
    scaled = tl.where(field > 0, (field << 23) + fraction, small)
    code = (scaled + (chance << (15 - FRACTION))) >> (23 - FRACTION)
    code = tl.minimum(code, (16 << FRACTION) - 1)
    if FRACTION == 3:
        code = code | ((whole >> 31 & 1) << 7)
    else:
        code = tl.where(bits > 0, tl.maximum(code, 1), code)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)


@triton.jit
def adam(
    weight, ties, adam_m, m_tops, adam_v, v_tops, grad, rounded, factor, table, of_blocks, step_key, numel,
    new_m, old_v, new_v, eps, kept, rate, filled,
    ROUND: tl.constexpr, LOW_BITS: tl.constexpr, BY_CHANCE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """new_m = 1 - beta1, old_v = beta2, new_v = 1 - beta2; the rest as in `ops/adam.AdamStep`.

    LOW_BITS: `weight` and `ties` are what is kept beside `rounded`. GROUP: moments are in 8 bits, in blocks
    of so many elements; 0: they are plain.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(factor).to(tl.float32)
    numel = tl.where(tl.abs(scale) < float("inf"), numel, 0)
    inside = at < numel
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
    if GROUP:
        m = decoded(adam_m, m_tops, at, inside, GROUP, 3)
        v = decoded(adam_v, v_tops, at, inside, GROUP, 4)
    else:
        m = tl.load(adam_m + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(adam_v + at, mask=inside, other=0.0).to(tl.float32)
    if GROUP or BY_CHANCE:
        chance = random_bits(table, of_blocks, step_key, at)
    if LOW_BITS:
        w = joined(rounded, weight, ties, at, inside)
    else:
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    m += new_m * (g - m)
    v = v * old_v + new_v * g * g
    spread = tl.sqrt_rn(tl.div_rn(v, filled)) + eps
    w = w * kept - rate * tl.div_rn(m, spread)
    if GROUP:
        store_encoded(m, chance >> 8 & 0xFF, adam_m, m_tops, at, inside, numel, GROUP, 3, BLOCK)
        store_encoded(v, chance & 0xFF, adam_v, v_tops, at, inside, numel, GROUP, 4, BLOCK)
    else:
        tl.store(adam_m + at, m.to(adam_m.dtype.element_ty), mask=inside)
        tl.store(adam_v + at, v.to(adam_v.dtype.element_ty), mask=inside)
    if LOW_BITS:
        store_split(w, rounded, weight, ties, at, inside, numel, BLOCK)
    else:
        if BY_CHANCE:
            bits = w.to(tl.int32, bitcast=True) + (chance >> 16 & 0xFFFF)
            w = (bits & -65536).to(tl.float32, bitcast=True)
        tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)
        if ROUND:
            tl.store(rounded + at, w.to(rounded.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_squares(values, sums, numel, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Program p writes sums[p], that of its BLOCKS x BLOCK elements, in fp64."""
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for block in range(BLOCKS):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total))
