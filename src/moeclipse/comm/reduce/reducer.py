"""What `PeerAllReduce` asks of the reductions under it, whatever memory they go over.

`on_host.CpuReducer` and `on_device.CudaReducer` are the two there are. Tensors that they get are contiguous
and of one of their `dtypes`; who calls makes sure of that, and that one call runs at a time.

A reduction comes as steps: it stops wherever it may be left open while this rank computes, and whoever wants
the result runs it to its end (`run_out`). On a device the call launches all of it, and no step is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

PlanKey = tuple[torch.dtype, int, int | None]
"""Of calls that are alike: dtype, length, and the number of stages that the caller asked for."""
Planned = Callable[[torch.Tensor, torch.Tensor | None, str], torch.Tensor | None]
"""An all-reduce of (x, out, label) that was made before; None where this one differs."""
Alone = Callable[[Callable[[torch.Tensor, torch.Tensor, str], None]], Planned]
"""Makes a plan of a function that must not run beside another call."""


class Reducer(Protocol):
    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...

    @property
    def asynchronous(self) -> bool:
        """Calls are only launched, on the current stream: errors show later, and graphs can capture them."""
        ...

    @property
    def arrived(self) -> bool:
        """Whether what was left open can go on without waiting for a peer."""
        ...

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor, two_stages: bool, chunk_bytes: int, label: str
    ) -> Iterator[None]:
        """out = the sum over ranks of x; `out` may be `x`."""
        ...

    def reduce_scatter(
        self, x: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str
    ) -> Iterator[None]:
        """out = the sum over ranks of x[bounds[me] : bounds[me + 1]], for bounds that `can_part` accepts."""
        ...

    def all_gather(
        self, shard: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str
    ) -> Iterator[None]:
        """out[bounds[p] : bounds[p + 1]] = the shard of rank p, for bounds that `can_part` accepts."""
        ...

    def all_reduce_rms_norm(
        self,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        weight_D: torch.Tensor,
        eps: float,
        two_stages: bool,
        label: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed, h) with h = residual + sum over ranks of x."""
        ...

    def can_part(self, bounds: Sequence[int], dtype: torch.dtype) -> bool: ...

    def plan(
        self,
        key: PlanKey,
        x: torch.Tensor,
        out: torch.Tensor,
        two_stages: bool,
        chunk_bytes: int,
        alone: Alone,
    ) -> Planned | None:
        """To repeat the all-reduce that was just made; None where nothing would be gained."""
        ...

    def is_shared(self, x: torch.Tensor) -> bool:
        """Whether reductions outside of a capture read `x` where it lies."""
        ...

    def share(self, x: torch.Tensor) -> None:
        """Collective. Open `x` to all peers, where that saves a copy."""

    def unshare(self, x: torch.Tensor) -> None: ...

    def capture(self, dtypes: Sequence[torch.dtype]) -> AbstractContextManager[None]:
        """Around the capture of a graph; ConfigError where there are no graphs."""
        ...

    def settle(self) -> None:
        """Wait for what was launched, and raise what went wrong with it."""

    def close(self) -> None: ...


def run_out(steps: Iterator[None]) -> None:
    for _ in steps:
        pass
