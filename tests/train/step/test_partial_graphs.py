"""Parts of microbatches that are captured and replayed, on ranks that exchange rows between them.

A capture on the CPU is played as in test_graphs.py; a replay tells no bucket anything, as a graph would not.
The real one is in tests/gpu/test_part_graphs_on_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_graphs import SMALL, Played, PlayedCapture

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.tensor.weight_grad import unheard
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.graphs import WARM_STEPS
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.partial_graphs import PartGraphs, obstacle_to_parts

DENSE_FIRST = {**SMALL, "model.num_layers": 3, "model.num_dense_layers": 1, "moe.num_shared_experts": 1}
STEPS = WARM_STEPS + 3


class PlayedParts(PlayedCapture):
    """`fails_at`: the capture that fails, counted from one."""

    fails_at = 0
    rooms = 0
    unkept_tensors = 0

    def unkept(self, tensor: torch.Tensor) -> torch.Tensor:
        self.unkept_tensors += 1
        return tensor.detach()

    def make_room(self) -> None:
        assert not self.captures
        self.rooms += 1

    def capture(self, work: Callable[[], None]) -> Any:
        self.fails, self.after = self.captures + 1 == self.fails_at, list[torch.Tensor]()

        def noted() -> None:
            work()
            self.after = [tensor.clone() for tensor in self.written()]

        played = super().capture(noted)
        return UnheardPlayed(self, work, played.seen)


class UnheardPlayed(Played):
    """A backward that was just played has no graph left to run a second time: it left what it wrote."""

    def __init__(self, capture: PlayedParts, work: Callable[[], None], seen: list[bool]) -> None:
        super().__init__(capture, work, seen)
        self.left = capture.after if work.__name__ == "_run_backward" else []

    def replay(self) -> None:
        if self.left:
            self.capture.replays += 1
            for tensor, value in zip(self.capture.written(), self.left, strict=True):
                tensor.copy_(value)
            self.left = []
            return
        with unheard(self.capture.states):
            super().replay()
        part: Any = self.work.__self__  # type: ignore[attr-defined]
        if part._dx is not None and part._x.grad is not None:  # a graph would have written it there
            part._dx.copy_(part._x.grad)


def with_parts(learner: Learner) -> PlayedParts:
    capture, sequential = PlayedParts(learner), learner.sequential
    sequential.parts = PartGraphs(learner.model.all_layers, capture, learner.mesh.recorder)
    return capture


def curve(learner: Learner) -> list[Any]:
    records = [learner.step(step) for step in range(STEPS)]
    found: list[Any] = [(record["loss"], record["grad_norm"], record["load"]) for record in records]
    return [*found, torch.cat([bucket.params for bucket in learner.buckets]).sum().item()]


def curves(mesh: Mesh, changes: dict[str, Any]) -> list[Any]:
    config = with_values(TrainConfig(), {**DENSE_FIRST, **changes})
    plain = curve(Learner(config, mesh))
    learner = Learner(config, mesh)
    early: list[bool] = []
    capture = with_parts(learner)
    launch = learner.buckets._launch_next

    def noted() -> None:
        early.append(learner.buckets._armed)
        launch()

    learner.buckets._launch_next = noted  # type: ignore[method-assign]
    found = curve(learner)
    assert capture.rooms == 1, "what eager steps took is given back, once"
    return [plain, found, capture.captures, capture.replays, any(early)]


CASES: dict[str, dict[str, Any]] = {
    "one microbatch": {},
    "three": {"optim.accumulate": 3},
    "smart": {"optim.accumulate": 2, "moe.schedule": "smart", "moe.chunks": 2},
    "biases that move": {"optim.accumulate": 2, "gate.kind": "sigmoid", "gate.bias_rate": 0.01},
    "uneven": {"optim.accumulate": 2, "data.batch_size": 10},
    "a gate that draws": {"gate.kind": "gshard", "gate.top_k": 2},
    "experts that move": {
        "placement.planner": "random",
        "placement.start_step": 1,
        "placement.every": 2,
        "placement.slots_per_rank": 3,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_parts_train_the_same_model(case: str) -> None:
    changes = CASES[case]
    accumulate = changes.get("optim.accumulate", 1)
    for plain, replayed, captures, replays, early in run_ranks(2, curves, changes):
        assert replayed == plain
        # Layers, forward and backward, storing and adding; uneven, the first microbatch has other sizes.
        assert captures == 3 * 2 * min(accumulate, 2)
        assert replays == 3 * 2 * accumulate * (STEPS - WARM_STEPS)
        assert early, "buckets leave while backward goes on"


def test_replayed_parts_where_ranks_only_share_gradients() -> None:
    for plain, replayed, captures, _, early in run_ranks(2, curves, {"optim.accumulate": 2}, dp=2):
        assert replayed == plain
        assert captures == 3 * 2 * 2
        assert early


def places(mesh: Mesh, accumulate: int) -> list[Any]:
    config = with_values(TrainConfig(), {**DENSE_FIRST, "optim.accumulate": accumulate})
    learner = Learner(config, mesh)
    capture = with_parts(learner)
    for step in range(STEPS):
        learner.step(step)
    assert isinstance(learner.graphs, PartGraphs)
    parts = list(learner.graphs._parts.values())
    given = [part.without_gradient.count(False) + (part._dx is not None) for part in parts]
    assert capture.unkept_tensors == sum(given) >= 2 * len(parts), "nobody keeps what parts give"
    inputs = {part._x.data_ptr() for part in parts}
    grads = {grad.data_ptr() for part in parts for grad in part._grads or () if grad is not None}
    return [len(parts), len(inputs), len(grads)]


def test_graphs_that_never_run_at_once_read_from_the_same_place() -> None:
    """A layer's input waits for its backward; kinds of microbatches, and gradients, wait for nobody."""
    parts, inputs, grads = run_alone(places, 1)
    assert (parts, inputs) == (3, 3)
    assert run_alone(places, 2) == [6, 3, grads]
    assert grads < 2 * parts


def failing(mesh: Mesh, at: int) -> tuple[bool, list[str], str]:
    config = with_values(TrainConfig(), {**DENSE_FIRST, "optim.accumulate": 2})
    plain, learner = Learner(config, mesh), Learner(config, mesh)
    with_parts(learner).fails_at = at
    notes: list[str] = []
    same = True
    for step in range(STEPS):
        record = learner.step(step)
        same &= record["grad_norm"] == plain.step(step)["grad_norm"]
        notes += record.get("notes", [])
    assert learner.graphs is not None
    return same, notes, learner.graphs.refused


def test_a_part_that_cannot_be_captured_runs_eagerly_and_says_so_once() -> None:
    """The second layer's: the first one is replayed in the same microbatch."""
    same, notes, refused = run_alone(failing, 2)
    assert same
    assert refused == "operation not permitted when stream is capturing"
    assert notes == [f"microbatches run without CUDA graphs: {refused}"]


def test_a_backward_that_cannot_be_captured_says_what_to_set() -> None:
    with pytest.raises(Exception, match=r'is capturing; set run.graphs to "off"'):
        run_alone(failing, 5)


def looked_at(mesh: Mesh) -> tuple[str, int]:
    """A bad step is computed again with hooks on every module, which a replay would not call."""
    learner = Learner(with_values(TrainConfig(), SMALL), mesh)
    capture = with_parts(learner)
    for step in range(WARM_STEPS + 1):
        learner.step(step)
    with torch.no_grad():
        learner.layers[0].gate.weight[0, 0] = torch.nan
    before = capture.replays
    learner.step(WARM_STEPS + 1)
    return learner.bad.why, capture.replays - before


def test_a_bad_step_is_looked_at_eagerly() -> None:
    why, replays = run_alone(looked_at)
    assert "gate.weight" in why
    assert replays == 2 * 2


def reasons(mesh: Mesh) -> list[str]:
    def why(**changes: Any) -> str:
        config = with_values(TrainConfig(), {**SMALL, **changes})
        return obstacle_to_parts(config, mesh, Learner(config, mesh).model)

    return [why(), why(**{"run.graphs": "off"}), why(**{"pipeline.overlap": "pair", "optim.accumulate": 2})]


def test_obstacles_are_named() -> None:
    here, off, program = run_alone(reasons)
    assert here == "there is no CUDA device"
    assert off == "run.graphs is off"
    assert program == "a program says what runs when"
