"""What travels beside rows and activations, as a shape says it: launches inside ops, and the end of a step.

    HostedLaunch  a collective that another op of a layer launches while it runs (sizes, scores, loads,
                  counts, gathers and sums over the tp ranks); in a program it is an op of its own
    BucketShape   parameters whose gradients are reduced, and whose weights are gathered, together
    StepShape     the axes that ranks stand on, and what is left of a step behind its microbatches

An axis is named as the group of a mesh that runs it (`comm/mesh`); who its members are follows from dp, ep
and tp alone. A program of one list for each place of the pipeline stands for all copies there: they launch
the same, so a circle among copies would be a circle in that program, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.kinds import Kind


class HostedLaunch(NamedTuple):
    """One collective of a layer, once for each microbatch or chunk that passes."""

    kind: Kind
    host: Kind
    """The op that launches it."""
    axis: str
    what: str
    """As the transfer is labelled; behind it stands the microbatch, but for those over tp."""
    ahead: bool = False
    """In front of the host's own work, not behind it."""
    once: bool = False
    """For all chunks of a microbatch together, with the last."""
    width: int = 0
    """Values that travel for each token; 0: a few for each expert, however many tokens there are."""


class BucketShape(NamedTuple):
    name: str
    axis: str
    places: tuple[tuple[int, int], ...]
    """(stage, layer in it) of the ops that fill it."""
    tied: bool = False
    """Holds an embedding that another stage fills, too."""
    num_bytes: float = 0.0
    host_bytes: float = 0.0
    """Of this rank's optimizer state, as far as it lies in the host's memory (`schedule/state_travel`)."""
    layer: str = ""
    """Buckets of one are neighbours, and are clipped and updated together where updates go by layers."""
    turn: int = -1
    """The bucket whose gradient lay in the same memory, and is on the host now (`schedule/grad_travel`);
    below 0: nobody's."""
    grad_bytes: float = 0.0
    """Of its own gradient, where that travels."""
    weights: bool = False
    """Its update writes weights that lie on the host (`schedule/weight_travel`)."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A whole step: with this, a program holds everything that travels."""

    dp: int = 1
    ep: int = 1
    tp: int = 1
    rows: str = "experts"
    """The axis that rows travel on."""
    buckets: tuple[tuple[BucketShape, ...], ...] = ()
    """Of each place of the pipeline, in the order in which they are reduced."""
    tied: bool = False
    """First and last stage add up gradients of one embedding."""
    loads: bool = True
    """There are experts, whose loads are told to everyone at the end of a step."""
    slots: int = 0
    """Buffers of the ring that state from the host's memory visits."""
    input_slots: int = 0
    """Inputs of layers that may wait for their way there, and as many buffers for those that come back."""
    weight_slots: int = 0
    """Buffers of the ring that weights from the host's memory visit."""
    first_backward: int = 0
    """The first layer that has a backward: those below it have nothing to train."""
    by_layer: bool = False
    """A layer's update stands behind its weight gradients, not behind the norm of all."""
    next_forward: bool = False
    """Updates are those of the step before: each stands in front of the forward of its layers."""
    mirrored: bool = False
    """Two copies of the model run in opposite directions: places p and P-1-p share their parameters."""

    @property
    def copies(self) -> int:
        return self.dp * self.ep * self.tp

    def size_of(self, axis: str) -> int:
        """Ranks on an axis of one place of the pipeline, and of the one that shares its parameters."""
        places = 2 if self.mirrored and axis in SHARING else 1
        return len(self.members(axis, 0, places, self.copies))

    def members(self, axis: str, rank: int, num_places: int, copies: int) -> tuple[int, ...]:
        """Ranks on one axis with `rank`; `copies` is 1 where one list stands for all of them."""
        place, copy = divmod(rank, copies)
        if axis == "world":
            return tuple(range(num_places * copies))
        if axis in ALONE:
            return (rank,)
        if axis == "line":
            return tuple(range(copy, num_places * copies, copies))
        if axis == "ends":
            return (copy, (num_places - 1) * copies + copy) if num_places > 1 else (copy,)
        if axis not in SAME:
            raise ScheduleError(f"there is no axis {axis!r}; known: {', '.join(sorted(SAME))}")
        mine = self._coordinates(copy)
        same = [at for at, kept in enumerate(SAME[axis]) if kept]
        beside = [
            other for other in range(copies) if all(self._coordinates(other)[at] == mine[at] for at in same)
        ]
        there = num_places - 1 - place if self.mirrored and axis in SHARING else place
        return tuple(each * copies + other for each in sorted({place, there}) for other in beside)

    def _coordinates(self, copy: int) -> tuple[int, int, int]:
        data, t = divmod(copy, self.tp)
        return data // self.ep, data % self.ep, t


ALONE = ("fetch", "store")
"""Axes of copies between host and device, on which a rank meets nobody."""
SAME: dict[str, tuple[bool, bool, bool]] = {
    "stage": (False, False, False),
    "dense_grads": (False, False, False),
    "experts": (True, False, False),
    "replicas": (False, True, True),
    "expert_grads": (False, True, False),
    "tensor": (True, True, False),
    "data": (False, False, True),
    "cut_grads": (False, False, True),
    "shard_experts": (True, False, True),
}
"""Which of (dp, ep, tp) the members of an axis have in common, beside their place in the pipeline."""
SHARING = ("dense_grads", "cut_grads", "replicas", "expert_grads")
"""Axes of those who hold the same parameters."""


def group_name(axis: str, members: tuple[int, ...]) -> str:
    """Groups of one axis are apart, so the first member names one."""
    return f"{axis}@{members[0]}"
