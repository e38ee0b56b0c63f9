"""The same sum through torch.distributed, for ranks that share no memory; added in an order of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moeclipse.comm.failure import Watch
from moeclipse.comm.group import Group


def obstacle_of(num_ranks: int, most: int, device_type: str) -> str:
    """Why a group cannot use peer memory at all; nothing where it may."""
    if num_ranks > most:
        return f"the group has {num_ranks} ranks, and peer memory serves 2 to {most}"
    if device_type not in ("cpu", "cuda"):
        return f"peer memory serves cpu and cuda, not {device_type}"
    return ""


def all_reduce_plain(
    group: Group, watch: Watch, x: torch.Tensor, out: torch.Tensor | None, label: str
) -> torch.Tensor:
    """The sum over ranks, in `out` or in a new tensor."""
    if out is None:
        out = x.clone()
    elif out is not x:
        out.copy_(x)
    if group.size > 1 and x.numel():
        summed = out.contiguous()
        try:
            work: Any = dist.all_reduce(summed, group=group.handle, async_op=True)
            work.wait(timedelta(seconds=watch.deadline_s))
        except RuntimeError as error:
            raise watch.explain(label, group.ranks, error) from None
        if summed is not out:
            out.copy_(summed)
    return out
