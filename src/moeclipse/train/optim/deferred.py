"""Updates that wait for the next step's forward: each runs before the first layer that reads its weights.

    end of step s        the norm of all gradients is known: nothing is updated yet
    step s + 1           update of embedding, layer 0 · forward of layer 0 · update of layer 1 · ...

Idea. State that lies in the host's memory has to travel for its update, and clipping by the norm of all
gradients lets no update begin before the last of backward. Behind it nothing is left to hide copies under,
but the next step has a forward: gradients stay where they are until a layer's turn comes, and are not
overwritten before, because backward comes later still.

Contract. Bits are those of updates at the end of a step: the same kernels, in another order of buckets. Who
looks at weights or state between steps sees them updated: `AdamW.states`, a forward of any kind (evaluation,
generation) and `state_dict` run what is left first.

Hazard. Parameters that are read in no such way are one update behind: call `finish` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from moeclipse.model.transformer import Transformer
from moeclipse.schedule.state_travel import update_order, updated_before


class Updating(Protocol):
    """What updates one bucket after the other."""

    def update_bucket(self, number: int, grad: torch.Tensor, lr: float, factor: torch.Tensor) -> None: ...
    def begin_fetching(self) -> None: ...


class DeferredUpdates:
    """Of one rank."""

    def __init__(self, optim: Updating, first_layers: Sequence[int]) -> None:
        """`first_layers`: of each bucket the first layer that reads its weights; 0 for the embedding."""
        self.optim = optim
        self._order = update_order(len(first_layers), next_forward=True)
        self._before = updated_before([first_layers[number] for number in self._order])
        self._held: tuple[list[torch.Tensor], float, torch.Tensor] | None = None
        self._next = 0
        """Of the order: updates before it have run."""

    def watch(self, model: Transformer) -> None:
        """Run updates as a forward of this model comes to its layers."""
        model.begin_forward = partial(self.before, 0)
        model.register_state_dict_pre_hook(lambda *_: self.finish())
        for number, layer in enumerate(model.all_layers):
            layer.register_forward_pre_hook(partial(self._entered, number))

    def _entered(self, layer: int, *_: object) -> None:
        self.before(layer)

    def hold(self, shards: list[torch.Tensor], lr: float, factor: torch.Tensor) -> None:
        """What is to be updated with; nothing else is waiting."""
        assert self._held is None, "the updates of the step before have not run"
        self._held, self._next = (shards, lr, factor), 0
        self.optim.begin_fetching()

    def drop(self) -> None:
        """The step is not taken."""
        self._held = None

    @property
    def waiting(self) -> bool:
        return self._held is not None

    def before(self, layer: int) -> None:
        """A forward is about to read the weights of this layer."""
        if self._held is None:
            return
        shards, lr, factor = self._held
        while self._next < len(self._order) and self._before[self._next] <= layer:
            number = self._order[self._next]
            self.optim.update_bucket(number, shards[number], lr, factor)
            self._next += 1
        if self._next == len(self._order):
            self._held = None
            self.optim.begin_fetching()

    def finish(self) -> None:
        """All that is left."""
        self.before(max(self._before, default=0))
