"""How many rows each rank has for each expert: counted once, read by all who balance or share them out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moeclipse.comm.async_ops.exchange import sum_of_parts
from moeclipse.comm.async_ops.in_flight import InFlight
from moeclipse.comm.group import Group


@dataclass(frozen=True)
class Loads:
    """Rows of each rank of a group for each expert, maybe still on their way."""

    parts: InFlight[torch.Tensor]
    group: Group

    def total(self) -> torch.Tensor:
        """The load of each expert, the same bits on every rank."""
        return sum_of_parts(self.parts.get())

    def of(self, group: Group) -> np.ndarray:
        """Those of the ranks of another group, [P, E]."""
        places = [self.group.ranks.index(rank) for rank in group.ranks]
        table: np.ndarray = self.parts.get().cpu().numpy()[places]
        return table
