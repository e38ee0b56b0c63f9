"""What a layer costs by the book: prices that are the same in every run.

Whoever cuts rows, lends experts or moves them weighs seconds against each other, and what is chosen decides
in which order sums are added. Measured seconds differ from run to run, so a run that promises equal bits
(`run.deterministic`) is told these instead: work and bytes are counted, and what one of them takes is written
down below for a kind of device. They need not be right for the machine at hand, only of the right size: they
decide how fast a run is. Where they are far off, a `choices.json` that was measured says it better.

Contract: a function of shapes, ranks, hosts and threads. Collective over the ranks of a stage, as `measure`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.cost.hardware import Device, Link, device, link
from moeclipse.moe.exchange.dispatch import Dispatcher
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.tune.probe import ExpertSizes, Probe
from moeclipse.moe.tune.stopwatch import tell

BACKWARD = 2.0
"""Products of a row on its way back, over those of its way there."""
FAR_LATENCY = 2.0
"""That of a wire between hosts, over that of one inside."""


@dataclass(frozen=True, kw_only=True)
class Book:
    """Of one kind of device, in seconds, beside products and bytes."""

    chip: Device
    near: Link
    far: Link
    kernel: float
    latency: float
    look: float
    loan: float
    sync: float


BOOKS = {
    "cpu": Book(
        chip=device("cpu"),
        near=link("loopback"),
        far=link("loopback"),
        kernel=2.5e-4,
        latency=2.5e-4,
        look=3e-3,
        loan=1e-3,
        sync=3.5e-3,
    ),
    "cuda": Book(
        chip=device("h200"),
        near=link("nvlink4"),
        far=link("infiniband"),
        kernel=5e-5,
        latency=3e-5,
        look=1e-3,
        loan=3e-4,
        sync=1e-3,
    ),
}
"""CPU: the least that probes of preset `tiny` saw on two cores. CUDA: orders of magnitude."""


def rate(mesh: Mesh) -> float:
    """Products and sums per second of one rank."""
    chip = BOOKS[mesh.device.type].chip
    whole = chip.flops * chip.efficiency
    return whole * torch.get_num_threads() / chip.processors if mesh.device.type == "cpu" else whole


def fixed_prices(pairs: PairwiseExperts, dispatcher: Dispatcher, mesh: Mesh) -> Probe:
    book, sizes = BOOKS[mesh.device.type], ExpertSizes.of(pairs, mesh)
    row = 2 * sizes.parameters / max(one for (one,) in tell(mesh, [rate(mesh)]))
    group, near, far = dispatcher.group, book.near, book.far
    hosts = {mesh.hosts[rank] for rank in group.ranks}
    bandwidth, far_bandwidth = (wire.bandwidth * wire.efficiency for wire in (near, far))
    between = {"far_bandwidth": far_bandwidth, "far_link": far_bandwidth}
    between["far_latency"] = FAR_LATENCY * book.latency
    return Probe(
        row_forward=row,
        row_backward=BACKWARD * row,
        kernel=book.kernel,
        latency=book.latency,
        bandwidth=bandwidth,
        link=bandwidth,
        shared_wire=False,
        num_ranks=group.size,
        loan=book.loan,
        look=book.look,
        sync=book.sync if group.size > 1 else 0.0,
        sync_bandwidth=bandwidth if group.size > 1 else 0.0,
        fixed=True,
        **sizes.as_bytes(),
        **(between if len(hosts) > 1 else {}),
    )
