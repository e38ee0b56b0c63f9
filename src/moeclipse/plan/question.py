"""What the search for a layout is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moeclipse.cost.step_bytes import ALONE, APART, Sharing
from moeclipse.plan.layout import Layout
from moeclipse.plan.step import StepTime, Terms


@dataclass(frozen=True, kw_only=True)
class Request:
    terms: Terms
    num_gpus: int
    batch: int
    """Sequences of a step."""
    imbalance: float = 1.1
    """Rows of the busiest rank, in mean ranks, that memory must have room for."""
    most_bytes: float = 0.0
    """That a rank may take of its device; 0: nearly all."""
    refuse: Callable[[Plan], str] = lambda _: ""
    """Why a plan cannot be run; empty: it can."""

    @property
    def fused(self) -> bool:
        """Whether experts run in our kernels."""
        return self.terms.cluster.device.name != "cpu"

    def room(self, layout: Layout) -> float:
        """Bytes of a device that may be taken."""
        usual = self.terms.cluster.device.memory * (APART if layout.ep * layout.tp > 1 else ALONE)
        return min(usual, self.most_bytes or usual)

    def sharing(self, layout: Layout) -> Sharing:
        return Sharing(
            dp=layout.dp * layout.copies,
            ep=layout.ep,
            tp=layout.tp,
            pp=layout.pp,
            imbalance=self.imbalance,
            fused=self.fused,
            by_layer=self.terms.place.by_layer and layout.layer_at_a_time,
        )

    def ring(self, layout: Layout) -> float:
        """Bytes in which state that lies on the host visits a device."""
        return self.terms.place.ring(self.terms.model, layout.num_ranks // layout.pp)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout with what it takes."""

    layout: Layout
    stages: tuple[int, ...]
    time: StepTime
    bytes_of: tuple[float, ...]
    """At the peak of each rank of the pipeline."""
    room: float
    host_bytes: float = 0.0
    """Of the host's memory, for one rank."""

    @property
    def peak(self) -> float:
        return max(self.bytes_of)

    def host_problem(self, room: float) -> str:
        """Empty: the host has room."""
        if self.host_bytes <= room:
            return ""
        return (
            f"state, inputs of layers and experts take {self.host_bytes / 1e9:.3g} GB of the host's memory, "
            f"of which a rank has {room / 1e9:.3g} (memory.host_gb)"
        )


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The layout that takes least, where none fits."""

    layout: Layout
    peak: float
    room: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    plans: tuple[Plan, ...]
    """Fastest first."""
    considered: int
    dropped: dict[str, int]
    """How many, by reason."""
    nearest: Nearest | None = None
