"""What a page draws: bounded, whole, and plain JSON."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from made_runs import make_run, make_trace

from moeclipse.report.figures import MOST_MOMENTS, MOST_POINTS, figures, readable_choice
from moeclipse.report.run import read_run


def test_everything_of_a_run_is_there(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, eval_loss=2.0, notes=["a plan was taken"])
    make_trace(folder)
    incident = {"kind": "deadline", "rank": 1, "step": 7, "what": "late"}
    (folder / "incidents.jsonl").write_text(json.dumps(incident))
    exchange = [{"steps": 2, "chunks": 1, "rule": "measured", "measured_ms": 1.0}]
    (folder / "summary.json").write_text(json.dumps({"exchange": exchange, "placement": {"plans": 2}}))
    chosen = {"layers": {}, "placement": {"row_s": 1e-6}, "ranks": [1, 2, 1, 1], "hosts": [0, 0]}
    (folder / "choices.json").write_text(json.dumps({**chosen, "settled": {"moe.transport": "peer"}}))
    (run,) = figures([read_run(folder)])["runs"]
    assert run["gaps"] == []
    assert run["curves"]["step"] == list(range(1, 21))
    assert run["eval"]["loss"] == [2.0] * 20
    assert [round(one["exposed"]) for one in run["ranks"]] == [6, 6]
    assert run["loads"]["layers"] == [0, 1]
    assert len(base64.b64decode(run["loads"]["over_time"][1])) == 20 * 4
    assert len(base64.b64decode(run["loads"]["by_source"])) == 2 * 4
    assert len(base64.b64decode(run["rows"]["cells"])) == 20 * 2
    assert {"step": 8, "kind": "deadline", "what": "rank 1: late"} in run["events"]
    assert run["events"][0] == {"step": 1, "kind": "placement", "what": "a plan was taken"}
    assert [(one["what"], one["chosen"]) for one in run["choices"]] == [
        ("exchange of layer 0", "2 steps x 1 chunk"),
        ("moe.transport", "peer"),
        ("placement", "row 1e-06 s"),
    ]
    assert run["hidden_by_op"][0]["op"] == "dispatch"


def test_the_heat_of_a_layer_is_that_of_its_experts(tmp_path: Path) -> None:
    """Cells lie step by step, and in a step expert by expert."""
    folder = make_run(tmp_path / "run", steps=3)
    (run,) = figures([read_run(folder)])["runs"]
    cells = base64.b64decode(run["loads"]["over_time"][0])
    assert [byte == 0 for byte in cells[:4]] == [True, False, False, False]  # rows 0, 10, 20, 30
    assert cells[1] < cells[2] < cells[3]


def test_it_does_not_grow_with_steps(tmp_path: Path) -> None:
    (run,) = figures([read_run(make_run(tmp_path / "run", steps=3000))])["runs"]
    assert len(run["curves"]["loss"]["mean"]) == MOST_POINTS
    assert len(run["curves"]["step"]) == MOST_POINTS
    assert len(run["loads"]["steps"]) == MOST_MOMENTS
    assert run["curves"]["loss"]["high"][0] == pytest.approx(5.0)


def test_settings_that_differ_are_marked(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", name="other")
    text = (second / "config.toml").read_text()
    (second / "config.toml").write_text(text.replace("blocking", "smart") + "more = 1\n")
    found = figures([read_run(first), read_run(second)])
    differing = {row["key"]: row["values"] for row in found["settings"] if row["differs"]}
    assert differing == {"moe.schedule": ['"blocking"', '"smart"'], "metrics.more": ["", "1"]}
    assert [run["mark"] for run in found["runs"]] == ["A", "B"]


def test_what_was_measured_is_readable() -> None:
    assert readable_choice({"step_s": 0.37742305, "search_s": 2}) == "step 0.377 s, search 2 s"
    assert readable_choice({"row_bytes": 512, "bandwidth": 1e6}) == "row 512 bytes, bandwidth 1e+06 bytes/s"
    assert readable_choice({"step_s": None}) == '{"step_s": null}'
    assert readable_choice([1, True]) == "[1, true]"


def test_incidents_name_their_rank_the_first_one_too(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    told = [{"kind": "slow", "rank": 0, "step": 2, "what": "late"}, {"step": None, "what": "all"}]
    (folder / "incidents.jsonl").write_text("\n".join(map(json.dumps, told)))
    (run,) = figures([read_run(folder)])["runs"]
    assert [one["what"] for one in run["events"]] == ["all", "rank 0: late"]
