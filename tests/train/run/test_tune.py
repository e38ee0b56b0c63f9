"""Longer trials: what is tried, which setting stays, and that a run repeats it from its first step on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_trainer import Notes, configure

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.moe.tune import exchange_policy as of_layer
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.run import tune
from moeclipse.train.run.choices import FILE
from moeclipse.train.run.trainer import Run
from moeclipse.train.run.tune import ONE_GO, TriedSetting, Tuning
from probed import PROBE

WHOLE = TriedSetting(transport="direct", peer="auto", cut=ONE_GO)
CUT = replace(WHOLE, cut=(2, 2))


def tuning(times: dict[TriedSetting, list[float]]) -> Tuning:
    made = Tuning.__new__(Tuning)
    made.times, made.lines = times, []
    return made


def test_the_plain_setting_stays_unless_another_is_clearly_faster() -> None:
    peer = replace(WHOLE, transport="peer")
    assert tuning({WHOLE: [10.0, 11.0, 90.0], CUT: [10.8]}).chosen() == WHOLE
    assert tuning({WHOLE: [10.0], CUT: [9.0], peer: [8.0]}).chosen() == peer
    assert tuning({CUT: [9.0], peer: [8.0]}).chosen() == peer, "the plain one was not among them"
    lucky = [7.0, 7.5, 8.0, 10.5]
    assert tuning({WHOLE: [10.0], CUT: lucky}).chosen() == WHOLE, "one of its steps was slower"
    assert tuning({WHOLE: [10.0], CUT: lucky, peer: [9.0, 9.5]}).chosen() == peer
    assert tuning({WHOLE: [10.0], CUT: lucky}).table()[1].endswith(" 0.70 - 1.05")
    assert not replace(WHOLE, peer="off").plain
    head, first, second = tuning({WHOLE: [10.0], CUT: [8.0]}).table()
    assert head.split()[:2] == ["transport", "peer"]
    assert first.endswith("<- chosen")
    assert "2 steps x 2 chunks" in first
    assert " 0.80 " in first
    assert "one go" in second
    assert " 1.00 " in second


def tuned(mesh: Mesh, config: TrainConfig) -> list[str]:
    tune.PASSES, tune.ROUNDS, tune.MOST_CUTS = 1, 2, 1
    notes = Notes()
    assert Run(config, mesh, notes).whole("off") == {}
    return notes.texts


def first_uses(mesh: Mesh, config: TrainConfig) -> list[tuple[int, int]]:
    """Steps and chunks of every call of a run."""
    seen: list[tuple[int, int]] = []
    real = of_layer.ExchangeSchedule.decide

    def noted(self: Any, *given: Any, **more: Any) -> Any:
        decision = real(self, *given, **more)
        seen.append((len(decision.decided.use.groups), decision.decided.use.chunks))
        return decision

    of_layer.ExchangeSchedule.decide = noted  # type: ignore[method-assign]
    Run(config, mesh, Notes()).whole("off")
    return seen


@pytest.mark.peer_memory
def test_a_run_repeats_what_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cuts and wires are tried; a cut that was chosen is in use from the first call on."""
    monkeypatch.setattr(of_layer, "measured", lambda *_: PROBE)  # a busy machine may not be able to tell
    small = {"run.steps": 3, "checkpoint.every": 0, "model.num_layers": 1, "run.tune": True}
    config = configure(tmp_path, **small)
    texts = run_ranks(2, tuned, config)[0]
    folder = Path(config.run.dir) / config.run.name
    rows = [text for text in texts if text.startswith(("direct", "peer"))]
    assert {tuple(row.split()[:2]) for row in rows} == {
        *(("direct", "auto"), ("direct", "off"), ("peer", "auto"), ("peer", "off"))
    }
    assert sum(row.endswith("<- chosen") for row in rows) == 1
    assert sum(text.startswith("pass ") for text in texts) == 4
    assert not (folder / "config.toml").exists(), "no run was begun"
    written = json.loads((folder / FILE).read_text())
    assert set(written["settled"]) == {"moe.transport", "parallel.peer"}
    (layer,) = written["layers"].values()
    assert layer["tried"] == []
    layer["chosen"] |= {"groups": [[0], [1]], "chunks": 2, "units": None}
    written["settled"] = {"moe.transport": "peer", "parallel.peer": "off"}
    (folder / FILE).write_text(json.dumps(written))
    again = {"run.tune": False, "run.name": "again", "run.tuned_from": str(folder)}
    assert run_ranks(2, first_uses, with_values(config, again)) == [[(2, 2)] * 3] * 2
