"""What this layer costs on these ranks: measured once, by all ranks together, after the first step.

Two sizes give a fixed part and a slope, for rows through experts and for bytes on the wire. The wire is
measured twice: while all ranks send to all others, step by step as an exchange does, and between two ranks
alone. The second tells what one link carries when others rest, which is how it is around a busy expert; and
where all together are much slower than that, ranks share a wire, and bytes add up over ranks instead of
travelling side by side. Where ranks are on several hosts (`Mesh.hosts`), links inside a host and between
hosts are measured apart, each in both ways, and whether the ranks of a host share a card follows from the
latter. All ranks leave with the same numbers, because whoever decides from them must decide alike.

Where more of something took no longer that could be seen, it is tried again with more of it, and is None if
that does not help (`moe/tune/stopwatch`): whoever decides does the plain thing then. Doubts say how far
figures may be off, rows and wires apart: on a slow wire it hardly matters that a busy processor made trials
of experts scatter. What is decided from figures has to win more than that.

    near, far    cost/exchange    what an exchange takes that is cut by hosts
                 balance/objective, by `from_measured`    what planners charge, card by card
                 balance/shadow_model    how many near rows or copies a far one is worth
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch

from moeclipse.balance.shadow_model import FAR_GRAIN, ShadowCosts
from moeclipse.comm.mesh import Mesh
from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.protocols import PendingWgrad
from moeclipse.moe.tune.replica_price import sync_price
from moeclipse.moe.tune.stopwatch import (
    MORE,
    REPEATS,
    CannotMeasure,
    Slope,
    Timing,
    by_all,
    slope_of,
    tell,
    timed,
)
from moeclipse.ops.precision import WIDE

ROWS = {"cpu": (4, 96), "cuda": (64, 2048)}
"""For each expert of a rank; a device needs some thousand rows to show what one of them costs."""
POSITIVE = ("row_forward", "row_backward", "bandwidth", "link", "num_ranks")
TYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
BYTES = {"cpu": (16 << 10, 256 << 10), "cuda": (1 << 20, 16 << 20)}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Seconds and bytes per second; the same on every rank. None: trials could not tell."""

    row_forward: float | None
    row_backward: float | None
    kernel: float
    """Of all experts of a rank, however few their rows: reading weights, launching."""
    latency: float
    bandwidth: float | None
    """Of each rank while all send to all, inside their hosts where there are several."""
    link: float | None
    """The same of one rank while all others rest."""
    shared_wire: bool
    row_bytes: float
    parameter_bytes: float
    gradient_bytes: float
    num_ranks: int = 1
    far_bandwidth: float | None = 0.0
    """Of each rank while all send to all ranks of other hosts; 0: there are none."""
    far_link: float | None = 0.0
    """The same of one rank while all others rest."""
    far_latency: float = 0.0
    loan: float = 0.0
    """Of one shadow in one direction, beside its bytes (`moe/tune/shadow_price`) ..."""
    look: float = 0.0
    """... and of choosing shadows in one call; 0: not measured."""
    sync: float = 0.0
    """Of a step, for a layer that has replicas, beside their bytes (`moe/tune/replica_price`) ..."""
    sync_bandwidth: float | None = 0.0
    """... and bytes per second of their gradients and weights; 0: not measured."""
    doubt: float = 0.0
    """Part that figures may be off by, as trials scattered: the most of ..."""
    row_doubt: float = 0.0
    """... what computing rows takes, and ..."""
    wire_doubt: float = 0.0
    """... what links carry."""
    fixed: bool = False
    """Nothing was measured: the prices of `moe/tune/fixed_prices`, which are the same in every run."""

    def __post_init__(self) -> None:
        """They may come from a file."""
        for name, value in vars(self).items():
            if value is not None and (value < 0 or (value == 0 and name in POSITIVE)):
                raise ValueError(f"{name} ({value!r}) is no price")

    @property
    def unknown(self) -> list[str]:
        """What trials could not tell."""
        return [name for name, value in vars(self).items() if value is None]

    @property
    def prices_rows(self) -> bool:
        """Whether rows and wires are known: what cuts and shadows are chosen from."""
        return set(self.unknown) <= {"sync_bandwidth"}

    def exchange_costs(self) -> ExchangeCosts:
        assert self.bandwidth is not None
        assert self.row_forward is not None
        return ExchangeCosts(
            row_bytes=self.row_bytes,
            near_bandwidth=self.bandwidth,
            far_bandwidth=self.far_bandwidth or self.bandwidth,
            row_seconds=self.row_forward,
            expert_bytes=self.parameter_bytes,
            latency=self.latency,
            far_latency=self.far_latency if self.far_bandwidth else None,
            kernel=self.kernel,
            inline_compute=True,
        )

    def shadow_costs(self, *, overlap: float) -> ShadowCosts:
        assert self.row_forward is not None
        assert self.row_backward is not None
        assert self.bandwidth is not None
        assert self.link is not None
        # The fullest rank sets the pace. On a shared wire the policy adds the bytes of all ranks up itself.
        byte = 1 / (self.bandwidth * self.num_ranks) if self.shared_wire else 1 / self.link
        near, far = (self.bandwidth, self.far_bandwidth) if self.shared_wire else (self.link, self.far_link)
        return ShadowCosts(
            row_forward=self.row_forward,
            row_backward=self.row_backward,
            row_send=self.row_bytes * byte,
            parameter_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            parameter_byte=byte,
            gradient_byte=byte,
            copy=self.latency + self.loan,
            overlap=overlap,
            shared_wire=self.shared_wire,
            row_doubt=self.row_doubt,
            wire_doubt=self.wire_doubt,
            far=max(round(FAR_GRAIN * near / far) / FAR_GRAIN, 1.0) if far else 1.0,
        )


class SizesInBytes(TypedDict):
    """Of a row, and of an expert's parameters and gradients."""

    row_bytes: float
    parameter_bytes: float
    gradient_bytes: float


class FarPrices(TypedDict):
    """Of links between hosts."""

    far_bandwidth: float | None
    far_link: float | None
    far_latency: float


NOTHING_FAR: FarPrices = {"far_bandwidth": 0.0, "far_link": 0.0, "far_latency": 0.0}


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """What all ranks know of an expert, though some may hold none."""

    row_bytes: int
    parameters: int
    weight_dtype: torch.dtype
    held: int
    """Experts of a rank, at most."""

    @classmethod
    def of(cls, pairs: PairwiseExperts, mesh: Mesh) -> ExpertSizes:
        """Collective over the ranks of a stage."""
        experts = pairs.experts
        held = len(experts.ids)
        dtype = next((weight.dtype for weight in experts.weights), pairs.like[0].dtype)
        size = sum(weight.numel() for weight in experts.weights) // max(held, 1)
        # A rank without experts may not know the type of their weights.
        told = zip(*tell(mesh, [float(size), float(held), float(dtype.itemsize)]), strict=True)
        parameters, most, width = (int(max(column)) for column in told)
        if width not in TYPES:
            raise CannotMeasure(f"experts have weights of {width} bytes, which nobody adds gradients to")
        return cls(
            row_bytes=sum(tensor.element_size() * tensor.shape[1:].numel() for tensor in pairs.like),
            parameters=parameters,
            weight_dtype=TYPES[width],
            held=most,
        )

    def as_bytes(self) -> SizesInBytes:
        # As they are read back from a file of choices: who repeats these writes the same text.
        return {
            "row_bytes": float(self.row_bytes),
            "parameter_bytes": float(self.parameters * self.weight_dtype.itemsize),
            "gradient_bytes": float(self.parameters * WIDE[self.weight_dtype].itemsize),
        }


def measure(pairs: PairwiseExperts, dispatcher: Dispatcher, mesh: Mesh) -> Probe:
    """Collective over the ranks of a stage: all that have this layer."""
    forward, backward, kernel = _rows(pairs, mesh)
    near, far = _links(dispatcher, mesh)
    sizes = ExpertSizes.of(pairs, mesh)
    given = (sizes.parameters, sizes.weight_dtype, sizes.held)
    fixed, bytes_per_s = sync_price(*given, dispatcher.group, mesh)
    row_doubt = doubt_of(forward, backward)
    wire_doubt = doubt_of(*near.slopes, *(() if far is None else far.slopes))
    alone, together = near.alone.rate, near.together.rate
    return Probe(
        row_forward=forward.each,
        row_backward=backward.each,
        kernel=kernel,
        latency=near.latency,
        bandwidth=together,
        link=alone,
        shared_wire=near.peers > 1 and None not in (alone, together) and alone > 2 * together,  # type: ignore[operator]
        num_ranks=dispatcher.group.size,
        sync=fixed,
        sync_bandwidth=bytes_per_s,
        doubt=max(row_doubt, wire_doubt),
        row_doubt=row_doubt,
        wire_doubt=wire_doubt,
        **sizes.as_bytes(),
        **(NOTHING_FAR if far is None else far.as_far()),
    )


def doubt_of(*slopes: Slope) -> float:
    """The most of those that trials could tell."""
    return max((slope.doubt for slope in slopes if slope.each is not None), default=0.0)


def _rows(pairs: PairwiseExperts, mesh: Mesh) -> tuple[Slope, Slope, float]:
    """(a row forward, backward; what experts take however few their rows): the mean of ranks with experts."""
    few, many = ROWS[mesh.device.type]
    for factor in MORE[mesh.device.type]:
        ends_PR = (_expert_seconds(pairs, rows, mesh) for rows in (few, factor * many))
        everyone = [[*small, *large[1:]] for small, large in zip(*ends_PR, strict=True) if small[0]]
        slopes, kernels = [], []
        for letter in (1, 3):
            ends = []
            for at in (letter, letter + 4):
                seconds = [row[at] / (row[0] * (factor * many - few)) for row in everyone]
                noises = [row[at + 1] / (row[0] * (factor * many - few)) for row in everyone]
                ends.append(Timing(sum(seconds) / len(everyone), math.hypot(*noises) / len(everyone)))
            slopes.append(slope_of(ends[0], ends[1], 1.0))
        for row in everyone:
            each = max(row[5] - row[1], 0.0) / (factor * many - few)
            kernels.append(max(row[1] - few * each, 0.0))
        if all(slope.each is not None for slope in slopes):
            break
    return slopes[0], slopes[1], sum(kernels) / len(kernels)


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """What was measured of one kind of links: seconds of a byte."""

    peers: int
    """That a rank sends to, at most."""
    together: Slope
    alone: Slope
    latency: float

    @property
    def slopes(self) -> tuple[Slope, Slope]:
        return self.together, self.alone

    def as_far(self) -> FarPrices:
        return {
            "far_bandwidth": self.together.rate,
            "far_link": self.alone.rate,
            "far_latency": self.latency,
        }


def _links(dispatcher: Dispatcher, mesh: Mesh) -> tuple[MeasuredLink, MeasuredLink | None]:
    """Links inside hosts, and between them where there are any; where hosts have one rank, both alike.

    Groups of one stage measure together, so what is measured follows from the hosts of all of them.
    """
    me = dispatcher.group.ranks
    partition = mesh.partitions.get(dispatcher.group.name, [me])
    families = [ranks for ranks in partition if set(ranks) <= set(mesh.stage.ranks)] or [me]
    hosts = [[mesh.hosts[rank] for rank in ranks] for ranks in families]
    mine = [mesh.hosts[rank] for rank in me]
    if all(len(set(names)) == 1 for names in hosts):
        return _link(dispatcher, mesh, len(me) - 1, lambda *_: True), None
    inside = max(names.count(name) for names in hosts for name in names) - 1
    across = max(len(names) - names.count(name) for names in hosts for name in names)
    far = _link(dispatcher, mesh, across, lambda a, b: mine[a] != mine[b])
    if inside == 0:
        return far, far
    return _link(dispatcher, mesh, inside, lambda a, b: mine[a] == mine[b]), far


def _link(dispatcher: Dispatcher, mesh: Mesh, peers: int, joins: Callable[[int, int], bool]) -> MeasuredLink:
    """`joins` says whether two ranks of the group have such a link; one of them is measured alone."""
    ranks, peers = range(dispatcher.group.size), max(peers, 1)
    pairs = [(a, b) for a in ranks for b in ranks if a != b and joins(a, b)]
    together, small = _bytes(dispatcher, mesh, pairs, peers)
    alone, _ = _bytes(dispatcher, mesh, pairs[:1], 1)
    # What a transfer of nothing would take; on a slow wire even the small one is mostly bytes.
    sent = peers * BYTES[mesh.device.type][0] * (together.each or 0.0)
    latency = max(small.seconds - sent, 0.1 * small.seconds) / peers
    return MeasuredLink(peers=peers, together=together, alone=alone, latency=latency)


def _bytes(
    dispatcher: Dispatcher, mesh: Mesh, pairs: Sequence[tuple[int, int]], peers: int
) -> tuple[Slope, Timing]:
    """(seconds of a byte, those of few bytes), `peers` being sent to by each rank."""
    few, many = BYTES[mesh.device.type]
    for factor in MORE[mesh.device.type]:
        small, large = (_wire_seconds(dispatcher, mesh, size, pairs) for size in (few, factor * many))
        slope = slope_of(small, large, peers * (factor * many - few))
        if slope.each is not None:
            break
    return slope, small


@torch.no_grad()
def _expert_seconds(pairs: PairwiseExperts, rows: int, mesh: Mesh) -> list[list[float]]:
    """Of every rank: its experts, and what `rows` rows through each take, forward and backward, weight
    gradients included; each with its noise."""
    experts, counts = pairs.experts, [rows] * len(pairs.experts.ids)
    x: Any = None
    y: Any = None

    def ready() -> list[float]:
        nonlocal x, y
        x = pairs.structure.put_together([t.new_ones(sum(counts), *t.shape[1:]) for t in pairs.like])
        y, _ = experts.forward(x, counts)
        return []

    def seconds() -> list[float]:
        sums = [torch.zeros_like(weight, dtype=WIDE[weight.dtype]) for weight in experts.weights]
        forward = timed(lambda: experts.forward(x, counts), mesh.device)
        saved = [experts.forward(x, counts)[1] for _ in range(REPEATS + 1)]  # modules go backward once

        def backward() -> None:
            _, pending = experts.dgrad(y, saved.pop())
            cast(PendingWgrad, pending).add_to(*sums)

        backward()
        return [len(counts), *forward, *timed(backward, mesh.device)]

    by_all(mesh, ready if counts else list)
    return by_all(mesh, seconds if counts else lambda: [0.0] * 5, 5)


def _wire_seconds(dispatcher: Dispatcher, mesh: Mesh, size: int, pairs: Sequence[tuple[int, int]]) -> Timing:
    """Of the slowest rank: `size` bytes between each of these pairs of the group, step by step."""
    me, num_ranks, wanted = dispatcher.group.index, dispatcher.group.size, set(pairs)
    rows = torch.zeros(size, dtype=torch.uint8, device=mesh.device)

    def at(step: int) -> tuple[list[int], list[int]]:
        """What goes to each rank at a step around the ring, and what comes from each."""
        sends, receives = [0] * num_ranks, [0] * num_ranks
        to, source = (me + step) % num_ranks, (me - step) % num_ranks
        sends[to] = size if (me, to) in wanted else 0
        receives[source] = size if (source, me) in wanted else 0
        return sends, receives

    steps = [at(step) for step in sorted({(b - a) % num_ranks for a, b in pairs})]

    def work() -> None:
        under_way = [
            dispatcher.transport.all_to_all(rows[: sum(sends)], sends, receives, "probe of the wire")
            for sends, receives in steps
        ]
        for arriving in under_way:
            arriving.get()

    work()
    tell(mesh, [])
    return max(Timing(*row) for row in tell(mesh, [*timed(work, mesh.device)]))
