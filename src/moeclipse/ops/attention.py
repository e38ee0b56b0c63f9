"""Causal attention: which keys a query sees, and what it takes from them, in one place.

    s_ij  = softcap(scale q_i . k_j)              softcap(s) = c tanh(s / c), where one is asked for
    out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(sink_h))

over the keys j that query i sees: those that are not behind it, less than `window` before it, and of its own
document. A sink is a learned logit of each head that takes weight and gives nothing; without sinks its term
is left out. Keys that are more than queries come before the first query.

Shapes: B samples, H query heads, G key-value heads (each serves H / G neighbours), S queries, L keys.

`attend_at` is for queries that stand anywhere among keys that were kept: each says itself which it sees.

Contract. `attend` equals `attend_reference`, gradients included. Plain causal attention is torch's
`scaled_dot_product_attention`, which on CUDA does not copy keys and values for the query heads that share
them. Everything else is flex attention on CUDA, where no S x L matrix is ever in memory, and a mask or the
reference elsewhere. float64 takes the reference on every device: it is for comparing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from moeclipse.ops.attention_blocks import document_blocks, runs_of, window_blocks
from moeclipse.ops.flex import flex
from moeclipse.ops.precision import WIDE


def restarting_positions(documents_BS: torch.Tensor) -> torch.Tensor:
    """Position of each token in its document; a document is a run of equal numbers.

    [[7, 7, 7, 2, 2]] -> [[0, 1, 2, 0, 1]]
    """
    place_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return place_S - torch.where(begins_BS, place_S, 0).cummax(dim=1).values


def seen_keys(
    queries: int, keys: int, window: int, documents_BS: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """[S, L], or [B, 1, S, L] with documents: whether a query sees a key."""
    query_S = torch.arange(keys - queries, keys, device=device)[:, None]
    key_L = torch.arange(keys, device=device)
    sees = key_L <= query_S
    if window:
        sees = sees & (query_S - key_L < window)
    if documents_BS is not None:
        document_BS = runs_of(documents_BS)
        sees = sees & (document_BS[:, None, :, None] == document_BS[:, None, None, :])
    return sees


def attend_reference(
    q_BHSd: torch.Tensor,
    k_BGLd: torch.Tensor,
    v_BGLe: torch.Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
    documents_BS: torch.Tensor | None = None,
    chosen_BSL: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, with all scores in memory."""
    samples, heads, queries, width = q_BHSd.shape
    group, wide = heads // k_BGLd.shape[1], WIDE[q_BHSd.dtype]
    q, k, v = (tensor.to(wide) for tensor in (q_BHSd, k_BGLd, v_BGLe))
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores_BHSL = q @ k.transpose(2, 3) * (width**-0.5 if scale is None else scale)
    if softcap:
        scores_BHSL = softcap * torch.tanh(scores_BHSL / softcap)
    sees = seen_keys(queries, k.shape[2], window, documents_BS, q.device)
    if chosen_BSL is not None:
        sees = sees & chosen_BSL[:, None]
    scores_BHSL = scores_BHSL.masked_fill(~sees, float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.to(wide).view(1, heads, 1, 1).expand(samples, heads, queries, 1)
        scores_BHSL = torch.cat([scores_BHSL, sinks], dim=-1)
    weights_BHSL = scores_BHSL.softmax(-1)[..., : k.shape[2]]
    return (weights_BHSL @ v).to(q_BHSd.dtype)


def attend(
    q_BHSd: torch.Tensor,
    k_BGLd: torch.Tensor,
    v_BGLe: torch.Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
    documents_BS: torch.Tensor | None = None,
    chosen_BSL: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, H, S, e]. `scale` left out: 1 / sqrt(width of a head); `window`, `softcap` 0: none.

    `chosen_BSL`: the keys that a query takes from, of those that it sees.
    """
    queries, keys = q_BHSd.shape[2], k_BGLd.shape[2]
    window = 0 if window >= keys else window
    masked = bool(window) or documents_BS is not None or chosen_BSL is not None or queries != keys
    given: dict[str, Any] = {"scale": scale, "window": window, "documents_BS": documents_BS}
    if not q_BHSd.numel() or not (masked or softcap or sinks_H is not None):
        return sdpa(q_BHSd, k_BGLd, v_BGLe, scale=scale)
    if q_BHSd.is_cuda and q_BHSd.dtype != torch.float64 and chosen_BSL is None:
        return attend_flex(q_BHSd, k_BGLd, v_BGLe, softcap=softcap, sinks_H=sinks_H, **given)
    if softcap or sinks_H is not None:
        given |= {"softcap": softcap, "sinks_H": sinks_H, "chosen_BSL": chosen_BSL}
        return attend_reference(q_BHSd, k_BGLd, v_BGLe, **given)
    sees = seen_keys(queries, keys, window, documents_BS, q_BHSd.device)
    if chosen_BSL is not None:
        sees = sees & chosen_BSL[:, None]
    return sdpa(q_BHSd, k_BGLd, v_BGLe, scale=scale, sees=sees)


def attend_at(
    q_BHSd: torch.Tensor,
    k_BGLd: torch.Tensor,
    v_BGLe: torch.Tensor,
    place_BS: torch.Tensor,
    *,
    first_BS: torch.Tensor | None = None,
    chosen_BSL: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, H, S, e]: a query sees the keys from `first_BS` (left out: 0) to its own place.

    The query heads that share a key-value head become queries of it, so keys and values are not copied.
    `mask`: that of `mask_at` for these places, where it is there already.
    """
    queries, groups, wide = q_BHSd.shape[2], k_BGLd.shape[1], WIDE[q_BHSd.dtype]
    share = q_BHSd.shape[1] // groups
    if not q_BHSd.numel():
        return q_BHSd.new_empty(*q_BHSd.shape[:3], v_BGLe.shape[3])
    if mask is None:
        mask = mask_at(place_BS, first_BS, k_BGLd.shape[2], share, q_BHSd.dtype)
    if chosen_BSL is not None:
        mask = mask.masked_fill(~for_each(chosen_BSL, share), float("-inf"))
    q_BGQd = q_BHSd.unflatten(1, (groups, share)).flatten(2, 3)
    if not softcap and sinks_H is None:
        out_BGQe = sdpa(q_BGQd, k_BGLd, v_BGLe, scale=scale, sees=mask)
    else:
        factor = q_BHSd.shape[3] ** -0.5 if scale is None else scale
        scores_BGQL = q_BGQd.to(wide) @ k_BGLd.to(wide).transpose(2, 3) * factor
        if softcap:
            scores_BGQL = softcap * torch.tanh(scores_BGQL / softcap)
        scores_BGQL = scores_BGQL + mask.to(wide)
        if sinks_H is not None:
            sinks = sinks_H.to(wide).view(1, groups, share, 1, 1)
            sinks = sinks.expand(len(q_BHSd), -1, -1, queries, -1).flatten(2, 3)
            scores_BGQL = torch.cat([scores_BGQL, sinks], dim=-1)
        weights_BGQL = scores_BGQL.softmax(-1)[..., : k_BGLd.shape[2]]
        out_BGQe = (weights_BGQL @ v_BGLe.to(wide)).to(q_BHSd.dtype)
    return out_BGQe.unflatten(2, (share, queries)).flatten(1, 2)


def mask_at(
    place_BS: torch.Tensor, first_BS: torch.Tensor | None, keys: int, share: int, dtype: torch.dtype
) -> torch.Tensor:
    """What is added to scores, [B, 1, share x S, L]: 0 where a query sees a key, else minus infinity."""
    key_L = torch.arange(keys, device=place_BS.device)
    sees_BSL = key_L <= place_BS[..., None]
    if first_BS is not None:
        sees_BSL = sees_BSL & (key_L >= first_BS[..., None])
    sees = for_each(sees_BSL, share)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))


def for_each(sees_BSL: torch.Tensor, share: int) -> torch.Tensor:
    """Of the query heads that share a key-value head: [B, 1, share x S, L]."""
    return sees_BSL[:, None, None].expand(-1, -1, share, -1, -1).flatten(2, 3)


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    sees: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch's attention: causal, or by a mask."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    grouped = group > 1 and q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    if group > 1 and not grouped:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    causal = sees is None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=sees, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def attend_flex(
    q_BHSd: torch.Tensor,
    k_BGLd: torch.Tensor,
    v_BGLe: torch.Tensor,
    *,
    scale: float | None,
    window: int,
    softcap: float,
    sinks_H: torch.Tensor | None,
    documents_BS: torch.Tensor | None,
) -> torch.Tensor:
    """Block by block on the device; blocks of keys that nobody sees are left out."""
    queries, keys = q_BHSd.shape[2], k_BGLd.shape[2]
    kind: tuple[bool | int, ...]
    if documents_BS is None:
        mask, kind = window_blocks(queries, keys, window, q_BHSd.device), (window, keys - queries)
    else:
        mask, kind = document_blocks(documents_BS, window), (window, 0, True)
    out, log_sum_BHS = flex(q_BHSd, k_BGLd, v_BGLe, mask=mask, kind=kind, softcap=softcap, scale=scale)
    if sinks_H is None:
        return out
    # Of the sum of exponentials with the sink, the keys have this share.
    share = torch.sigmoid(log_sum_BHS - sinks_H.to(log_sum_BHS.dtype)[None, :, None])
    return out * share[..., None].to(out.dtype)
