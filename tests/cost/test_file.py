"""Costs in files, with all their problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeclipse.core.errors import ConfigError
from moeclipse.cost.file import costs_from, load_costs
from moeclipse.cost.model import PRESETS, Costs


def test_a_file_with_a_table(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(
        'name = "mine"\nlaunch = 5e-6\nwire = 1e-4\ninline_compute = true\nrank_speed = [1.0, 0.5]\n'
        '[seconds]\nF = 1.0\nB = 2\n[fixed]\nF = 0.1\n[contention]\n"compute/a2a" = 0.85\n'
    )
    costs = load_costs(str(path))
    assert costs == Costs(
        name="mine",
        seconds={"F": 1.0, "B": 2},
        fixed={"F": 0.1},
        launch=5e-6,
        wire=1e-4,
        inline_compute=True,
        rank_speed=(1.0, 0.5),
        contention={("compute", "a2a"): 0.85},
    )
    assert load_costs("unit") is PRESETS["unit"]


def test_a_file_with_a_shape(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(
        'device = "h200"\nlink = "infiniband"\nnum_ranks = 64\ncomm_processors = 20\n'
        "[layer]\ntokens = 8192\n[seconds]\nROUTE_F = 0.0\n"
    )
    costs = load_costs(str(path))
    assert costs.seconds["ROUTE_F"] == 0.0
    assert costs.contention["compute", "a2a"] == pytest.approx(112 / 132)
    small = load_costs_with(tmp_path, tokens=4096)
    assert costs.seconds["MLP_F"] == pytest.approx(2 * small.seconds["MLP_F"])
    assert costs.seconds["DISPATCH_F"] == pytest.approx(2 * small.seconds["DISPATCH_F"], rel=0.01)


def load_costs_with(folder: Path, tokens: int) -> Costs:
    path = folder / f"{tokens}.toml"
    path.write_text(f'device = "h200"\nlink = "infiniband"\nnum_ranks = 64\n[layer]\ntokens = {tokens}\n')
    return load_costs(str(path))


def test_bad_files_name_every_fault_and_the_nearest_key() -> None:
    with pytest.raises(ConfigError) as caught:
        costs_from({"secnds": {}, "launch": "fast", "contention": {"compute": 0.5}, "seconds": {"F": "x"}})
    text = str(caught.value)
    assert "unknown key 'secnds'; did you mean 'seconds'?" in text
    assert "launch ('fast') must be a number" in text
    assert 'must look like "compute/a2a"' in text
    assert "seconds.F ('x') must be a number" in text
    with pytest.raises(ConfigError, match="device, link and num_ranks go together"):
        costs_from({"device": "h100"})
    with pytest.raises(ConfigError, match="needs a table"):
        costs_from({"name": "empty"})
    with pytest.raises(ConfigError, match="neither a file nor one of unit, deepseek-v3"):
        load_costs("nowhere.toml")


def test_broken_toml_is_told(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text("seconds = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_costs(str(path))


def test_what_a_file_gives_wins_over_what_follows_from_a_shape() -> None:
    shape = {"device": "h200", "link": "infiniband", "num_ranks": 64}
    plain, given = costs_from(shape), costs_from({**shape, "fixed": {"DISPATCH_F": 0.5, "MLP_F": 0.25}})
    assert given.fixed == {**plain.fixed, "DISPATCH_F": 0.5, "MLP_F": 0.25}
    assert given.seconds == plain.seconds


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 1e15, True])
def test_costs_can_be_added_up(value: float) -> None:
    with pytest.raises(ConfigError, match="must be a number, finite and not negative"):
        costs_from({"seconds": {"F": value}})
