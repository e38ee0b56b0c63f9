"""Which part of a logical weight a rank holds, and whose gradients add up.

Idea. Under tensor parallelism a weight is cut along one dimension. A `Cut` says which part of the logical
tensor the local one is; it hangs on the parameter, so that initial weights, buckets and checkpoints can speak
of the logical tensor. Other parameters are whole on every rank; a mark on them says what their gradients are:

    cut     this rank's part: summed over the ranks that hold the same part
    sum     every tp rank computed another share of the gradient: summed over all ranks (no mark: this)
    same    every tp rank computed the same gradient: counted on one of them

Contract. Any width can be cut over any number of ranks that does not exceed it; the first parts are larger.
Blocks that are stacked in one matrix ([gate; up]) are each cut alike. The initial weights of a part are those
of the logical tensor, to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from moeclipse.core.errors import ConfigError
from moeclipse.core.shares import even_bounds
from moeclipse.ops.random import CHUNK, normal

Share = Literal["cut", "sum", "same"]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Rows (dim 0) or columns (dim 1) start .. stop - 1 of each block of a logical vector or matrix."""

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    blocks: int = 1

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        dim: int,
        *,
        index: int,
        parts: int,
        blocks: int = 1,
        unit: int = 1,
        what: str = "the width",
    ) -> Cut:
        """Part `index` of `parts`; `unit` neighbours (a head) stay together."""
        units, rest = divmod(shape[dim], blocks * unit)
        if rest or units < parts:
            raise ConfigError(
                f"{what} ({shape[dim]}) has {units} units to be cut, fewer than the {parts} ranks of tp; "
                "choose a smaller tp"
                if not rest
                else f"{what} ({shape[dim]}) must be a multiple of {blocks} x {unit}"
            )
        bounds = even_bounds(units, parts)
        return cls(
            shape=shape,
            dim=dim,
            start=bounds[index] * unit,
            stop=bounds[index + 1] * unit,
            blocks=blocks,
        )

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[self.dim] = self.blocks * self.length
        return tuple(shape)

    @property
    def columns(self) -> tuple[int, int] | None:
        """(first, stop) where columns are cut: then no stretch of the logical tensor is whole here."""
        return (self.start, self.stop) if self.dim == 1 else None

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Where rows are cut: (first element in the logical tensor, number of elements) of each block."""
        assert self.dim == 0
        width, block = math.prod(self.shape[1:]), self.shape[0] // self.blocks
        return [((b * block + self.start) * width, self.length * width) for b in range(self.blocks)]

    def fill(self, tensor: torch.Tensor, key: int, std: float) -> None:
        """This part of what `fill_normal` puts into the logical tensor."""
        if tensor.is_meta:
            return
        width = math.prod(self.shape[1:])
        device = tensor.device
        rows = torch.arange(self.shape[0], device=device)
        columns = torch.arange(width, device=device)
        if self.dim == 0:
            rows = rows.view(self.blocks, -1)[:, self.start : self.stop].flatten()
        else:
            columns = columns[self.start : self.stop]
        local = tensor.view(len(rows), len(columns))
        step = max(1, CHUNK // max(1, len(columns)))
        with torch.no_grad():
            for first in range(0, len(rows), step):
                index = rows[first : first + step, None] * width + columns
                local[first : first + step] = (std * normal(key, index)).to(tensor.dtype)


def mark(parameter: torch.nn.Parameter, share: Cut | Literal["sum", "same"]) -> torch.nn.Parameter:
    """Say what the gradients of a parameter are under tensor parallelism."""
    parameter.tensor_share = share  # type: ignore[attr-defined]
    return parameter


def share_of(parameter: torch.nn.Parameter) -> Share:
    share: Cut | Literal["sum", "same"] = getattr(parameter, "tensor_share", "sum")
    return "cut" if isinstance(share, Cut) else share


def cut_of(parameter: torch.nn.Parameter) -> Cut | None:
    share = getattr(parameter, "tensor_share", None)
    return share if isinstance(share, Cut) else None
