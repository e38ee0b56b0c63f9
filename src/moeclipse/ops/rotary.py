"""Rotary positions of queries and keys in one launch, behind norms of their heads where a model has them.

    z = x                        or   x s w,   s = 1 / sqrt(mean(x^2) + eps) of each head
    out = (z1 cos - z2 sin, z2 cos + z1 sin)          for each pair of components (z1, z2)

    backward    dz = (d1 cos + d2 sin, d2 cos - d1 sin), then that of the norm

Shapes: B samples, S positions, H query heads, G key heads, d components of a head, P = d / 2 pairs.
`table_2RP` holds cos and sin for R = S positions, or for R = B S tokens where samples differ. A pair is
component i of the first and of the second half, or two `neighbours`.

Contract. Outputs are as the linears leave them, [B, S, heads, d]; `transpose` makes heads of them without a
copy. Nothing is kept for backward without norms, and x with them. Kernels take bf16, fp16 and fp32 on CUDA,
all components turning; everything else is the reference.
"""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.ops.first_order import first_order
from moeclipse.ops.norm import rms_norm_reference
from moeclipse.ops.precision import WIDE
from moeclipse.ops.sum_parts import Place, weight_grad_of_parts

Norms = tuple[torch.Tensor, torch.Tensor] | None
Places = tuple[Place | None, Place | None]
PROGRAMS = 512
"""Of the backward with norms, for queries and for keys: each adds up a row of dw."""
WIDEST = 512
"""Components of a head."""


def turn_reference(
    x_BSHd: torch.Tensor,
    table_2RP: torch.Tensor,
    neighbours: bool = False,
    weight_d: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    if weight_d is not None:
        x_BSHd = rms_norm_reference(x_BSHd, weight_d, eps)
    # In memory heads come before positions: plain attention reads each of them as one block.
    table_2BHSP = table_2RP.unflatten(1, (-1, x_BSHd.shape[1]))[:, :, None]
    return rotate(x_BSHd.transpose(1, 2), table_2BHSP, neighbours).transpose(1, 2)


def rotate(x: torch.Tensor, table: torch.Tensor, neighbours: bool = False) -> torch.Tensor:
    """Turn pairs of components by angles that fit x; components behind the table's width stay as they are."""
    width, wide = 2 * table.shape[-1], WIDE[x.dtype]
    if width < x.shape[-1]:
        turning, rest = x.split([width, x.shape[-1] - width], dim=-1)
        return torch.cat([rotate(turning, table, neighbours), rest], dim=-1)
    cos, sin = table.to(wide)
    if neighbours:
        first, second = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
        return turned.to(x.dtype)
    first, second = x.to(wide).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def turn(
    q_BSHd: torch.Tensor,
    k_BSGd: torch.Tensor,
    table_2RP: torch.Tensor,
    neighbours: bool = False,
    norms: Norms = None,
    eps: float = 0.0,
    places: Places = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, turned; `norms` are the weights of their norms, `places` those of their gradients."""
    if turn_fits(q_BSHd, k_BSGd, table_2RP, norms):
        q, k = _Turn.apply(q_BSHd, k_BSGd, *(norms or (None, None)), table_2RP, neighbours, eps, places)
        return q, k
    q_weight, k_weight = norms or (None, None)
    q = turn_reference(q_BSHd, table_2RP, neighbours, q_weight, eps)
    return q, turn_reference(k_BSGd, table_2RP, neighbours, k_weight, eps)


def turn_fits(q: torch.Tensor, k: torch.Tensor, table_2RP: torch.Tensor, norms: Norms) -> bool:
    return (
        q.is_cuda
        and q.numel() > 0
        and q.dtype == k.dtype
        and q.dtype.itemsize < 8
        and 2 * table_2RP.shape[-1] == q.shape[-1] <= WIDEST
        and (norms is None or all(weight.dtype == q.dtype for weight in norms))
        and not torch.compiler.is_compiling()
    )


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        table_2RP: torch.Tensor,
        neighbours: bool,
        eps: float,
        places: Places,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.neighbours, ctx.eps, ctx.places = neighbours, eps, places
        ctx.save_for_backward(table_2RP, *(() if q_weight is None else (q, k, q_weight, k_weight)))
        return turn_kernel((q, k), (q_weight, k_weight), table_2RP, neighbours, eps)

    @staticmethod
    @first_order
    def backward(ctx: Any, *d_outs: torch.Tensor) -> tuple[Any, ...]:
        table_2RP, *kept = ctx.saved_tensors
        if not kept:
            return (
                *turn_kernel(d_outs, (None, None), table_2RP, ctx.neighbours, ctx.eps, back=True),
                *[None] * 6,
            )
        q, k, *weights = kept
        grads = turn_backward_kernel(d_outs, (q, k), weights, table_2RP, ctx.neighbours, ctx.eps)
        wanted = ctx.needs_input_grad[2:4]
        d_weights = [
            weight_grad_of_parts(parts, weight, place) if asked else None
            for parts, weight, place, asked in zip(grads[2:], weights, ctx.places, wanted, strict=True)
        ]
        return (*grads[:2], *d_weights, None, None, None, None)


def turn_kernel(
    tensors: Any,
    weights: Any,
    table_2RP: torch.Tensor,
    neighbours: bool,
    eps: float,
    *,
    back: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors turned; `back`: by the opposite angles, which is the gradient."""
    from moeclipse.ops.triton import rotary

    q, k = (_whole_heads(tensor) for tensor in tensors)
    table_2RP, launch = table_2RP.to(torch.float32).contiguous(), _launch(q.shape[3], neighbours)
    outs = q.new_empty(q.shape), k.new_empty(k.shape)
    blocks = [-(-tensor.shape[:3].numel() // launch["ROWS"]) for tensor in (q, k)]
    rotary.turn[(sum(blocks),)](
        q, *q.stride()[:3], q.shape[2], k, *k.stride()[:3], k.shape[2], *outs, *weights, table_2RP,
        q.shape[0] * q.shape[1], q.shape[1], table_2RP.shape[1], q.shape[3], blocks[0], eps,
        NORM=weights[0] is not None, BACK=back, **launch,
    )  # fmt: skip
    return outs


def turn_backward_kernel(
    d_outs: Any, tensors: Any, weights: Any, table_2RP: torch.Tensor, neighbours: bool, eps: float
) -> list[torch.Tensor]:
    """dq, dk and the gradients of both norms' weights, in parts."""
    from moeclipse.ops.triton import rotary

    table_2RP = table_2RP.to(torch.float32).contiguous()
    d_xs, d_weights = [], []  # the latter in parts
    for d_out, x, weight in zip(d_outs, tensors, weights, strict=True):
        d_out, x = _whole_heads(d_out), _whole_heads(x)
        width, launch = x.shape[3], _launch(x.shape[3], neighbours)
        programs = max(1, min(PROGRAMS, -(-x.shape[:3].numel() // launch["ROWS"])))
        d_x, parts_Pd = x.new_empty(x.shape), x.new_empty(programs, width, dtype=torch.float32)
        rotary.turn_norm_backward[(programs,)](
            d_out, *d_out.stride()[:3], x, *x.stride()[:3], d_x, weight, parts_Pd, table_2RP,
            x.shape[0] * x.shape[1], x.shape[1], x.shape[2], table_2RP.shape[1], width, programs, eps,
            **launch,
        )  # fmt: skip
        d_xs.append(d_x)
        d_weights.append(parts_Pd)
    return d_xs + d_weights


def _whole_heads(x_BSHd: torch.Tensor) -> torch.Tensor:
    return x_BSHd if x_BSHd.stride(3) == 1 else x_BSHd.contiguous()


def _launch(width: int, neighbours: bool) -> dict[str, Any]:
    half = 1 << max(width // 2 - 1, 1).bit_length()
    return {"NEIGHBOURS": neighbours, "ROWS": max(1, 1024 // half), "HALF": half, "num_warps": 4}
