"""A gate's choice in one pass over its logits, and all of its gradients in another.

A program holds BLOCK tokens and all experts. Sums over tokens leave as one row for each program, and are
added up afterwards in one order, so two runs give the same bits.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def probabilities(value, real, SIGMOID: tl.constexpr):
    """(p of each expert, softmax, log of the sum of exponentials) of rows of logits; `real`: not padding."""
    largest = tl.max(tl.where(real, value, float("-inf")), axis=1)
    power = tl.where(real, tl.exp(value - largest[:, None]), 0.0)
    total = tl.sum(power, axis=1)
    softmax = power / total[:, None]
    p = softmax
    if SIGMOID:
        p = tl.where(real, 1.0 / (1.0 + tl.exp(-value)), 0.0)
    return p, softmax, largest + tl.log(total)


@triton.jit
def choose(
    logits, bias, scores, ids, loads, probs, squares, num_tokens, E, scale,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Equal preferences: smaller id first. NaN is preferred, so that ids stay inside and scores tell."""
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    expert, choice = tl.arange(0, E_PADDED), tl.arange(0, K_PADDED)
    inside = token < num_tokens
    real = (expert < E)[None, :] & (token >= 0)[:, None]
    at = token.to(tl.int64)[:, None] * E + expert[None, :]
    value = tl.load(logits + at, mask=real & inside[:, None], other=0.0)
    p, _, lse = probabilities(value, real, SIGMOID)
    wanted = p + tl.load(bias + expert, mask=expert < E, other=0.0)[None, :]
    wanted = tl.where(wanted == wanted, wanted, float("inf"))
    weight = tl.zeros((BLOCK, K_PADDED), dtype=tl.float32)
    chosen = tl.zeros((BLOCK, K_PADDED), dtype=tl.int32)
    free = tl.zeros((BLOCK, E_PADDED), dtype=tl.int32) + (expert < E)[None, :].to(tl.int32)
    for k in tl.static_range(K):
        best = tl.max(tl.where(free > 0, wanted, float("-inf")), axis=1)
        where = tl.min(tl.where((free > 0) & (wanted == best[:, None]), expert[None, :], E_PADDED), axis=1)
        hit = expert[None, :] == where[:, None]
        weight = tl.where(choice[None, :] == k, tl.sum(tl.where(hit, p, 0.0), axis=1)[:, None], weight)
        chosen = tl.where(choice[None, :] == k, where[:, None], chosen)
        free = tl.where(hit, 0, free)
    if RENORMALISE:
        if K == 1:
            weight = weight * 0.0 + 1.0  # NaN stays
        else:
            weight = weight / (tl.sum(weight, axis=1)[:, None] + 1e-20)
    place = token.to(tl.int64)[:, None] * K + choice[None, :]
    mask = inside[:, None] & (choice < K)[None, :]
    tl.store(scores + place, weight * scale, mask=mask)
    tl.store(ids + place, chosen.to(tl.int64), mask=mask)
    counted = inside[:, None] & (expert < E)[None, :] & (free == 0)
    row = block * E + expert
    tl.store(loads + row, tl.sum(counted.to(tl.int32), axis=0), mask=expert < E)
    share = p
    if SIGMOID:
        share = p / tl.sum(p, axis=1)[:, None]
    tl.store(probs + row, tl.sum(tl.where(inside[:, None], share, 0.0), axis=0), mask=expert < E)
    tl.store(squares + block, tl.sum(tl.where(inside, lse * lse, 0.0), axis=0))


@triton.jit
def sum_blocks(
    loads, probs, squares, load, prob, all_squares, N, E, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """What the programs of `choose` left, N rows, added up in the order of their tokens."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    count, total = tl.zeros((COLUMNS,), dtype=tl.int64), tl.zeros((COLUMNS,), dtype=tl.float32)
    square = 0.0
    for first in range(0, N, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < N)[:, None] & (expert < E)[None, :]
        at = row[:, None] * E + expert[None, :]
        count += tl.sum(tl.load(loads + at, mask=mask, other=0), axis=0).to(tl.int64)
        total += tl.sum(tl.load(probs + at, mask=mask, other=0.0), axis=0)
        square += tl.sum(tl.load(squares + row, mask=row < N, other=0.0), axis=0)
    tl.store(load + expert, count, mask=expert < E)
    tl.store(prob + expert, total, mask=expert < E)
    if tl.program_id(0) == 0:
        tl.store(all_squares, square)


@triton.jit
def choose_backward(
    logits, ids, d_scores, d_probs, d_squares, pieces, num_tokens, E, scale,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, HAS_PROBS: tl.constexpr, HAS_SQUARES: tl.constexpr,
    K: tl.constexpr, K_PADDED: tl.constexpr, E_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits as a sum of three of a short type, side by side: [tokens, 3, E]."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert, choice = tl.arange(0, E_PADDED), tl.arange(0, K_PADDED)
    inside = token < num_tokens
    real = (expert < E)[None, :] & (token >= 0)[:, None]
    mask = inside[:, None] & (expert < E)[None, :]
    value = tl.load(logits + token.to(tl.int64)[:, None] * E + expert[None, :], mask=mask, other=0.0)
    p, softmax, lse = probabilities(value, real, SIGMOID)
    place = token.to(tl.int64)[:, None] * K + choice[None, :]
    some = inside[:, None] & (choice < K)[None, :]
    chosen = tl.load(ids + place, mask=some, other=0).to(tl.int32)
    d_weight = tl.load(d_scores + place, mask=some, other=0.0) * scale
    if RENORMALISE and K == 1:
        d_weight = d_weight * 0.0
    elif RENORMALISE:
        weight = tl.zeros((BLOCK, K_PADDED), dtype=tl.float32)
        for k in tl.static_range(K):
            where = tl.sum(tl.where(choice[None, :] == k, chosen, 0), axis=1)
            found = tl.sum(tl.where(expert[None, :] == where[:, None], p, 0.0), axis=1)
            weight = tl.where(choice[None, :] == k, found[:, None], weight)
        total = tl.sum(weight, axis=1) + 1e-20
        along = tl.sum(d_weight * weight, axis=1) / total
        d_weight = (d_weight - along[:, None]) / total[:, None]
    d_p = tl.zeros((BLOCK, E_PADDED), dtype=tl.float32)
    for k in tl.static_range(K):
        where = tl.sum(tl.where(choice[None, :] == k, chosen, 0), axis=1)
        given = tl.sum(tl.where(choice[None, :] == k, d_weight, 0.0), axis=1)
        d_p = tl.where(expert[None, :] == where[:, None], given[:, None], d_p)
    if HAS_PROBS:
        d_share = tl.load(d_probs + expert, mask=expert < E, other=0.0)[None, :] + tl.zeros_like(p)
        if SIGMOID:
            all_p = tl.sum(p, axis=1)[:, None]
            d_share = (d_share - tl.sum(d_share * p, axis=1)[:, None] / all_p) / all_p
        d_p += d_share
    if SIGMOID:
        d_logit = p * (1.0 - p) * d_p
    else:
        d_logit = p * (d_p - tl.sum(p * d_p, axis=1)[:, None])
    if HAS_SQUARES:
        d_logit += 2.0 * tl.load(d_squares) * lse[:, None] * softmax
    short = pieces.dtype.element_ty
    to = token.to(tl.int64)[:, None] * (3 * E) + expert[None, :]
    for part in tl.static_range(3):
        rounded = d_logit.to(short)
        tl.store(pieces + to + part * E, rounded, mask=mask)
        d_logit -= rounded.to(tl.float32)
