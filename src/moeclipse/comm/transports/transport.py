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
from typing import Protocol

import torch

from moeclipse.comm.async_ops.lane import InFlight, TorchTransport
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.gloo_pairs import GlooPairs


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
        ...


def direct(mesh: Mesh, group: Group, hosts: Sequence[int]) -> TorchTransport:
    """Rank to rank. Within a host gloo's all-to-all costs less processor time; between hosts links count."""
    several = len({hosts[rank] for rank in group.ranks}) > 1
    far = several and group.backend == "gloo" and mesh.device.type == "cpu"
    if not far:
        return TorchTransport(mesh.a2a, group)
    return TorchTransport(mesh.a2a, group, mesh.once(f"gloo pairs {group.name}", lambda: GlooPairs(group)))
