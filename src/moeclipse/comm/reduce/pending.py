"""Whether a reduction applies, one that was begun, and how tensors of any shape become flat ones and back.

`Pending` is what `PeerAllReduce.begin_*` return: the input is where peers can read it, and the rest, waiting
for theirs and reading them, is done by `get`, or by the next call of the same all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from moeclipse.core.errors import ConfigError


class Pending:
    """Hazard: its tensors must not change before `get` returns."""

    def __init__(
        self,
        steps: Iterator[None] | None,
        value: torch.Tensor,
        complete: Callable[[], None],
        arrived: Callable[[], bool],
    ) -> None:
        self._steps, self._value, self._complete, self._arrived = steps, value, complete, arrived

    def advance(self) -> bool:
        """Run on to the next place where it may be left open; whether there is one. For its owner."""
        if self._steps is not None:
            for _ in self._steps:
                return True
            self._steps = None
        return False

    @property
    def ready(self) -> bool:
        """Whether all peers have begun, too."""
        return self._steps is None or self._arrived()

    def get(self) -> torch.Tensor:
        if self._steps is not None:
            self._complete()
        return self._value


def same_kind(x: torch.Tensor, out: torch.Tensor | None) -> None:
    if out is None or (out.shape == x.shape and out.dtype == x.dtype and out.device == x.device):
        return
    raise ConfigError(
        f"out is {out.dtype} {tuple(out.shape)} on {out.device}, "
        f"expected {x.dtype} {tuple(x.shape)} on {x.device} as the input"
    )


def flat_of(out: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Where the flat result is written: straight into `out` where its memory allows."""
    if out is not None:
        with suppress(RuntimeError):
            return out.detach().view(-1)
    return x.new_empty(x.numel())


def shaped(flat: torch.Tensor, out: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    if out is None:
        return flat.view(x.shape)
    if flat.data_ptr() != out.data_ptr():
        out.detach().copy_(flat.view(x.shape))
    return out


def is_plain(x: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether both lie in the memory of the host as they are: dense, contiguous, apart from each other (or
    the same) and without a gradient."""
    if not x.is_cpu or x.requires_grad or x.layout is not torch.strided or not x.is_contiguous():
        return False
    return out is None or (
        out.dtype is x.dtype and out.shape == x.shape and out.is_cpu and not out.requires_grad
        and out.is_contiguous() and not 0 < abs(out.data_ptr() - x.data_ptr()) < x.nbytes
    )  # fmt: skip
