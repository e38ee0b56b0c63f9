"""Grouped experts as operators that torch knows: for `torch.compile` and its tools.

A compiler cannot look into Triton launches with descriptors, so each operator says what shapes come out
(its *fake*) and what its gradient is. Everything that backward needs is an output; a grouping travels as six
tensors.

    moeclipse::grouped_experts            (out, h, u of an adapter, scores_M, then the grouping)
    moeclipse::grouped_experts_backward   (dx, d_scores, gradients of the weights; empty for what is not there
                                           or not wanted)

Hazard: an operator's outputs must not share memory with its inputs or with each other, so views are cloned.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from moeclipse.ops import expert_passes
from moeclipse.ops.activation import Activation
from moeclipse.ops.expert_passes import NAMES, ExpertState, ExpertWeights, in_row_order
from moeclipse.ops.grouping import Grouping, group_rows, tile_capacity
from moeclipse.ops.precision import WIDE

Tensor = torch.Tensor
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def pack(grouping: Grouping) -> list[torch.Tensor]:
    """A grouping as tensors; one without tiles (plain torch) has empty ones."""
    tiles, num_tiles = grouping.tiles_3C, grouping.num_tiles
    if tiles is None or num_tiles is None:
        tiles, num_tiles = grouping.counts_E.new_empty(3, 0), grouping.counts_E.new_empty(0)
    assert grouping.row_place_M is not None
    assert grouping.row_token_M is not None
    assert grouping.place_row_TK is not None
    tables_2M = grouping.tables_2M
    if tables_2M is None:
        tables_2M = torch.stack([grouping.row_place_M, grouping.row_token_M])
    return [grouping.counts_E, grouping.offsets_E1, tiles, num_tiles, tables_2M, grouping.place_row_TK]


def unpack(tensors: list[torch.Tensor]) -> Grouping:
    counts_E, offsets_E1, tiles_3C, num_tiles, tables_2M, place_row_TK = tensors
    has_tiles = num_tiles.numel() > 0
    return Grouping(
        num_rows=tables_2M.shape[1],
        counts_E=counts_E,
        offsets_E1=offsets_E1,
        tiles_3C=tiles_3C if has_tiles else None,
        num_tiles=num_tiles if has_tiles else None,
        row_place_M=tables_2M[0],
        row_token_M=tables_2M[1],
        place_row_TK=place_row_TK,
    )


@torch.library.custom_op("moeclipse::grouped_experts", mutates_args=())
def grouped_experts(
    x_TD: Tensor,
    scores_TK: Tensor,
    expert_ids_TK: Tensor,
    up_EHD: Tensor,
    down_EDF: Tensor,
    up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    up_a_ERD: Tensor | None,
    up_b_EHR: Tensor | None,
    down_a_ERF: Tensor | None,
    down_b_EDR: Tensor | None,
    activation: str,
    scale: float,
) -> Outputs:
    adapters = (up_a_ERD, up_b_EHR, down_a_ERF, down_b_EDR)
    weights = ExpertWeights.of((up_EHD, down_EDF, up_bias_EH, down_bias_ED, *adapters), scale=scale)
    grouping = group_rows(expert_ids_TK, len(up_EHD))
    scores_M, kind = in_row_order(scores_TK, grouping), cast(Activation, activation)
    out_TD, state = expert_passes.forward(x_TD, scores_M, weights, grouping, kind)
    u_MR = x_TD.new_empty(0, 0) if state.u_MR is None else state.u_MR
    return cast(Outputs, (out_TD, state.h_MH, u_MR, scores_M, *pack(grouping)))


@grouped_experts.register_fake
def _(x_TD: Tensor, scores_TK: Tensor, expert_ids_TK: Tensor, *rest: Any) -> Outputs:
    *weights, _activation, scale = rest
    given = ExpertWeights.of(weights, scale=scale)
    num_experts, H = given.up_EHD.shape[:2]
    num_rows, cuda = expert_ids_TK.numel(), x_TD.is_cuda
    wide = WIDE[scores_TK.dtype]

    def table(*shape: Any) -> Tensor:
        return x_TD.new_empty(shape, dtype=torch.int32)

    return (
        x_TD.new_empty(x_TD.shape),
        x_TD.new_empty(num_rows, H),
        x_TD.new_empty(*((0, 0) if (up := given.up_adapter) is None else (num_rows, up.a_ERK.shape[1]))),
        x_TD.new_empty(num_rows, dtype=wide),
        table(num_experts),
        table(num_experts + 1),
        table(3, tile_capacity(num_rows, num_experts) if cuda else 0),
        table(1 if cuda else 0),
        table(2, num_rows),
        table(*expert_ids_TK.shape),
    )


@torch.library.custom_op("moeclipse::grouped_experts_backward", mutates_args=())
def grouped_experts_backward(
    d_out_TD: Tensor,
    x_TD: Tensor,
    h_MH: Tensor,
    u_MR: Tensor,
    scores_M: Tensor,
    up_EHD: Tensor,
    down_EDF: Tensor,
    up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    up_a_ERD: Tensor | None,
    up_b_EHR: Tensor | None,
    down_a_ERF: Tensor | None,
    down_b_EDR: Tensor | None,
    grouping: list[Tensor],
    activation: str,
    scale: float,
    wanted: list[bool],
) -> Gradients:
    """`wanted`: dx, then the weights in their order."""
    adapters = (up_a_ERD, up_b_EHR, down_a_ERF, down_b_EDR)
    weights = ExpertWeights.of((up_EHD, down_EDF, up_bias_EH, down_bias_ED, *adapters), scale=scale)
    grads, kind = weights.empty_grads(wanted[1:]), cast(Activation, activation)
    state = ExpertState(
        x_TD=x_TD,
        h_MH=h_MH,
        u_MR=u_MR if u_MR.numel() else None,
        scores_M=scores_M,
        grouping=unpack(grouping),
        activation=kind,
    )
    how = {"accumulate": False, "d_x": wanted[0]}
    dx_TD, d_scores_TK = expert_passes.backward(d_out_TD, state, weights, grads, **how)
    found = [x_TD.new_empty(0) if grad is None else grad for grad in (dx_TD, *grads.tensors())]
    return cast(Gradients, (found[0], d_scores_TK, *found[1:]))


@grouped_experts_backward.register_fake
def _(_d_out: Tensor, x_TD: Tensor, _h: Tensor, _u: Tensor, scores_M: Tensor, *rest: Any) -> Gradients:
    *weights, grouping, _activation, _scale, wanted = rest
    d_scores_TK = scores_M.new_empty(grouping[-1].shape)
    asked = zip((x_TD, *weights), wanted, strict=True)
    found = [torch.empty_like(t) if t is not None and want else x_TD.new_empty(0) for t, want in asked]
    return cast(Gradients, (found[0], d_scores_TK, *found[1:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x_TD, scores_TK, _, *weights, activation, scale = inputs
    ctx.save_for_backward(x_TD, *weights, *output[1:])
    ctx.activation, ctx.scale, ctx.scores_dtype = activation, scale, scores_TK.dtype


def _differentiate(ctx: Any, d_out_TD: Tensor, *_: Any) -> tuple[Any, ...]:
    x_TD, *rest = ctx.saved_tensors
    weights, (h_MH, u_MR, scores_M, *grouping) = rest[: len(NAMES)], rest[len(NAMES) :]
    wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3 : 3 + len(NAMES)]]
    kept = (x_TD, h_MH, u_MR, scores_M, *weights, grouping)
    grads = grouped_experts_backward(d_out_TD, *kept, ctx.activation, ctx.scale, wanted)
    dx_TD, d_scores_TK, *found = grads
    asked = zip(wanted, (x_TD, *weights), (dx_TD, *found), strict=True)
    dx, *given = [grad if want and of is not None else None for want, of, grad in asked]
    return dx, d_scores_TK.to(ctx.scores_dtype), None, *given, None, None


grouped_experts.register_autograd(_differentiate, setup_context=_keep)
