"""Leave, lend, copy or move: whatever `auto` or a policy chooses, training is that of one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_background_plan import CHEAP
from test_learner import BOUND, configure, corpus  # noqa: F401  (a fixture)
from test_model_placement import WIDE, compare, join_slabs

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.tune.cut_choice import LayerChoice
from moeclipse.moe.tune.probe import Probe
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

AUTO = {
    **WIDE,
    "placement.planner": "auto",
    "placement.start_step": 2,
    "placement.every": 2,
    "placement.commit_after": 1,
    "integrity.every": 1,
}
PAGE = Path(__file__).parents[3] / "docs" / "extending.md"
PROBE = {
    "row_forward": 1e-3,
    "row_backward": 2e-3,
    "kernel": 0.0,
    "latency": 0.0,
    "bandwidth": 1e9,
    "link": 1e9,
    "shared_wire": False,
    "row_bytes": 1.0,
    "parameter_bytes": 1.0,
    "gradient_bytes": 1.0,
}
"""Loans cost so little that some are made, whatever this machine measures."""


def trained(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[list, list[float], dict[str, Any]]:
    learner = Learner(config, mesh)
    if config.placement.moves:
        learner.placement.costs = CHEAP
        # As if steps and searches took no time: on a busy machine nothing would be worth a share of a step.
        learner.placement.choices.search = {"step_s": 1e-9, "search_s": 1e-9}
    layers = [placed.layer for placed in learner.placement.layers]
    for layer in layers:
        layer.schedule.take_choice(LayerChoice(probe=Probe(**PROBE), tried=(), chosen=None))
    losses, notes, lent = [], [], 0
    for step in range(steps):
        record = learner.step(step)
        losses.append(record["loss"])
        notes += record.get("notes", [])
        plans = [layer.schedule.shadow_plan for layer in layers]
        lent += sum(len(plan.shadows) for plan in plans if plan is not None)
    pieces = [(piece.name, piece.start, piece.data.clone()) for piece in learner.optim.pieces()]
    replicas = [placed.placement.num_replicas for placed in learner.placement.layers]
    return pieces, losses, {"lent": lent, "notes": notes, "replicas": replicas}


def same_as_alone(corpus: str, steps: int, changes: dict[str, Any], **axes: int) -> list[dict[str, Any]]:  # noqa: F811
    plain = {key: value for key, value in changes.items() if not key.startswith(("placement.", "moe.shadow"))}
    alone, expected, _ = run_alone(trained, configure(corpus, **{**WIDE, **plain}), steps)
    results = run_ranks(4, trained, configure(corpus, **{**AUTO, **changes}), steps, **axes)
    compare(join_slabs([(pieces, 0.0) for pieces, *_ in results]), join_slabs([(alone, 0.0)]))
    for _, losses, _ in results:
        assert difference(losses, expected) <= BOUND
    return [told for *_, told in results]


@pytest.mark.parametrize(
    ("shadow", "axes"),
    [
        ("auto", {}),
        *(pytest.param(*other, marks=pytest.mark.full) for other in (("off", {}), ("auto", {"dp": 2}))),
    ],
)
def test_whatever_auto_chooses_training_is_the_same(shadow: str, axes: dict[str, int], corpus: str) -> None:  # noqa: F811
    changes = {"moe.shadow": shadow, "moe.schedule": "blocking"}
    for told in same_as_alone(corpus, 6, changes, **axes):
        if shadow == "off":
            assert max(told["replicas"]) > 5, told["notes"]
        else:
            assert told["lent"] > 0, "what can be lent for nothing is"


def test_a_policy_of_ones_own_is_taken(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    """The one in the documentation, word by word; and training is as before."""
    file = tmp_path / "plans.py"
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (policy,) = [block for block in code if "def hottest_everywhere" in block]
    file.write_text(policy + "\n\ndef wrong(problem):\n    return [[0]]\n")
    given = {"placement.planner": "static", "placement.slots_per_rank": 3}
    for told in same_as_alone(corpus, 5, {**given, "placement.policy": f"{file}:hottest_everywhere"}):
        assert max(told["replicas"]) == 5 + 3
        assert any("predicted to take" in note for note in told["notes"])
    config = configure(corpus, **{**AUTO, **given, "placement.policy": f"{file}:wrong"})
    for *_, told in run_ranks(2, trained, config, 4):
        assert "placement.policy returned list, and no Placement; experts stay" in told["notes"][0]


def alone_with_auto(mesh: Mesh, config: TrainConfig) -> bool:
    return Learner(config, mesh).placement.in_use


def test_on_one_rank_auto_does_nothing(corpus: str) -> None:  # noqa: F811
    assert not run_alone(alone_with_auto, configure(corpus, **AUTO))
    assert run_alone(alone_with_auto, configure(corpus, **{**AUTO, "placement.planner": "incremental"}))
