"""The global microbatch as one rank sees it.

Each rank holds a contiguous part of the microbatch's tokens, in rank order. A gate that counts or draws
over the whole microbatch asks here, and so gives the same answer however the tokens are shared out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moeclipse.comm.exchange import Result, gather
from moeclipse.comm.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """This rank's tokens are first .. first + local - 1 of `total`."""

    mesh: Mesh
    first: int
    total: int
    step: int = 0
    microbatch: int = 0

    @classmethod
    def of(cls, mesh: Mesh, local: int, step: int = 0, microbatch: int = 0) -> Tokens:
        """Ask the other ranks how many tokens they have."""
        if mesh.num_ranks == 1:
            return cls(mesh=mesh, first=0, total=local, step=step, microbatch=microbatch)
        mine = torch.tensor([local], device=mesh.device)
        everyone = gather(mesh.a2a, mesh.world, mine, "exchange of token counts").to_host()
        counts = [count for (count,) in everyone]
        first = sum(counts[: mesh.rank])
        return cls(mesh=mesh, first=first, total=sum(counts), step=step, microbatch=microbatch)

    def gather(self, value: torch.Tensor, label: str) -> Result:
        """Every rank's value, [P, ...]."""
        return gather(self.mesh.a2a, self.mesh.world, value, f"{label}, microbatch {self.microbatch}")
