"""Where experts live during training, and when that changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.policy import policy_problems
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import parse_json, read_text

SPARE = 4
"""Where slots are left to us: one more for every so many experts of a rank, and one at least."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which rank holds which experts of each layer; planners add replicas and move experts."""

    slots: tuple[tuple[int, ...], ...] | str = ""
    """Experts of each rank, like [[0, 3], [1, 2], [1, 2], [0, 3]], or a file of them; empty: even shares."""
    slots_per_rank: int | Literal["auto"] = "auto"
    """Experts that a rank can hold in each layer; auto: its share, for planners more as memory allows."""
    planner: Literal["static", "random", "greedy", "incremental", "wrap_fill", "exact", "auto"] = "static"
    """static: nothing moves; the others re-plan from the loads, beside training (docs/placement.md)."""
    policy: str = ""
    """A planner of your own: FILE.py:FUNCTION or MODULE:FUNCTION, from a PlanProblem to a Placement."""
    start_step: int = 10
    """Steps before the first plan; the next ones follow after 2, 4, ... times as many, ..."""
    every: int = 10
    """... at most this many steps apart."""
    lifetime: int = 50
    """Steps in which a plan must win more than its moves cost."""
    decay: float | Literal["auto"] = "auto"
    """What a step leaves of the average loads that plans are made for; auto: as their drift asks for."""
    commit_after: int = 2
    """Steps from asking for a plan to taking it, at most as many as plans are apart."""
    max_moved: float = 0.05
    """Part of the slots that one incremental plan may fill anew, or eight; a first plan may take more."""
    time_limit_s: float = 10.0
    """For planner = "exact", per layer, beside training."""
    reduce: Literal["sum", "fedavg"] = "sum"
    """sum: one optimizer step with the gradient of all replicas; fedavg: each steps, weights are averaged."""
    average_every: int = 1
    """With fedavg: steps between averages of the replicas' weights, by the rows each has seen."""

    def problems(self) -> Iterator[str]:
        if self.slots_per_rank != "auto" and self.slots_per_rank < 1:
            yield f'placement.slots_per_rank ({self.slots_per_rank}) must be at least 1, or "auto"'
        for name in ("start_step", "every", "lifetime", "average_every"):
            if getattr(self, name) < 1:
                yield f"placement.{name} ({getattr(self, name)}) must be at least 1"
        if self.decay != "auto" and not 0 <= self.decay < 1:
            yield f'placement.decay ({self.decay}) must lie between 0 and 1 (excluded), or be "auto"'
        if self.commit_after < 0:
            yield f"placement.commit_after ({self.commit_after}) must be 0 (wait for it at once) or more"
        if not 0 <= self.max_moved <= 1:
            yield f"placement.max_moved ({self.max_moved}) must lie between 0 and 1: a part of the slots"
        if self.policy:
            yield from policy_problems(self.policy, self.planner)
        if self.time_limit_s <= 0:
            yield f"placement.time_limit_s ({self.time_limit_s}) must be positive"

    @property
    def moves(self) -> bool:
        return self.planner != "static" or bool(self.policy)

    @property
    def at_ease(self) -> bool:
        """Whether experts may move, but need not: where something speaks against it, they stay."""
        return self.planner == "auto" and not self.policy

    @property
    def delay(self) -> int:
        """Steps from asking to taking: a plan is taken before the next one is asked for."""
        return min(self.commit_after, self.start_step, self.every)

    @property
    def ahead(self) -> float:
        """Steps from asking for a plan to the middle of the time in which it holds."""
        return self.delay + self.every / 2

    @property
    def in_use(self) -> bool:
        """Whether experts have slots of their own, instead of one even share for each rank."""
        return self.moves or bool(self.slots) or self.slots_per_rank != "auto"

    def used_by(self, num_ranks: int) -> bool:
        """The same for so many ranks that share the experts: auto has no choice on one."""
        idle = num_ranks == 1 and self.at_ease
        return replace(self, planner="static").in_use if idle else self.in_use

    def due(self, step: int) -> bool:
        """Whether a plan is asked for after this step: soon at first, then every `every` steps."""
        done, after, apart = step + 1, self.start_step, self.start_step
        while after < done:
            apart = min(2 * apart, self.every)
            if apart == self.every and done > after:
                return (done - after) % self.every == 0
            after += apart
        return after == done

    def tables(self) -> list[Any]:
        """What `slots` gives: one table for all layers, or one for each."""
        value: Any = self.slots
        if isinstance(value, str):
            value = read_tables(value)
        if isinstance(value, dict) and set(value) == {"layers"} and isinstance(value["layers"], list):
            return value["layers"]
        return [value]

    def placements(self, num_experts: int, num_ranks: int | None = None) -> list[Placement]:
        """The tables of `slots`, checked: all problems in one error."""
        found: list[Placement] = []
        problems: list[str] = []
        most = None if self.slots_per_rank == "auto" else self.slots_per_rank
        try:
            tables = self.tables()
        except ConfigError as error:
            raise ConfigError([f"placement.slots: {problem}" for problem in error.problems]) from None
        for number, table in enumerate(tables):
            where = "placement.slots" if len(tables) == 1 else f"placement.slots, layer {number}"
            try:
                parsed = Placement.parse(table, num_experts=num_experts, num_ranks=num_ranks, max_slots=most)
                found.append(padded(parsed, most))
            except ConfigError as error:
                problems += [f"{where}: {problem}" for problem in error.problems]
        if problems:
            raise ConfigError(problems)
        return found

    def start_problems(self, num_experts: int, num_ranks: int | None, num_layers: int) -> Iterator[str]:
        """Why so many layers with experts cannot begin; `num_ranks`: None where it is not known yet."""
        if self.slots:
            try:
                tables = self.placements(num_experts, num_ranks)
            except ConfigError as error:
                yield from error.problems
                return
            if 1 < len(tables) < num_layers:
                yield (
                    f"placement.slots holds {len(tables)} layers, but the model has at least {num_layers} "
                    "with experts (model.num_layers, model.num_dense_layers); give one table for all of "
                    "them, or one for each"
                )
        elif self.slots_per_rank != "auto" and num_ranks is not None:
            share = -(-num_experts // num_ranks)
            if self.slots_per_rank < share:
                yield (
                    f"placement.slots_per_rank ({self.slots_per_rank}) is too small: {num_experts} experts "
                    f"(moe.num_experts) on {num_ranks} ranks (parallel.ep) need {share}"
                )

    def start(self, num_experts: int, num_ranks: int, layer: int) -> Placement:
        """The placement that a layer (counted among those with experts) begins with."""
        problems = list(self.start_problems(num_experts, num_ranks, layer + 1))
        if problems:
            raise ConfigError(problems)
        if self.slots:
            tables = self.placements(num_experts, num_ranks)
            return tables[layer if len(tables) > 1 else 0]
        even = Placement.contiguous(num_experts, num_ranks)
        if self.slots_per_rank != "auto":
            return padded(even, min(self.slots_per_rank, num_experts))
        return padded(even, usual_slots(num_experts, num_ranks)) if self.moves else even


def usual_slots(num_experts: int, num_ranks: int) -> int:
    """Of each rank, for planners, where nothing else is said."""
    share = -(-num_experts // num_ranks)
    return min(share + max(share // SPARE, 1), num_experts)


def padded(placement: Placement, slots: int | None) -> Placement:
    """With empty slots behind each rank's, up to so many."""
    if slots is None:
        return placement
    rows = tuple(row + (EMPTY,) * (slots - len(row)) for row in placement.slots)
    return Placement(rows, placement.primary)


def read_tables(text: str) -> Any:
    """JSON, or the path of a file with JSON: one table, or {"layers": [...]} as `moeclipse place` writes."""
    if not text.lstrip().startswith(("[", "{")):
        path = Path(text)
        if not path.is_file():
            raise ConfigError(f"there is no placement file {path}")
        try:
            text = read_text(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"a placement must be JSON, like [[0, 3], [1, 2]]: {error}") from None
