"""Types under `torch.autocast`, as torch's own layers have them.

Experts compute in autocast's type, as `nn.Linear` does, from weights that stay as they are; gates compute in
fp32, because a rounded logit chooses another expert. float64 is never rounded. Inside the layer autocast is
off: backward does not run under it, and must meet the types that forward had.
"""

from __future__ import annotations

import torch

from moeclipse.core.errors import ConfigError


def is_on(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)


def off(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)


def rows_for(x_TD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The tokens in the type that experts with this weight compute in."""
    if is_on(x_TD.device) and x_TD.dtype != torch.float64 and weight.dtype != torch.float64:
        return x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
    if x_TD.dtype != weight.dtype:
        given, has = (str(dtype).removeprefix("torch.") for dtype in (x_TD.dtype, weight.dtype))
        raise ConfigError(
            f"the layer got {given} tokens, but its experts have {has} weights; call it inside "
            f"torch.autocast({x_TD.device.type!r}, dtype=torch.{given}) to compute in {given} with {has} "
            f"weights, or give both one type: moe.to(torch.{given}), or x.to(torch.{has})"
        )
    return x_TD
