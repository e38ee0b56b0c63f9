"""The global microbatch as one rank sees it: its tokens, and the rows that ranks have for each expert.

Each rank of a group holds a contiguous part of the microbatch's tokens, in rank order. A gate that counts or
draws over the whole microbatch asks here, and so gives the same answer however the tokens are shared out.
Rows are counted once, for all who balance or share them out. Both numbers travel by themselves, or with the
sizes of the exchange that follows (`Told`): then a call of a layer has one small message instead of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from moeclipse.comm.async_ops.exchange import sum_of_parts
from moeclipse.comm.async_ops.lane import InFlight, gather, gather_to_host
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """This rank's tokens are first .. first + local - 1 of `total`."""

    mesh: Mesh
    first: int
    total: int
    step: int = 0
    microbatch: int = 0
    group: Group = None  # type: ignore[assignment]
    """The ranks that share out the tokens; left out: all of them."""
    largest: int = 0
    """Tokens of the rank that has most; 0: all have as many."""

    def __post_init__(self) -> None:
        if self.group is None:
            object.__setattr__(self, "group", self.mesh.stage)

    @classmethod
    def of(
        cls, mesh: Mesh, local: int, step: int = 0, microbatch: int = 0, group: Group | None = None
    ) -> Tokens:
        """Ask the other ranks how many tokens they have; who wants to know waits for it."""
        group = group or mesh.stage
        if group.size == 1:
            return cls(mesh=mesh, first=0, total=local, step=step, microbatch=microbatch, group=group)
        mine = torch.tensor([local], device=mesh.device)
        counts = gather_to_host(mesh.a2a, group, mine, "exchange of token counts")
        return AskedTokens.asked(mesh, counts, step, microbatch, group)

    def most(self, local: int, group: Group) -> int:
        """Tokens that no rank of `group` has more of, the same number on all of them."""
        if not self.largest and self.total != local * self.group.size:
            raise CommError(
                f"rank {self.mesh.rank} has {local} of {self.total} tokens, and nobody said how many others "
                "have"
            )
        del group
        return self.largest or local

    def gather(self, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
        """Every rank's value, [P, ...]."""
        return gather(self.mesh.a2a, self.group, value, f"{label}, microbatch {self.microbatch}")


class AskedTokens(Tokens):
    """Whose `first` and `total` are on their way until somebody asks for one of them."""

    @classmethod
    def asked(
        cls, mesh: Mesh, counts: InFlight[list[Any]], step: int, microbatch: int, group: Group
    ) -> AskedTokens:
        """`counts`: tokens of each rank of the group. What `replace` makes of it knows all numbers."""
        tokens = object.__new__(cls)
        vars(tokens).update(mesh=mesh, step=step, microbatch=microbatch, group=group, _counts=counts)
        return tokens

    @cached_property
    def _of_ranks(self) -> list[int]:
        counts: InFlight[list[Any]] = vars(self)["_counts"]
        return [count for (count,) in counts.get()]

    def most(self, local: int, group: Group) -> int:
        del local
        return max(self._of_ranks[self.group.ranks.index(rank)] for rank in group.ranks)

    @cached_property
    def first(self) -> int:
        return sum(self._of_ranks[: self.group.index])

    @cached_property
    def total(self) -> int:
        return sum(self._of_ranks)


@dataclass
class Told:
    """Loads and the number of tokens of each rank, sent with the sizes of an exchange."""

    mine: torch.Tensor | None = None
    _all: torch.Tensor | None = None

    def arrived(self, table: list[list[int]]) -> None:
        self._all = torch.tensor(table)

    @property
    def all(self) -> torch.Tensor:
        """[P, E + 1], the tokens last; after the sizes have arrived."""
        assert self._all is not None, "the sizes of the exchange have not been asked for"
        return self._all

    def loads(self, load_E: torch.Tensor, num_tokens: int, group: Group) -> Loads:
        self.mine = torch.cat([load_E, load_E.new_tensor([num_tokens])])
        return Loads(ToldLoads(self), group, self)

    @property
    def tokens(self) -> ToldTokens:
        """Of each rank, an `InFlight`."""
        return ToldTokens(self)


@dataclass(frozen=True)
class ToldLoads:
    told: Told

    def get(self) -> torch.Tensor:
        return self.told.all[:, :-1]


@dataclass(frozen=True)
class ToldTokens:
    told: Told

    def get(self) -> list[list[int]]:
        tokens: list[list[int]] = self.told.all[:, -1:].tolist()
        return tokens


@dataclass(frozen=True)
class Loads:
    """Rows of each rank of a group for each expert, maybe still on their way."""

    parts: InFlight[torch.Tensor]
    group: Group
    told: Told | None = None
    """What brings them, where that is the exchange of sizes."""

    def total(self) -> torch.Tensor:
        """The load of each expert, the same bits on every rank."""
        return sum_of_parts(self.parts.get()) if self.told is None else self.told.all[:, :-1].sum(0)

    def of(self, group: Group) -> np.ndarray:
        """Those of the ranks of another group, [P, E]."""
        places = [self.group.ranks.index(rank) for rank in group.ranks]
        table: np.ndarray = self.parts.get().cpu().numpy()[places]
        return table
