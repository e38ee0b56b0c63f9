"""Grouped experts as operators that torch knows: for `torch.compile` and its tools.

A compiler cannot look into Triton launches with descriptors, so each operator says what shapes come out
(its *fake*) and what its gradient is. Everything that backward needs is an output; a grouping travels as six
tensors.

    moeclipse::grouped_experts            (out, h, u of an adapter, scores_M, then the grouping)
    moeclipse::grouped_experts_backward   (dx, d_scores, gradients of the weights; empty for what is not there
                                           or not wanted)

Registered without `custom_op`, which looks for shared memory among thirteen inputs and ten outputs in every
call: of 0.6 ms that a layer's forward took of the host, half. `opcheck` looks once, in a test.

Hazard: an operator's outputs must not share memory with its inputs or with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from moeclipse.ops import expert_passes
from moeclipse.ops.activation import Activation
from moeclipse.ops.expert_passes import NAMES, ExpertState, ExpertWeights, in_row_order
from moeclipse.ops.first_order import refuse_second_order
from moeclipse.ops.grouping import Grouping, group_rows, tile_capacity
from moeclipse.ops.precision import WIDE

Tensor = torch.Tensor
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """The operator of a function's name, with the function as what it does on every device."""
    name = f"moeclipse::{function.__name__}"
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", function)
    return cast(Callable[..., Any], getattr(torch.ops.moeclipse, function.__name__).default)


def pack(grouping: Grouping) -> list[torch.Tensor]:
    """A grouping as tensors; one without tiles (plain torch) has empty ones."""
    tiles, num_tiles = grouping.tiles_3C, grouping.num_tiles
    if tiles is None or num_tiles is None:
        tiles, num_tiles = grouping.counts_E.new_empty(3, 0), grouping.counts_E.new_empty(0)
    assert grouping.row_place_M is not None
    assert grouping.row_token_M is not None
    assert grouping.place_row_TK is not None
    tables = [grouping.row_place_M, grouping.row_token_M, grouping.place_row_TK]
    return [grouping.counts_E, grouping.offsets_E1, tiles, num_tiles, *tables]


def unpack(tensors: list[torch.Tensor]) -> Grouping:
    counts_E, offsets_E1, tiles_3C, num_tiles, row_place_M, row_token_M, place_row_TK = tensors
    has_tiles = num_tiles.numel() > 0
    return Grouping(
        num_rows=row_place_M.shape[0],
        counts_E=counts_E,
        offsets_E1=offsets_E1,
        tiles_3C=tiles_3C if has_tiles else None,
        num_tiles=num_tiles if has_tiles else None,
        row_place_M=row_place_M,
        row_token_M=row_token_M,
        place_row_TK=place_row_TK,
    )


@operator
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


@torch.library.register_fake("moeclipse::grouped_experts")
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
        table(num_rows),
        table(num_rows),
        table(*expert_ids_TK.shape),
    )


@operator
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


@torch.library.register_fake("moeclipse::grouped_experts_backward")
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
    refuse_second_order("grouped_experts")
    x_TD, *rest = ctx.saved_tensors
    weights, (h_MH, u_MR, scores_M, *grouping) = rest[: len(NAMES)], rest[len(NAMES) :]
    wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3 : 3 + len(NAMES)]]
    kept = (x_TD, h_MH, u_MR, scores_M, *weights, grouping)
    grads = grouped_experts_backward(d_out_TD, *kept, ctx.activation, ctx.scale, wanted)
    dx_TD, d_scores_TK, *found = grads
    asked = zip(wanted, (x_TD, *weights), (dx_TD, *found), strict=True)
    dx, *given = [grad if want and of is not None else None for want, of, grad in asked]
    return dx, d_scores_TK.to(ctx.scores_dtype), None, *given, None, None


torch.library.register_autograd("moeclipse::grouped_experts", _differentiate, setup_context=_keep)
