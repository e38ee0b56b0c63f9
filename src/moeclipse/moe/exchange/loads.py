"""How many rows each rank has for each expert: counted once, read by all who balance or share them out.

They travel by themselves, or with the sizes of the exchange that follows (`Told`): then a call of a layer has
one small message instead of three.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moeclipse.comm.async_ops.exchange import sum_of_parts
from moeclipse.comm.async_ops.in_flight import InFlight, Then
from moeclipse.comm.group import Group


class Told:
    """Loads and the number of tokens of each rank, sent with the sizes of an exchange; an `InFlight`."""

    def __init__(self) -> None:
        self.mine: torch.Tensor | None = None
        self._all: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """[P, E + 1], the tokens last; after the sizes have arrived."""
        assert self._all is not None, "the sizes of the exchange have not been asked for"
        return self._all

    def arrived(self, table: list[list[int]]) -> None:
        self._all = torch.tensor(table)

    def loads(self, load_E: torch.Tensor, num_tokens: int, group: Group) -> Loads:
        self.mine = torch.cat([load_E, load_E.new_tensor([num_tokens])])
        return Loads(Then(self, lambda table: table[:, :-1]), group, self)

    @property
    def tokens(self) -> InFlight[list[list[int]]]:
        """Of each rank."""
        return Then(self, lambda table: table[:, -1:].tolist())


@dataclass(frozen=True)
class Loads:
    """Rows of each rank of a group for each expert, maybe still on their way."""

    parts: InFlight[torch.Tensor]
    group: Group
    told: Told | None = None
    """What brings them, where that is the exchange of sizes."""

    def total(self) -> torch.Tensor:
        """The load of each expert, the same bits on every rank."""
        return sum_of_parts(self.parts.get())

    def of(self, group: Group) -> np.ndarray:
        """Those of the ranks of another group, [P, E]."""
        places = [self.group.ranks.index(rank) for rank in group.ranks]
        table: np.ndarray = self.parts.get().cpu().numpy()[places]
        return table
