"""The gated delta rule: a state that each token reads, after it has made it forget and written to it.

    S <- a_t S                            a_t = exp(log_decay_t), one for a head or one for each key component
    S <- S + b_t k_t (v_t - S^T k_t)^T    what is written is how far v is from what the state has for k
    o_t = S^T q_t / sqrt(K)

q and k are made unit vectors first. The chunked form takes C tokens at once. With g the sum of log decays
from the chunk's beginning, D_ij = exp(g_i - g_j) for i >= j, and S the state before the chunk:

    A = strictly lower (b K K^T * D)      U = (1 + A)^-1 b V       W = (1 + A)^-1 b K exp(g)
    N = U - W S                           what the tokens of the chunk write
    O = (Q exp(g)) S + lower (Q K^T * D) N
    S' = exp(g_C) S + (K exp(g_C - g))^T N

Shapes: B samples, S positions, H heads of values, G of keys (each for H / G neighbours), K components of a
key, V of a value; log decays are [B, S, H], or [B, S, H, K].

Contract. `begins_BS` marks tokens before which the state is empty: documents begin there. A token with b = 0
and a log decay of 0 leaves the state as it was. All is computed in fp32 (fp64 for fp64).
With the extra `fla` half types on CUDA go through the kernels of flash-linear-attention, where no state is
given or wanted (`states_read`); everything else is the chunked form.
Hazard. A chunk with decays for each component has a [C, C, K] tensor in memory: such chunks are shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from moeclipse.ops.precision import WIDE

CHUNK, CHUNK_BY_COMPONENT = 64, 16
TINY = 1e-6
"""Added to a sum of squares that is divided by."""


def unit(x: torch.Tensor) -> torch.Tensor:
    """Of length 1 along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + TINY)


def delta_rule_reference(
    q_BSGK: torch.Tensor,
    k_BSGK: torch.Tensor,
    v_BSHV: torch.Tensor,
    log_decay: torch.Tensor,
    beta_BSH: torch.Tensor,
    *,
    state_BHKV: torch.Tensor | None = None,
    begins_BS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token: (what they read, the state behind the last)."""
    q, k, v, log_decay, beta, state = _prepared(q_BSGK, k_BSGK, v_BSHV, log_decay, beta_BSH, state_BHKV)
    found = []
    for t in range(v.shape[2]):
        if begins_BS is not None:
            state = state.masked_fill(begins_BS[:, t, None, None, None], 0.0)
        state = state * log_decay[:, :, t, :, None].exp()
        key = k[:, :, t, :, None]
        delta = (v[:, :, t] - (state * key).sum(-2)) * beta[:, :, t, None]
        state = state + key * delta[:, :, None]
        found.append((state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(found, dim=1).to(v_BSHV.dtype), state


def delta_rule(
    q_BSGK: torch.Tensor,
    k_BSGK: torch.Tensor,
    v_BSHV: torch.Tensor,
    log_decay: torch.Tensor,
    beta_BSH: torch.Tensor,
    *,
    state_BHKV: torch.Tensor | None = None,
    begins_BS: torch.Tensor | None = None,
    chunk: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, `chunk` tokens at once; 0: as many as usual."""
    chunk = chunk or (CHUNK if log_decay.dim() == 3 else CHUNK_BY_COMPONENT)
    q, k, v, log_decay, beta, state = _prepared(q_BSGK, k_BSGK, v_BSHV, log_decay, beta_BSH, state_BHKV)
    found, length = [], v.shape[2]
    for first in range(0, length, chunk):
        here = slice(first, min(first + chunk, length))
        begins_BC = None if begins_BS is None else begins_BS[:, here]
        rows = (x[:, :, here] for x in (q, k, v, log_decay, beta))
        read, state = _chunk(rows, state, begins_BC)
        found.append(read)
    out = torch.cat(found, dim=2) if found else v
    return out.transpose(1, 2).to(v_BSHV.dtype), state


def states_read(
    q_BSGK: torch.Tensor,
    k_BSGK: torch.Tensor,
    v_BSHV: torch.Tensor,
    log_decay: torch.Tensor,
    beta_BSH: torch.Tensor,
    begins_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """What tokens read where states begin empty, and nobody wants them behind the last token."""
    if not fla_fits(v_BSHV):
        return delta_rule(q_BSGK, k_BSGK, v_BSHV, log_decay, beta_BSH, begins_BS=begins_BS)[0]
    shape = v_BSHV.shape
    rows = [q_BSGK, k_BSGK, v_BSHV, log_decay, beta_BSH]
    given: dict[str, Any] = {}
    if begins_BS is not None:  # all documents in one row, by where they begin
        begins = begins_BS.clone()
        begins[:, 0] = True
        rows = [x.flatten(0, 1)[None] for x in rows]
        edges = begins.flatten().nonzero().flatten()
        given["cu_seqlens"] = torch.cat([edges, edges.new_tensor([begins.numel()])])
    return fla_kernel(by_component=log_decay.dim() == 4)(
        **dict(zip(("q", "k", "v", "g", "beta"), rows, strict=True)), use_qk_l2norm_in_kernel=True, **given
    )[0].view(shape)


def fla_fits(v_BSHV: torch.Tensor) -> bool:
    half = v_BSHV.dtype in (torch.bfloat16, torch.float16)
    return v_BSHV.is_cuda and half and v_BSHV.numel() > 0 and find_spec("fla") is not None


def fla_kernel(*, by_component: bool) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Of flash-linear-attention; imported where it is needed: it looks for devices."""
    module, name = ("kda", "chunk_kda") if by_component else ("gated_delta_rule", "chunk_gated_delta_rule")
    found: Callable[..., tuple[torch.Tensor, Any]] = getattr(import_module(f"fla.ops.{module}"), name)
    return found


def _prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads first, [B, H, S, ...], in the wide type; decays have components, or one for all of them."""
    wide, share = WIDE[v.dtype], v.shape[2] // k.shape[2]
    q, k, v, log_decay, beta = (x.to(wide).transpose(1, 2) for x in (q, k, v, log_decay, beta))
    q, k = (unit(x).repeat_interleave(share, dim=1) for x in (q, k))
    if state is None:
        state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    log_decay = log_decay if log_decay.dim() == 4 else log_decay[..., None]
    return q * q.shape[-1] ** -0.5, k, v, log_decay, beta, state.to(wide)


def _chunk(
    rows: Iterable[torch.Tensor], state: torch.Tensor, begins_BC: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, log_decay, beta = rows
    size = q.shape[2]
    sum_BHCK = log_decay.cumsum(2)
    sees = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    carried = kept = torch.ones((), device=q.device, dtype=q.dtype)
    if begins_BC is not None:
        run_BC = begins_BC.cumsum(1)
        sees = sees & (run_BC[:, :, None] == run_BC[:, None, :])[:, None]
        carried = (run_BC == 0)[:, None, :, None].to(q.dtype)  # reads the state before the chunk
        kept = (run_BC == run_BC[:, -1:])[:, None, :, None].to(q.dtype)  # is in the state behind it
    k_beta = k * beta[..., None]
    wrote, scores = _products(k_beta, q, k, sum_BHCK, sees)
    old = sum_BHCK.exp() * carried
    system = wrote.tril(-1)  # with ones on its diagonal, which nobody reads
    solved = torch.linalg.solve_triangular(
        system, torch.cat([v * beta[..., None], k_beta * old], dim=-1), upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    new = u - w @ state
    out = (q * old) @ state + scores @ new
    to_end = (sum_BHCK[:, :, -1:] - sum_BHCK).exp() * kept
    forgets = old[:, :, -1, :, None]
    return out, state * forgets + (k * to_end).transpose(2, 3) @ new


def _products(
    k_beta: torch.Tensor, q: torch.Tensor, k: torch.Tensor, sums: torch.Tensor, sees: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """b k_i . k_j and q_i . k_j with decay from j to i, for those that see each other: [B, H, C, C]."""
    apart = sums[:, :, :, None] - sums[:, :, None]  # masked before exp: what lies ahead would overflow
    decay = apart.masked_fill(~sees[..., None], float("-inf")).exp()
    if decay.shape[-1] == 1:
        return (k_beta @ k.transpose(2, 3)) * decay[..., 0], (q @ k.transpose(2, 3)) * decay[..., 0]
    keys = k[:, :, None] * decay
    return (k_beta[:, :, :, None] * keys).sum(-1), (q[:, :, :, None] * keys).sum(-1)
