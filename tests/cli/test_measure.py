"""`moeclipse measure`: a file for plan and simulate, from this machine or from a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeclipse.cli.main import main
from moeclipse.cli.measure import measured_wire
from moeclipse.cli.simulate_run import RunTerms, load_run
from moeclipse.cost.cluster import cluster_at


def test_the_wire_between_two_ranks() -> None:
    found = measured_wire("cpu")
    assert found is not None
    bandwidth, latency = found
    assert 1e7 < bandwidth < 1e12
    assert 1e-6 < latency < 1.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.toml").write_text('preset = "tiny"\n[model]\nnum_layers = 2\n')
    (folder / "choices.json").write_text(json.dumps({"ranks": [1, 2, 1, 1], "settled": None}))
    times = {"step_ms": 90.0, "compute_ms": 60.0, "comm_ms": 20.0, "window": "steps 3 to 9"}
    (folder / "summary.json").write_text(json.dumps(times))
    return folder


def test_a_run_predicts_itself_with_what_was_fitted_to_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costs.toml"
    assert main(["measure", "--run", str(run), "-o", str(out)]) == 0
    assert "fitted to steps 4 to 10" in capsys.readouterr().out
    assert cluster_at(str(out)).device.name == "cpu"
    found = load_run(run, RunTerms(device=str(out)))
    assert found.measured is None, "from prices alone"
    summary = found.answer("1f1b").summary
    moved = sum(time.total for time in summary.kinds.values())
    assert summary.ranks[0].compute == pytest.approx(0.060, rel=0.02)
    assert moved == pytest.approx(0.020, rel=0.02)
    assert main(["plan", "tiny", "--gpus", "2", "--tokens-per-step", "16k", "--device", str(out)]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "--device ('tpu') must be auto, cpu or cuda"),
        (["--run", "nowhere"], "there is no file nowhere"),
        (["--run", ".", "--device", "cpu"], "--run brings its own"),
        (["-o", "nowhere/costs.toml"], "there is no folder"),
    ],
)
def test_bad_input_is_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_times_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").unlink()
    assert main(["measure", "--run", str(run)]) == 2
    assert "has no summary of measured steps" in capsys.readouterr().err
