"""What cures would bring a run, on its own loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import CHOICES, PROBE, make_run, write_loads

from moeclipse.balance.load import Load
from moeclipse.report.advice import advise_run
from moeclipse.report.cures import cures_of, recorded, some_layers
from moeclipse.report.measures import measures_of
from moeclipse.report.run import read_run

PRICES = {**PROBE, "bandwidth": 1e8, "parameter_bytes": 10.0, "gradient_bytes": 20.0, "doubt": 0.1}


def skewed(folder: Path, exposed_ms: float = 1e4, **choices: Any) -> Path:
    """Two ranks, four experts; three quarters of the rows want those of rank 0."""
    make_run(folder, exposed_ms=exposed_ms)
    write_loads(folder, np.tile(np.array([3000, 3000, 1000, 1000]), (20, 3, 1)), 2)
    told = {**CHOICES, "placement": PRICES, **choices}
    (folder / "choices.json").write_text(json.dumps(told))
    return folder


def test_gains(tmp_path: Path) -> None:
    run = read_run(skewed(tmp_path / "run"))
    found = cures_of(run)
    assert found is not None
    assert (found.steps, found.layers) == (20, (2, 3))
    by_way = {cure.way: cure for cure in found.found}
    assert by_way["static"].gain_ms == 0
    assert by_way["static"].throughput == pytest.approx(2 / 3, abs=0.02)
    assert by_way["planned"].gain_ms > 0
    assert found.best.way in ("planned", "auto", "shadows")
    for cure in found.found:
        assert cure.low <= cure.share + 1e-12
        assert cure.share <= cure.high + 1e-12
        assert cure.gain_ms <= found.cost_ms * 1.01, "nobody wins what uneven gates do not cost"
    assert found.prices == "prices are measured, give or take 10 %"
    assert cures_of(run) is found, "replayed once"


def test_no_cure_wins_more_than_ranks_waited(tmp_path: Path) -> None:
    run = read_run(skewed(tmp_path / "run", exposed_ms=2.0))
    found = cures_of(run)
    assert found is not None
    waited = 2.0 + run.steps.column("straggle_ms")[3:].mean()
    assert found.best.gain_ms == pytest.approx(waited)
    assert found.cost_ms == pytest.approx(waited)


def test_prices_of_the_book_give_way_to_what_rows_have_cost(tmp_path: Path) -> None:
    measured = cures_of(
        read_run(skewed(tmp_path / "a", placement={**PRICES, "row_forward": 1e-9, "fixed": True}))
    )
    by_hand = {**PRICES, "row_forward": 0.0, "row_backward": 5e-5}  # as test_skew finds them
    asked = cures_of(read_run(skewed(tmp_path / "b", placement={**by_hand, "doubt": 0.0})))
    assert measured is not None
    assert asked is not None
    assert measured.cost_ms == pytest.approx(asked.cost_ms, rel=1e-3)
    assert "follows from the run's own steps" in measured.prices


@pytest.mark.parametrize(
    "choices", [{"placement": None}, {"placement": {"row_forward": 1}}, {"ranks": "two"}]
)
def test_without_prices_nothing_is_promised(tmp_path: Path, choices: dict[str, Any]) -> None:
    assert cures_of(read_run(skewed(tmp_path / "run", **choices))) is None


def test_advice_has_the_numbers(tmp_path: Path) -> None:
    run = read_run(skewed(tmp_path / "run"))
    told = [one for one in advise_run(run, measures_of(run)) if "placement" in one.setting]
    assert len(told) == 1
    assert "replayed on the run's own loads: uneven gates cost" in told[0].why
    assert "planned +" in told[0].why
    assert f"skew {tmp_path / 'run'}" in told[0].why


def test_layers_that_stand_for_all() -> None:
    rows_LE = np.array([[1, 1], [9, 1], [3, 1], [2, 1], [5, 1], [7, 1]])
    load = Load(
        average_LPE=rows_LE[:, None].astype(float), steps_N=np.arange(2), rows_NLE=np.stack([rows_LE] * 2)
    )
    assert some_layers(load, 9) == [0, 1, 2, 3, 4, 5]
    assert some_layers(load, 1) == [2], "the middle one"
    assert some_layers(load, 2) == [3, 5]
    steps = recorded(load, 1, 2, 1)
    assert len(steps) == 1
    assert steps[0].sum(0).tolist() == [9, 1]


def found_for(folder: Path, config: str, **choices: Any) -> Any:
    run = skewed(folder, **choices)
    (run / "config.toml").write_text(config)
    found = cures_of(read_run(run))
    assert found is not None
    return found


def test_advice_knows_what_the_run_had(tmp_path: Path) -> None:
    """Nobody is told to switch on what is on; prices of the book are a reason why it may do little."""
    static = found_for(tmp_path / "a", "")
    assert static.now == "static"
    assert static.advice().startswith("try --")
    assert static.advice().endswith("of a step with experts that stay")
    on = '[moe]\nshadow = "auto"\n[placement]\nplanner = "auto"\n'
    has = found_for(tmp_path / "b", on)
    assert has.now == "auto"
    assert has.advice().startswith("the run has the best of these on already (--placement.planner auto")
    assert has.advice().endswith("already in its times")
    book = found_for(tmp_path / "c", on, placement={**PRICES, "fixed": True})
    assert "try --run.deterministic false, which measures them" in book.advice()
    assert found_for(tmp_path / "d", '[moe]\nshadow = "auto"\n').now == "shadows"
    assert found_for(tmp_path / "e", '[placement]\nplanner = "greedy"\n').now == "planned"


def test_a_planner_that_decides_by_the_book_is_told_to_measure(tmp_path: Path) -> None:
    for name, fixed in (("a", True), ("b", False)):
        run = skewed(tmp_path / name, placement={**PRICES, "fixed": fixed})
        (run / "config.toml").write_text('[moe]\nschedule = "smart"\n[placement]\nplanner = "auto"\n')
        read = read_run(run)
        told = [one.setting for one in advise_run(read, measures_of(read))]
        assert ("--run.deterministic false" in told) == fixed


def test_doubts_of_rows_and_wires_count_by_their_part(tmp_path: Path) -> None:
    """Rows are most of this layer: what wires are off by hardly matters."""
    wires = found_for(tmp_path / "a", "", placement={**PRICES, "row_doubt": 0.0, "wire_doubt": 0.5})
    rows = found_for(tmp_path / "b", "", placement={**PRICES, "row_doubt": 0.5, "wire_doubt": 0.0})
    assert wires.doubt + rows.doubt == pytest.approx(0.5, abs=0.05)
    assert wires.doubt != pytest.approx(rows.doubt, rel=0.1)
