"""What this layer costs on these ranks: measured once, by all ranks together, after the first step.

Two sizes give a fixed part and a slope, for rows through experts and for bytes on the wire. The wire is
measured twice: while all ranks send to all others, step by step as an exchange does, and between two ranks
alone. The second tells what one link carries when others rest, which is how it is around a busy expert; and
where all together are much slower than that, ranks share a wire, and bytes add up over ranks instead of
travelling side by side. Where ranks are on several hosts (`Mesh.hosts`), links inside a host and between
hosts are measured apart, each in both ways, and whether the ranks of a host share a card follows from the
latter. All ranks leave with the same numbers, because whoever decides from them must decide alike.

    near, far    cost/exchange    what an exchange takes that is cut by hosts
                 balance/objective, by `from_measured`    what planners charge, card by card
                 balance/shadow_model    how many near rows or copies a far one is worth
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moeclipse.balance.shadow_model import FAR_GRAIN, ShadowCosts
from moeclipse.comm.mesh import Mesh
from moeclipse.cost.exchange import ExchangeCosts
from moeclipse.moe.dispatch import Dispatcher
from moeclipse.moe.pairwise import PairwiseExperts
from moeclipse.moe.replica_price import sync_price
from moeclipse.moe.stopwatch import REPEATS, clock, tell
from moeclipse.ops.precision import wide_of

ROWS = {"cpu": (4, 96), "cuda": (64, 2048)}
"""For each expert of a rank; a device needs some thousand rows to show what one of them costs."""
BYTES = {"cpu": (16 << 10, 256 << 10), "cuda": (1 << 20, 16 << 20)}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Seconds and bytes per second; the same on every rank."""

    row_forward: float
    row_backward: float
    kernel: float
    """Of all experts of a rank, however few their rows: reading weights, launching."""
    latency: float
    bandwidth: float
    """Of each rank while all send to all, inside their hosts where there are several."""
    link: float
    """The same of one rank while all others rest."""
    shared_wire: bool
    row_bytes: float
    parameter_bytes: float
    gradient_bytes: float
    num_ranks: int = 1
    far_bandwidth: float = 0.0
    """Of each rank while all send to all ranks of other hosts; 0: there are none."""
    far_link: float = 0.0
    """The same of one rank while all others rest."""
    far_latency: float = 0.0
    loan: float = 0.0
    """Of one shadow in one direction, beside its bytes (`moe/shadow_price`) ..."""
    look: float = 0.0
    """... and of choosing shadows in one call; 0: not measured."""
    sync: float = 0.0
    """Of a step, for a layer that has replicas, beside their bytes (`moe/replica_price`) ..."""
    sync_bandwidth: float = 0.0
    """... and bytes per second of their gradients and weights; 0: not measured."""

    def exchange_costs(self) -> ExchangeCosts:
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
            far=max(round(FAR_GRAIN * near / far) / FAR_GRAIN, 1.0) if far else 1.0,
        )


def measure(pairs: PairwiseExperts, dispatcher: Dispatcher, mesh: Mesh) -> Probe:
    """Collective over the ranks of a stage: all that have this layer."""
    experts, rows = pairs.experts, ROWS[mesh.device.type]
    few, many = (_expert_seconds(pairs, number, mesh) for number in rows)
    more = max(len(experts.ids), 1) * (rows[1] - rows[0])
    slope = [max(b - a, 0.0) / more for a, b in zip(few, many, strict=True)]
    near, far = _links(dispatcher, mesh)
    weight_dtype = next((weight.dtype for weight in experts.weights), pairs.like[0].dtype)
    size = sum(weight.numel() for weight in experts.weights) // max(len(experts.ids), 1)
    held = len(experts.ids)
    kernel = max(few[0] - held * rows[0] * slope[0], 0.0)
    mine = [*slope, kernel, float(size), float(held), float(weight_dtype.itemsize)]
    everyone = tell(mesh, mine)
    forward, backward, kernel, *_ = (sum(column) / len(everyone) for column in zip(*everyone, strict=True))
    # A rank without experts may not know the type of their weights.
    parameters, most, width = (max(entry[number] for entry in everyone) for number in (3, 4, 5))
    weight_dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[int(width)]
    fixed, bytes_per_s = sync_price(int(parameters), weight_dtype, int(most), dispatcher.group, mesh)
    row_bytes = sum(tensor.element_size() * tensor.shape[1:].numel() for tensor in pairs.like)
    return Probe(
        row_forward=forward,
        row_backward=backward,
        kernel=kernel,
        latency=near.latency,
        bandwidth=near.bandwidth,
        link=near.alone,
        shared_wire=near.peers > 1 and near.alone > 2 * near.bandwidth,
        row_bytes=row_bytes,
        parameter_bytes=parameters * weight_dtype.itemsize,
        gradient_bytes=parameters * wide_of(weight_dtype).itemsize,
        num_ranks=dispatcher.group.size,
        sync=fixed,
        sync_bandwidth=bytes_per_s,
        **({} if far is None else far.as_far()),
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """What was measured of one kind of links."""

    peers: int
    """That a rank sends to, at most."""
    bandwidth: float
    alone: float
    latency: float

    def as_far(self) -> dict[str, float]:
        return {"far_bandwidth": self.bandwidth, "far_link": self.alone, "far_latency": self.latency}


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
    sizes, ranks, peers = BYTES[mesh.device.type], range(dispatcher.group.size), max(peers, 1)
    pairs = [(a, b) for a in ranks for b in ranks if a != b and joins(a, b)]
    small, large = (_wire_seconds(dispatcher, mesh, size, pairs) for size in sizes)
    alone = [_wire_seconds(dispatcher, mesh, size, pairs[:1]) for size in sizes]
    sent = sizes[1] - sizes[0]
    bandwidth, link = (part * sent / max(b - a, 1e-7) for part, a, b in ((peers, small, large), (1, *alone)))
    # What a transfer of nothing would take; on a slow wire even the small one is mostly bytes.
    latency = max(small - peers * sizes[0] / bandwidth, 0.1 * small) / peers
    return MeasuredLink(peers=peers, bandwidth=bandwidth, alone=link, latency=latency)


def _expert_seconds(pairs: PairwiseExperts, rows: int, mesh: Mesh) -> tuple[float, float]:
    """(forward, backward) of `rows` rows through each expert, weight gradients included."""
    experts, device = pairs.experts, mesh.device
    if not experts.ids:
        tell(mesh, [])
        return 0.0, 0.0
    counts = [rows] * len(experts.ids)
    x = pairs.structure.put_together([t.new_ones(sum(counts), *t.shape[1:]) for t in pairs.like])
    sums = [torch.zeros_like(weight, dtype=wide_of(weight.dtype)) for weight in experts.weights]
    with torch.no_grad():
        y, _ = experts.forward(x, counts)
        tell(mesh, [])
        forward = clock(lambda: experts.forward(x, counts), device)
        saved = [experts.forward(x, counts)[1] for _ in range(REPEATS + 1)]  # modules go backward once

        def backward() -> None:
            experts.dgrad(y, saved.pop())[1].add_to(*sums)

        backward()
        return forward, clock(backward, device)


def _wire_seconds(dispatcher: Dispatcher, mesh: Mesh, size: int, pairs: Sequence[tuple[int, int]]) -> float:
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
    return max(seconds for (seconds,) in tell(mesh, [clock(work, mesh.device)]))
