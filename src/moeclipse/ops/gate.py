"""A gate in two kernels beside its products: which experts a token visits, their gate weights, and the sums
that losses need.

    chosen = gate(x_TD, weight_ED, bias_E, k, ...)
    logits    x w^T, in fp32, and a bias of their own where the router has one
    p         softmax or sigmoid of the logits
    ids       the k largest of p + bias; the bias steers the choice and never the score
    scores    p of those, divided by their sum or not, times `scale`
    load_E    tokens of each expert;  prob_E   sum over tokens of p (of sigmoids: divided by their sum)
    squares   sum over tokens of logsumexp(logits)^2

Contract. `gate` equals `gate_reference`, gradients of x and w included; gradients reach w through its
main_grad, where it has one. Two runs give the same bits. Kernels take x and w in bf16 on CUDA; products of
such numbers are exact in fp32, so tensor cores lose nothing: the gradient of the logits, which is fp32, goes
in as a sum of three bf16 numbers, of 24 bits together.

Hazard: NaN logits choose some experts, inside the bounds, with scores that are NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from moeclipse.ops.first_order import first_order
from moeclipse.ops.precision import WIDE
from moeclipse.ops.sum_parts import Place, weight_grad_of_parts

MOST_EXPERTS, MOST_CHOICES = 1024, 32


class Chosen(NamedTuple):
    scores_TK: torch.Tensor
    ids_TK: torch.Tensor
    load_E: torch.Tensor
    prob_E: torch.Tensor
    squares: torch.Tensor


class GateKind(NamedTuple):
    """How logits become scores."""

    k: int
    sigmoid: bool = False
    renormalise: bool = True
    scale: float = 1.0


def gate_reference(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    bias_E: torch.Tensor,
    kind: GateKind,
    logit_bias_E: torch.Tensor | None = None,
) -> Chosen:
    wide = WIDE[x_TD.dtype]
    more_E = None if logit_bias_E is None else logit_bias_E.to(wide)
    logits_TE = F.linear(x_TD.to(wide), weight_ED.to(wide), more_E)
    p_TE = logits_TE.sigmoid() if kind.sigmoid else logits_TE.softmax(-1)
    wanted_TE = (p_TE + bias_E).detach()
    # A stable sort, because topk does not say which of two equal ones comes first.
    ids_TK = wanted_TE.sort(dim=1, descending=True, stable=True).indices[:, : kind.k]
    scores_TK = p_TE.gather(1, ids_TK)
    if kind.renormalise:
        total = scores_TK.sum(-1, keepdim=True) + 1e-20
        # p / p: its gradient is zero, not what rounding leaves of it.
        scores_TK = 0 * scores_TK + 1 if kind.k == 1 else scores_TK / total
    share_TE = p_TE / p_TE.sum(-1, keepdim=True) if kind.sigmoid else p_TE
    load_E = F.one_hot(ids_TK, len(weight_ED)).sum((0, 1))
    squares = logits_TE.logsumexp(-1).square().sum()
    return Chosen(scores_TK * kind.scale, ids_TK, load_E, share_TE.sum(0), squares)


def gate(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    bias_E: torch.Tensor,
    kind: GateKind,
    place: Place | None = None,
    logit_bias_E: torch.Tensor | None = None,
) -> Chosen:
    """The weight's gradient goes to its `place`; left out: autograd gets it."""
    if not gate_fits(x_TD, weight_ED, kind.k):
        return gate_reference(x_TD, weight_ED, bias_E, kind, logit_bias_E)
    return Chosen(*_Gate.apply(x_TD, weight_ED, bias_E, kind, place, logit_bias_E))


def gate_fits(x_TD: torch.Tensor, weight_ED: torch.Tensor, k: int) -> bool:
    return (
        x_TD.is_cuda
        and len(x_TD) > 0
        and x_TD.dtype == weight_ED.dtype == torch.bfloat16
        and len(weight_ED) <= MOST_EXPERTS
        and k <= MOST_CHOICES
        and not torch.compiler.is_compiling()
    )


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_ED: torch.Tensor,
        bias_E: torch.Tensor,
        kind: GateKind,
        place: Place | None,
        logit_bias_E: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        logits_TE = torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
        if logit_bias_E is not None:
            logits_TE += logit_bias_E
        chosen = choose_kernel(logits_TE, bias_E, kind)
        ctx.save_for_backward(x_TD, weight_ED, logits_TE, chosen.ids_TK)
        ctx.kind, ctx.place = kind, place
        ctx.bias_dtype = None if logit_bias_E is None else logit_bias_E.dtype
        ctx.mark_non_differentiable(chosen.ids_TK, chosen.load_E)
        ctx.set_materialize_grads(False)
        return tuple(chosen)

    @staticmethod
    @first_order
    def backward(ctx: Any, d_scores_TK: Any, _ids: Any, _load: Any, d_prob_E: Any, d_squares: Any) -> Any:
        x_TD, weight_ED, logits_TE, ids_TK = ctx.saved_tensors
        grads = (d_scores_TK, d_prob_E, d_squares)
        pieces = choose_backward_kernel(logits_TE, ids_TK, *grads, ctx.kind, x_TD.dtype)
        d_x, d_weight, d_bias = None, None, None
        if ctx.needs_input_grad[0]:
            d_x = pieces @ weight_ED.repeat(3, 1)
        if ctx.needs_input_grad[1]:
            parts_3ED = torch.mm(pieces.t(), x_TD, out_dtype=torch.float32).view(3, *weight_ED.shape)
            d_weight = weight_grad_of_parts(parts_3ED, weight_ED, ctx.place)
        if ctx.needs_input_grad[5]:
            d_bias = pieces.sum(0, dtype=WIDE[pieces.dtype]).view(3, -1).sum(0).to(ctx.bias_dtype)
        return d_x, d_weight, None, None, None, d_bias


def choose_kernel(logits_TE: torch.Tensor, bias_E: torch.Tensor, kind: GateKind) -> Chosen:
    from moeclipse.ops.triton import gate as kernels

    T, E = logits_TE.shape
    launch = _launch(T, E, kind)
    blocks = -(-T // launch["BLOCK"])
    scores_TK = logits_TE.new_empty(T, kind.k)
    ids_TK = logits_TE.new_empty(T, kind.k, dtype=torch.int64)
    loads_NE = logits_TE.new_empty(blocks, E, dtype=torch.int32)
    probs_NE, squares_N = logits_TE.new_empty(blocks, E), logits_TE.new_empty(blocks)
    kernels.choose[(blocks,)](
        logits_TE, bias_E, scores_TK, ids_TK, loads_NE, probs_NE, squares_N, T, E, kind.scale, **launch
    )
    load_E, prob_E = logits_TE.new_empty(E, dtype=torch.int64), logits_TE.new_empty(E)
    squares = logits_TE.new_empty(())
    kernels.sum_blocks[(-(-E // 16),)](
        loads_NE, probs_NE, squares_N, load_E, prob_E, squares, blocks, E, ROWS=128, COLUMNS=16
    )
    return Chosen(scores_TK, ids_TK, load_E, prob_E, squares)


def choose_backward_kernel(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    d_scores_TK: torch.Tensor | None,
    d_prob_E: torch.Tensor | None,
    d_squares: torch.Tensor | None,
    kind: GateKind,
    short: torch.dtype,
) -> torch.Tensor:
    """[T, 3 E]: their sum over the three parts is the gradient of the logits."""
    from moeclipse.ops.triton import gate as kernels

    T, E = logits_TE.shape
    launch = _launch(T, E, kind)
    pieces = logits_TE.new_empty(T, 3 * E, dtype=short)
    if d_scores_TK is None:
        d_scores_TK = logits_TE.new_zeros(T, kind.k)
    kernels.choose_backward[(-(-T // launch["BLOCK"]),)](
        logits_TE, ids_TK, d_scores_TK.contiguous(),
        logits_TE if d_prob_E is None else d_prob_E.contiguous(),
        logits_TE if d_squares is None else d_squares,
        pieces, T, E, kind.scale, HAS_PROBS=d_prob_E is not None, HAS_SQUARES=d_squares is not None, **launch,
    )  # fmt: skip
    return pieces


def _launch(num_tokens: int, num_experts: int, kind: GateKind) -> dict[str, Any]:
    padded = 1 << (num_experts - 1).bit_length()
    block = min(max(1, 2048 // padded), 1 << (num_tokens - 1).bit_length())
    return {
        "K": kind.k,
        "K_PADDED": 1 << (kind.k - 1).bit_length(),
        "E_PADDED": padded,
        "BLOCK": block,
        "SIGMOID": kind.sigmoid,
        "RENORMALISE": kind.renormalise,
    }
