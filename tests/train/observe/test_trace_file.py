"""The file of a trace: ranks on one clock, and beside them what the simulator makes of the same program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_trainer import configure

from moeclipse.comm.mesh import Mesh
from moeclipse.report.timeline import SIMULATED
from moeclipse.schedule.kinds import COMPUTE
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.observe.trace_file import RankTrace, Slice, as_measured, measured_events, write_trace
from moeclipse.train.step.learner import Learner


def rank_of(begin_s: float, **more: float) -> RankTrace:
    slices = [
        Slice("compute", "compute", "a", 10.0, 5.0),
        Slice("a2a", "transfer", "b", 12.0, 6.0, (1.0, 2.0, 3.0)),
    ]
    return RankTrace(step=3, begin_s=begin_s, slices=slices, **more)  # type: ignore[arg-type]


def test_what_ranks_tell_comes_back() -> None:
    mine = rank_of(1.5, compute_s=2.0)
    assert RankTrace.read(json.loads(json.dumps(mine.told()))) == mine


def test_clocks_are_one() -> None:
    """Rank 1 began 2 ms after rank 0, whatever its own clock says."""
    ranks = [[rank_of(100.0)], [rank_of(100.002)]]
    first, second = (
        [event for event in measured_events(rank, ranks[rank], ranks) if event["ph"] == "X"]
        for rank in (0, 1)
    )
    assert first[0]["ts"] == pytest.approx(10.0)
    assert second[0]["ts"] == pytest.approx(2010.0)
    assert second[1]["args"] == {"turn": 0, "hidden_us": 1.0, "exposed_us": 2.0, "late_us": 3.0}
    names = [
        event["args"]["name"]
        for event in measured_events(1, ranks[1], ranks)
        if event["name"] == "thread_name"
    ]
    assert names == ["compute", "a2a"]


def simulated_beside(mesh: Mesh, folder: str) -> None:
    config = configure(Path(folder))
    learner = Learner(config, mesh)
    verified = learner.program()
    told = [[rank_of(0.0, compute_s=0.6, moving_s=0.2).told()], [rank_of(0.0, compute_s=0.2).told()]]
    write_trace(Path(folder), config, mesh, told, verified)
    trace = json.loads((Path(folder) / "trace.json").read_text())
    beside = [event for event in trace["traceEvents"] if event["pid"] == SIMULATED and event["ph"] == "X"]
    computed = sum(event["dur"] for event in beside if event["cat"] == "compute")
    assert computed == pytest.approx(0.4e6), "as long as ranks have computed, in the mean"
    assert trace["otherData"]["simulated"].startswith("simulated with the measured sums")
    first = [rank_of(0.0, compute_s=0.6, moving_s=0.2)]
    (row,) = as_measured(verified, [[1.0] * len(verified.program.ranks[0])], first)
    ops = verified.program.ranks[0]
    moved = [seconds for op, seconds in zip(ops, row, strict=True) if op.lane != COMPUTE]
    assert sum(moved) == pytest.approx(0.2)


def test_the_program_is_simulated_beside(tmp_path: Path) -> None:
    run_alone(simulated_beside, str(tmp_path))


def test_a_full_disk_costs_the_trace_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def write(mesh: Mesh) -> None:
        config = configure(tmp_path)
        verified = Learner(config, mesh).program()
        write_trace(tmp_path / "gone", config, mesh, [[rank_of(0.0).told()]], verified)

    run_alone(write)
    assert "trace.json cannot be written" in capfd.readouterr().out
