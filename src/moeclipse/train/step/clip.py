"""Gradients are clipped, all by one norm or each layer by its own, and updated when that is known.

    global    sums of squares -> norm of everything -> updates of everything             behind backward,
              or under the next forward (`train/optim/deferred`)
    layer     sums of squares of a layer -> its norm -> its update                       behind its gradients

By layers, on one rank whose microbatches go one after the other, or layer by layer (`pipeline.schedule =
"layers"`), a layer is updated inside backward, as soon as its last gradient is there: state that travels does
so under backward, and gradients of other layers need not be kept. Elsewhere the norms of all layers are told
with the numbers of a step, and updates follow then; bits are the same.

Contract. A step whose loss is not finite changes nothing. By layers, one whose gradient is not finite stands
still alone, and this is told; the count of updates goes on.

Hazard. By layers nothing can be taken back once backward has begun: such a step is not looked at again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from moeclipse.schedule.state_travel import layers_of
from moeclipse.train.optim.adamw import AdamW
from moeclipse.train.optim.buckets import Bucket
from moeclipse.train.step.results import CORRUPTED, LOSS, SQUARES


class LayerClip:
    """Of one rank; `optim.clip = "layer"`."""

    def __init__(self, optim: AdamW, num_layers: int, *, in_backward: bool) -> None:
        self.optim, self.size, self.in_backward = optim, num_layers + 2, in_backward
        self._last = layers_of([bucket.layer_name for bucket in optim.buckets])
        self._squares: list[torch.Tensor] = []
        self._lr, self._scale = 0.0, 1.0
        self._good: torch.Tensor | None = None
        self.ask: Callable[[], torch.Tensor] | None = None
        """The loss of a step that is run by a program: it is there before the first layer's update."""
        if in_backward:
            optim.buckets.on_reduce = self._reduced

    def place_of(self, bucket: Bucket) -> int:
        """Of its layer among all of the model's, embedding and head behind them."""
        if bucket.layer_name.startswith("layers."):
            return int(bucket.layer_name.split(".")[1])
        return self.size - 2 if bucket.layer_name == "embedding" else self.size - 1

    # --- inside backward, on one rank ---------------------------------------------------------------------

    def begin(self, lr: float, scale: float) -> None:
        """Before the microbatches of a step."""
        if self.in_backward:
            self._lr, self._scale, self._good = lr, scale, None
            self._squares = self._zeros()
            self.optim.updates += 1

    def judge(self, loss: torch.Tensor) -> None:
        """The loss of all of the step, before its last backward."""
        self._good = loss.detach().isfinite()

    @torch.no_grad()
    def _reduced(self, number: int) -> None:
        """A bucket's gradients are there; with the last of its layer the layer is updated."""
        if number not in self._last:
            return
        buckets = self.optim.buckets.buckets
        which = self._last[number]
        shards = [buckets[each].reduced() for each in which]
        squares = self.optim.sum_of_squares_of([buckets[each] for each in which], shards)
        self._squares[self.place_of(buckets[number])] = squares
        if self._good is None and self.ask is not None:
            self.judge(self.ask())
        assert self._good is not None, "a layer is updated, and the loss is not known"
        factor = self.optim.factor(
            torch.where(self._good, squares.sqrt() / self._scale, math.nan), self._scale
        )
        for each, shard in zip(which, shards, strict=True):
            self.optim.update_bucket(each, shard, self._lr, factor)

    # --- with the numbers of a step -----------------------------------------------------------------------

    def squares(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """This rank's sums, layer by layer; of `shards`, where these were not updated in backward."""
        if not self.in_backward:
            self._squares = self._zeros()
            buckets = self.optim.buckets.buckets
            for which in self._last.values():
                some = [buckets[each] for each in which]
                found = self.optim.sum_of_squares_of(some, [shards[each] for each in which])
                self._squares[self.place_of(some[0])] = found
        return torch.stack(self._squares)

    @torch.no_grad()
    def update(self, shards: list[torch.Tensor], lr: float, results: torch.Tensor, scale: float) -> None:
        """Behind backward, from the sums over all ranks; nothing where backward did it."""
        if self.in_backward:
            return
        self.optim.updates += 1
        good = results[LOSS].isfinite() & (results[CORRUPTED] == 0)
        norms = torch.where(good, results[-self.size :].sqrt() / scale, math.nan)
        for number, (bucket, shard) in enumerate(zip(self.optim.buckets, shards, strict=True)):
            self.optim.update_bucket(
                number, shard, lr, self.optim.factor(norms[self.place_of(bucket)], scale)
            )

    def hear(self, rows: list[list[float]]) -> tuple[list[list[float]], list[str]]:
        """What ranks said without the layers' sums, the norm that of finite ones; what to say of the others.

        Where no layer's is finite, neither is the norm: such a step is a bad one.
        """
        totals = [sum(column) for column in zip(*(row[-self.size :] for row in rows), strict=True)]
        finite = [place for place, total in enumerate(totals) if math.isfinite(total)]
        still = [self._name(place) for place in range(self.size) if place not in finite]
        for row in rows:
            row[SQUARES] = sum(row[-self.size :][place] for place in finite) if finite else math.nan
        notes = [f"not updated, gradients were not finite: {', '.join(still)}"] if still and finite else []
        return [row[: -self.size] for row in rows], notes

    def _name(self, place: int) -> str:
        return f"layer {place}" if place < self.size - 2 else ("embedding", "head")[place - self.size + 2]

    def _zeros(self) -> list[torch.Tensor]:
        device = self.optim.buckets.buckets[0].params.device
        return [torch.zeros((), dtype=torch.float64, device=device) for _ in range(self.size)]
