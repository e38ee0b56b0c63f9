"""Embedding and cross-entropy whose vocabulary is cut over the tp ranks.

Each rank holds the rows of some token ids. A lookup gives zeros for ids of other ranks, and the sum over
ranks is the embedding. The loss never gathers logits: for each token the ranks exchange three numbers
(largest logit, sum of exponentials below it, logit of the target), 3/V of what the logits would take.

Contract. The loss is a sum over tokens in fp32 (fp64 for fp64 logits), the same on every rank of the group,
and so is its gradient's scale: backward needs no exchange. Only logits, in their own type, are kept for
backward; `head_losses` does not even keep those of a large vocabulary, and never has them whole. A target of
NO_TARGET (-1) counts for nothing: no loss, no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.ops.cross_entropy import gradient, statistics
from moeclipse.ops.embedding import embedding_grad
from moeclipse.ops.first_order import first_order
from moeclipse.ops.grouped_gemm import dense_wgrad
from moeclipse.ops.precision import WIDE
from moeclipse.tensor.cut import Cut
from moeclipse.tensor.linear import cast, column_linear, eager, reduce_input_grad
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.weight_grad import accumulator, weight_grad

NO_TARGET = -1
"""Where nothing is to be predicted: behind the end of a document, in what somebody else said."""
CHUNK_BYTES = 1 << 29
"""Logits that may be in memory at once; with more, the head and its loss go over the tokens in chunks."""


@eager
def embed(ids: torch.Tensor, weight_VD: nn.Parameter, cut: Cut, tp: TensorParallel) -> torch.Tensor:
    """[T, D] (this rank's part of the tokens with sequence parallelism) for T flattened ids."""
    out: torch.Tensor = _Embed.apply(ids.flatten(), weight_VD, cut, tp)
    return out


class _Embed(torch.autograd.Function):
    """
    forward    h  = [all-reduce | reduce-scatter] W[ids], zero for ids of other ranks
    dgrad      none: ids are numbers
    wgrad      dW[ids] += [gather] dh
    """

    @staticmethod
    def forward(ctx: Any, ids_T: torch.Tensor, weight: Any, cut: Cut, tp: TensorParallel) -> torch.Tensor:
        ctx.tp, ctx.cut, ctx.weight = tp, cut, weight
        ctx.save_for_backward(ids_T)
        if tp.size == 1:
            return F.embedding(ids_T, weight)
        local_T, mine_T = _local(ids_T, cut)
        h_TD = F.embedding(local_T, weight).masked_fill_(~mine_T[:, None], 0)
        if tp.parts_tokens:
            return tp.sum_scatter_rows(h_TD, "reduce-scatter of embeddings").get()
        return tp.sum_rows(h_TD, "all-reduce of embeddings").get()

    @staticmethod
    @first_order
    def backward(ctx: Any, d_h: torch.Tensor) -> tuple[Any, ...]:
        (ids_T,) = ctx.saved_tensors
        if ctx.tp.parts_tokens:
            d_h = ctx.tp.gather_rows(d_h, "backward gather of embeddings", reuse=True).get()
        into, grad = accumulator(ctx.weight)
        embedding_grad(ids_T - ctx.cut.start, d_h, into, outside=ctx.tp.size > 1)
        return None, grad, None, None


def _local(ids_T: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """(row in this rank's part or 0, whether the id is in it)."""
    mine_T = (ids_T >= cut.start) & (ids_T < cut.stop)
    return torch.where(mine_T, ids_T - cut.start, 0), mine_T


@eager
def head_losses(
    x: torch.Tensor,
    weight_VD: nn.Parameter,
    targets_T: torch.Tensor,
    cut: Cut,
    tp: TensorParallel,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sum, the loss of each token, which has no gradient)."""
    most = max(1, chunk_bytes // max(len(weight_VD) * x.element_size(), 1))
    if len(targets_T) <= most:
        (logits_TV,) = column_linear(x, [weight_VD], tp, label="head")
        return token_losses(logits_TV, targets_T, cut, tp)
    # Chunks of equal size: one that is left over would be a thin product.
    chunks = -(-len(targets_T) // most)
    rows = -(-len(targets_T) // chunks)
    loss, loss_T = _HeadLoss.apply(cast(x), weight_VD, targets_T, cut, tp, rows)
    return loss, loss_T


class _HeadLoss(torch.autograd.Function):
    """Chunk by chunk; logits are computed again in backward, because to keep them is to have them all.

    forward    l = [gather] x W^T, loss = sum_t log(sum_v exp(l_tv)) - l_t,target
    dgrad      dl = d_loss (softmax(l) - onehot(target)),  dx = [all-reduce | reduce-scatter] dl W
    wgrad      dW += dl^T [gather] x, at once also where weight gradients wait for W
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Any,
        targets_T: torch.Tensor,
        cut: Cut,
        tp: TensorParallel,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole_TD, frozen = x, not ctx.needs_input_grad[1]
        if tp.parts_tokens:
            whole_TD = tp.gather_rows(x, "gather of inputs, head", reuse=not frozen).get()
        target_T = _targets(targets_T, cut, tp)
        operand = weight.to(x.dtype)
        parts = [
            statistics(F.linear(x_CD, operand), target_C)
            for x_CD, target_C in zip(whole_TD.split(rows), target_T.split(rows), strict=True)
        ]
        log_sum_T, logit_T = _over_ranks(torch.cat(parts, dim=1), tp)
        loss_T, log_sum_T = _counted(targets_T, log_sum_T, logit_T)
        # A frozen head gathers nothing in backward, as any frozen linear: then all of x is kept.
        ctx.save_for_backward(whole_TD if frozen else x, weight, log_sum_T, target_T)
        ctx.tp, ctx.rows = tp, rows
        ctx.mark_non_differentiable(loss_T)
        return loss_T.sum(), loss_T

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: torch.Tensor, _: Any) -> tuple[Any, ...]:
        tp, (x, weight, log_sum_T, target_T) = ctx.tp, ctx.saved_tensors
        whole_TD = x
        if tp.parts_tokens and ctx.needs_input_grad[1]:
            whole_TD = tp.gather_rows(x, "backward gather of inputs, head", reuse=True).get()
        operand, d_x = weight.to(x.dtype), torch.empty_like(whole_TD)
        # Without a main_grad the chunks add up in a wide sum of their own.
        adds_up = getattr(weight, "main_grad", None) is None and ctx.needs_input_grad[1]
        fresh = torch.zeros_like(weight, dtype=WIDE[weight.dtype]) if adds_up else None
        chunks = (tensor.split(ctx.rows) for tensor in (whole_TD, log_sum_T, target_T, d_x))
        for x_CD, log_sum_C, target_C, d_x_CD in zip(*chunks, strict=True):
            d_CV = gradient(F.linear(x_CD, operand), log_sum_C, target_C, d_loss, in_place=True)
            if ctx.needs_input_grad[0]:
                torch.mm(d_CV, operand, out=d_x_CD)
            if fresh is not None:
                dense_wgrad(d_CV, x_CD, fresh)
            elif ctx.needs_input_grad[1]:
                weight_grad(weight, d_CV, x_CD)
        if tp.size > 1 and ctx.needs_input_grad[0]:
            d_x = reduce_input_grad(tp, d_x, "head").get()
        return (
            d_x if ctx.needs_input_grad[0] else None,
            None if fresh is None else fresh.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _targets(targets_T: torch.Tensor, cut: Cut, tp: TensorParallel) -> torch.Tensor:
    """Columns of this rank's logits; -1 for targets of other ranks."""
    if tp.size == 1:
        return targets_T
    local_T, mine_T = _local(targets_T, cut)
    return torch.where(mine_T, local_T, -1)


def _over_ranks(mine_3T: torch.Tensor, tp: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
    """(log of the sum of exponentials, logit of the target) over all parts of the vocabulary."""
    largest_T, sum_T, logit_T = mine_3T
    if tp.size > 1:
        parts_P3T = tp.comm.gather(mine_3T, "exchange of loss statistics").get()
        largest_T = parts_P3T[:, 0].amax(0)
        sum_T = (parts_P3T[:, 1] * (parts_P3T[:, 0] - largest_T).exp()).sum(0)
        logit_T = parts_P3T[:, 2].sum(0)
    return largest_T + sum_T.log(), logit_T


def _counted(
    targets_T: torch.Tensor, log_sum_T: torch.Tensor, logit_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each token, log sums for backward): beside an infinite sum every probability is 0."""
    nothing_T = targets_T < 0
    loss_T = (log_sum_T - logit_T).masked_fill(nothing_T, 0)
    return loss_T, log_sum_T.masked_fill(nothing_T, torch.inf)


@eager
def token_losses(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, cut: Cut, tp: TensorParallel
) -> tuple[torch.Tensor, torch.Tensor]:
    """-log softmax(logits)[target]: (the sum, that of each token, which has no gradient).

    `logits_TV` are this rank's part of them.
    """
    loss, loss_T = _CrossEntropy.apply(logits_TV, targets_T, cut, tp)
    return loss, loss_T


class _CrossEntropy(torch.autograd.Function):
    """
    forward    loss = sum_t log(sum_v exp(l_tv)) - l_t,target
    dgrad      dl   = d_loss (softmax(l) - onehot(target))
    wgrad      none
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor, cut: Cut, tp: TensorParallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        target_T = _targets(targets_T, cut, tp)
        log_sum_T, logit_T = _over_ranks(statistics(logits_TV, target_T), tp)
        loss_T, log_sum_T = _counted(targets_T, log_sum_T, logit_T)
        ctx.save_for_backward(logits_TV, log_sum_T, target_T)
        ctx.mark_non_differentiable(loss_T)
        return loss_T.sum(), loss_T

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: torch.Tensor, _: Any) -> tuple[Any, ...]:
        logits_TV, log_sum_T, target_T = ctx.saved_tensors
        return gradient(logits_TV, log_sum_T, target_T, d_loss), None, None, None
