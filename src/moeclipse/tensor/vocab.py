"""Embedding and cross-entropy whose vocabulary is cut over the tp ranks.

Each rank holds the rows of some token ids. A lookup gives zeros for ids of other ranks, and the sum over
ranks is the embedding. The loss never gathers logits: for each token the ranks exchange three numbers
(largest logit, sum of exponentials below it, logit of the target), 3/V of what the logits would take.

Contract. The loss is a sum over tokens in fp32 (fp64 for fp64 logits), the same on every rank of the group,
and so is its gradient's scale: backward needs no exchange. Only logits, in their own type, are kept for
backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from moeclipse.ops.precision import wide_of
from moeclipse.tensor.cut import Cut
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.weight_grad import accumulator


@torch.compiler.disable
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
    @once_differentiable
    def backward(ctx: Any, d_h: torch.Tensor) -> tuple[Any, ...]:
        (ids_T,) = ctx.saved_tensors
        if ctx.tp.parts_tokens:
            d_h = ctx.tp.gather_rows(d_h, "backward gather of embeddings", reuse=True).get()
        into, grad = accumulator(ctx.weight)
        if ctx.tp.size > 1:
            local_T, mine_T = _local(ids_T, ctx.cut)
            ids_T, d_h = local_T[mine_T], d_h[mine_T]
        into.index_put_((ids_T,), d_h.to(into.dtype), accumulate=True)
        return None, grad, None, None


def _local(ids_T: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """(row in this rank's part or 0, whether the id is in it)."""
    mine_T = (ids_T >= cut.start) & (ids_T < cut.stop)
    return torch.where(mine_T, ids_T - cut.start, 0), mine_T


@torch.compiler.disable
def cross_entropy(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, cut: Cut, tp: TensorParallel
) -> torch.Tensor:
    """The sum over tokens of -log softmax(logits)[target]; `logits_TV` are this rank's part of them."""
    loss: torch.Tensor = _CrossEntropy.apply(logits_TV, targets_T, cut, tp)
    return loss


class _CrossEntropy(torch.autograd.Function):
    """
    forward    loss = sum_t log(sum_v exp(l_tv)) - l_t,target
    dgrad      dl   = d_loss (softmax(l) - onehot(target))
    wgrad      none
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor, cut: Cut, tp: TensorParallel
    ) -> torch.Tensor:
        wide_TV = _wide(logits_TV)
        local_T, mine_T = _local(targets_T, cut)
        target_T = wide_TV.gather(1, local_T[:, None])[:, 0].masked_fill(~mine_T, 0)
        largest_T = wide_TV.amax(1)
        sum_T = (wide_TV - largest_T[:, None]).exp_().sum(1)
        if tp.size > 1:
            mine = torch.stack([largest_T, sum_T, target_T])
            parts_P3T = tp.comm.gather(mine, "exchange of loss statistics").get()
            largest_T = parts_P3T[:, 0].amax(0)
            sum_T = (parts_P3T[:, 1] * (parts_P3T[:, 0] - largest_T).exp()).sum(0)
            target_T = parts_P3T[:, 2].sum(0)
        log_sum_T = largest_T + sum_T.log()
        ctx.save_for_backward(logits_TV, log_sum_T, local_T, mine_T)
        return (log_sum_T - target_T).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[Any, ...]:
        logits_TV, log_sum_T, local_T, mine_T = ctx.saved_tensors
        d_TV = (_wide(logits_TV) - log_sum_T[:, None]).exp_()
        d_TV.scatter_add_(1, local_T[:, None], -mine_T[:, None].to(d_TV.dtype))
        return (d_TV.mul_(d_loss)).to(logits_TV.dtype), None, None, None


def _wide(logits_TV: torch.Tensor) -> torch.Tensor:
    return logits_TV.to(wide_of(logits_TV.dtype))
