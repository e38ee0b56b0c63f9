"""Each token's k largest logits, and the softmax over them: a gate in one pass.

    scores_TK, ids_TK = topk_softmax(logits_TE, k)        scores in fp32 (fp64 for fp64 logits), ids int32

Contract: ids descend by logit, equal logits by ascending id; scores sum to one; differentiable in the logits.
Inside `torch.compile` the call is the registered operator `moeclipse::topk_softmax`.
Hazard: NaN logits choose no expert that exists; find them before the gate does.
"""

from __future__ import annotations

from typing import Any

import torch

from moeclipse.ops.first_order import first_order
from moeclipse.ops.launch import launch
from moeclipse.ops.precision import WIDE


def topk_softmax_reference(logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = WIDE[logits_TE.dtype]
    # A stable sort, because topk does not say which of two equal logits comes first.
    values_TE, ids_TE = logits_TE.to(wide).sort(dim=1, descending=True, stable=True)
    return values_TE[:, :k].softmax(1), ids_TE[:, :k].to(torch.int32)


def topk_softmax(logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not gate_fits(logits_TE, k):
        return topk_softmax_reference(logits_TE, k)
    if torch.compiler.is_compiling():
        return topk_softmax_operator(logits_TE, k)
    return _TopkSoftmax.apply(logits_TE, k)


def gate_fits(logits_TE: torch.Tensor, k: int) -> bool:
    return logits_TE.is_cuda and logits_TE.numel() > 0 and logits_TE.dtype != torch.float64 and k <= 32


class _TopkSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores_TK, ids_TK = topk_softmax_kernel(logits_TE, k)
        ctx.save_for_backward(scores_TK, ids_TK)
        ctx.shape, ctx.dtype = logits_TE.shape, logits_TE.dtype
        ctx.mark_non_differentiable(ids_TK)
        return scores_TK, ids_TK

    @staticmethod
    @first_order
    def backward(ctx: Any, d_scores_TK: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        scores_TK, ids_TK = ctx.saved_tensors
        return topk_softmax_backward_kernel(scores_TK, ids_TK, d_scores_TK, ctx.shape[1], ctx.dtype), None


def topk_softmax_kernel(logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    from moeclipse.ops.triton import topk

    num_tokens, num_experts = logits_TE.shape
    scores_TK = logits_TE.new_empty(num_tokens, k, dtype=torch.float32)
    ids_TK = logits_TE.new_empty(num_tokens, k, dtype=torch.int32)
    sizes = _sizes(num_experts, k)
    operands = (logits_TE.contiguous(), scores_TK, ids_TK, num_tokens, num_experts)
    launch(topk.topk_softmax, (-(-num_tokens // sizes["BLOCK"]),), *operands, **sizes)
    return scores_TK, ids_TK


def topk_softmax_backward_kernel(
    scores_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    d_scores_TK: torch.Tensor,
    num_experts: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    from moeclipse.ops.triton import topk

    num_tokens, k = scores_TK.shape
    d_logits_TE = scores_TK.new_empty(num_tokens, num_experts, dtype=dtype)
    sizes = _sizes(num_experts, k)
    operands = (scores_TK, ids_TK, d_scores_TK.contiguous(), d_logits_TE, num_tokens, num_experts)
    launch(topk.topk_softmax_backward, (-(-num_tokens // sizes["BLOCK"]),), *operands, **sizes)
    return d_logits_TE


def _sizes(num_experts: int, k: int) -> dict[str, int]:
    padded = 1 << (num_experts - 1).bit_length()
    block = max(1, 2048 // padded)
    return {"K": k, "K_PADDED": 1 << (k - 1).bit_length(), "E_PADDED": padded, "BLOCK": block}


@torch.library.custom_op("moeclipse::topk_softmax", mutates_args=())
def topk_softmax_operator(logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (topk_softmax_kernel if gate_fits(logits_TE, k) else topk_softmax_reference)(logits_TE, k)


@topk_softmax_operator.register_fake
def _(logits_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = WIDE[logits_TE.dtype]
    shape = (logits_TE.shape[0], k)
    return logits_TE.new_empty(shape, dtype=wide), logits_TE.new_empty(shape, dtype=torch.int32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.num_experts, ctx.dtype = inputs[0].shape[1], inputs[0].dtype


def _differentiate(ctx: Any, d_scores_TK: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
    """In plain operations, which a compiler fuses by itself."""
    scores_TK, ids_TK = ctx.saved_tensors
    d_logits_TK = scores_TK * (d_scores_TK - (scores_TK * d_scores_TK).sum(1, keepdim=True))
    d_logits_TE = d_logits_TK.new_zeros(len(ids_TK), ctx.num_experts)
    return d_logits_TE.scatter(1, ids_TK.long(), d_logits_TK).to(ctx.dtype), None


topk_softmax_operator.register_autograd(_differentiate, setup_context=_keep)
