"""Microbatches that are captured and replayed: what Python would have done is done all the same.

A capture on the CPU is played: the work runs, and what it wrote is put back; a replay runs it with the flags
that it saw, and leaves them alone, as a graph would. The real one is in tests/gpu/test_graphs_on_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.async_ops.record import Recorder
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.graphs import WARM_STEPS, MicrobatchGraphs, obstacle
from moeclipse.train.step.learner import Learner

TEXT = str(Path(__file__).parents[1] / "text.txt")
SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.dtype": "float64",
    "moe.num_experts": 4,
    "moe.d_ff": 16,
    "data.seq_len": 8,
    "data.batch_size": 6,
    "data.files": (TEXT,),
}


class PlayedCapture:
    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.states = [state for bucket in learner.buckets for state in bucket.sums]
        self.captures = self.replays = 0
        self.fails = False

    def written(self) -> list[torch.Tensor]:
        learner = self.learner
        return [
            learner.sequential.sums,
            *(b.grads for b in learner.buckets),
            *(one.load_E for one in learner.layers),
        ]

    def eagerly(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> Any:
        self.captures += 1
        seen = [state.empty for state in self.states]
        before = [tensor.clone() for tensor in self.written()]
        work()
        for tensor, kept in zip(self.written(), before, strict=True):
            tensor.copy_(kept)
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return Played(self, work, seen)


class Played:
    def __init__(self, capture: PlayedCapture, work: Callable[[], None], seen: list[bool]) -> None:
        self.capture, self.work, self.seen = capture, work, seen

    def replay(self) -> None:
        self.capture.replays += 1
        states = self.capture.states
        now = [state.empty for state in states]
        for state, empty in zip(states, self.seen, strict=True):
            state.empty = empty
        recorder = self.capture.learner.mesh.recorder
        with recorder.apart("a graph"), recorder.region():  # what it launches has been told
            self.work()
        for state, empty in zip(states, now, strict=True):
            state.empty = empty


def with_graphs(learner: Learner) -> PlayedCapture:
    capture = PlayedCapture(learner)
    learner.sequential.graphs = MicrobatchGraphs(
        learner.sequential.replayed, capture.states, capture, learner.mesh.recorder
    )
    return capture


def curves(mesh: Mesh, accumulate: int) -> list[Any]:
    """[(loss, norm, load) of each step without graphs, the same with, captures, replays]."""
    found: list[Any] = []
    for graphs in (False, True):
        learner = Learner(with_values(TrainConfig(), {**SMALL, "optim.accumulate": accumulate}), mesh)
        capture = with_graphs(learner) if graphs else None
        records = [learner.step(step) for step in range(WARM_STEPS + 3)]
        found.append([(record["loss"], record["grad_norm"], record["load"]) for record in records])
        weights = torch.cat([bucket.params for bucket in learner.buckets])
        found[-1].append(weights.sum().item())
    assert capture is not None
    return [*found, capture.captures, capture.replays]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_replayed_microbatches_train_the_same_model(accumulate: int) -> None:
    without, with_, captures, replays = run_alone(curves, accumulate)
    assert with_ == without
    assert captures == min(accumulate, 2), "one that stores, one that adds"
    assert replays == 3 * accumulate


def uneven(mesh: Mesh) -> tuple[bool, int]:
    """Five samples in two microbatches: three and two."""
    config = with_values(TrainConfig(), {**SMALL, "data.batch_size": 5, "optim.accumulate": 2})
    plain, learner = Learner(config, mesh), Learner(config, mesh)
    capture = with_graphs(learner)
    same = [
        learner.step(step)["grad_norm"] == plain.step(step)["grad_norm"] for step in range(WARM_STEPS + 2)
    ]
    return all(same), capture.captures


def test_microbatches_need_not_be_alike() -> None:
    same, captures = run_alone(uneven)
    assert same
    assert captures == 2


def failing(mesh: Mesh) -> tuple[bool, list[str], str]:
    config = with_values(TrainConfig(), {**SMALL, "optim.accumulate": 3})
    plain, learner = Learner(config, mesh), Learner(config, mesh)
    capture = with_graphs(learner)
    capture.fails = True
    notes: list[str] = []
    same = True
    for step in range(WARM_STEPS + 2):
        record = learner.step(step)
        same &= record["grad_norm"] == plain.step(step)["grad_norm"]
        notes += record.get("notes", [])
    assert learner.graphs is not None
    return same and capture.captures == 1, notes, learner.graphs.refused


def test_what_cannot_be_captured_runs_eagerly_and_says_so_once() -> None:
    same, notes, refused = run_alone(failing)
    assert same
    assert refused == "operation not permitted when stream is capturing"
    assert notes == [f"microbatches run without CUDA graphs: {refused}"]


def looked_at(mesh: Mesh) -> tuple[str, int]:
    """A bad step is computed again with hooks on every module, which a replay would not call."""
    learner = Learner(with_values(TrainConfig(), SMALL), mesh)
    capture = with_graphs(learner)
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
    assert replays == 1


def reasons(mesh: Mesh) -> list[str]:
    def why(**changes: Any) -> str:
        config = with_values(TrainConfig(), {**SMALL, **changes})
        return obstacle(config, mesh, Learner(config, mesh).model)

    return [why(), why(**{"run.graphs": "off"}), why(**{"pipeline.overlap": "pair", "optim.accumulate": 2})]


def test_obstacles_are_named() -> None:
    here, off, program = run_alone(reasons)
    assert here == "there is no CUDA device"
    assert off == "run.graphs is off"
    assert "a program says what runs when" in program


class SilentCapture:
    """A capture whose replay does nothing that Python could see."""

    def eagerly(self, work: Callable[[], None]) -> None:
        work()

    def capture(self, work: Callable[[], None]) -> Any:
        work()
        return self

    def replay(self) -> None:
        return


def test_what_a_capture_launches_passes_at_every_replay() -> None:
    """A graph is launched as one, and a ledger still hears of all that it lists."""
    recorder = Recorder(torch.device("cpu"))
    passed: list[str] = []
    recorder.passes = lambda lane, group, label: passed.append(label)  # type: ignore[method-assign]
    noting = Recorder.passes

    def compute(*_: torch.Tensor) -> None:
        noting(recorder, "tp", "tensor", "a sum")

    graphs = MicrobatchGraphs(compute, [], SilentCapture(), recorder)
    tokens = torch.zeros(2, dtype=torch.int64)
    for _ in range(WARM_STEPS + 3):
        graphs.run(tokens, tokens, 1.0, 0)
    assert passed == ["a sum"] * 3


class RepeatedWork:
    """What a capture gives: replayed, the work runs again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class RepeatingCapture(SilentCapture):
    def capture(self, work: Callable[[], None]) -> Any:
        return RepeatedWork(work)


def test_a_scale_that_changes_reaches_graphs_of_every_shape() -> None:
    seen: list[tuple[int, float]] = []

    def compute(inputs: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, m: int) -> None:
        seen.append((len(inputs), float(scale)))

    graphs = MicrobatchGraphs(compute, [], RepeatingCapture(), Recorder(torch.device("cpu")))
    calls = [(2, 1.0)] * (WARM_STEPS + 1) + [(3, 1.0), (2, 8.0), (3, 8.0), (3, 8.0), (2, 4.0), (3, 8.0)]
    for length, scale in calls:
        tokens = torch.zeros(length, dtype=torch.int64)
        graphs.run(tokens, tokens, scale, 0)
    assert seen == calls


def test_where_weights_are_updated_inside_a_forward_that_microbatch_is_never_replayed() -> None:
    captured: list[int] = []

    class Counting(SilentCapture):
        def capture(self, work: Callable[[], None]) -> Any:
            captured.append(1)
            return super().capture(work)

    ran: list[int] = []

    def compute(inputs: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, m: int) -> None:
        ran.append(m)

    graphs = MicrobatchGraphs(compute, [], Counting(), Recorder(torch.device("cpu")))
    graphs.first_eagerly = True
    tokens = torch.zeros(2, dtype=torch.int64)
    for _ in range(WARM_STEPS + 3):
        for m in (0, 1):
            graphs.run(tokens, tokens, 1.0, m)
    assert len(captured) == 1, "of the second one"
    assert ran.count(0) == WARM_STEPS + 3
