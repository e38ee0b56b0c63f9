"""Experts over rows grouped by expert, in as few passes over memory as there are matrix products.

    up         h_m = x W_up_e^T + b_up_e,  a_m = f(h_m)          x_m, or x[index_m] gathered while loading
    down       y_m = a_m W_down_e^T + b_down_e
    d_hidden   dA = dy W_down_e, then dh, score x a and the score gradient, from h alone
    d_rows     dx_m = dh_m W_up_e

Contract: W_up is [E, H, D], W_down [E, D, F]; H is 2F for gated activations (gate rows first), else F;
`grouping` says which rows are whose; biases are optional. Only x and h are needed for backward: a is rebuilt,
y and its gradient are never kept. Rows past the last expert's are not written.

Hazard: widths must be multiples of 8 and rows bf16 or fp16 for the kernels; everything else takes the
reference, which loops over experts and reads counts on the host.
"""

from __future__ import annotations

import warnings

import torch

from moeclipse.ops.activation import GATED, Activation, activate, activate_backward
from moeclipse.ops.bias import add_bias, bias_dots
from moeclipse.ops.grouped_gemm import grouped_mm_reference
from moeclipse.ops.grouping import ROW_TILE, Grouping
from moeclipse.ops.precision import wide_of
from moeclipse.ops.tuning import Tile, delay, device_fits, num_programs, tile_for

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def up_reference(
    x: torch.Tensor,
    up_EHD: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    bias_EH: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x if index_M is None else x[index_M.long()]
    h = add_bias(_products(rows, up_EHD.transpose(1, 2), grouping), bias_EH, grouping)
    return h, activate(h, activation)


def down_reference(
    a_MF: torch.Tensor, down_EDF: torch.Tensor, grouping: Grouping, *, bias_ED: torch.Tensor | None = None
) -> torch.Tensor:
    return add_bias(_products(a_MF, down_EDF.transpose(1, 2), grouping), bias_ED, grouping)


def d_hidden_reference(
    dy: torch.Tensor,
    scores_M: torch.Tensor,
    h_MH: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = dy if index_M is None else dy[index_M.long()]
    d_a = _products(rows, down_EDF, grouping)
    wide = wide_of(dy.dtype)
    scores, d_a = scores_M.to(wide)[:, None], d_a.to(wide)
    d_h, a = activate_backward(d_a * scores, h_MH.to(wide), activation)
    return d_h.to(dy.dtype), (a * scores).to(dy.dtype), (d_a * a).sum(1)


def d_rows_reference(d_h_MH: torch.Tensor, up_EHD: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    return _products(d_h_MH, up_EHD, grouping)


def _products(rows: torch.Tensor, weight_EIO: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    used = sum(counts := grouping.counts_E.tolist())
    out = grouped_mm_reference(rows[:used], weight_EIO, counts)
    if used == len(rows):
        return out
    return torch.cat([out, out.new_zeros(len(rows) - used, out.shape[1])])


def up(
    x: torch.Tensor,
    up_EHD: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    bias_EH: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(h [M, H], a [M, F])."""
    # Both halves of h are addressed by themselves, so each must begin on 16 bytes.
    fits = mlp_fits(x, up_EHD, grouping) and (activation not in GATED or up_EHD.shape[1] % 16 == 0)
    picked = up_kernel if fits else up_reference
    return picked(x, up_EHD, grouping, index_M, activation=activation, bias_EH=bias_EH)


def down(
    a_MF: torch.Tensor, down_EDF: torch.Tensor, grouping: Grouping, *, bias_ED: torch.Tensor | None = None
) -> torch.Tensor:
    """y [M, D], not yet weighted by scores."""
    picked = down_kernel if mlp_fits(a_MF, down_EDF, grouping) else down_reference
    return picked(a_MF, down_EDF, grouping, bias_ED=bias_ED)


def d_hidden(
    dy: torch.Tensor,
    scores_M: torch.Tensor,
    h_MH: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    *,
    activation: Activation = "swiglu",
    bias_ED: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(d_h [M, H], score x a [M, F], d_score [M]) from the gradient of the weighted sum of rows."""
    picked = d_hidden_kernel if mlp_fits(dy, down_EDF, grouping) else d_hidden_reference
    d_h, scaled, d_score = picked(dy, scores_M, h_MH, down_EDF, grouping, index_M, activation=activation)
    if bias_ED is not None:
        d_score = d_score + bias_dots(dy, bias_ED, grouping, index_M)
    return d_h, scaled, d_score


def d_rows(d_h_MH: torch.Tensor, up_EHD: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    """dx [M, D], one for each row."""
    picked = d_rows_kernel if mlp_fits(d_h_MH, up_EHD, grouping) else d_rows_reference
    return picked(d_h_MH, up_EHD, grouping)


def mlp_fits(rows: torch.Tensor, weight: torch.Tensor, grouping: Grouping) -> bool:
    """Whether the kernels take these operands; on CUDA a refusal is told once."""
    if not rows.is_cuda or len(rows) == 0:
        return False
    fits = (
        grouping.tiles_3C is not None
        and rows.dtype in KERNEL_DTYPES
        and weight.dtype == rows.dtype
        and weight.is_contiguous()
        and rows.stride(1) == 1
        and rows.stride(0) % 8 == 0
        and rows.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == 0
        and weight.shape[2] % 8 == 0
        and device_fits(rows.device)
    )
    if not fits:
        warnings.warn(
            f"experts of {rows.dtype} with weights {tuple(weight.shape)} run in plain torch: the kernels take"
            " bf16 and fp16, contiguous, with widths that are multiples of 8, on Hopper GPUs",
            stacklevel=3,
        )
    return fits


def up_kernel(
    x: torch.Tensor,
    up_EHD: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    tile: Tile | None = None,
    *,
    activation: Activation = "swiglu",
    bias_EH: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from triton.tools.ragged_tma import create_ragged_descriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    from moeclipse.ops.triton import expert_forward

    if activation not in GATED:
        return _up_without_gate(x, up_EHD, grouping, index_M, tile, activation, bias_EH)
    D, F = x.shape[1], up_EHD.shape[1] // 2
    tile = tile or tile_for("up", x.device, D, F)
    h = x.new_empty(grouping.num_rows, 2 * F)
    a = x.new_empty(grouping.num_rows, F)
    out_block = [ROW_TILE, tile.n]
    expert_forward.up_gated[(num_programs(tile, x.device),)](
        x if index_M is not None else TensorDescriptor.from_tensor(x, [ROW_TILE, tile.k]), index_M,
        TensorDescriptor.from_tensor(up_EHD.unflatten(1, (2, F)), [1, 2, tile.n, tile.k]), _plain(bias_EH),
        create_ragged_descriptor(h[:, :F], out_block), create_ragged_descriptor(h[:, F:], out_block),
        create_ragged_descriptor(a, out_block),
        grouping.tiles_3C, grouping.num_tiles, _capacity(grouping), x.stride(0), D, F,
        ACT=activation, BIAS=bias_EH is not None,
        GATHER=index_M is not None, EVEN=D % tile.k == 0, FLATTEN=tile.flatten, GROUP=tile.group,
        STAGGER=delay(tile, x.device, _capacity(grouping) * -(-F // tile.n)),
        PROGRAMS=num_programs(tile, x.device), BM=ROW_TILE, BN=tile.n, BK=tile.k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return h, a


def _up_without_gate(
    x: torch.Tensor,
    up_EFD: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None,
    tile: Tile | None,
    activation: Activation,
    bias_EF: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tile = tile or tile_for("up, no gate", x.device, *up_EFD.shape[1:])
    a = x.new_empty(grouping.num_rows, up_EFD.shape[1])
    h = _rows_times_weight(
        x, up_EFD, grouping, tile, transposed=True, index_M=index_M, bias=bias_EF, activation=activation, a=a
    )
    return h, a


def down_kernel(
    a_MF: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    tile: Tile | None = None,
    *,
    bias_ED: torch.Tensor | None = None,
) -> torch.Tensor:
    tile = tile or tile_for("down", a_MF.device, *down_EDF.shape[1:])
    return _rows_times_weight(a_MF, down_EDF, grouping, tile, transposed=True, bias=bias_ED)


def d_rows_kernel(
    d_h_MH: torch.Tensor, up_EHD: torch.Tensor, grouping: Grouping, tile: Tile | None = None
) -> torch.Tensor:
    tile = tile or tile_for("d_rows", d_h_MH.device, *up_EHD.shape[1:])
    return _rows_times_weight(d_h_MH, up_EHD, grouping, tile, transposed=False)


def d_hidden_kernel(
    dy: torch.Tensor,
    scores_M: torch.Tensor,
    h_MH: torch.Tensor,
    down_EDF: torch.Tensor,
    grouping: Grouping,
    index_M: torch.Tensor | None = None,
    tile: Tile | None = None,
    *,
    activation: Activation = "swiglu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The product, then one pass that turns dA into score x a where it lies: no buffer for dA alone."""
    from moeclipse.ops.triton import expert_backward

    F = down_EDF.shape[2]
    tile = tile or tile_for("d_hidden", dy.device, *down_EDF.shape[1:])
    d_a_scaled = _rows_times_weight(dy, down_EDF, grouping, tile, transposed=False, index_M=index_M)
    d_h = torch.empty_like(h_MH)
    d_score = dy.new_empty(grouping.num_rows, dtype=torch.float32)
    block_f = min(1024, 1 << (F - 1).bit_length())
    block_m = max(1, 2048 // block_f)
    expert_backward.activation_backward[(-(-grouping.num_rows // block_m),)](
        d_a_scaled, h_MH, scores_M.contiguous(), d_h, d_score, grouping.offsets_E1, len(grouping.counts_E), F,
        ACT=activation, GATED=activation in GATED, BLOCK_M=block_m, BLOCK_F=block_f, num_warps=8,
    )  # fmt: skip
    return d_h, d_a_scaled, d_score


def _rows_times_weight(
    rows: torch.Tensor,
    weight: torch.Tensor,
    grouping: Grouping,
    tile: Tile,
    *,
    transposed: bool,
    index_M: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: Activation | None = None,
    a: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product; with an activation, its value goes to `a` on the way."""
    from triton.tools.ragged_tma import create_ragged_descriptor
    from triton.tools.tensor_descriptor import TensorDescriptor

    from moeclipse.ops.triton import expert_forward

    K, N = rows.shape[1], weight.shape[1 if transposed else 2]
    out = rows.new_empty(grouping.num_rows, N)
    if transposed:
        w = TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.n, tile.k])
    else:
        w = TensorDescriptor.from_tensor(weight, [1, tile.k, tile.n])
    gather, piece = index_M is not None, [ROW_TILE, tile.n // tile.split]
    expert_forward.rows_times_weight[(num_programs(tile, rows.device),)](
        rows if gather else TensorDescriptor.from_tensor(rows, [ROW_TILE, tile.k]), index_M, w, _plain(bias),
        create_ragged_descriptor(out, piece), None if a is None else create_ragged_descriptor(a, piece),
        grouping.tiles_3C, grouping.num_tiles, _capacity(grouping), rows.stride(0), K, N,
        ACT=activation or "none", BIAS=bias is not None,
        GATHER=gather, EVEN=K % tile.k == 0, TRANSPOSED=transposed, FLATTEN=tile.flatten, GROUP=tile.group,
        STAGGER=delay(tile, rows.device, _capacity(grouping) * -(-N // tile.n)),
        PROGRAMS=num_programs(tile, rows.device), BM=ROW_TILE, BN=tile.n, BK=tile.k, SPLIT=tile.split,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _plain(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.contiguous()


def _capacity(grouping: Grouping) -> int:
    assert grouping.tiles_3C is not None
    return grouping.tiles_3C.shape[1]
