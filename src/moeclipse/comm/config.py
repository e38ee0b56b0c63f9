"""How the ranks of a run are laid out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MAX_DEADLINE_S = 1e9
"""Clocks of torch.distributed overflow somewhere beyond."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Mesh axes: `tp` ranks read the same tokens and share dense weights, `ep` of these share the experts.

    `pp` times as many ranks hold the layers in turn.
    """

    dp: int | Literal["auto"] = "auto"
    """Copies of the expert set; auto: what the ranks leave after ep."""
    ep: int | Literal["auto"] = "auto"
    """Ranks that share the experts; auto: as many as possible."""
    tp: int = 1
    """Ranks that share each dense weight matrix (tensor parallel)."""
    pp: int = 1
    """Ranks that hold the layers in turn (pipeline parallel); see `pipeline.schedule`."""
    sequence_parallel: bool = True
    """With tp: between matrices each rank keeps its part of the tokens, not all of them."""
    async_all_reduce: Literal["auto", "on", "off"] = "auto"
    """With tp, without sequence_parallel: all-reduce input gradients under the weight gradient's product."""
    peer: Literal["auto", "on", "off"] = "auto"
    """Ranks of a host reduce through each other's memory: where they can; or fail; or torch.distributed."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """auto: NCCL where each rank has a GPU of its own; nccl: also where ranks share one, over sockets."""
    pin: Literal["auto", "off"] = "auto"
    """auto: the launcher keeps each rank to cores of its own, where there are enough; off: to any core."""
    deadline_s: float = 60.0
    """A collective that takes longer than this ends the run and names who did not arrive."""
    start_deadline_s: float = 300.0
    """The same for start-up, where ranks may arrive minutes apart."""
    check_launches: bool = False
    """For tests: end at a transfer that is not next in the step's program; not for model.memory with tp."""

    def problems(self) -> Iterator[str]:
        for axis in ("dp", "ep"):
            size = getattr(self, axis)
            if size != "auto" and size < 1:
                yield f'parallel.{axis} ({size}) must be at least 1, or "auto"'
        for axis in ("tp", "pp"):
            if getattr(self, axis) < 1:
                yield f"parallel.{axis} ({getattr(self, axis)}) must be at least 1"
        if self.tp > 1 and self.sequence_parallel and self.async_all_reduce == "on":
            yield (
                "parallel.async_all_reduce = 'on' needs parallel.sequence_parallel = false: with sequence "
                "parallelism no gradient is all-reduced (its reduce-scatter is hidden anyway); use 'auto'"
            )
        for name in ("deadline_s", "start_deadline_s"):
            yield from deadline_problems(f"parallel.{name}", getattr(self, name))

    def sizes(
        self, num_ranks: int, num_experts: int, expert_tp: Literal["folded", "sharded"] = "folded"
    ) -> tuple[int, int]:
        """(dp, ep) for this many ranks; raises ValueError with the choices there are."""
        blocks, name = num_ranks, "the number of ranks"
        for axis in ("pp", "tp"):
            size = getattr(self, axis)
            if blocks % size:
                raise ValueError(
                    f"parallel.{axis} ({size}) must divide {name} ({blocks}); choose {list_divisors(blocks)}"
                )
            blocks //= size
            name += f" over parallel.{axis}" if size > 1 else ""
        what, choices = f"{name} ({blocks})", list_divisors(blocks)
        folds = self.tp if expert_tp == "folded" else 1
        if self.ep != "auto":
            ep = self.ep
        elif self.dp != "auto":
            ep = max(blocks // self.dp, 1)
        else:
            ep = max(n for n in divisors(blocks) if n == 1 or n * folds <= num_experts)
        dp = max(blocks // ep, 1) if self.dp == "auto" else self.dp
        if blocks % ep:
            raise ValueError(f"parallel.ep ({ep}) must divide {what}; choose {choices}")
        if blocks % dp:
            raise ValueError(f"parallel.dp ({dp}) must divide {what}; choose {choices}")
        if dp * ep != blocks:
            raise ValueError(
                f"parallel.dp ({dp}) x parallel.ep ({ep}) must equal {what}; leave one of them at auto"
            )
        if num_experts and ep * folds > num_experts:
            name = f"parallel.ep ({ep})" if folds == 1 else f"parallel.ep ({ep}) x parallel.tp ({self.tp})"
            hint = "" if folds == 1 else "; or set moe.expert_tp = 'sharded'"
            raise ValueError(
                f"{name} must not exceed moe.num_experts ({num_experts}): "
                f"a rank without experts would only wait{hint}"
            )
        return dp, ep


def deadline_problems(key: str, seconds: float) -> Iterator[str]:
    if not 0 < seconds <= MAX_DEADLINE_S:
        yield f"{key} ({seconds}) must be positive and at most {MAX_DEADLINE_S:g} seconds"


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def list_divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
