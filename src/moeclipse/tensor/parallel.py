"""What tensor-parallel layers share: the tp ranks, and how activations pass between them.

Idea. The tp ranks of a group read the same tokens. Between matrices activations are either whole on every
rank (replicated), or, with sequence parallelism, each rank keeps its part of the tokens: a contiguous part
of the first dimension, in rank order, equal parts. Gradients of replicated activations are whole, too:
every rank holds the gradient of the one-process model, not a share of it.

    move(x, tp, forward, backward)

        same         sum          replicated tokens enter a region where each rank computes a share
        sum          same         ... and leave it
        gather       sum_scatter  parts of the tokens enter such a region
        sum_scatter  gather       ... and leave it
        slice        gather       each rank takes over a part of the tokens
        gather       slice        ... and gives it back

Contract. Every rank of a group makes the same calls in the same order, in forward and in backward. Order on
the device comes from events; nothing depends on CUDA_DEVICE_MAX_CONNECTIONS. With one rank nothing is sent
or copied.

Hazard. `GatherBuffer` hands out the same memory again and again: what it holds is valid until the next
gather, so it serves a product that runs at once and is never saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from moeclipse.comm.async_ops.lane import InFlight, Lane, Ready, Then
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.collectives import Collectives, PeerUse, collectives
from moeclipse.core.errors import ConfigError
from moeclipse.core.shares import even_bounds
from moeclipse.ops.first_order import first_order
from moeclipse.tensor.weight_grad import WeightGrads

MoveKind = Literal["same", "sum", "gather", "sum_scatter", "slice", "gather_columns", "slice_columns"]


class GatherBuffer:
    """Memory for gathered activations, reused by all layers; it grows to the largest one."""

    def __init__(self) -> None:
        self._flat: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        key = (like.dtype, like.device)
        if key not in self._flat or self._flat[key].numel() < numel:
            self._flat[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return self._flat[key][:numel].view(*shape)


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """The tp ranks and how their linears communicate; one for a model."""

    group: Group
    lane: Lane
    sequence_parallel: bool = False
    """Activations between linears are parts of the tokens."""
    async_all_reduce: bool | None = None
    """Without sequence parallelism: all-reduce d_x under the weight gradient; None: as overlap."""
    overlap: bool = True
    """Hide gathers under the input gradient's product, and reduce-scatters under the weight gradient's."""
    fuse: bool = True
    """Add weight gradients into main_grad inside the product."""
    wire: Collectives | None = field(default=None, repr=False)
    """How the ranks talk; None: over torch.distributed."""
    wgrads: WeightGrads = field(default_factory=WeightGrads)
    buffer: GatherBuffer = field(default_factory=GatherBuffer, repr=False)
    size: int = field(init=False)
    index: int = field(init=False)
    parts_tokens: bool = field(init=False)
    """Whether activations between linears are parts of the tokens."""

    def __post_init__(self) -> None:
        size, parts_tokens = self.group.size, self.sequence_parallel and self.group.size > 1
        vars(self).update(size=size, index=self.group.index, parts_tokens=parts_tokens)
        if self.sequence_parallel and self.async_all_reduce:
            raise ConfigError(
                "async_all_reduce = True needs sequence_parallel = False: with sequence parallelism input "
                "gradients are reduce-scattered, not all-reduced; leave async_all_reduce out"
            )

    @classmethod
    def of(cls, mesh: Mesh, *, peer: PeerUse = "off", **options: Any) -> TensorParallel:
        """Over the tp ranks of a mesh; with `peer`, through each other's memory where that applies."""
        wire = collectives(mesh, mesh.tensor, mesh.tp_comm, peer)
        return cls(group=mesh.tensor, lane=mesh.tp_comm, wire=wire, **options)

    @property
    def alone(self) -> TensorParallel:
        """For linears that are whole on every rank: they tell nobody, and defer with the others."""
        group = replace(self.group, ranks=(self.group.ranks[self.index],), index=0, handle=None)
        return replace(self, group=group, wire=None, sequence_parallel=False, async_all_reduce=None)

    @property
    def comm(self) -> Collectives:
        return self.wire or Collectives(self.lane, self.group)

    @property
    def whole_share(self) -> Literal["sum", "same"]:
        """What gradients of whole parameters between linears (norms) are: see `cut`."""
        return "sum" if self.sequence_parallel else "same"

    @property
    def hides_all_reduce(self) -> bool:
        return self.overlap if self.async_all_reduce is None else self.async_all_reduce

    def gather_rows(
        self, x: torch.Tensor, label: str, *, bounds: Sequence[int] | None = None, reuse: bool = False
    ) -> InFlight[torch.Tensor]:
        """All ranks' rows in rank order. `reuse`: into the shared buffer, for a product that runs at once."""
        if self.size == 1:
            return Ready(x)
        bounds = bounds or [rank * len(x) for rank in range(self.size + 1)]
        shape = (bounds[-1], *x.shape[1:])
        out = self.buffer.take(shape, x) if reuse else x.new_empty(shape)
        out[bounds[self.index] : bounds[self.index + 1]] = x
        result = self.comm.all_gather_shards(out.view(-1), self._flat(bounds, out), label)
        return Then(result, lambda flat: flat.view(shape))

    def sum_scatter_rows(
        self, x: torch.Tensor, label: str, *, bounds: Sequence[int] | None = None
    ) -> InFlight[torch.Tensor]:
        """This rank's part of the rows of the sum over ranks."""
        if self.size == 1:
            return Ready(x)
        if bounds is None:
            if len(x) % self.size:
                raise ConfigError(
                    f"{len(x)} rows cannot be shared out evenly over tp ({self.size}); "
                    "sequence parallelism needs a number of tokens that tp divides"
                )
            bounds = even_bounds(len(x), self.size)
        x = x.contiguous()
        result = self.comm.reduce_scatter(x.view(-1), self._flat(bounds, x), label)
        shape = (bounds[self.index + 1] - bounds[self.index], *x.shape[1:])
        return Then(result, lambda flat: flat.view(shape))

    def sum_rows(self, x: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
        """The sum over ranks, the same bits on each."""
        return self.comm.all_reduce(x, label)

    @staticmethod
    def _flat(bounds: Sequence[int], rows: torch.Tensor) -> list[int]:
        width = rows.shape[1:].numel()
        return [bound * width for bound in bounds]


def move(
    x: torch.Tensor,
    tp: TensorParallel,
    forward: MoveKind,
    backward: MoveKind,
    label: str,
    *,
    bounds: Sequence[int] | None = None,
) -> torch.Tensor:
    """Pass activations between the ways of holding them; see the table above. `bounds` cut the rows."""
    if tp.size == 1:
        return x
    out: torch.Tensor = _Move.apply(x, tp, forward, backward, label, bounds)
    return out


class _Move(torch.autograd.Function):
    """
    forward    y  = forward(x)
    dgrad      dx = backward(dy)
    wgrad      none
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        tp: TensorParallel,
        forward: MoveKind,
        backward: MoveKind,
        label: str,
        bounds: Sequence[int] | None,
    ) -> torch.Tensor:
        ctx.call = (tp, backward, label, bounds)
        moved = _moved(x, tp, forward, label, bounds)
        return moved.view_as(x) if moved is x else moved

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        tp, backward, label, bounds = ctx.call
        return _moved(dy, tp, backward, f"backward of {label}", bounds), None, None, None, None, None


def _moved(
    x: torch.Tensor, tp: TensorParallel, kind: MoveKind, label: str, bounds: Sequence[int] | None
) -> torch.Tensor:
    if kind == "same":
        return x
    if kind == "sum":
        return tp.sum_rows(x.clone(), label).get()
    if kind == "gather":
        return tp.gather_rows(x, label, bounds=bounds).get()
    if kind == "sum_scatter":
        return tp.sum_scatter_rows(x, label, bounds=bounds).get()
    if kind == "slice":
        bounds = bounds or even_bounds(len(x), tp.size)
        return x[bounds[tp.index] : bounds[tp.index + 1]].contiguous()
    if kind == "gather_columns":
        parts = tp.comm.gather(x.contiguous(), label).get()
        return torch.cat(parts.unbind(), dim=-1)
    width = x.shape[-1] // tp.size
    return x[..., tp.index * width : (tp.index + 1) * width].contiguous()
