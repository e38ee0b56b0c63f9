"""Segment-recurrent attention: a layer also attends to what it saw in the segment before.

    step s      x_1 ... x_S                     attention over  [memory | x]
    step s + 1        x_(S+1) ... x_2S          memory = the last `model.memory` inputs of this attention

Idea (Transformer-XL). Row b of one step continues row b of the step before (`data.order = "stream"`). Each
attention keeps its input (the normed hidden states) of the last positions; in the next step keys and values
are computed from them with the weights of that step. No gradient flows into what was kept, but keys and
values of the past do train their weights. Memory may be longer than a segment: it then grows over steps.

Contract. What a step reads was written by the step before, never by itself: writing goes to a second set,
and `turn` makes it the first. So microbatches may run in any order, and recomputing a forward reads the same.
Positions are relative (RoPE): those of memory are negative, and distances go on across the border.

Under tensor parallelism memory is held as linears hold tokens: whole on each rank, or, with sequence
parallelism, as this rank's contiguous part of the rows [samples x positions].

Shapes: B samples, S positions of a segment, M positions of memory, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moeclipse.core.shares import even_bounds
from moeclipse.tensor.parallel import TensorParallel

Place = tuple[int, int]
"""Samples of a step: (microbatch, the first one's number in it)."""


@dataclass(frozen=True)
class Past:
    """What some samples left in one layer."""

    x_TD: torch.Tensor
    """Rows as linears hold them: those of a sample are neighbours."""
    positions: int


class LayerMemory:
    """The memory of one layer's attention."""

    def __init__(self, size: int, layer: int, tp: TensorParallel) -> None:
        self.size, self.layer, self.tp = size, layer, tp
        self._now: dict[Place, Past] = {}
        self._next: dict[Place, Past] = {}
        self._loaded: dict[int, tuple[int, torch.Tensor]] = {}

    def read(self, place: Place, samples: int) -> Past | None:
        """What the step before left for so many samples; None where the text begins."""
        microbatch, first = place
        if microbatch in self._loaded:  # a checkpoint does not know into which pieces samples are cut
            begin, kept_BMD = self._loaded[microbatch]
            mine_BMD = kept_BMD[first - begin : first - begin + samples]
            return Past(self._part(mine_BMD.flatten(0, 1)), kept_BMD.shape[1])
        return self._now.get(place)

    @torch.no_grad()
    def write(self, place: Place, x_TD: torch.Tensor, positions: int, past: Past | None) -> None:
        """Keep the last positions of the past and of this segment, for the next step."""
        x_TD = x_TD.detach()
        if self.size == positions:  # the whole segment, held as it is
            self._next[place] = Past(x_TD.clone(), positions)
            return
        x_BSD = self._whole(x_TD).unflatten(0, (-1, positions))
        if past is not None and self.size > positions:
            x_BSD = torch.cat([self._whole(past.x_TD).unflatten(0, (-1, past.positions)), x_BSD], dim=1)
        kept_BMD = x_BSD[:, -self.size :]
        self._next[place] = Past(self._part(kept_BMD.flatten(0, 1)), kept_BMD.shape[1])

    def turn(self, *, keep: bool = True) -> None:
        """A step is over: what it wrote is the past now, or, after a bad step, there is none."""
        self._now, self._next, self._loaded = (self._next if keep else {}), {}, {}

    def forget(self) -> None:
        """The text goes on elsewhere."""
        self._now, self._loaded = {}, {}

    def kept(self) -> Iterator[tuple[Place, Past, int]]:
        """(samples, what they left, number of this rank's first row among theirs), for a checkpoint."""
        loaded = {
            (microbatch, first): Past(self._part(kept_BMD.flatten(0, 1)), kept_BMD.shape[1])
            for microbatch, (first, kept_BMD) in self._loaded.items()
        }
        for place, past in (loaded or self._now).items():
            if self.tp.parts_tokens:
                yield place, past, self.tp.index * len(past.x_TD)
            elif self.tp.index == 0:
                yield place, past, 0

    def put(self, place: Place, kept_BMD: torch.Tensor) -> None:
        """What a checkpoint held for this rank's samples of a microbatch."""
        microbatch, first = place
        self._loaded[microbatch] = (first, kept_BMD)

    def _whole(self, x_TD: torch.Tensor) -> torch.Tensor:
        if not self.tp.parts_tokens:
            return x_TD
        return self.tp.gather_rows(x_TD, f"gather of memory, layer {self.layer}").get()

    def _part(self, x_TD: torch.Tensor) -> torch.Tensor:
        if not self.tp.parts_tokens:
            return x_TD.clone()
        cuts = even_bounds(len(x_TD), self.tp.size)
        return x_TD[cuts[self.tp.index] : cuts[self.tp.index + 1]].clone()


def memories(model: nn.Module) -> Iterator[LayerMemory]:
    """Those of all layers of a model (or of a stage of it) that have one."""
    for module in model.modules():
        memory = getattr(module, "memory", None)
        if isinstance(memory, LayerMemory):
            yield memory
