"""How the ranks of a run are laid out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Mesh axes. Every rank reads its own tokens; `ep` ranks share one set of experts."""

    dp: int | Literal["auto"] = "auto"
    """Copies of the expert set; auto: what the ranks leave after ep."""
    ep: int | Literal["auto"] = "auto"
    """Ranks that share the experts; auto: as many as possible."""
    deadline_s: float = 60.0
    """A collective that takes longer than this ends the run and names who did not arrive."""
    start_deadline_s: float = 300.0
    """The same for start-up, where ranks may arrive minutes apart."""

    def problems(self) -> Iterator[str]:
        for axis in ("dp", "ep"):
            size = getattr(self, axis)
            if size != "auto" and size < 1:
                yield f'parallel.{axis} ({size}) must be at least 1, or "auto"'
        for name in ("deadline_s", "start_deadline_s"):
            if getattr(self, name) <= 0:
                yield f"parallel.{name} ({getattr(self, name)}) must be positive"

    def sizes(self, num_ranks: int, num_experts: int) -> tuple[int, int]:
        """(dp, ep) for this many ranks; raises ValueError with the choices there are."""
        divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        choices = ", ".join(map(str, divisors))
        if self.ep != "auto":
            ep = self.ep
        elif self.dp != "auto":
            ep = max(num_ranks // self.dp, 1)
        else:
            ep = max(n for n in divisors if n <= max(num_experts, 1))
        dp = max(num_ranks // ep, 1) if self.dp == "auto" else self.dp
        if num_ranks % ep:
            raise ValueError(
                f"parallel.ep ({ep}) must divide the number of ranks ({num_ranks}); choose {choices}"
            )
        if num_ranks % dp:
            raise ValueError(
                f"parallel.dp ({dp}) must divide the number of ranks ({num_ranks}); choose {choices}"
            )
        if dp * ep != num_ranks:
            raise ValueError(
                f"parallel.dp ({dp}) x parallel.ep ({ep}) must equal the number of ranks ({num_ranks}); "
                "leave one of them at auto"
            )
        if num_experts and ep > num_experts:
            raise ValueError(
                f"parallel.ep ({ep}) must not exceed moe.num_experts ({num_experts}): "
                "a rank without experts would only wait"
            )
        return dp, ep
