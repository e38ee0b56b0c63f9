"""The same configuration on the same ranks gives the same bits, whatever a clock says or memory is left."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_choices import directory, weights
from test_trainer import configure, losses, whole

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.moe.tune import exchange_policy, fixed_prices
from moeclipse.moe.tune.probe import Probe
from moeclipse.moe.tune.shadow_choice import ShadowChoice
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load
from moeclipse.train.run import choices
from moeclipse.train.step import memory_bytes

ALL_AUTO = {
    "run.steps": 9,
    "checkpoint.every": 0,
    "model.num_layers": 1,
    "model.dtype": "float32",
    "model.d_model": 32,
    "moe.num_experts": 8,
    "moe.d_ff": 64,
    "moe.shadow": "auto",
    "placement.planner": "auto",
    "placement.start_step": 2,
    "placement.every": 2,
    "placement.commit_after": 1,
    "gate.kind": "softmax",
    "gate.bias_rate": 0.0,
    "data.batch_size": 8,
}
"""Everything that a run may choose is left to it, and planners are asked often."""
LENDING = {"placement.planner": "static"}
MOVING = {"moe.shadow": "off"}
SMART = {"moe.schedule": "smart", **LENDING}
PIPELINE = {
    "parallel.pp": 2,
    "model.num_layers": 4,
    "optim.accumulate": 4,
    "placement.planner": "static",
    "moe.shadow": "off",
}


class Weather:
    """A clock that runs as it likes: all that is timed takes between a microsecond and a second."""

    def __init__(self, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0

    def __call__(self) -> float:
        self.now += 10.0 ** self.random.uniform(-6, 0)
        return self.now

    def measured(self, *given: Any) -> Probe:
        """Prices as trials may tell them, the same on all ranks."""
        _, experts, dispatcher, _, mesh = given
        book = fixed_prices.fixed_prices(experts, dispatcher, mesh)
        size = [10.0 ** self.random.uniform(-7, -3) for _ in range(6)]
        rows = {"row_forward": size[0], "row_backward": size[1], "loan": 1e-3 * size[4], "sync": size[5]}
        return replace(book, **rows, bandwidth=1 / size[2], link=1 / size[3], look=1e-9, fixed=False)


def in_all_weathers(mesh: Mesh, configs: list[TrainConfig]) -> list[int]:
    """One run after the other, each under another clock; short ones try, too, and lending is nearly free."""
    choices.SHORTEST, choices.TRIAL_SHARE = 2, 0.9
    cheap = replace(fixed_prices.BOOKS["cpu"], latency=1e-9, look=1e-9, loan=1e-9, sync=1e-9)
    fixed_prices.BOOKS["cpu"] = replace(cheap, chip=replace(cheap.chip, flops=1e9))
    lent, choose = [0] * len(configs), ShadowChoice.choose
    for number, config in enumerate(configs):
        time.perf_counter = time.thread_time = Weather(1000 * number + mesh.rank)  # type: ignore[assignment]
        prices = Weather(number)
        exchange_policy.measured = prices.measured  # type: ignore[attr-defined, assignment]
        free = (1e9, 1e5, 1e6)[number % 3]
        memory_bytes.available_memory = lambda free=free: free  # type: ignore[attr-defined, misc]

        def counted(self: ShadowChoice, *given: Any, number: int = number) -> Any:
            found = choose(self, *given)
            lent[number] += self.plan is not None and bool(self.plan.shadows)
            return found

        ShadowChoice.choose = counted  # type: ignore[method-assign]
        whole(mesh, config)
    return lent


def check_weathers(
    tmp_path: Path, settings: list[dict[str, Any]], number: int, ranks: int = 2, **axes: int
) -> None:
    """As many runs of each of these, under as many clocks."""
    kinds = [configure(tmp_path, **{**ALL_AUTO, **changes}) for changes in settings]
    configs = [
        with_values(one, {"run.name": f"run{kind}-{at}"})
        for kind, one in enumerate(kinds)
        for at in range(number)
    ]
    lent_by = run_ranks(ranks, in_all_weathers, configs, **axes)[0]
    for kind, first in enumerate(kinds):
        alike = configs[kind * number : (kind + 1) * number]
        for other in alike[1:]:
            assert losses(other) == losses(alike[0]), other.run.name
            assert weights(other) == weights(alike[0]), other.run.name
        lent = lent_by[kind * number : (kind + 1) * number]
        assert lent == [lent[0]] * number
        assert lent[0] > 0 or first.moe.shadow == "off", "experts were lent, by counts"
        found = [json.loads((directory(one) / "summary.json").read_text())["placement"] for one in alike]
        assert not first.placement.moves or found[0]["plans"] > 0, "and moved"
        settled = [json.loads((directory(one) / choices.FILE).read_text())["settled"] for one in alike]
        for one in settled:  # a wire carries rows and adds nothing: it may be chosen by its times
            one.pop("moe.transport", None)
        assert settled == [settled[0]] * number


def test_no_clock_decides_a_bit(tmp_path: Path) -> None:
    check_weathers(tmp_path, [LENDING, {**MOVING, "placement.planner": "incremental"}], 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "ranks", "axes"),
    [(MOVING, 3, {}), (SMART, 3, {}), (PIPELINE, 4, {"pp": 2})],
    ids=["moving experts", "smart", "pipeline"],
)
def test_ten_clocks_and_the_same_bits(
    changes: dict[str, Any], ranks: int, axes: dict[str, int], tmp_path: Path
) -> None:
    check_weathers(tmp_path, [{**changes, "run.steps": 16, "data.batch_size": 24}], 10, ranks, **axes)


def runs_of(mesh: Mesh, configs: list[TrainConfig]) -> None:
    for config in configs:
        whole(mesh, config)


@pytest.mark.full
def test_ten_runs_of_tiny_have_the_same_bits(tmp_path: Path) -> None:
    """As `moeclipse train --preset tiny --ranks 2 --run.steps 8` does; the loss of one in three differed."""
    tiny = with_values(load(preset="tiny"), {"run.dir": str(tmp_path), "run.steps": 8, "run.sample": 0})
    configs = [with_values(tiny, {"run.name": f"run{number}"}) for number in range(10)]
    run_ranks(2, runs_of, configs)
    for other in configs[1:]:
        assert losses(other) == losses(configs[0]), other.run.name
        assert weights(other) == weights(configs[0]), other.run.name
