"""How rows cross between ranks: one small interface, several wires.

    result = transport.all_to_all(rows, send_counts, receive_counts, label, out)
    ...                      # compute that does not need them
    rows = result.get()

`TorchTransport` is torch.distributed's all-to-all on a lane; a step of the pair-wise exchange has zero counts
for all ranks but its own, and empty messages cost next to nothing. Other wires offer the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moeclipse.comm.exchange import Result, all_to_all
from moeclipse.comm.lane import Lane
from moeclipse.comm.mesh import Group


class Transport(Protocol):
    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> Result:
        """send_counts[p] leading rows to each peer p, in order; receive likewise. Collective."""


@dataclass(frozen=True)
class TorchTransport:
    lane: Lane
    group: Group

    def all_to_all(
        self,
        rows: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        label: str,
        out: torch.Tensor | None = None,
    ) -> Result:
        return all_to_all(self.lane, self.group, rows, send_counts, receive_counts, label, out)
