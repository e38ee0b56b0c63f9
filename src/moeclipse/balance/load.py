"""Load: how many rows each expert of each layer got from each source rank, averaged and traced.

Idea: planners want a moving average, people want to see its course. `LoadAverage` is the first, a value
that each step replaces; `LoadTrace` is the second, with a bounded number of steps: when it is full, every
other step is dropped, so it always spans the whole run.

Contract: all ranks that add the same counts have the same average. Files are plain arrays (`np.load` with
allow_pickle=False); a damaged or foreign file gives a ConfigError that says what is missing.

Shapes: L layers, P source ranks, E experts, N recorded steps.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.drift import UNKNOWN, Drift
from moeclipse.balance.regimes import Regimes
from moeclipse.core.errors import ConfigError
from moeclipse.core.outside import regular

FILE_KEYS = ("average_LPE", "steps_N", "rows_NLE")


@dataclass(frozen=True, kw_only=True)
class LoadAverage:
    """An exponential moving average that is right from the first step on."""

    decay: float = 0.9
    sum_LPE: np.ndarray | None = None
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(
                f"decay ({self.decay}) must lie in [0, 1): the part that a step leaves of the past"
            )

    def add(self, counts_LPE: np.ndarray) -> LoadAverage:
        """The average after one more step."""
        if self.sum_LPE is not None and self.sum_LPE.shape != counts_LPE.shape:
            raise ConfigError(
                f"counts are {list(counts_LPE.shape)}, but the average was begun with "
                f"{list(self.sum_LPE.shape)} (layers, ranks, experts); begin a new one"
            )
        past = 0.0 if self.sum_LPE is None else self.decay * self.sum_LPE
        return LoadAverage(
            decay=self.decay,
            sum_LPE=past + (1 - self.decay) * counts_LPE,
            weight=self.decay * self.weight + (1 - self.decay),
        )

    @property
    def rows_LPE(self) -> np.ndarray:  # noqa: N802
        """Rows per step."""
        if self.sum_LPE is None:
            raise ConfigError("there is no load yet; add the counts of a step first")
        return self.sum_LPE / self.weight


@dataclass
class LoadTrace:
    """The average, and the loads of single steps over the whole run."""

    average: LoadAverage = field(default_factory=LoadAverage)
    drift: Drift | None = None
    """Where the decay of the average is to follow it."""
    regimes: Regimes = field(default_factory=Regimes)
    max_steps: int = 256
    every: int = 1
    steps: list[int] = field(default_factory=list)
    rows_LE: list[np.ndarray] = field(default_factory=list)

    def add(self, step: int, counts_LPE: np.ndarray) -> None:
        if self.drift is not None:
            self.drift = self.drift.add(counts_LPE.sum(1))
            past = LoadAverage() if self.drift.jumped else self.average
            self.average = replace(past, decay=self.drift.decay)
            self.regimes = self.regimes.add(counts_LPE.sum(1), self.drift.jumped)
        self.average = self.average.add(counts_LPE)
        if step % self.every:
            return
        self.steps.append(step)
        self.rows_LE.append(counts_LPE.sum(1).astype(np.int64))
        if len(self.steps) > self.max_steps:
            self.every *= 2
            kept = [i for i, recorded in enumerate(self.steps) if recorded % self.every == 0]
            self.steps = [self.steps[i] for i in kept]
            self.rows_LE = [self.rows_LE[i] for i in kept]

    @property
    def jumped(self) -> bool:
        """Whether the last step's loads were so far from those before that the average began anew."""
        return self.drift is not None and self.drift.jumped

    def asks(self, config: PlacementConfig, step: int, idle: bool) -> bool:
        """Whether a plan is asked for after this step: one that can be expected to be of use.

        `idle`: no other one is under way.
        """
        asked = config.due(step) or self.jumped or (idle and self.regimes.looks_again)
        return asked and self.average.sum_LPE is not None and self.lasting(config) > 0

    def lasting(self, config: PlacementConfig) -> int:
        """Steps in which a plan that is asked for now has to win more than its moves cost."""
        left = self.regimes.lasting(config.lifetime + config.delay) - config.delay
        return max(left, 0)

    def error(self, steps: float) -> float:
        """How far loads will be from their average so many steps ahead, in mean loads."""
        return UNKNOWN if self.drift is None else self.drift.error(steps)

    def load(self) -> Load:
        average = self.average.rows_LPE
        shape = (0, average.shape[0], average.shape[2])
        rows = np.stack(self.rows_LE) if self.rows_LE else np.zeros(shape, dtype=np.int64)
        steps_N = np.array(self.steps, dtype=np.int64)
        return Load(average_LPE=average, steps_N=steps_N, rows_NLE=rows, every=self.every)

    def save(self, path: Path) -> None:
        self.load().save(path)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a file of loads holds."""

    average_LPE: np.ndarray
    """Rows per step, averaged: layer, source rank, expert."""
    steps_N: np.ndarray
    rows_NLE: np.ndarray
    """Rows of single steps, summed over source ranks."""
    every: int = 1
    """Steps from one recorded step to the next."""

    def save(self, path: Path) -> None:
        # Written beside and renamed: a reader never sees half a file.
        beside = path.with_name(path.name + ".tmp")
        with beside.open("wb") as file:
            np.savez_compressed(
                file,
                average_LPE=self.average_LPE,
                steps_N=self.steps_N,
                rows_NLE=self.rows_NLE,
                every=np.array(self.every),
            )
        os.replace(beside, path)

    @classmethod
    def read(cls, path: Path) -> Load:
        if not path.is_file():
            raise ConfigError(f"there is no load file {path}; training writes one as runs/NAME/load.npz")
        try:
            with np.load(regular(path), allow_pickle=False) as file:
                missing = [key for key in FILE_KEYS if key not in file]
                if missing:
                    raise ConfigError(f"{path} is no load file: it lacks {', '.join(missing)}")
                average_LPE, steps_N, rows_NLE = (file[key] for key in FILE_KEYS)
                every = max(int(file["every"]), 1) if "every" in file else 1
        except ConfigError:
            raise
        except Exception as error:  # zip, zlib and numpy have a dozen kinds for a damaged file
            raise ConfigError(f"{path} is no load file, or damaged: {error or repr(error)}") from None
        problems = _problems(average_LPE, steps_N, rows_NLE)
        if problems:
            raise ConfigError([f"{path}: {problem}" for problem in problems])
        return cls(average_LPE=average_LPE.astype(float), steps_N=steps_N, rows_NLE=rows_NLE, every=every)

    @property
    def num_layers(self) -> int:
        return self.average_LPE.shape[0]

    @property
    def num_experts(self) -> int:
        return self.average_LPE.shape[2]

    def counts(self, layer: int, num_ranks: int) -> np.ndarray:
        """Average counts [P, E] of a layer for so many ranks.

        Several groups of so many ranks (data parallelism) count as one. Any other number of ranks shares the
        same rows evenly: ranks hold shards of the same data, so no source is special.
        """
        return spread(self.average_LPE[layer], num_ranks)

    def last_step(self, layer: int, num_ranks: int) -> np.ndarray | None:
        """Counts [P, E] of the newest recorded step, its rows shared among sources as on average."""
        if not len(self.steps_N):
            return None
        average_PE = spread(self.average_LPE[layer], num_ranks)
        total_E = average_PE.sum(0)
        part_PE = np.where(total_E > 0, average_PE / np.where(total_E > 0, total_E, 1), 1 / num_ranks)
        reach = np.rint(np.cumsum(part_PE * self.rows_NLE[-1, layer], axis=0)).astype(np.int64)
        return np.diff(reach, axis=0, prepend=0)

    def before_last(self, decay: float = 0.9) -> Load:
        """The load as it was known before the newest recorded step: what a planner may see."""
        rows = self.rows_NLE[:-1].astype(float)
        if not len(rows):
            return self
        weight = decay ** np.arange(len(rows) - 1, -1, -1)
        mean_LE = np.tensordot(weight / weight.sum(), rows, 1)
        total_LE = self.average_LPE.sum(1)
        scale = np.where(total_LE > 0, mean_LE / np.where(total_LE > 0, total_LE, 1), 0.0)
        even = np.where(total_LE > 0, 0.0, mean_LE / self.average_LPE.shape[1])
        average = self.average_LPE * scale[:, None] + even[:, None]
        return Load(average_LPE=average, steps_N=self.steps_N[:-1], rows_NLE=self.rows_NLE[:-1])


def spread(counts_PE: np.ndarray, num_ranks: int) -> np.ndarray:
    if len(counts_PE) % num_ranks == 0:
        return counts_PE.reshape(-1, num_ranks, counts_PE.shape[1]).sum(0)
    return np.repeat(counts_PE.sum(0, keepdims=True) / num_ranks, num_ranks, axis=0)


def _problems(average_LPE: np.ndarray, steps_N: np.ndarray, rows_NLE: np.ndarray) -> list[str]:
    problems = []
    if average_LPE.dtype.kind not in "fiu" or {steps_N.dtype.kind, rows_NLE.dtype.kind} - set("iu"):
        kinds = f"{average_LPE.dtype}, {steps_N.dtype} and {rows_NLE.dtype}"
        return [f"its arrays are {kinds}; expected numbers, and whole ones for steps and rows"]
    if steps_N.ndim != 1:
        return [f"steps_N is {list(steps_N.shape)}; expected one row of steps"]
    if average_LPE.ndim != 3 or 0 in average_LPE.shape:
        problems.append(f"average_LPE is {list(average_LPE.shape)}; expected [layers, ranks, experts]")
    elif not np.isfinite(average_LPE).all() or (average_LPE < 0).any():
        problems.append("average_LPE holds numbers that are negative or not finite")
    elif rows_NLE.shape != (len(steps_N), average_LPE.shape[0], average_LPE.shape[2]):
        expected = [len(steps_N), average_LPE.shape[0], average_LPE.shape[2]]
        problems.append(f"rows_NLE is {list(rows_NLE.shape)}; expected {expected} (steps, layers, experts)")
    elif (rows_NLE < 0).any():
        problems.append("rows_NLE holds negative numbers")
    return problems
