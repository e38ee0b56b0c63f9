"""What a loss needs of logits, each in one pass over them: three numbers of each row, and the gradient.

    statistics   of row t: largest logit, sum of exponentials below it, logit of the target (0 for none)
    gradient     d_tv = (exp(l_tv - log_sum_t) - [v = target_t]) d_loss

Contract. Sums are fp32 (fp64 for fp64 logits); the gradient has the logits' type and may take their place. A
target of -1 is none of these columns: another rank has it. Targets and d_loss stay on the device.
"""

from __future__ import annotations

import torch

from moeclipse.ops.precision import WIDE


def statistics_reference(logits_TV: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
    wide_TV = logits_TV.to(WIDE[logits_TV.dtype])
    logit_T = wide_TV.gather(1, target_T.clamp(min=0)[:, None])[:, 0].masked_fill(target_T < 0, 0)
    largest_T = wide_TV.amax(1)
    return torch.stack([largest_T, (wide_TV - largest_T[:, None]).exp_().sum(1), logit_T])


def statistics(logits_TV: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
    """[3, T]: largest, sum, logit of the target."""
    return (statistics_kernel if logits_fit(logits_TV) else statistics_reference)(logits_TV, target_T)


def gradient_reference(
    logits_TV: torch.Tensor,
    log_sum_T: torch.Tensor,
    target_T: torch.Tensor,
    d_loss: torch.Tensor,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    d_TV = (logits_TV.to(WIDE[logits_TV.dtype]) - log_sum_T[:, None]).exp_()
    d_TV.scatter_add_(1, target_T.clamp(min=0)[:, None], -(target_T >= 0)[:, None].to(d_TV.dtype))
    d_TV.mul_(d_loss)
    return logits_TV.copy_(d_TV) if in_place else d_TV.to(logits_TV.dtype)


def gradient(
    logits_TV: torch.Tensor,
    log_sum_T: torch.Tensor,
    target_T: torch.Tensor,
    d_loss: torch.Tensor,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    picked = gradient_kernel if logits_fit(logits_TV) else gradient_reference
    return picked(logits_TV, log_sum_T, target_T, d_loss, in_place=in_place)


def logits_fit(logits_TV: torch.Tensor) -> bool:
    return logits_TV.is_cuda and logits_TV.numel() > 0 and logits_TV.dtype.itemsize < 8


def statistics_kernel(logits_TV: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
    from moeclipse.ops.triton import cross_entropy

    logits_TV, (T, V) = logits_TV.contiguous(), logits_TV.shape
    out_3T = logits_TV.new_empty(3, T, dtype=torch.float32)
    cross_entropy.statistics[(T,)](logits_TV, target_T.contiguous(), out_3T, T, V, **_launch(V))
    return out_3T


def gradient_kernel(
    logits_TV: torch.Tensor,
    log_sum_T: torch.Tensor,
    target_T: torch.Tensor,
    d_loss: torch.Tensor,
    *,
    in_place: bool = False,
) -> torch.Tensor:
    from moeclipse.ops.triton import cross_entropy

    given_TV, (T, V) = logits_TV.contiguous(), logits_TV.shape
    launch = _launch(V)
    out_TV = logits_TV if in_place and logits_TV.is_contiguous() else torch.empty_like(given_TV)
    cross_entropy.gradient[(T, -(-V // launch["BLOCK"]))](
        given_TV, log_sum_T.contiguous(), target_T.contiguous(), d_loss, out_TV, V, **launch
    )
    return out_TV


def _launch(V: int) -> dict[str, int]:
    block = min(4096, 1 << max(V - 1, 1).bit_length())
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}
