"""Where the time of a step went, across ranks whose clocks differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import configure

from moeclipse.comm.async_ops.lane import Lane, Ready, Then, Transfer
from moeclipse.comm.async_ops.record import StepStamps
from moeclipse.comm.mesh import Mesh
from moeclipse.report.intervals import split_step
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe import step_times
from moeclipse.train.observe.step_times import StepTimes, StepTold, gather_splits, mean_times, split_of
from moeclipse.train.step.learner import Learner


def split(mesh: Mesh, skew: float, known: bool) -> tuple[float, float]:
    """Rank 1 launches a transfer 2 s late; its clock is `skew` ahead."""
    ahead = skew if mesh.rank == 1 else 0.0
    begun = ahead + (3.0 if mesh.rank == 1 else 1.0)
    stamps = StepStamps(
        window=(ahead, ahead + 6.0),
        compute=[(ahead, begun)],
        waits=[],
        transfers=[("world", "dispatch", begun, ahead + 5.0)],
    )
    found = split_of(stamps, mesh, -ahead if known else 0.0)
    return found.straggle, found.exposed


@pytest.mark.parametrize("skew", [0.0, 100.0, -100.0])
def test_late_ranks_are_told_from_the_wire_on_any_clock(skew: float) -> None:
    early, late = run_ranks(2, split, skew, True)
    assert early == pytest.approx((2.0, 2.0))
    assert late == pytest.approx((0.0, 2.0))


class Watched:
    """Messages of one rank: in which step each was sent, and in which the host asked for it."""

    def __init__(self) -> None:
        self.step, self.sent, self.asked = 0, list[int](), list[tuple[int, int]]()
        self.real = step_times.gather

    def gather(self, lane: Any, group: Any, value: torch.Tensor, label: str) -> Any:
        self.sent.append(self.step)
        return Then(Ready((self.step, self.real(lane, group, value, label))), self._ask)

    def _ask(self, sent: tuple[int, Any]) -> torch.Tensor:
        self.asked.append((sent[0], self.step))
        found: torch.Tensor = sent[1].get()
        return found


def stamps_of(mesh: Mesh, step: int, number: int) -> StepStamps:
    """Of so many transfers; rank 1 launches 2 s late in even steps."""
    begin = 100.0 * step
    begun = begin + (3.0 if mesh.rank == 1 and step % 2 == 0 else 1.0)
    transfers = [("world", "dispatch", begun, begin + 5.0)] * number
    return StepStamps(window=(begin, begin + 6.0), compute=[(begin, begun)], waits=[], transfers=transfers)


def late(mesh: Mesh, launches: int, more: int) -> list[tuple[int, dict[str, Any]]]:
    """Seven steps; from the fourth on there are more transfers."""
    times, watched, found = StepTimes(mesh), Watched(), list[StepTold]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_times, "gather", watched.gather)
        for step in range(7):
            watched.step = step
            stamps = stamps_of(mesh, step, launches + (more if step >= 3 else 0))
            assert times.after(step, stamps, step + mesh.rank) == pytest.approx(6000.0)
            found += times.take()
        assert watched.sent == [0, *range(7)], "one a step; in the first all agree on a length"
        assert watched.asked == [(0, 0), *((step, step + 1) for step in range(6))], "nobody waits"
        assert [told.step for told in found] == list(range(5)), "two steps later"
        times.settle()
    return [(told.step, told.times) for told in (*found, *times.take())]


@pytest.mark.parametrize(("launches", "more"), [(1, 0), (3, 0), (1, 5)])
def test_one_message_a_step_that_nobody_waits_for(launches: int, more: int) -> None:
    for found in run_ranks(2, late, launches, more):
        assert [step for step, _ in found] == list(range(7)), "all of them, in order"
        for step, times in found:
            ranks = times["ranks"]
            # All learn of more launches with the message that had no room for them.
            assert ranks["straggle_ms"] == pytest.approx([2000.0 if step % 2 == 0 else 0.0, 0.0]), step
            assert ranks["rows"] == [step, step + 1]
            assert times["step_ms"] == pytest.approx(6000.0)


class Counted:
    """Transfers of one rank, and which of them its host waits for."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launched, self.behind, self.waited = list[str](), list[str](), list[str]()
        launch, block = Lane.launch, Transfer._block

        def launched(lane: Lane, group: Any, label: str, *rest: Any, **more: Any) -> Any:
            self.launched.append(label)
            if not lane.recorder.active:
                self.behind.append(label)
            return launch(lane, group, label, *rest, **more)

        def waited(transfer: Any, patience_s: float | None) -> None:
            self.waited.append(transfer._op.label)
            block(transfer, patience_s)

        patch.setattr(Lane, "launch", launched)
        patch.setattr(Transfer, "_block", waited)


def counted(mesh: Mesh, config: TrainConfig) -> tuple[list[str], list[str], int, int]:
    """Of the fourth step, in which all is settled: what ends it, what is behind it; launches, waits."""
    learner = Learner(config, mesh)
    for step in range(3):
        learner.step(step)
    with pytest.MonkeyPatch.context() as patch:
        found = Counted(patch)
        learner.step(3)
        at_end = [label for label in found.launched if "microbatch" not in label]
        now = [label for label in found.waited if label != MESSAGE]  # it is asked for a step later
    return at_end, found.behind, len(found.launched), len(now)


MESSAGE = "exchange of step times"
COUNTS = {
    "experts": ({}, {}, "exchange of expert loads", 19),
    "copies": ({}, {"dp": 2}, "exchange of expert loads", 5),
    "stages": ({"pipeline.schedule": "1f1b"}, {"pp": 2}, "loads of all stages", 5),
}


@pytest.mark.parametrize("layout", COUNTS)
def test_a_step_sends_one_message_of_measurement_and_waits_for_none(layout: str, tmp_path: Path) -> None:
    """All others bring what the step itself needs: before, each group of the mesh sent one, and all were
    waited for (38 transfers and waits of two microbatches over experts, which are 35 and 34 now)."""
    changes, axes, loads, num = COUNTS[layout]
    text = tmp_path / "text.txt"
    text.write_text("So many words to learn from, again and again.\n" * 60)
    config = configure(text, **{"model.num_layers": 2, "optim.accumulate": 1, **changes})
    for at_end, behind, launched, waits in run_ranks(2, counted, config, **axes):
        assert at_end == ["exchange of step results", loads, MESSAGE]
        assert behind == [MESSAGE]
        assert (launched, waits) == (num, num - 1)


def of_all(mesh: Mesh) -> dict[str, list[float]]:
    window = (0.0, 2.0 + mesh.rank)
    return gather_splits(
        split_step(window, compute=[(0.0, 1.5)], waits=[], transfers=[]), mesh, 7 + mesh.rank
    )


def test_every_rank_has_the_times_of_all() -> None:
    for found in run_ranks(2, of_all):
        assert found["step_ms"] == pytest.approx([2000.0, 3000.0])
        assert found["compute_ms"] == pytest.approx([1500.0, 1500.0])
        assert found["rows"] == [7, 8]


def test_hidden_time_is_a_part_of_communication() -> None:
    found = mean_times({"comm_ms": [10.0, 30.0], "exposed_ms": [4.0, 6.0]})
    assert (found["comm_ms"], found["hidden_ms"], found["hidden_fraction"]) == (20.0, 15.0, 0.75)
    assert mean_times({"comm_ms": [0.0], "exposed_ms": [0.0]})["hidden_fraction"] == 0.0
