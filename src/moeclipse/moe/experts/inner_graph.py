"""Autograd's graph of somebody's module, inside a node of our own.

    y, inner = InnerGraph.record(function, inputs, weights)   runs the function
    grads = inner.backward(dy)                                of inputs and weights, None where there is none

A node of ours that calls a module builds a second graph under the first one. Left alone, that graph would
keep its tensors where torch does not look for them: activation checkpointing would free nothing, or run a
whole region again for each module. So the tensors that the inner graph saves are taken out of it into
`tensors`, and whoever keeps an InnerGraph keeps them as it keeps its own (`moe/exchange/saved_tensors`). What
is left are edges and numbers.

Contract. The inputs are not kept by the graph itself: it begins at a node, not at leaves. A tensor that the
function changed in place after the graph had saved it is refused in backward, as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from moeclipse.moe.private_torch import VERSION_OF, keeps_graph

Edges = tuple[GradientEdge | None, ...]


class Box:
    """Where the inner graph looks for its tensors while it runs backward."""

    tensors: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, kw_only=True)
class InnerGraph:
    inputs: Edges
    weights: Edges
    output: GradientEdge | None
    """None where nothing that came out depends on anything that wants a gradient."""
    tensors: tuple[torch.Tensor, ...]
    box: Box
    changed: bool
    """Whether the function changed in place what its graph had saved."""

    @classmethod
    def record(
        cls,
        function: Callable[..., torch.Tensor],
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, InnerGraph]:
        """(function(*inputs), its graph); floating inputs get gradients."""
        box, saved, versions = Box(), [], []

        def pack(tensor: torch.Tensor) -> int:
            saved.append(tensor.detach())
            versions.append(VERSION_OF(tensor))
            return len(saved) - 1

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda number: box.tensors[number]):
            anchor = torch.zeros((), requires_grad=True)
            given = [_Begin.apply(anchor, t) if t.is_floating_point() else t for t in inputs]
            y = function(*given)
            inner = cls(
                inputs=tuple(map(edge, given)),
                weights=tuple(map(edge, weights)),
                output=edge(y),
                tensors=tuple(saved),
                box=box,
                changed=[VERSION_OF(tensor) for tensor in saved] != versions,
            )
        saved.clear()  # the graph keeps the hooks, and with them this list
        return y.detach(), inner

    def backward(self, dy: torch.Tensor) -> list[torch.Tensor | None]:
        """Of all inputs, then of all weights."""
        if self.changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                "operation: an expert changed in place what its own graph had saved"
            )
        places = (*self.inputs, *self.weights)
        wanted = [place for place in places if place is not None]
        if self.output is None or not wanted:
            return [None] * len(places)
        self.box.tensors = self.tensors
        try:
            found = iter(
                torch.autograd.grad(self.output, wanted, dy, allow_unused=True, retain_graph=keeps_graph())
            )
        finally:
            self.box.tensors = ()
        return [None if place is None else next(found) for place in places]


def edge(tensor: torch.Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


class _Begin(torch.autograd.Function):
    """The first node of an inner graph: a leaf would be kept by the graph, and its rows with it."""

    @staticmethod
    def forward(ctx: object, anchor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return rows.detach()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None  # what arrives here is taken on the way
