"""Presets, and the way from preset, file and flags to one checked TrainConfig.

A preset is a TOML file in the folder `presets/` beside this module. A user's file may name one in its first
line (`preset = "tiny"`); a preset named on the command line takes its place. Without a file the preset is
`tiny`; a file that names none stands on the defaults of the configuration classes. Where a Hugging Face
model is named (`model.from_hf`), its config.json stands between preset and file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from moeclipse.core.config import Built, ConfigLayer, Sourced, build, nearest, read_toml, table_layer
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.core.toml import parse_toml
from moeclipse.hf.config_file import config_of, is_model_folder
from moeclipse.hf.read import contradictions, read_config
from moeclipse.train.config import TrainConfig
from moeclipse.train.weights.init_config import is_kept

DEFAULT_PRESET = "tiny"


def _folder() -> Traversable:
    return resources.files("moeclipse.train") / "presets"


def preset_names() -> list[str]:
    """The presets there are."""
    return sorted(
        file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml")
    )


def preset_table(name: str) -> dict[str, object]:
    """The table of a preset; ConfigError with the names there are."""
    if name not in preset_names():
        raise ConfigError(_unknown_preset(name, "preset_table"))
    return parse_toml((_folder() / f"{name}.toml").read_text(encoding="utf-8"), f"preset {name}")


def _unknown_preset(name: object, origin: str) -> str:
    names = preset_names()
    close = nearest(str(name), names)
    hint = f"; did you mean {close!r}?" if close else ""
    return f"preset = {name!r}: expected one of {', '.join(names)}{hint} ({origin})"


@dataclasses.dataclass(frozen=True)
class Merged:
    """What preset, file and flags came to."""

    preset: str
    """Name of the preset; empty when a file named none."""
    built: Built[TrainConfig]


def merge(
    file: str | Path | None = None,
    preset: str | None = None,
    flags: ConfigLayer | None = None,
    problems: Iterable[str] = (),
) -> Merged:
    """Preset, then file, then flags, with every problem found on the way; only unreadable TOML raises."""
    found = list(problems)
    table = read_toml(file) if file is not None else {}
    origin = str(file)
    named = table.pop("preset", "" if file is not None else DEFAULT_PRESET)
    if preset is not None:
        named, origin = preset, "--preset"
    layers: list[ConfigLayer] = []
    if named and named not in preset_names():
        found.append(_unknown_preset(named, origin))
        named = ""
    if named:
        layers.append(_layer(preset_table(named), f"preset {named}", found))
    own: list[ConfigLayer] = [_layer(table, str(file), found)] if table else []
    own += [flags] if flags else []
    own += begun_layers([*layers, *own])
    folder, dense = last_given([*layers, *own], "model.from_hf"), dense_folder([*layers, *own])
    layers += [folder_layer(folder, found)] if folder else []
    layers += [dense_layer(dense, found)] if dense else []
    folder = folder or dense
    built = build(TrainConfig, [*layers, *own], found)
    if folder and layers[-1]:
        values = {key: given.value for key, given in layers[-1].items() if key != "data.tokenizer"}
        wrong = contradictions(values, built.config, folder)
        built = dataclasses.replace(built, problems=(*built.problems, *wrong))
    return Merged(preset=named, built=built)


def last_given(layers: Iterable[ConfigLayer], key: str) -> str:
    """The text that counts for a key; empty: none."""
    text = ""
    for layer in layers:
        given = layer.get(key)
        if given is not None:
            text = str(given.value[0] if given.words and given.value else given.value or "")
    return text


def begun_layers(layers: Sequence[ConfigLayer]) -> list[ConfigLayer]:
    """`run.init_from` that names a Hugging Face model of the run's own kind is its `model.from_hf`."""
    path = last_given(layers, "run.init_from")
    if not path or dense_folder(layers) or not is_model_folder(Path(path)):
        return []
    if last_given(layers, "model.from_hf"):
        return []  # two models: a fault, told elsewhere
    return [
        {
            "model.from_hf": Sourced(path, "run.init_from"),
            "run.init_from": Sourced("", "run.init_from"),
        }
    ]


def dense_folder(layers: Sequence[ConfigLayer]) -> str:
    """The Hugging Face model that experts are made of; empty: none."""
    path = last_given(layers, "run.init_from")
    upcycles = last_given(layers, "init.upcycle") in ("copy", "split")
    return path if path and upcycles and is_model_folder(Path(path)) else ""


def dense_layer(folder: str, found: list[str]) -> dict[str, Sourced]:
    """What a dense Hugging Face model says of the model that is made of it; experts are the user's."""
    layer = folder_layer(folder, found, dense=True)
    return {key: given for key, given in layer.items() if is_kept(key) or key == "data.tokenizer"}


def folder_layer(folder: str, found: list[str], *, dense: bool = False) -> dict[str, Sourced]:
    """What a Hugging Face model says of its own shape; it wins over a preset, and nothing may contradict
    it."""
    try:
        read = read_config(config_of(Path(folder)), folder, dense=dense)
    except CheckpointError as error:
        found.append(f"{error} ({'run.init_from' if dense else 'model.from_hf'})")
        return {}
    layer = {key: Sourced(value, f"{folder}/config.json") for key, value in read.values.items()}
    tokenizer = Path(folder) / "tokenizer.json"
    if tokenizer.is_file():
        layer["data.tokenizer"] = Sourced(str(tokenizer), folder)
    return layer


def _layer(table: Mapping[str, object], origin: str, found: list[str]) -> dict[str, Sourced]:
    layer, problems = table_layer(TrainConfig, table, origin)
    found += problems
    return layer


def load(file: str | Path | None = None, preset: str | None = None) -> TrainConfig:
    """The checked configuration of a file, a preset, or both; for use from Python."""
    return merge(file, preset).built.with_warnings()
