"""The global microbatch as one rank sees it.

Each rank of a group holds a contiguous part of the microbatch's tokens, in rank order. A gate that counts or
draws over the whole microbatch asks here, and so gives the same answer however the tokens are shared out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeclipse.comm.async_ops.exchange import gather, gather_to_host
from moeclipse.comm.async_ops.in_flight import InFlight
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh


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

    def __post_init__(self) -> None:
        if self.group is None:
            object.__setattr__(self, "group", self.mesh.stage)

    @classmethod
    def of(
        cls, mesh: Mesh, local: int, step: int = 0, microbatch: int = 0, group: Group | None = None
    ) -> Tokens:
        """Ask the other ranks how many tokens they have."""
        group = group or mesh.stage
        first, total = 0, local
        if group.size > 1:
            mine = torch.tensor([local], device=mesh.device)
            everyone = gather_to_host(mesh.a2a, group, mine, "exchange of token counts").get()
            counts = [count for (count,) in everyone]
            first, total = sum(counts[: group.index]), sum(counts)
        return cls(mesh=mesh, first=first, total=total, step=step, microbatch=microbatch, group=group)

    def gather(self, value: torch.Tensor, label: str) -> InFlight[torch.Tensor]:
        """Every rank's value, [P, ...]."""
        return gather(self.mesh.a2a, self.group, value, f"{label}, microbatch {self.microbatch}")
