"""A traced step: everything that ran and travelled, on one clock, and not a bit of the run changed by it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trainer import configure, losses, whole
from torch import nn

from moeclipse.comm.async_ops.record import Recorder, StepStamps
from moeclipse.comm.mesh import Mesh
from moeclipse.report.intervals import TransferInterval
from moeclipse.report.timeline import SIMULATED, hidden_by_op
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.observe.step_trace import parts_of, rank_trace, watch_layer


def traced(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The trace of a run of two ranks, whose losses are those of the run without."""
    plain = configure(tmp_path, **changes, **{"run.name": "plain", "run.steps": 4})
    config = configure(tmp_path, **changes, **{"run.name": "traced", "run.steps": 4, "metrics.trace": 2})
    run_ranks(2, whole, plain)
    run_ranks(2, whole, config)
    assert losses(config) == losses(plain)
    folder = tmp_path / "runs"
    assert not (folder / "plain" / "trace.json").exists()
    told: dict[str, Any] = json.loads((folder / "traced" / "trace.json").read_text())
    return told


def slices(trace: dict[str, Any], rank: int, kind: str, turn: int | None = 0) -> list[dict[str, Any]]:
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == rank]
    return [one for one in events if one["cat"] == kind and turn in (None, one["args"].get("turn"))]


def inside(part: dict[str, Any], whole: dict[str, Any]) -> bool:
    return whole["ts"] - 1 <= part["ts"] and part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 1


def test_layers_and_transfers_of_all_ranks(tmp_path: Path) -> None:
    trace = traced(tmp_path)
    assert trace["otherData"]["steps"] == [1, 2, 3]
    for rank in (0, 1):
        computed = {one["name"]: one for one in slices(trace, rank, "compute")}
        names = [
            "microbatch 0",
            "layer 0 F",
            "layer 1 F",
            "layer 1 B",
            "layer 0 B",
            "end of backward",
            "update",
        ]
        assert [name for name in computed if name in names] == names, "in the order in which they ran"
        for name in names[1:5]:
            assert inside(computed[name], computed["microbatch 0"])
        sent = [one["name"] for one in slices(trace, rank, "transfer")]
        for layer in (0, 1):
            assert any(name.startswith("dispatch ") and f"layer {layer}" in name for name in sent)
            assert any(name.startswith("backward combine ") and f"layer {layer}" in name for name in sent)
        assert {one["args"]["turn"] for one in slices(trace, rank, "transfer", None)} == {0, 1, 2}
    ops = {re.split(r"[ ,]", row["op"])[0] for row in hidden_by_op(trace)}
    assert ops >= {"dispatch", "combine", "reduction"}
    simulated = [event for event in trace["traceEvents"] if event["pid"] >= SIMULATED]
    assert {event["cat"] for event in simulated if event["ph"] == "X"} == {"compute", "transfer"}


@pytest.mark.full
def test_ops_of_a_program(tmp_path: Path) -> None:
    """Of pairs of microbatches, which one stage overlaps."""
    trace = traced(tmp_path, **{"optim.accumulate": 2, "pipeline.overlap": "pair+self"})
    for rank in (0, 1):
        names = " ".join(one["name"] for one in slices(trace, rank, "compute"))
        assert all(part in names for part in ("program", "ATTN_F", "ATTN_B", "MLP_W", "COMBINE_F"))
        assert any("dispatch" in one["name"] for one in slices(trace, rank, "transfer"))
    assert slices(trace, SIMULATED, "compute", None)


def both_ways(_: Mesh) -> None:
    recorder = Recorder(torch.device("cpu"))
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    hooks = [*watch_layer("0", first, recorder), *watch_layer("1", second, recorder)]
    x = torch.ones(2, 3, requires_grad=True)
    second(first(x)).sum().backward()
    assert recorder.marks is None, "outside of traced steps hooks do nothing"
    plain = x.grad
    for _ in range(2):
        recorder.marks, x.grad = [], None
        second(first(x)).sum().backward()
        assert [name for name, _, _ in recorder.marks] == ["layer 0 F", "layer 1 F", "layer 1 B", "layer 0 B"]
        assert x.grad is not None
        assert torch.equal(x.grad, plain)  # type: ignore[arg-type]
    for hook in hooks:
        hook.remove()
    recorder.marks = []
    second(first(x)).sum().backward()
    assert recorder.marks == []


def test_a_layer_is_watched_both_ways_and_let_go() -> None:
    run_alone(both_ways)


def test_parts_of_a_transfer_add_up() -> None:
    computing = [(0.0, 2.0), (3.0, 4.0), (9.0, 10.0)]
    one = TransferInterval(label="x", launched=1.0, last_launched=1.5, done=5.0)
    hidden, exposed, late = parts_of(one, computing)
    assert (hidden, exposed, late) == (pytest.approx(1.5), pytest.approx(2.0), pytest.approx(0.5))
    never = TransferInterval(label="x", launched=1.0, last_launched=7.0, done=5.0)
    assert parts_of(never, computing) == (0.0, 0.0, pytest.approx(4.0))


def test_too_many_slices_leave_the_longest() -> None:
    stamps = StepStamps(window=(100.0, 101.0), compute=[(100.0, 100.5)], waits=[])
    stamps.named = [(f"op {number}", 100.0, 100.0 + 0.001 * number) for number in range(1, 21)]
    times: Any = SimpleNamespace(stamps=stamps, transfers=[], clock_s=5.0, clock_error_s=0.1)
    found = rank_trace(3, times, [], most=5)
    assert {one.name for one in found.slices} == {f"op {number}" for number in range(16, 21)}
    assert (found.left_out, found.begin_s, found.compute_s) == (15, 105.0, pytest.approx(0.5))


def test_a_lane_carries_one_thing_at_a_time() -> None:
    """Slices of a row must not overlap: viewers nest them."""
    stamps = StepStamps(window=(0.0, 9.0), compute=[], waits=[])
    stamps.lanes = ["a2a", "a2a", "grads"]
    spans = [(1.0, 3.0), (2.0, 5.0), (2.0, 4.0)]
    transfers = [TransferInterval(label="x", launched=a, last_launched=a, done=b) for a, b in spans]
    times: Any = SimpleNamespace(stamps=stamps, transfers=transfers, clock_s=0.0, clock_error_s=0.0)
    found = rank_trace(0, times, [], most=9)
    assert [(one.lane, one.start, one.length) for one in found.slices] == [
        ("a2a", 1e6, 2e6),
        ("grads", 2e6, 2e6),
        ("a2a", 3e6, 2e6),
    ]
    assert found.moving_s == pytest.approx(7.0)
