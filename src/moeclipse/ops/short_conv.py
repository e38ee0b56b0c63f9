"""A causal convolution over a few positions, each channel by itself.

    y_t = sum_j w_j x_(t - (J - 1) + j)          j = 0 ... J - 1: the last weight is the token's own

Shapes: B samples, S positions, C channels, J weights of a channel.

Contract. With `place_BS`, where each token stands in its document, a token takes nothing from before its
document. `before_BPC` are the P = J - 1 inputs before the first; left out, there are none. Weight gradients
are sums over positions, so any cut of channels gives the same numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def short_conv(
    x_BSC: torch.Tensor,
    weight_CJ: torch.Tensor,
    *,
    place_BS: torch.Tensor | None = None,
    before_BPC: torch.Tensor | None = None,
) -> torch.Tensor:
    (_, length, channels), reach = x_BSC.shape, weight_CJ.shape[1] - 1
    if place_BS is None and before_BPC is None:
        padded_BCS = F.pad(x_BSC.transpose(1, 2), (reach, 0))
        return F.conv1d(padded_BCS, weight_CJ[:, None].to(x_BSC.dtype), groups=channels).transpose(1, 2)
    whole = with_before(x_BSC, before_BPC, reach)
    out = torch.zeros_like(x_BSC)
    for j in range(reach + 1):
        taken = whole[:, j : j + length] * weight_CJ[:, j].to(x_BSC.dtype)
        if place_BS is not None and j < reach:
            taken = taken * (place_BS >= reach - j)[..., None]
        out = out + taken
    return out


def with_before(x_BSC: torch.Tensor, before_BPC: torch.Tensor | None, reach: int) -> torch.Tensor:
    """Behind the `reach` inputs before it; zeros where there are none."""
    if before_BPC is None:
        return F.pad(x_BSC, (0, 0, reach, 0))
    return torch.cat([before_BPC.to(x_BSC.dtype), x_BSC], dim=1)


def last_inputs(
    x_BSC: torch.Tensor, before_BPC: torch.Tensor | None, reach: int, count_B: torch.Tensor
) -> torch.Tensor:
    """The `reach` inputs that the next token needs, where row b has `count_B` new ones: [B, P, C]."""
    whole = with_before(x_BSC, before_BPC, reach)
    index_BP = count_B[:, None] + torch.arange(reach, device=x_BSC.device)
    return whole.gather(1, index_BP[..., None].expand(-1, -1, x_BSC.shape[2]))
