"""Slots that are left to us: within memory, alike on all ranks, kept, and no other training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_background_plan import CHEAP
from test_learner import configure, corpus  # noqa: F401  (a fixture)
from test_model_placement import WIDE

from moeclipse.balance.config import PlacementConfig, usual_slots
from moeclipse.balance.planner import SMALL
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement import spare_slots
from moeclipse.train.placement.spare_slots import KEY, left_open, slot_bytes, slots_for
from moeclipse.train.run.choices import FILE, Choices
from moeclipse.train.run.resolve_auto import left_to_choose, settle
from moeclipse.train.step.learner import Learner

LONG = {**WIDE, "run.steps": 100, "placement.planner": "auto", "placement.start_step": 2}


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "affordable", "expected"),
    [
        (16, 4, 100, 8),  # twice the share
        (16, 4, 2, 6),  # as memory allows
        (16, 4, 0, 5),  # but never fewer than usual
        (5, 2, 100, 5),  # no rank holds an expert twice
        (256, 64, 100, 5),  # the table would be too large to search through
        (128, 16, 100, 10),
        (64, 16, 100, 8),
        (4, 4, 100, 2),
    ],
)
def test_twice_the_share_at_most(num_experts: int, num_ranks: int, affordable: int, expected: int) -> None:
    found = slots_for(num_experts, num_ranks, affordable)
    assert found == expected
    assert found * num_ranks <= SMALL or found == usual_slots(num_experts, num_ranks)


def test_usual_slots_are_those_that_planners_have_without_a_word() -> None:
    for num_experts, num_ranks in ((16, 4), (5, 2), (3, 4), (64, 8)):
        table = PlacementConfig(planner="greedy").start(num_experts, num_ranks, 0)
        assert table.max_slots == usual_slots(num_experts, num_ranks)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"placement.planner": "incremental"}, True),
        ({"placement.planner": "exact"}, True),
        ({"placement.planner": "static"}, False),
        ({"placement.planner": "greedy"}, False),  # it fills whatever there is
        ({KEY: 3}, False),
        ({"placement.slots": ((0, 1, 2), (3, 4))}, False),
    ],
)
def test_what_is_said_counts(changes: dict[str, Any], expected: bool) -> None:
    config = with_values(TrainConfig(), {"placement.planner": "auto", "moe.num_experts": 5, **changes})
    assert left_open(config) is expected
    assert (KEY in left_to_choose(config)) is expected


def bytes_of(mesh: Mesh, config: TrainConfig) -> tuple[int, int]:
    """What one slot more takes, and what it is said to take."""
    held = []
    for slots in (3, 4):
        learner = Learner(with_values(config, {KEY: slots}), mesh)
        buckets = [bucket for placed in learner.placement.layers for bucket in placed.buckets]
        tensors = [tensor for bucket in buckets for tensor in (bucket.params, bucket.grads)]
        held.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    return held[1] - held[0], slot_bytes(config, mesh)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.dtype": "auto"},
        {"model.dtype": "bfloat16", "optim.main_grad": "bf16"},
        {"model.dtype": "bfloat16", "moe.expert_bias": True, "moe.activation": "gelu"},
    ],
)
def test_a_slot_takes_what_is_said(changes: dict[str, Any], corpus: str) -> None:  # noqa: F811
    for measured, said in run_ranks(2, bytes_of, configure(corpus, **{**LONG, **changes})):
        assert measured == said


def trained(mesh: Mesh, config: TrainConfig, folder: str, room: float) -> list[Any]:
    """Slots, lines and losses of a run, settled twice, on ranks that have more or less memory left."""
    if config.placement.moves:
        # Where bits repeat, as on CPUs, the memory of the host counts.
        spare_slots.memory_given = lambda _: room * (1 + mesh.rank)  # type: ignore[attr-defined, assignment]
        choices = Choices(mesh, Path(folder))
        config, lines = settle(config, mesh, choices)
        choices.write()
        spare_slots.memory_given = lambda _: 0.0  # type: ignore[attr-defined, assignment]
        later = Choices(mesh, Path(folder))
        later.read("", resumed=True)
        assert settle(config, mesh, later)[0] == config, "a run that goes on keeps its slots"
    else:
        lines = []
    learner = Learner(config, mesh)
    learner.placement.costs = CHEAP
    # As if steps and searches took no time: on a busy machine nothing would be worth a share of a step.
    learner.placement.choices.search = {"step_s": 1e-9, "search_s": 1e-9}
    losses = [learner.step(step)["loss"] for step in range(6)]
    tables = [placed.placement for placed in learner.placement.layers]
    return [[table.max_slots for table in tables], [table.num_replicas for table in tables], lines, losses]


@pytest.mark.parametrize(("room", "slots"), [(1e9, 4), (0.0, 3)])
def test_training_with_these_slots_is_the_same(
    room: float,
    slots: int,
    corpus: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    eight = {"moe.num_experts": 8, "gate.top_k": 2}
    plain = with_values(configure(corpus, **LONG), {**eight, "placement.planner": "static"})
    *_, expected = run_alone(trained, plain, "", 0.0)
    config = configure(corpus, **{**LONG, **eight, "moe.shadow": "off"})
    for found, replicas, lines, losses in run_ranks(4, trained, config, str(tmp_path), room):
        assert found == [slots, slots]
        assert min(replicas) > 8, "they are used"
        (line,) = [line for line in lines if line.startswith("placement:")]
        assert line.startswith(f"placement: {slots - 2} slots to spare on each rank and layer, ")
        assert difference(losses, expected) <= 1e-12
    assert f'"{KEY}": {slots}' in (tmp_path / FILE).read_text()
