"""Training with replicas and with experts that move equals training without: gradients, state and curves."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import (
    BOUND,
    LATENT,
    configure,
    corpus,  # noqa: F401  (a fixture)
    gradients,
    join,
    state_after_load,
)

from moeclipse.balance.drift import Drift
from moeclipse.balance.load import LoadTrace
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.moe.tune.probe import Probe
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.model_placement import ModelPlacement, costs_of
from moeclipse.train.step.learner import Learner

TABLES = {
    "seed": (4, ((0, 3), (1, 2), (1, 2), (0, 3))),
    "ragged": (5, ((0, 1, 2), (0, 3), (4, 0, -1), (0,))),
    "few": (2, ((1,), (0, 1), (), (0,))),
}
STEPS = 20
WIDE = {"moe.d_ff": 192}
"""Experts of several grains: replicas own parts of them."""


@pytest.mark.parametrize(("dp", "mirrored", "copies"), [(1, False, 1), (2, False, 2), (2, True, 4)])
def test_owners_are_spread_over_all_that_hold_a_layer(dp: int, mirrored: bool, copies: int) -> None:
    """Of two copies of the model, over both places of the pipeline that hold it."""
    config = with_values(TrainConfig(), {"placement.slots": ((0, 1), (2, 3)), "moe.num_experts": 4})
    (mesh := Mesh.single()).dp, mesh.mirrored = dp, mirrored
    owners = ModelPlacement(config, mesh)._owners
    placed = config.placement.start(4, 2, 0)
    assert owners(placed, SimpleNamespace(layer=0)).copies == copies  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "schedule"),
    [
        ("seed", "blocking"),
        ("ragged", "smart"),
        ("few", "blocking"),
        *(pytest.param(*other, marks=pytest.mark.full) for other in (("seed", "smart"), ("few", "smart"))),
    ],
)
def test_gradients_of_replicas_are_summed_to_the_owner(table: str, schedule: str, corpus: str) -> None:  # noqa: F811
    num_experts, slots = TABLES[table]
    common = {"moe.num_experts": num_experts, "gate.top_k": 2, **WIDE}
    expected = gradients_alone(configure(corpus, **common))
    smart = {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2} if schedule == "smart" else {}
    results = run_ranks(4, gradients, configure(corpus, **common, **smart, **{"placement.slots": slots}))
    compare(join(results), expected)


def test_gradients_of_replicas_in_copies(corpus: str) -> None:  # noqa: F811
    expected = gradients_alone(configure(corpus, **WIDE))
    slots = ((0, 1, 2, 4), (3, 1, 0))
    results = run_ranks(4, gradients, configure(corpus, **WIDE, **{"placement.slots": slots}), dp=2)
    compare(join(results), expected)


@pytest.mark.parametrize("expert_tp", ["folded", "sharded"])
def test_gradients_of_replicas_with_tp(expert_tp: str, corpus: str) -> None:  # noqa: F811
    common = {"model.num_kv_heads": 2, "moe.expert_tp": expert_tp, **WIDE}
    expected = gradients_alone(configure(corpus, **common))
    slots: Any = ((0, 1, 2, 4), (3, 1, 0)) if expert_tp == "sharded" else ((0, 3), (1, 2), (4, 2), (0, 1))
    config = configure(corpus, **common, **{"placement.slots": slots})
    compare(join_slabs(run_ranks(4, gradients, config, tp=2)), expected)


def join_slabs(results: list[tuple[list, float]]) -> dict[str, torch.Tensor]:
    """Columns that tp cut are put side by side."""

    whole: dict[str, torch.Tensor] = {}
    column_shards: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, values in join(results).items():
        found = re.fullmatch(r"(.*)\[:, (\d+):(\d+)\]", name)
        if found is None:
            whole[name] = values
        else:
            width = int(found[3]) - int(found[2])
            column_shards.setdefault(found[1], []).append((int(found[2]), values.view(-1, width)))
    for name, parts in column_shards.items():
        whole[name] = torch.cat([part for _, part in sorted(parts, key=lambda p: p[0])], dim=1).flatten()
    return whole


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = BOUND) -> None:
    assert found.keys() == expected.keys()
    bad = {name: difference(found[name], expected[name]) for name in expected}
    bad = {name: value for name, value in bad.items() if not value <= bound}
    assert not bad, bad


def trained(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[list, list[float], int]:
    """State after some steps, the losses, and how many plans were taken."""
    learner = Learner(config, mesh)
    losses = [learner.step(step)["loss"] for step in range(steps)]
    pieces = [(piece.name, piece.start, piece.data.clone()) for piece in learner.optim.pieces()]
    return pieces, losses, learner.placement.plans_taken


@cache
def trained_alone(config: TrainConfig, steps: int) -> tuple[list, list[float], int]:
    found: tuple[list, list[float], int] = run_alone(trained, config, steps)
    return found


@cache
def gradients_alone(config: TrainConfig) -> dict[str, torch.Tensor]:
    return join([run_alone(gradients, config)])


RANDOM = {
    **WIDE,
    "placement.planner": "random",
    "placement.start_step": 1,
    "placement.every": 3,
    "placement.slots_per_rank": 3,
    "integrity.every": 2,
}


def same_as_without(corpus: str, steps: int, layout: dict[str, int], **changes: Any) -> None:  # noqa: F811
    """Optimizer state and losses with random re-placements every 3 steps, and of one process."""
    ranks = layout["ranks"]
    plain = {k: value for k, value in changes.items() if not k.startswith(("placement.", "pipeline."))}
    alone, expected, _ = trained_alone(configure(corpus, **WIDE, **plain), steps)
    config = configure(corpus, **{**RANDOM, **changes})
    axes = {"dp": layout.get("dp", 1), "tp": layout.get("tp", 1), "pp": layout.get("pp", 1)}
    results = run_ranks(ranks, trained, config, steps, **axes, deadline_s=600.0)
    assert all(plans >= steps // 3 - 2 for _, _, plans in results), [plans for *_, plans in results]
    compare(join_slabs([(pieces, 0.0) for pieces, _, _ in results]), join_slabs([(alone, 0.0)]))
    for _, losses, _ in results:
        assert difference(losses, expected) <= BOUND


def test_random_re_placement_changes_nothing(corpus: str) -> None:  # noqa: F811
    same_as_without(corpus, 8, {"ranks": 4})


MICROBATCHES = {"optim.accumulate": 4, "data.batch_size": 18, "model.num_layers": 4}
FULL_CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "blocking": ({"ranks": 4}, {}),
    "smart": ({"ranks": 4}, {"moe.schedule": "smart", "moe.group_size": 1, "moe.chunks": 2}),
    "shadows": ({"ranks": 4}, {"moe.schedule": "smart", "moe.group_size": 2, "moe.shadow": (0, 2)}),
    "copies": ({"ranks": 4, "dp": 2}, {}),
    "tp folded": ({"ranks": 4, "tp": 2}, {"model.num_kv_heads": 2}),
    "tp sharded": ({"ranks": 4, "tp": 2}, {"model.num_kv_heads": 2, "moe.expert_tp": "sharded"}),
    "latent": ({"ranks": 4}, {**LATENT, "placement.slots_per_rank": 4}),
    "overlap": ({"ranks": 2}, {**MICROBATCHES, "pipeline.overlap": "pair+self"}),
    "pipeline": ({"ranks": 4, "pp": 2}, {**MICROBATCHES, "pipeline.schedule": "1f1b"}),
    "dualpipev": (
        {"ranks": 4, "pp": 2},
        {**MICROBATCHES, "pipeline.schedule": "dualpipev", "pipeline.overlap": "pair+self"},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_CASES)
def test_twenty_steps_with_a_random_re_placement_every_three(case: str, corpus: str) -> None:  # noqa: F811
    layout, changes = FULL_CASES[case]
    same_as_without(corpus, STEPS, layout, **changes)


def save_and_go_on(mesh: Mesh, config: TrainConfig, folder: str, steps: int) -> tuple[str, list, list[float]]:
    """A checkpoint after some steps, the placements it holds, and three more losses."""
    learner = Learner(config, mesh)
    for step in range(steps):
        learner.step(step)
    path = str(learner.save(Path(folder), steps))
    tables = [entry["slots"] for entry in learner.placement.state()]
    return path, tables, [learner.step(step)["loss"] for step in range(steps, steps + 3)]


def tables_after_load(mesh: Mesh, config: TrainConfig, path: str) -> list:
    learner = Learner(config, mesh)
    learner.load(Checkpoint.open(path, mesh))
    return [entry["slots"] for entry in learner.placement.state()]


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_checkpoint_of_one_placement_is_read_by_any_other(many: bool, corpus: str, tmp_path: Path) -> None:  # noqa: F811
    saved = run_ranks(4, save_and_go_on, configure(corpus, **RANDOM), str(tmp_path), 5)
    path, tables, losses = saved[0]
    assert any(tables[0] != other for other in ([[0, 1, -1], [2, -1, -1]], tables[1])), "experts have moved"
    truth: dict[str, torch.Tensor] | None = None
    other = {"placement.slots": ((0, 1, 2), (1, 3, 4)), "placement.planner": "static", **WIDE}
    layouts: list[tuple[int, int, dict[str, Any]]] = [
        (1, 1, WIDE),
        (2, 1, other),
        (4, 2, other),
        (4, 1, RANDOM),
        (2, 1, RANDOM),
        (3, 1, WIDE),
    ]
    for ranks, dp, changes in layouts if many else layouts[:2]:
        results = run_ranks(ranks, state_after_load, configure(corpus, **changes), path, dp=dp)
        state = join([(pieces, 0.0) for pieces, _, _ in results])
        truth = truth or state
        compare(state, truth, bound=0.0)
        for _, _, found in results:
            assert difference(found, losses) < 1e-11


@pytest.mark.full
def test_a_resumed_run_holds_what_the_checkpoint_held(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    config = configure(corpus, **RANDOM)
    path, tables, _ = run_ranks(4, save_and_go_on, config, str(tmp_path), 5)[0]
    assert run_ranks(4, tables_after_load, config, path)[0] == tables
    given = {"placement.slots": ((0, 1, 4), (2,), (3,), (4,)), "placement.slots_per_rank": 3}
    assert run_ranks(4, tables_after_load, configure(corpus, **{**RANDOM, **given}), path)[0] == tables
    loaded = run_ranks(4, tables_after_load, configure(corpus, **WIDE, **given), path)[0]
    assert loaded[0][:2] == ((0, 1, 4), (2, -1, -1)), "without a planner a given table counts"


def test_layers_begin_with_their_table(corpus: str) -> None:  # noqa: F811
    dense = {"model.num_layers": 3, "model.num_dense_layers": 1}
    tables = '{"layers": [[[0, 1, 2, 3, 4]], [[4, 3, 2, 1, 0]]]}'
    found = ModelPlacement(configure(corpus, **dense, **{"placement.slots": tables}), Mesh.single())
    assert found.placement_of(0) is None, "a dense layer has no experts"
    starts = [found.placement_of(layer) for layer in (1, 2)]
    assert [start.slots[0] for start in starts if start is not None] == [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0)]
    unused = ModelPlacement(configure(corpus, **dense), Mesh.single())
    assert not unused.in_use
    assert unused.placement_of(1) is None
    assert (unused.layers, unused.state()) == ([], [])  # no step asks it


def loaded(mesh: Mesh, config: TrainConfig, saved: list[dict[str, Any]]) -> list[Any]:
    learner = Learner(config, mesh)
    learner.placement.load_state(saved)
    return [entry["slots"] for entry in learner.placement.state()]


def test_a_saved_placement_is_taken_where_it_fits(corpus: str) -> None:  # noqa: F811
    planned = configure(corpus, **{**RANDOM, "placement.slots_per_rank": 4})
    start = run_ranks(2, loaded, planned, [])[0]
    assert start[0] == ((0, 1, 2, -1), (3, 4, -1, -1))
    fits = {"layer": 0, "slots": [[4, 3, 2, 1], [0, 1, -1, -1]], "primary": [1, 0, 0, 0, 0], "expected": None}
    other = [
        {**fits, "layer": 7},
        {**fits, "slots": [[4, 3, 2], [0, 1, 2]]},  # other slots
        {**fits, "slots": [[4, 3, 2, 1], [0, 1, -1, -1], [0, -1, -1, -1]]},  # other ranks
    ]
    assert run_ranks(2, loaded, planned, [fits])[0] == [((4, 3, 2, 1), (0, 1, -1, -1)), start[1]]
    for entry in other:
        assert run_ranks(2, loaded, planned, [entry])[0] == start
    static = configure(corpus, **{"placement.slots_per_rank": 4})
    assert run_ranks(2, loaded, static, [fits])[0] == start, "without a planner the configuration counts"


def asked_when(mesh: Mesh, config: TrainConfig) -> list[int]:
    """The steps at which plans are asked for, with loads that change in step 30."""
    learner, asked = Learner(config, mesh), []
    planner, trace = learner.placement.planner, LoadTrace(drift=Drift())
    rng, num_experts = np.random.default_rng(0), config.moe.num_experts
    for step in range(36):
        weights_E = np.ones(num_experts)
        weights_E[0 if step < 30 else -1] = 6.0
        counts_E = rng.multinomial(4000, weights_E / weights_E.sum())
        trace.add(step, np.tile(counts_E, (learner.num_moe_layers, mesh.stage.size, 1)))
        learner.placement._plan(step, trace)
        asked += [step] if planner.pending == step else []
    return asked


def test_a_plan_is_asked_for_when_loads_jump(corpus: str) -> None:  # noqa: F811
    given = {"placement.planner": "greedy", "placement.every": 100, "placement.slots_per_rank": 4}
    for start_step, asked in ((100, [30]), (30, [29, 30])):
        config = configure(corpus, **given, **{"placement.start_step": start_step})
        assert run_ranks(2, asked_when, config) == [asked] * 2, "also in place of one that is under way"


def test_planners_are_told_what_was_measured() -> None:
    probe = Probe(
        num_ranks=4,
        row_forward=1.0,
        row_backward=2.0,
        kernel=0.1,
        latency=0.1,
        bandwidth=8.0,
        link=32.0,
        shared_wire=True,
        row_bytes=16.0,
        parameter_bytes=100.0,
        gradient_bytes=200.0,
    )
    costs = costs_of(probe, every=25)
    assert (costs.row_seconds, costs.row_bytes, costs.every) == (3.0, 16.0, 25)
    assert (costs.weight_bytes, costs.gradient_bytes) == (100.0, 200.0)
    assert costs.state_bytes == 3 * 200.0, "master weights and two moments"
    assert (costs.near_bandwidth, costs.far_bandwidth, costs.shared_wire) == (8.0, 8.0, True)
