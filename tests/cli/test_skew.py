"""`moeclipse skew`: what uneven gates cost, in plain words, for a run and for a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from made_runs import CHOICES, PROBE, make_run, write_loads

from moeclipse.cli.main import main
from moeclipse.cli.skew import NAMED_TOKENS, SkewConfig, advice_of_config, look_at


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", exposed_ms=1e4)
    write_loads(folder, np.tile(np.array([3000, 3000, 1000, 1000]), (20, 1, 1)), 2)
    prices = {**PROBE, "parameter_bytes": 10.0, "gradient_bytes": 20.0, "doubt": 0.1}
    (folder / "choices.json").write_text(json.dumps({**CHOICES, "placement": prices}))
    assert main(["skew", str(folder), "--steps", "12"]) == 0
    out = capsys.readouterr().out
    assert "made: 12 recorded steps, 1 of 1 layer with experts" in out
    assert "uneven gates cost" in out
    assert "try --" in out
    assert "give or take 10 %" in out
    for way in ("static", "shadows", "replicas", "planned", "auto"):
        assert sum(line.startswith(way) for line in out.splitlines()) == 1
    assert sum("(this run)" in line for line in out.splitlines()) == 1
    assert main(["skew", str(folder), "--ranks", "4"]) == 2
    assert "--ranks, --slots and --tokens are for configurations" in capsys.readouterr().err


def test_a_run_that_nothing_is_known_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["skew", str(make_run(tmp_path / "run"))]) == 2
    told = capsys.readouterr().err
    assert "is not known" in told
    assert f"moeclipse skew {tmp_path / 'run' / 'config.toml'}" in told


def test_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny", "--ranks", "2", "--device", "cpu", "--steps", "16", "--workloads", "even", "hot rank"]
    assert main(["skew", *words]) == 0
    out = capsys.readouterr().out
    assert "tiny: 4 layers of 8 experts, top-2, on 2 ranks that share them (cpu), 5 slots each" in out
    rows = {line[:8].strip(): line.split() for line in out.splitlines()}
    static, auto = (float(rows["hot rank"][place]) for place in (3, 7))
    assert static < 0.8 < 0.85 < auto
    assert float(rows["even"][2]) > 0.9
    assert "uneven gates make a step up to" in out
    assert "(hot rank); most helps" in out
    assert "loads are made" in out


def test_what_a_configuration_is_taken_for() -> None:
    looked = look_at(SkewConfig(source="qwen3-30b-a3b", ranks=16, device="h100"))
    assert (looked.shape.num_experts, looked.shape.top_k, looked.shape.num_ranks) == (128, 8, 16)
    assert looked.bed.node_P == (0,) * 8 + (1,) * 8
    assert looked.bed.slots == 10
    assert 0.4 < looked.share < 0.8
    # Drawn tokens stand for all: rows cost so many times as much.
    flops = 3 * 2 * 3 * 2048 * 768
    each = looked.bed.costs.row_seconds * looked.shape.tokens / NAMED_TOKENS
    assert flops / each == pytest.approx(989e12, rel=0.5)
    more = look_at(SkewConfig(source="qwen3-30b-a3b", ranks=16, device="h100", tokens=2 * NAMED_TOKENS))
    assert more.bed.costs.row_seconds == pytest.approx(2 * looked.bed.costs.row_seconds)


def test_nothing_is_advised_that_wins_nothing() -> None:
    gains = {"static": [0.0], "shadows": [0.001], "replicas": [0.0], "planned": [0.0], "auto": [0.002]}
    assert advice_of_config(("even",), [0.02], gains).endswith("nothing of it wins 1 % of a step")
    gains["shadows"], gains["auto"] = [0.095], [0.1]
    assert "most helps shadows (--moe.shadow auto)" in advice_of_config(("even",), [0.02], gains)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "say what to look at"),
        (["tiny", "--steps", "1"], "--steps (1) must be at least 2"),
        (["tiny", "--workloads", "cold"], "--workloads 'cold' is unknown; choose of even"),
        (["tiny", "--parallel.ep", "2"], "unknown"),
        (["tiny", "--ranks", "1"], "--ranks (1) must be at least 2"),
        (["tiny", "--ranks", "2", "--workloads", "even", "warm"], "'warm'"),
        (["nope"], "'nope'"),
    ],
)
def test_what_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["skew", *words]) == 2
    assert told in capsys.readouterr().err
