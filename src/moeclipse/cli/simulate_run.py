"""`moeclipse simulate --config FILE`: the step of a run as its configuration lays it out.

    moeclipse simulate --config runs/mine/config.toml --device h200 --link infiniband
    moeclipse simulate --config mine.toml --ranks 16 --compare

The program is the one that the run would execute (`train/predict/run_step`). What ops cost follows from the
model's sizes and the hardware (`sim/step_costs`), or from a table (--costs), in which what it does not name
of these is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from moeclipse.core.config import Given
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.cost.file import load_costs
from moeclipse.cost.hardware import device, link
from moeclipse.pipeline.config import Schedule
from moeclipse.schedule import kinds
from moeclipse.sim.compare import Answer
from moeclipse.sim.step_costs import StepCosts
from moeclipse.train.predict.run_step import RunStep as RunStep
from moeclipse.train.predict.step_sizes import step_work, value_bytes
from moeclipse.train.presets import merge

RUN_SCHEDULES = ("pp1", *(name for name in get_args(Schedule) if name != "auto"))
"""Schedules that a run can take."""


def load_run(
    path: Path,
    *,
    num_ranks: int | None,
    costs: str | None,
    device_name: str,
    link_name: str,
    changes: Mapping[str, tuple[str, Any]] | None = None,
    memory_limit: float | None = None,
) -> RunStep:
    """The run of a configuration; `num_ranks` decides what it leaves to the number of ranks.

    `changes`: (option, value) for keys of the configuration; None leaves a key as it is.
    """
    if not path.is_file():
        raise ConfigError(f"--config: there is no file {path}")
    given = {key: Given(value, flag) for key, (flag, value) in (changes or {}).items() if value is not None}
    config = merge(path, flags=given).built.with_warnings()
    parallel = config.parallel
    if num_ranks is None:
        if "auto" in (parallel.dp, parallel.ep):
            raise ConfigError(
                "parallel.dp and parallel.ep of the configuration depend on the number of ranks; "
                "say how many with --ranks"
            )
        dp, ep = int(parallel.dp), int(parallel.ep)
    else:
        try:
            dp, ep = parallel.sizes(num_ranks, config.moe.num_experts, config.moe.expert_tp)
        except ValueError as error:
            raise ConfigError(f"--ranks {num_ranks}: {error}") from None
    table = None if costs is None else load_costs(costs)
    if table is not None and kinds.ATTN_F.name not in table.seconds:
        raise ConfigError(f"--costs {costs}: a run needs seconds of layer ops, like ATTN_F; this has none")
    hardware = device(device_name)
    width = value_bytes(config.model.dtype, hardware)
    priced = StepCosts(step_work(config, dp, ep, width), hardware, link(link_name))
    return RunStep(config=config, dp=dp, ep=ep, costs=table, step_costs=priced, memory_limit=memory_limit)


def answers_of(run: RunStep, schedules: tuple[str, ...]) -> tuple[list[Answer], dict[str, str]]:
    """Answers, fastest first, and why the others cannot be taken."""
    answers, refused = [], {}
    for name in schedules:
        try:
            answers.append(run.answer(name))
        except (ScheduleError, ConfigError) as error:
            refused[name] = str(error)
    return sorted(answers, key=lambda answer: answer.summary.makespan), refused
