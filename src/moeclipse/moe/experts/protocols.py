"""What the layer asks of experts: two protocols, and the calls that both have.

    ExpertSet      the experts of a rank over rows that are grouped by expert, `counts` rows for each
                   `experts.Experts`, `adapters.ModuleExperts` (modules of the user), `experts.PadToCapacity`
    PairExperts    the same over rows as they arrive, of which each may visit several experts
                   `pairwise.PairwiseExperts` (any ExpertSet), `fused.FusedExperts` (kernels)

Forward, dgrad and wgrad are three calls with explicit state, so that a schedule can place them and many
microbatches can be in flight. What belongs to one call is in what that call returns, never in the experts:
also the weights that it computed with, which need not be those that the experts have when backward comes
(`torch.func.functional_call`, weights in another type, shadows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moeclipse.core.shown import warn
from moeclipse.tensor.weight_grad import Grads

Rows = TypeVar("Rows")


class Unhooked(nn.Module):
    """Experts of a rank: a schedule runs them in parts, so that as a module they are never called.

    Tools that put hooks on everything go on; who waits for these is told.
    """

    def register_forward_hook(self, *args: Any, **options: Any) -> RemovableHandle:
        tell_about_hooks()
        return super().register_forward_hook(*args, **options)

    def register_forward_pre_hook(self, *args: Any, **options: Any) -> RemovableHandle:
        tell_about_hooks()
        return super().register_forward_pre_hook(*args, **options)

    def register_full_backward_hook(self, *args: Any, **options: Any) -> RemovableHandle:
        tell_about_hooks()
        return super().register_full_backward_hook(*args, **options)


def tell_about_hooks() -> None:
    warn(
        "hooks on moe.experts never fire: a schedule runs experts in parts; hook the layer (moe), or give it "
        "experts of your own (MoE(experts=...)), whose modules are called one by one",
        stacklevel=3,
    )


class PendingWgrad(Protocol):
    """Weight gradients that are still to be computed."""

    def add_to(self, *into: torch.Tensor | None) -> None:
        """Add them to `into`, which lie as the experts' `weights`; None: nobody asked for that one."""


class Trainable(Protocol):
    @property
    def weights(self) -> tuple[nn.Parameter, ...]: ...

    def wgrad(self, pending: Sequence[Any], begun: Grads = (), wanted: Sequence[bool] | None = None) -> Grads:
        """Add up all parts; what autograd gets for each weight is nothing where there is a main_grad.

        `begun` is what an earlier call of the same backward returned: these parts add to it. `wanted` says
        which weights' gradients anybody asked for; left out: those of weights that require one.
        """
        ...


class ExpertSet(Trainable, Protocol[Rows]):
    """`Rows`: one tensor, or a tuple or dict of them where a token is several.

    `shadows`: the flat weights of other ranks' experts, a row each, to compute with instead.
    """

    ids: tuple[int, ...]
    """Logical experts in the order of slots."""

    @property
    def out_width(self) -> int: ...

    def forward(
        self, x: Rows, counts: Sequence[int], shadows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, object]:
        """(y, what backward needs)."""
        ...

    def dgrad(self, dy: torch.Tensor, saved: Any) -> tuple[Rows, object]:
        """(gradient of x, in its structure; a PendingWgrad); with the weights that forward had."""
        ...

    def flatten(self, slots: Sequence[int]) -> torch.Tensor:
        """The weights of these experts, one row each: what travels to ranks that shadow them."""
        ...

    def shadow_wgrad(self, pending: Any, rows: torch.Tensor) -> None:
        """Add the gradients of shadows to `rows`, one row each."""

    def add_shadow_grads(
        self, slots: Sequence[int], rows: torch.Tensor, weight_grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Add gradients that shadows returned to where this rank's own went."""


class PairExperts(Trainable, Protocol):
    def forward(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
    ) -> tuple[torch.Tensor, object]:
        """(the partial sum of each row's experts, what backward needs).

        `rows` holds each of a token's tensors; pairs are grouped by expert, `index_M` names the row of each.
        """
        ...

    def recompute(
        self,
        rows: Sequence[torch.Tensor],
        index_M: torch.Tensor,
        counts: Sequence[int],
        score_M: torch.Tensor,
    ) -> object:
        """What backward needs, of the same rows once more."""

    def dgrad(
        self, d_partial_RO: torch.Tensor, saved: Any
    ) -> tuple[list[torch.Tensor | None], torch.Tensor, object]:
        """(gradients of `rows`, None for integers; gradient of the scores; a PendingWgrad)."""
        ...


class WrappedExperts:
    """Hands on what another `ExpertSet` does; who wraps it says what becomes of rows on their way."""

    def __init__(self, experts: ExpertSet[torch.Tensor]) -> None:
        self.experts, self.ids = experts, experts.ids

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return self.experts.weights

    @property
    def out_width(self) -> int:
        return self.experts.out_width

    def wgrad(self, pending: Sequence[Any], begun: Grads = (), wanted: Sequence[bool] | None = None) -> Grads:
        return self.experts.wgrad(pending, begun, wanted)

    def flatten(self, slots: Sequence[int]) -> torch.Tensor:
        return self.experts.flatten(slots)

    def shadow_wgrad(self, pending: Any, rows: torch.Tensor) -> None:
        self.experts.shadow_wgrad(pending, rows)

    def add_shadow_grads(
        self, slots: Sequence[int], rows: torch.Tensor, weight_grads: Sequence[torch.Tensor | None]
    ) -> None:
        self.experts.add_shadow_grads(slots, rows, weight_grads)
