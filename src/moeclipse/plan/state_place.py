"""Optimizer state in the host's memory, in closed form: how much must leave a device, and what its way costs.

    share    the smallest part of all state, in hundredths, without which every rank has room: for the rest of
             its bytes, and for the ring in which state visits the device for its update
    left     seconds of its way that nothing hides. Both directions work at once, and the ring is full when
             updates begin; the rest goes by while updates run, and on one rank while that does in which they
             stand: backward with updates by layers (`optim.clip`), else the next step's forward

Inputs of layers may lie there, too: of a rank all but those of the model's first and last layer; and of one
rank weights of experts, all but those of the ring's layers twice a microbatch.

`train/predict/host_share` simulates the program of a run op by op: tests hold the two together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from moeclipse.cost.sizes import ModelSizes
from moeclipse.schedule.state_travel import room_of


@dataclass(frozen=True, kw_only=True)
class StatePlace:
    """Where moments and master weights may lie, inputs of layers and weights of experts."""

    host_room: float = 0.0
    """Bytes of the host's memory that a rank may take."""
    state: bool = True
    """Whether state may lie there."""
    each: float = 12.0
    """Bytes of a parameter that may travel."""
    fixed: float | None = None
    """The share that is asked for; None: as little as must."""
    buffers: int = 3
    """Large buckets that the ring has room for."""
    by_layer: bool = False
    """On one rank a layer is updated as soon as its gradients are there."""
    inputs: Literal["device", "auto", "host"] = "device"
    """Where inputs of layers may lie; auto: on the host where nothing fits without."""
    weights: Literal["device", "auto", "host"] = "device"
    """Where weights of experts may; auto: on the host where nothing fits without these, too."""
    weight_bytes: float = 0.0
    """Of one layer with experts."""

    def ring(self, model: ModelSizes, ranks: int) -> float:
        """Bytes, on each of the ranks that share a layer."""
        return self.each / ranks * ring_parameters(model, self.buffers)

    def away(self, model: ModelSizes) -> tuple[float, float]:
        """Where weights are on the host: (bytes of them, of these what a device is spared for the ring)."""
        layers = sum(model.moe_layers)
        return layers * self.weight_bytes, max(layers - self.buffers, 0) * self.weight_bytes

    def share(
        self,
        peaks: Sequence[float],
        owned: Sequence[float],
        ring: float,
        room: float,
        taken: float = 0.0,
    ) -> float | None:
        """None: there is no such. `peaks`: bytes of each rank with its state, `owned`: parameters of that;
        `taken`: of the host's memory by others."""
        if self.fixed is not None:
            return self.fixed
        most = 0.0
        for peak, mine in zip(peaks, owned, strict=True):
            if peak > room:
                most = max(most, math.ceil(100 * (peak + ring - room) / max(self.each * mine, 1.0)) / 100)
        if most and not self.state:
            return None
        return most if most <= 1 and most * self.each * max(owned) + taken <= self.host_room else None

    @staticmethod
    def left(way: float, ring: float, beside: float) -> float:
        """Of `way` seconds in each direction, `ring` of them in front; `beside` is what updates run in."""
        return max(way - ring - beside, 0.0)


@lru_cache(maxsize=64)
def ring_parameters(model: ModelSizes, buffers: int) -> float:
    """Head, layers from the last to the first, embedding; each stack of experts for itself.

    Kept: every layout of a search asks for it.
    """
    embedding, head = (model.table_parameters * trains for trains in model.trained_tables)
    buckets, up, down = [head], model.up_width, model.expert_width
    for layer in reversed(range(model.num_layers)):
        experts = model.trained_experts(layer)
        stacks = [experts * width / (up + down) for width in (down, up) if experts]
        buckets += [*stacks, model.trained_dense(layer)]
    return room_of([*filter(None, buckets), embedding], buffers)
