"""The k largest logits of each token and their softmax, in one pass over the logits.

Backward needs the scores and the choices alone: d_logit of choice k is s_k (ds_k - sum_j s_j ds_j), and zero
for every expert that was not chosen.
"""

# Arguments of kernels have no Python types.
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def topk_softmax(
    logits, scores, ids, num_tokens, E,
    K: tl.constexpr, K_PADDED: tl.constexpr, E_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K = 2, logits [1, 3, 2]: ids [1, 2], scores [1, 1/e] / (1 + 1/e). Equal logits: smaller id first."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    expert = tl.arange(0, E_PADDED)
    lowest = float("-inf")
    value = tl.load(
        logits + token.to(tl.int64)[:, None] * E + expert[None, :],
        mask=inside[:, None] & (expert < E)[None, :],
        other=lowest,
    ).to(tl.float32)
    choice = tl.arange(0, K_PADDED)
    largest = tl.max(value, axis=1)
    weight = tl.zeros((BLOCK, K_PADDED), dtype=tl.float32)
    chosen = tl.zeros((BLOCK, K_PADDED), dtype=tl.int32)
    free = tl.zeros((BLOCK, E_PADDED), dtype=tl.int32) + (expert < E)[None, :].to(tl.int32)
    for k in tl.static_range(K):
        best = tl.max(tl.where(free > 0, value, lowest), axis=1)
        at = tl.where((free > 0) & (value == best[:, None]), expert[None, :], E_PADDED)
        where = tl.min(at, axis=1)
        weight = tl.where(choice[None, :] == k, tl.exp(best - largest)[:, None], weight)
        chosen = tl.where(choice[None, :] == k, where[:, None], chosen)
        free = tl.where(expert[None, :] == where[:, None], 0, free)
    weight = weight / tl.sum(weight, axis=1)[:, None]
    place = token[:, None] * K + choice[None, :]
    mask = inside[:, None] & (choice < K)[None, :]
    tl.store(scores + place, weight, mask=mask)
    tl.store(ids + place, chosen, mask=mask)


@triton.jit
def topk_softmax_backward(
    scores, ids, d_scores, d_logits, num_tokens, E,
    K: tl.constexpr, K_PADDED: tl.constexpr, E_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """scores [0.5, 0.5], ids [2, 0], d_scores [1, 0]: d_logits [-0.25, 0, 0.25]."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    choice = tl.arange(0, K_PADDED)
    place = token[:, None] * K + choice[None, :]
    mask = inside[:, None] & (choice < K)[None, :]
    score = tl.load(scores + place, mask=mask, other=0.0)
    d_score = tl.load(d_scores + place, mask=mask, other=0.0)
    chosen = tl.load(ids + place, mask=mask, other=-1)
    d_choice = score * (d_score - tl.sum(score * d_score, axis=1)[:, None])
    expert = tl.arange(0, E_PADDED)
    out = tl.zeros((BLOCK, E_PADDED), dtype=tl.float32)
    for k in tl.static_range(K):
        pick = choice[None, :] == k
        where = tl.sum(tl.where(pick, chosen, 0), axis=1)
        value = tl.sum(tl.where(pick, d_choice, 0.0), axis=1)
        out = tl.where(expert[None, :] == where[:, None], value[:, None], out)
    at = token.to(tl.int64)[:, None] * E + expert[None, :]
    mask = inside[:, None] & (expert < E)[None, :]
    tl.store(d_logits + at, out.to(d_logits.dtype.element_ty), mask=mask)
