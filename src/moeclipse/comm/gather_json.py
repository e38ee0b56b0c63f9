"""All-gather of JSON objects: what ranks decide together, not what they compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from moeclipse.comm.failure import Watch
from moeclipse.comm.group import Group

T = TypeVar("T")


def tell(value: T, device: str | torch.device, share: Callable[[torch.Tensor], torch.Tensor]) -> list[T]:
    """Every member's value, in order. `share` gives [P, n] for everyone's n numbers; it is called twice."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = share(torch.tensor([text.numel()], device=device)).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    parts = share(padded).cpu().numpy()
    return [json.loads(part[:size].tobytes()) for part, size in zip(parts, sizes, strict=True)]


def tell_all(group: Group, watch: Watch, value: T, label: str) -> list[T]:
    """Every member's JSON value, in order, on every member; within the deadline."""

    def share(mine: torch.Tensor) -> torch.Tensor:
        sent = mine.repeat(group.size)
        out = torch.empty_like(sent)
        try:
            work = dist.all_to_all_single(out, sent, group=group.handle, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=watch.deadline_s))
        except RuntimeError as error:
            raise watch.explain(label, group.ranks, error) from None
        return out.view(group.size, -1)

    return tell(value, "cuda" if group.backend == "nccl" else "cpu", share)
