"""`moeclipse simulate RUN` and `--config FILE`: the step of a run as its configuration lays it out.

    moeclipse simulate runs/mine --compare      # as it was measured, and under other schedules
    moeclipse simulate mine.toml --device h800 --ranks 64 --compare
    moeclipse simulate --config mine.toml --device cluster.toml --link infiniband

The program is the one that the run would execute (`train/predict/run_step`). What ops cost, and the bytes of
a rank, follow from the model's sizes and the cluster as in `moeclipse plan`; or ops cost what a table says
(--costs), in which what it does not name of these is free. The folder of a run that has ended brings its
number of ranks, what it chose for itself, and how long its steps took: sums of compute and of communication
are then the measured ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch

from moeclipse.core.config import Sourced, table_layer
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.core.outside import read_table
from moeclipse.cost.cluster import Cluster, cluster_at
from moeclipse.cost.file import load_costs
from moeclipse.cost.hardware import link
from moeclipse.cost.model import Costs
from moeclipse.cost.step_bytes import Sharing
from moeclipse.pipeline.config import Schedule
from moeclipse.report.choices_form import fitting
from moeclipse.schedule import kinds
from moeclipse.sim.compare import Answer
from moeclipse.train.config import TrainConfig
from moeclipse.train.predict.model_sizes import sizes_of_run
from moeclipse.train.predict.plan_config import state_of
from moeclipse.train.predict.run_step import Measured, RunBytes, RunStep
from moeclipse.train.predict.step_program import grads_take_turns
from moeclipse.train.predict.step_sizes import cluster_costs, tokens_of, value_bytes
from moeclipse.train.presets import merge

RUN_SCHEDULES = ("pp1", *(name for name in get_args(Schedule) if name != "auto"))
"""Schedules that a run can take."""
CHOICES, SUMMARY = "choices.json", "summary.json"


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """On what a run is simulated, beside its configuration; None: as the run has it, or the usual one."""

    num_ranks: int | None = None
    costs: str | None = None
    device: str | None = None
    far: str | None = None
    """The link between nodes."""
    imbalance: float | None = None
    memory_limit: float | None = None
    """GiB of a rank."""
    changes: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """(option, value) for keys of the configuration."""


@dataclass(frozen=True, kw_only=True)
class RunSource:
    """A configuration, and what the folder knows beside it."""

    config: Path
    ranks: tuple[int, int] | None = None
    """dp and ep, as the run had them."""
    num_ranks: int | None = None
    """That have told of their memory; a run of one rank chooses nothing and writes no ranks."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    measured: Measured | None = None
    on_cpu: bool = False

    @classmethod
    def read(cls, path: Path) -> RunSource:
        if path.is_dir():
            if not (path / "config.toml").is_file():
                raise ConfigError(f"{path} holds no run: there is no config.toml in it")
            return cls._of_run(path)
        if not path.is_file():
            raise ConfigError(f"there is no file {path}; give the folder of a run, or a configuration")
        return cls(config=path)

    @classmethod
    def _of_run(cls, folder: Path) -> RunSource:
        choices, summary = fitting(_table(folder / CHOICES)), _table(folder / SUMMARY)
        ranks = choices.get("ranks")
        known = isinstance(ranks, list) and len(ranks) == 4 and all(isinstance(size, int) for size in ranks)
        times = [summary.get(key) for key in ("step_ms", "compute_ms", "comm_ms")]
        measured = None
        if all(isinstance(time, int | float) and math.isfinite(time) for time in times):
            step, compute, comm = (1e-3 * float(time) for time in times if time is not None)
            window = str(summary.get("window", "some steps"))
            measured = Measured(step=step, compute=compute, communication=comm, window=window)
        return cls(
            config=folder / "config.toml",
            ranks=(ranks[0], ranks[1]) if known else None,  # type: ignore[index]
            num_ranks=_ranks_told(summary),
            settled=choices.get("settled") or {},
            measured=measured,
            on_cpu=bool(summary) and "mfu" not in summary,
        )


def _ranks_told(summary: Mapping[str, Any]) -> int | None:
    memory = summary.get("memory")
    told = memory.get("ranks") if isinstance(memory, dict) else None
    return len(told) if isinstance(told, list) and told else None


def _table(path: Path) -> dict[str, Any]:
    """Empty where there is no such file, or nothing in it that can be read."""
    if not path.is_file():
        return {}
    try:
        return read_table(path, numbers=False)
    except (OSError, ValueError, json.JSONDecodeError):
        return {}


def load_run(path: Path, terms: RunTerms) -> RunStep:
    """The run of a configuration or of a folder."""
    source = RunSource.read(path)
    given, strange = table_layer(TrainConfig, source.settled, CHOICES)
    changed = {key: Sourced(value, flag) for key, (flag, value) in terms.changes.items() if value is not None}
    config = merge(source.config, flags=given | changed, problems=strange).built.with_warnings()
    measured = source.measured
    if measured is not None and "pipeline.schedule" in changed:
        own = merge(source.config, flags=given, problems=strange).built.with_warnings()
        measured = replace(measured, schedule=own.pipeline.schedule)
    dp, ep = axes_of(config, source, terms.num_ranks)
    # Another device, other ranks or another microbatch: what was measured says nothing of these.
    as_run = terms.device is None and terms.far is None and terms.num_ranks is None and terms.costs is None
    as_run = as_run and not {"optim.accumulate", "pipeline.recompute"} & set(changed)
    name = terms.device or ("cpu" if source.on_cpu else "h200")
    machine = cluster_at(name)
    if terms.far is not None:
        machine = replace(machine, far=link(terms.far))
    imbalance = 1.1 if terms.imbalance is None else terms.imbalance
    limit = None if terms.memory_limit is None else terms.memory_limit * 2**30
    run = step_on(machine, config, (dp, ep), imbalance)
    measured = measured if as_run else None
    return replace(run, costs=table_of(terms.costs), memory_limit=limit, measured=measured)


def step_on(machine: Cluster, config: TrainConfig, axes: tuple[int, int], imbalance: float = 1.0) -> RunStep:
    """Priced by the machine alone; `axes`: dp and ep."""
    return RunStep(
        config=config,
        dp=axes[0],
        ep=axes[1],
        costs=None,
        step_costs=cluster_costs(config, machine, axes, imbalance),
        bytes=bytes_of(config, machine, axes, imbalance),
    )


def axes_of(config: TrainConfig, source: RunSource, num_ranks: int | None) -> tuple[int, int]:
    parallel = config.parallel
    if num_ranks is None and source.ranks is None:
        num_ranks = source.num_ranks
    if num_ranks is not None:
        try:
            return parallel.sizes(num_ranks, config.moe.num_experts, config.moe.expert_tp)
        except ValueError as error:
            raise ConfigError(f"--ranks {num_ranks}: {error}") from None
    if source.ranks is not None:
        return source.ranks
    if parallel.dp == "auto" or parallel.ep == "auto":
        raise ConfigError(
            "parallel.dp and parallel.ep of the configuration depend on the number of ranks; "
            "say how many with --ranks"
        )
    return parallel.dp, parallel.ep


def table_of(costs: str | None) -> Costs | None:
    table = None if costs is None else load_costs(costs)
    if table is not None and kinds.ATTN_F.name not in table.seconds:
        raise ConfigError(f"--costs {costs}: a run needs seconds of layer ops, like ATTN_F; this has none")
    return table


def bytes_of(config: TrainConfig, machine: Cluster, axes: tuple[int, int], imbalance: float) -> RunBytes:
    dp, ep = axes
    width = value_bytes(config.model.dtype, machine.device)
    held = torch.float32 if width > 2 else torch.bfloat16
    pp, tp = config.parallel.pp, config.parallel.tp
    turns = grads_take_turns(config, pp * dp * ep * tp, pp)
    return RunBytes(
        model=sizes_of_run(config),
        sharing=Sharing(
            dp=dp,
            ep=ep,
            tp=tp,
            pp=pp,
            imbalance=imbalance,
            fused=width < 4,
            by_layer=turns > 0,
            at_once=turns,
        ),
        state=state_of(config, held),
        tokens=tokens_of(config, axes),
        width=width,
    )


def answers_of(run: RunStep, schedules: tuple[str, ...]) -> tuple[list[Answer], dict[str, str]]:
    """Answers, fastest first, and why the others cannot be taken."""
    answers, refused = [], {}
    for name in schedules:
        try:
            answers.append(run.answer(name))
        except (ScheduleError, ConfigError) as error:
            refused[name] = str(error)
    return sorted(answers, key=lambda answer: answer.summary.makespan), refused
