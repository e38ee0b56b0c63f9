"""Advice follows from what a run has measured, and stays away where nothing would help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import CHOICES, PROBE, make_run

from moeclipse.report.advice import Advice, advise_run
from moeclipse.report.measures import measures_of
from moeclipse.report.run import read_run
from moeclipse.report.skew import outlook


def advised(folder: Path, config: str = "", summary: dict[str, Any] | None = None) -> dict[str, Advice]:
    if config:
        (folder / "config.toml").write_text(config)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    run = read_run(folder)
    return {one.setting: one for one in advise_run(run, measures_of(run))}


def test_blocking_exchanges_and_uneven_ranks(tmp_path: Path) -> None:
    found = advised(make_run(tmp_path / "run"))
    assert list(found) == ["--placement.planner auto", "--moe.schedule auto"]
    assert found["--moe.schedule auto"].gain_ms == pytest.approx(6.0)
    assert found["--moe.schedule auto"].at_most
    # A row costs 0.05 ms; the fullest rank has so many rows more than the mean.
    above = sum(200 - 10 * (step % 7) for step in range(3, 20)) / 17
    assert found["--placement.planner auto"].gain_ms == pytest.approx(0.05 * above, rel=1e-6)
    assert found["--placement.planner auto"].at_most, "the run has measured no costs of transfers"


def test_what_is_used_already_is_not_advised(tmp_path: Path) -> None:
    text = '[moe]\nschedule = "smart"\n[placement]\nplanner = "incremental"\n'
    assert advised(make_run(tmp_path / "run"), text) == {}


def test_one_rank_has_nothing_to_hide(tmp_path: Path) -> None:
    assert advised(make_run(tmp_path / "run", ranks=1)) == {}


def test_a_planner_is_advised_with_its_own_prediction(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "choices.json").write_text(json.dumps(CHOICES))
    (advice,) = [one for name, one in advised(folder).items() if "planner" in name]
    assert not advice.at_most
    would = outlook(read_run(folder))
    assert would is not None
    assert advice.gain_ms == pytest.approx(would.gain_ms)
    assert f"ranks at 0.88; planned placement predicts a step {would.faster:.2f} x faster" in advice.why
    # Where a row costs nothing, a planner says that nothing helps: then nothing is advised.
    free = {**PROBE, "row_forward": 0.0, "row_backward": 0.0, "row_bytes": 0.0}
    (folder / "choices.json").write_text(json.dumps({**CHOICES, "placement": free}))
    assert not [name for name in advised(folder) if "planner" in name]


def test_cuts_that_cost_more_than_they_hide(tmp_path: Path) -> None:
    layer = {"measured_ms": 9.0, "blocking_ms": 4.0}
    text = '[moe]\nschedule = "smart"\n[placement]\nplanner = "greedy"\n'
    found = advised(make_run(tmp_path / "run"), text, {"exchange": [layer, {"measured_ms": None}, 3]})
    assert found["--moe.schedule auto"].gain_ms == pytest.approx(5.0)
    assert found["--moe.schedule auto"].at_most, "a prediction may be wrong, too"


def test_microbatches_that_could_overlap(tmp_path: Path) -> None:
    text = '[moe]\nschedule = "auto"\n[placement]\nplanner = "greedy"\n[optim]\naccumulate = 4\n[pipeline]\n'
    found = advised(make_run(tmp_path / "run"), f'{text}overlap = "off"\n')
    assert found["--pipeline.overlap auto"].gain_ms == pytest.approx(6.0)
    assert found["--pipeline.overlap auto"].at_most
    assert advised(tmp_path / "run", f'{text}overlap = "auto"\n') == {}
    assert advised(tmp_path / "run", text.replace("= 4", "= 1") + 'overlap = "off"\n') == {}


def test_rows_that_could_go_another_way(tmp_path: Path) -> None:
    text = '[moe]\nschedule = "auto"\ntransport = "{}"\n[placement]\nplanner = "greedy"\n'
    folder = make_run(tmp_path / "run")
    found = advised(folder, text.format("direct"))
    assert list(found) == ["--moe.transport auto"]
    assert found["--moe.transport auto"].gain_ms == pytest.approx(6.0)
    assert found["--moe.transport auto"].at_most
    assert advised(folder, text.format("peer")) == advised(folder, text.format("auto")) == {}
    for hosts, advice in (([0, 0], ["--moe.transport auto"]), ([0, 1], [])):
        (folder / "choices.json").write_text(json.dumps({**CHOICES, "hosts": hosts}))
        assert list(advised(folder, text.format("direct"))) == advice


def test_a_pipeline_with_a_shorter_bubble(tmp_path: Path) -> None:
    text = '[moe]\nschedule = "smart"\n[placement]\nplanner = "greedy"\n'
    text += "[parallel]\npp = 4\n[optim]\naccumulate = 8\n"
    found = advised(make_run(tmp_path / "run"), f'{text}[pipeline]\nschedule = "1f1b"\n')
    (setting,) = found
    assert setting.startswith("--pipeline.schedule ")
    measures = measures_of(read_run(tmp_path / "run"))
    spare = (measures["step_ms"] or 0) - (measures["compute_ms"] or 0)
    assert 0.1 * 128 < spare == found[setting].gain_ms, "what is simulated would be more"
    best = setting.split()[1]
    assert advised(tmp_path / "run", f'{text}[pipeline]\nschedule = "{best}"\n') == {}
    assert advised(tmp_path / "run", f'{text}[pipeline]\noverlap = "pair"\n') == {}


def test_dropped_rows_bad_steps_waiting_for_disks_and_rising_loss(tmp_path: Path) -> None:
    text = "[checkpoint]\nbeside = false\n[eval]\nkeep_best = false\n[metrics]\nwarmup_steps = 1\n"
    folder = make_run(tmp_path / "run", dropped=3, skipped=True, eval_loss=2.0)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"eval_loss": 2.5}
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    found = advised(folder, text, {"saves": {"begun": 4, "stall_ms": 50.0}})
    assert found["--checkpoint.asynchronous true"].gain_ms == pytest.approx(10.0)
    assert {"--gate.capacity-factor 0", "--optim.lr (lower)", "--eval.keep-best true"} <= set(found)


def test_words_tell_gain_and_reason() -> None:
    one = Advice(setting="--x 1", why="so", gain_ms=5.0, at_most=True)
    assert one.in_words(100.0) == "--x 1: wins at most 5 % of a step (5 ms); so"
    assert Advice(setting="--x 1", why="so").in_words(100.0) == "--x 1: so"
