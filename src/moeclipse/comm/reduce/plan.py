"""All-reduces on a device that were made before: the next one finds everything looked up.

Up to a few hundred kilobytes a call takes as long as the host takes to launch it, so what a call needs is
found once and kept for its dtype and length. What a tensor is (its place, its layout, whether peers have it
open) is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import ref

import torch

from moeclipse.comm.reduce.reducer import Planned
from moeclipse.comm.shared.inputs import SharedInputs
from moeclipse.ops.peer_reduce import Launch

MAX_VIEWS = 256  # of shared tensors, that a plan keeps a launch for
Repeat = Callable[[int, int], None]


class PlanOwner(Protocol):
    """What a plan needs of `on_device.CudaReducer`."""

    device: torch.device
    seen: memoryview
    inputs: SharedInputs
    capturing: bool
    label: str

    def is_large(self, num_bytes: int) -> bool: ...


class CudaPlan:
    """Calls of one dtype and length that were made before, with all but pointers known: one that copies, and
    by address those that read their input where it lies. `call` is None where none of them applies."""

    def __init__(self, owner: PlanOwner, num_bytes: int) -> None:
        self.copied: Repeat | None = None
        self.there: dict[tuple[int, bool], Repeat] = {}
        self.call = planned(owner, self, num_bytes)

    def keep(self, launch: Launch, x: int, out: int) -> None:
        repeat = launch.launcher.again(launch).launch
        if not launch.inputs:
            self.copied = repeat
            return
        if len(self.there) == MAX_VIEWS:
            self.there.clear()
        self.there[x, x == out] = repeat


def planned(owner: PlanOwner, plan: CudaPlan, num_bytes: int) -> Planned:
    """The call itself. A function and not a method: small all-reduces wait for the host, and what a function
    closes over is found faster than what an object has."""
    device, seen, there, inputs = owner.device.index, owner.seen, plan.there, owner.inputs
    starts = inputs.starts if owner.is_large(num_bytes) else []
    known: Callable[[], torch.Tensor | None] = type(None)  # the last `out`, if it is still there

    def call(x: torch.Tensor, out: torch.Tensor | None, label: str) -> torch.Tensor | None:
        nonlocal known
        if x.get_device() != device or not x.is_contiguous() or owner.capturing:
            return None
        if out is None:
            out = torch.empty_like(x)
        elif out is not x:
            if not out.is_contiguous():
                return None
            if out is not known():  # one that is known still has its device, type and memory
                if out.get_device() != device or out.dtype is not x.dtype or out.shape != x.shape:
                    return None
                known = ref(out)
        source, target = x.data_ptr(), out.data_ptr()
        if (source | target) & 15 or seen[0]:
            return None
        if 0 < abs(source - target) < num_bytes:
            return None  # the whole call says what is wrong with that
        repeat = plan.copied
        if starts and inputs.find(source, num_bytes) is not None:
            repeat = there.get((source, source == target))
        if repeat is None:
            return None
        owner.label = label
        repeat(source, target)
        return out

    return call
