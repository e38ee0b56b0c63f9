"""Activation recompute: parts of a layer that are computed again in backward instead of being kept.

    run_again    keeps the inputs of a part alone, and runs it a second time when its gradients come; who
                 gives it another form for that time leaves out what only the outputs need
    forget       gives back the memory of a tensor that is quick to make, until its gradients come

Contract. The same numbers to the bit: the same operations run over the same inputs. Parameters take their
gradients as always, in the backward inside the backward. Both can be captured in a CUDA graph.

Hazard. A forgotten tensor is empty until the gradient of `until` is there: whoever else keeps it for
backward must be behind `until`, and nobody may read it in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch.utils.checkpoint import CheckpointFunction

from moeclipse.ops.frozen import Scratch
from moeclipse.tensor.linear import eager

Again = Literal["off", "norms", "attn", "mlp", "moe", "full"]
Part = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


class Elsewhere(Protocol):
    """Keeps the input of a part between forward and backward, where autograd would."""

    def leave(self, x: torch.Tensor, microbatch: int, /) -> None: ...
    def back(self, microbatch: int, /) -> torch.Tensor: ...
    def done(self, microbatch: int, /) -> None:
        """Nobody reads what came back any more."""


Kept = tuple[Elsewhere, int]
"""By whom an input is kept, and of which microbatch it is."""


class Visiting(Protocol):
    """Brings weights that lie elsewhere, for as long as they are read."""

    def come(self, microbatch: int, /, *, again: bool) -> None: ...
    def gone(self, *, again: bool) -> None: ...


Visit = tuple[Visiting, int]
"""By whom weights are brought, and for which microbatch."""


class RunAgain(CheckpointFunction):
    """What the second forward decodes of frozen weights serves the gradients right behind it."""

    @staticmethod
    def forward(
        ctx: Any,
        scratch: Scratch,
        part: Part,
        again: Part,
        kept: Kept | None,
        visit: Visit | None,
        x: torch.Tensor,
    ) -> Any:
        ctx.scratch, ctx.kept, ctx.visit = scratch, kept, visit
        if kept is not None:
            kept[0].leave(x, kept[1])
        # What is random in a model is keyed by step and token, so there is no state of a generator to keep.
        found = CheckpointFunction.forward(ctx, part, False, x)
        if kept is not None:
            ctx.save_for_backward()
            ctx.tensor_indices = []
        ctx.run_function = again
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        kept: Kept | None = ctx.kept
        visit: Visit | None = ctx.visit
        if visit is not None:
            visit[0].come(visit[1], again=True)
        if kept is not None:
            ctx.inputs = [kept[0].back(kept[1]).detach().requires_grad_()]
        with ctx.scratch.reusing():
            _, _, d_x = CheckpointFunction.backward(ctx, *grads)
        if kept is not None:
            kept[0].done(kept[1])
        if visit is not None:
            visit[0].gone(again=True)
        return None, None, None, None, None, d_x


@eager
def run_again(
    part: Part,
    x: torch.Tensor,
    scratch: Scratch,
    again: Part | None = None,
    kept: Kept | None = None,
    visit: Visit | None = None,
) -> tuple[torch.Tensor, ...]:
    """part(x), of which nothing but x is kept; `scratch`: of its frozen weights.

    `again`: the same for gradients alone; values of its outputs are nobody's business. `kept`: x lies there.
    `visit`: brings weights for backward; forward is up to the caller.
    """
    if not torch.is_grad_enabled() or not x.requires_grad:  # below what is trained nothing is kept anyway
        return part(x)
    # Not the other kind, which hands backward copies of parameters: these have no main_grad. Not by torch's
    # `checkpoint` either, which loads the compiler, two seconds of a process, to say that it is not for it.
    found: tuple[torch.Tensor, ...] = RunAgain.apply(scratch, part, again or part, kept, visit, x)
    return found


def forget(x: torch.Tensor, make: Callable[[], torch.Tensor], until: torch.Tensor) -> None:
    """Free x; `make` gives its numbers once more, when gradients have come back as far as `until`."""
    if not until.requires_grad:
        return
    storage, size = x.untyped_storage(), x.untyped_storage().nbytes()

    def restore(_: torch.Tensor) -> None:
        storage.resize_(size)
        with torch.no_grad():
            # Not a change that autograd should mind: it is what was there.
            x.data.copy_(make())

    until.register_hook(restore)
    storage.resize_(0)
