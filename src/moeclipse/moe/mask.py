"""Tokens that take no part: padding is left out before anything is counted, and gets zeros.

    y = moe(x, mask=mask)         mask: one boolean for each token, True for those that take part

What is left is a call with fewer tokens, so loads, losses, capacity and gradients are those of the layer
without padding, on any ranks; a rank may be all padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeclipse.core.errors import ConfigError
from moeclipse.moe.exchange.structure import Inputs, Structure


def leave_out(call: Callable[[Inputs], torch.Tensor], x: Inputs, mask: torch.Tensor) -> torch.Tensor:
    """`call` on the tokens of the mask; zeros for all others."""
    leading = x.shape[:-1] if isinstance(x, torch.Tensor) else Structure.take_apart(x)[1][0].shape[:1]
    if mask.dtype != torch.bool or mask.shape != leading:
        raise ConfigError(
            f"the mask must have one boolean for each token, shape {tuple(leading)}; got {mask.dtype} of "
            f"shape {tuple(mask.shape)}"
        )
    structure, tensors = Structure.take_apart(Structure.as_tokens(x) if isinstance(x, torch.Tensor) else x)
    (kept,) = mask.flatten().nonzero(as_tuple=True)
    y = call(structure.put_together([tensor[kept] for tensor in tensors]))
    out = y.new_zeros(mask.numel(), y.shape[-1]).index_copy(0, kept, y)
    return out.view(*leading, y.shape[-1])
