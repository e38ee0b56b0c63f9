"""A folder becomes one structure, or says what it lacks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from made_runs import make_run, make_trace, record_of

from moeclipse.core.errors import ConfigError
from moeclipse.report.figures import figures
from moeclipse.report.run import read_run

OLD = Path(__file__).parent.parent / "data" / "release-0.1" / "old"


def test_a_whole_run_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=20, eval_loss=2.5)
    make_trace(folder)
    run = read_run(folder)
    assert run.gaps == []
    assert (run.name, run.num_ranks, len(run.steps.step)) == ("made", 2, 20)
    assert run.steps.column("loss")[:3].tolist() == [5.0, 2.5, 5.0 / 3]
    assert run.steps.ranks["rows"].shape == (20, 2)
    assert run.config["moe.schedule"] == "blocking"
    assert run.window.tolist() == [False] * 3 + [True] * 17
    assert run.load is not None
    assert run.load.num_experts == 4


def test_a_step_that_ran_again_counts_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record_of(2, loss=9.0)) + "\n")
    run = read_run(folder)
    assert run.steps.step.tolist() == [0, 1, 2, 3]
    assert run.steps.column("loss")[2] == 9.0


def test_what_is_cut_or_missing_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=5)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: len(text) // 2] + '\n[1]\n{"step": "x"}\nnull\n')
    (folder / "summary.json").write_text("{")
    (folder / "config.toml").write_text("= 3")
    (folder / "load.npz").write_bytes(b"PK nothing")
    (folder / "choices.json").write_text("[]")
    (folder / "incidents.jsonl").write_text('{"kind": "error", "what": "x"}\nnonsense\n')
    (folder / "trace.json").write_text('{"traceEvents": 3}')
    run = read_run(folder)
    said = " | ".join(run.gaps)
    for part in (
        "4 lines of metrics",
        "summary.json cannot",
        "config.toml cannot",
        "load file",
        "choices.json",
    ):
        assert part in said
    for part in (
        "lines of incidents.jsonl are damaged",
        "trace.json holds no events",
        "nothing was validated",
    ):
        assert part in said
    assert [one["what"] for one in run.incidents] == ["x"]
    assert 0 < len(run.steps.step) < 5
    figures([run])  # and nothing of it is in the way of a page


def test_numbers_that_are_none_stay_away(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=6, loss=math.nan, grad_norm="much", ranks=1)
    run = read_run(folder)
    assert not run.steps.has("loss")
    assert not run.steps.has("grad_norm")
    figures([run])


@pytest.mark.parametrize("kept", ["metrics.jsonl", "summary.json", "config.toml"])
def test_one_file_is_enough(tmp_path: Path, kept: str) -> None:
    folder = make_run(tmp_path / "run", steps=6)
    for path in folder.iterdir():
        if path.name != kept:
            path.unlink()
    run = read_run(folder)
    assert len(run.gaps) >= 3
    figures([run])


def test_a_run_of_version_0_1_is_read() -> None:
    run = read_run(OLD)
    assert len(run.steps.step) >= 1
    assert run.steps.has("loss")
    assert figures([run])["runs"][0]["done"] >= 1


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        read_run(tmp_path / "nothing")


def test_layers_have_the_numbers_of_the_model(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert read_run(folder).expert_layers(2) == [0, 1]
    (folder / "config.toml").write_text("[model]\nnum_dense_layers = 1\ndense_layers = [2, 3]\n")
    run = read_run(folder)
    assert run.expert_layers(3) == [1, 4, 5]
    assert figures([run])["runs"][0]["loads"]["layers"] == [1, 4]
