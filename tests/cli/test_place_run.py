"""What is read of a run for `moeclipse place`, and what of a bare file of loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeclipse.cli.place_run import RunFacts
from moeclipse.core.errors import ConfigError


def test_a_bare_file_knows_nothing(tmp_path: Path) -> None:
    facts = RunFacts.read(tmp_path / "other.npz")
    assert (facts.ranks, facts.slots, facts.probe) == (None, None, None)
    assert [facts.size(name) for name in ("d_model", "d_ff", "every")] == [2048, 1408, 50]
    assert facts.layer_numbers(3) == [0, 1, 2]


def test_costs_of_planners_come_before_those_of_a_layer(tmp_path: Path) -> None:
    text = {"ranks": [2, 8, 1, 1], "layers": {"1": {"probe": {"row_forward": 1.0}}}, "placement": None}
    (tmp_path / "choices.json").write_text(json.dumps(text))
    facts = RunFacts.read(tmp_path)
    assert (facts.load, facts.ranks, facts.probe) == (tmp_path / "load.npz", 8, {"row_forward": 1.0})
    (tmp_path / "choices.json").write_text(json.dumps(text | {"placement": {"row_forward": 2.0}}))
    assert RunFacts.read(tmp_path / "load.npz").probe == {"row_forward": 2.0}


def test_what_the_run_could_not_tell_is_not_known(tmp_path: Path) -> None:
    probe = {"row_forward": 1.0, "bandwidth": None}
    text = {"ranks": [1, 4, 1, 1], "layers": {"1": {"probe": probe}}, "placement": None}
    (tmp_path / "choices.json").write_text(json.dumps(text))
    assert RunFacts.read(tmp_path).probe is None


def test_slots_are_those_of_the_run(tmp_path: Path) -> None:
    text = {"ranks": [1, 4, 1, 1], "layers": {}, "settled": {"placement.slots_per_rank": 8}}
    (tmp_path / "choices.json").write_text(json.dumps(text))
    assert RunFacts.read(tmp_path).slots == 8
    (tmp_path / "config.toml").write_text("[placement]\nslots_per_rank = 6\n")
    assert RunFacts.read(tmp_path).slots == 6, "what was asked for counts"


def test_damage_is_told(tmp_path: Path) -> None:
    (tmp_path / "choices.json").write_text('{"ranks"')
    with pytest.raises(ConfigError, match=r"choices\.json cannot be read"):
        RunFacts.read(tmp_path)


def test_dense_layers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[model]\nnum_dense_layers = 1\ndense_layers = [2, 3]\n")
    assert RunFacts.read(tmp_path).layer_numbers(3) == [1, 4, 5]
