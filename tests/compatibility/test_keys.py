"""Every key and every flag of version 0.1 is still read, under its old name too where it has a new one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from release import PUBLIC

from moeclipse.cli.doctor import DoctorOptions
from moeclipse.cli.place import PlaceConfig
from moeclipse.cli.simulate import SimulateConfig
from moeclipse.cli.train import Options, TrainCommand
from moeclipse.core.config import build, flag_layer, keys_of, table_layer, to_flat
from moeclipse.core.toml import parse_toml, toml_value
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import preset_names

COMMANDS: dict[str, type] = {
    "train": Options,
    "simulate": SimulateConfig,
    "place": PlaceConfig,
    "doctor": DoctorOptions,
}


def taken(layer: Any, key: str) -> Any:
    return to_flat(build(TrainConfig, [layer]).config)[TrainConfig.RENAMED.get(key, key)]


def plain(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("key", PUBLIC["keys"])
def test_a_key_of_0_1_is_still_read_from_files_and_flags(key: str) -> None:
    stored = PUBLIC["keys"][key]
    section, _, name = key.rpartition(".")
    for value in [stored["default"], *stored.get("words", ())]:
        table = parse_toml(f"[{section}]\n{name} = {toml_value(value)}\n", "old.toml")
        layer, problems = table_layer(TrainConfig, table, "old.toml")
        assert not problems
        assert plain(taken(layer, key)) == plain(value)
        words = [] if isinstance(value, list) else [str(value)]
        for flag in (f"--{key}", f"--{key.replace('_', '-')}"):
            layer, problems = flag_layer(TrainCommand, [flag, *words])
            assert not problems
            assert plain(taken(layer, key)) == plain(value)


@pytest.mark.parametrize("command", PUBLIC["options"])
def test_a_flag_of_0_1_is_still_there(command: str) -> None:
    names = {field.name for field in dataclasses.fields(COMMANDS[command])}
    assert set(PUBLIC["options"][command]) <= names


def test_presets_of_0_1_are_still_there() -> None:
    assert set(PUBLIC["presets"]) <= set(preset_names())


def test_renamed_keys_lead_to_keys_of_today() -> None:
    known = keys_of(TrainConfig)
    assert set(TrainConfig.RENAMED.values()) <= set(known)
    assert not set(TrainConfig.RENAMED) & set(known)
