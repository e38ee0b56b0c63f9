"""What Python launches in a piece of work, counted without a profiler.

Operators that torch dispatches on CUDA tensors, Triton's launches and replays of graphs are counted where
they are called: a profiler instruments graphs, in which ranks of one GPU wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL = ("empty", "detach", "view", "alias", "as_strided", "slice", "select", "expand", "reshape", "t.")


class Launches(TorchDispatchMode):
    """An upper bound: an operator counts once, also where it launches nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        found = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
        if any(x.is_cuda for x in found) and not func.is_view and not name.startswith(NO_KERNEL):
            self.number += 1
        return out


@contextmanager
def counted() -> Iterator[Launches]:
    from triton.runtime.jit import JITFunction

    from moeclipse.ops import launch

    with Launches() as found:
        replaced = [(torch.cuda.CUDAGraph, "replay"), (JITFunction, "run")]
        watched, launch.is_watched = launch.is_watched, lambda: True  # by Triton's way goes every launch
        before = [getattr(owner, name) for owner, name in replaced]

        def counting(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                found.number += 1
                return call(*args, **kwargs)

            return run

        for (owner, name), call in zip(replaced, before, strict=True):
            setattr(owner, name, counting(call))
        try:
            yield found
        finally:
            launch.is_watched = watched
            for (owner, name), call in zip(replaced, before, strict=True):
                setattr(owner, name, call)
