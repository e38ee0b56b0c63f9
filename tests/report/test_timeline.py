"""A trace as rows to draw, and what its transfers had hidden."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from made_runs import make_trace, slice_of

from moeclipse.report.timeline import MOST_RANKS, MOST_SLICES, hidden_by_op, timeline_of


def test_rows_are_ranks_and_lanes(tmp_path: Path) -> None:
    make_trace(tmp_path)
    found = timeline_of(json.loads((tmp_path / "trace.json").read_text()))
    assert [(row["rank"], row["simulated"], row["lane"]) for row in found["rows"]] == [
        (rank, simulated, lane)
        for simulated in (False, True)
        for rank in (0, 1)
        for lane in ("compute", "all-to-all")
    ]
    start, length, name, kind = found["rows"][1]["slices"][0]
    assert (start, length) == (200.0, 200.0)  # the first slice of all begins at 0
    assert (found["names"][name], found["kinds"][kind]) == ("dispatch of layer 0", "transfer")
    assert found["left_out"] == 7


def test_a_page_holds_so_much_and_no_more() -> None:
    many = [slice_of(0, 0, "compute", "x", at, 1.0) for at in range(MOST_SLICES)]
    far = [slice_of(MOST_RANKS, 0, "compute", "x", 0.0, 1.0)]
    later = [slice_of(0, 0, "compute", "x", 0.0, 1.0, turn=1)]
    found = timeline_of({"traceEvents": many + far + later})
    assert sum(len(row["slices"]) for row in found["rows"]) == MOST_SLICES // 2
    assert found["left_out"] == MOST_SLICES // 2 + 2


def test_broken_events_are_passed_over() -> None:
    broken = [
        3,
        {},
        {"ph": "X", "pid": 0, "ts": math.nan, "dur": 1},
        {"ph": "X", "pid": 0, "ts": 1, "dur": -1},
        {"ph": "X", "pid": "a", "ts": 1, "dur": 1},
        {"ph": "X", "pid": 0, "ts": 1, "dur": 1, "args": 3},
    ]
    found = timeline_of({"traceEvents": broken, "otherData": 7})
    assert [len(row["slices"]) for row in found["rows"]] == [1]
    assert hidden_by_op({"traceEvents": broken}) == []


def test_transfers_are_summed_by_kind(tmp_path: Path) -> None:
    make_trace(tmp_path)
    (only,) = hidden_by_op(json.loads((tmp_path / "trace.json").read_text()))
    assert only["op"] == "dispatch"
    assert only["count"] == 2, "of a rank, though two ranks were traced"
    assert (only["hidden_ms"], only["exposed_ms"]) == (pytest.approx(0.3), pytest.approx(0.08))


def test_times_are_those_of_one_step_of_one_rank(tmp_path: Path) -> None:
    make_trace(tmp_path)
    trace = json.loads((tmp_path / "trace.json").read_text())
    (once,) = hidden_by_op(trace)
    again = [{**one, "args": {**one["args"], "turn": 1}} for one in trace["traceEvents"] if one["ph"] == "X"]
    (twice,) = hidden_by_op({"traceEvents": [*trace["traceEvents"], *again]})
    assert twice == once
