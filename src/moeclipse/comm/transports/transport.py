"""How rows cross between ranks: one small interface, several wires.

    arriving = transport.all_to_all(rows, send_counts, receive_counts, label, out)
    ...                      # compute that does not need them
    rows = arriving.get()

`TorchTransport` is torch.distributed's all-to-all on a lane; between hosts that only have gloo, sends and
receives of our own (`gloo_pairs` says why). A step of the pair-wise exchange has zero counts for all ranks
but one, and empty messages cost next to nothing. Other wires offer the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moeclipse.comm.async_ops.exchange import all_to_all
from moeclipse.comm.async_ops.in_flight import InFlight
from moeclipse.comm.async_ops.lane import Lane
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.gloo_pairs import GlooPairs, PairsWork


class Transport(Protocol):
    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        """send_counts[p] leading rows to each peer p, in order; receive likewise. Collective."""


@dataclass(frozen=True)
class TorchTransport:
    """`pairs`: on all ranks of the group, or on none; rows are on the CPU."""

    lane: Lane
    group: Group
    pairs: GlooPairs | None = None

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> InFlight[torch.Tensor]:
        pairs = self.pairs
        if pairs is None:
            return all_to_all(self.lane, self.group, rows, send_counts, receive_counts, label, out)
        rows = rows.detach().contiguous()
        if out is None:
            out = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        leaving, arriving = rows.split(list(send_counts)), out.detach().split(list(receive_counts))

        def start() -> PairsWork:
            return pairs.exchange(leaving, arriving)

        return self.lane.launch(self.group, label, start, out, rows)


def direct(mesh: Mesh, group: Group, hosts: Sequence[int]) -> TorchTransport:
    """Rank to rank. Within a host gloo's all-to-all costs less processor time; between hosts links count."""
    several = len({hosts[rank] for rank in group.ranks}) > 1
    far = several and group.backend == "gloo" and mesh.device.type == "cpu"
    if not far:
        return TorchTransport(mesh.a2a, group)
    return TorchTransport(mesh.a2a, group, mesh.once(f"gloo pairs {group.name}", lambda: GlooPairs(group)))
