"""What keeps the load even and the logits small.

Both losses are means over all tokens of the microbatch on all ranks. Each rank computes its share of them:
the shares sum to the loss of the one-process model, and so do their gradients.

    balance   E * sum_e f_e * p_e      f_e = rows of expert e / all rows (no gradient)
                                       p_e = mean probability of expert e
    z         mean_t logsumexp(logits_t)^2
"""

from __future__ import annotations

import torch

from moeclipse.moe.routing import Routing


def balance_loss(routing: Routing, global_load_E: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """This rank's share; 1 (over all ranks) when load and probabilities are even."""
    probs_TE = routing.probs_TE
    share_E = global_load_E.to(probs_TE.dtype) / global_load_E.sum().clamp(min=1)
    return probs_TE.shape[1] * (share_E * probs_TE.sum(0)).sum() / max(total_tokens, 1)


def z_loss(routing: Routing, total_tokens: int) -> torch.Tensor:
    """This rank's share."""
    return routing.logits_TE.logsumexp(-1).square().sum() / max(total_tokens, 1)
