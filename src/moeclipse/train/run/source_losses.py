"""The loss of each source of a step: added up by samples, and told beside the loss of all.

Sums have (loss, aux loss, dropped rows) in front, and behind them the loss of each source if there are
several.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.train.data.samples import Batches

IN_FRONT = 3


def zero_sums(batches: Batches, mesh: Mesh) -> torch.Tensor:
    """Where a step begins to add."""
    several = len(batches.samples.names) if len(batches.samples.names) > 1 else 0
    return torch.zeros(IN_FRONT + several, dtype=torch.float64, device=mesh.device)


def add_by_source(sums: torch.Tensor, loss_T: torch.Tensor, sources: torch.Tensor, mesh: Mesh) -> None:
    """The losses of samples to those of their sources; tp ranks have the same ones, and one of them adds."""
    if mesh.tp_index == 0 and len(sources):
        of_sample = loss_T.double().view(len(sources), -1).sum(1)
        sums.index_add_(0, sources.to(sums.device), of_sample)


def told_by_source(batches: Batches, step: int, sums: Sequence[float]) -> dict[str, object]:
    """Loss and number of targets of each source that a step has read of, from sums over all ranks."""
    if not sums:
        return {}
    parts = zip(batches.samples.names, sums, batches.counted_by_source(step), strict=True)
    return {"sources": {name: {"loss": one / count, "targets": count} for name, one, count in parts if count}}
