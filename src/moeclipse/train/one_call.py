"""A run as one call, with what the command line takes.

    moeclipse.train("tiny", run={"steps": 20})                          a preset, and keys by section
    moeclipse.train("my.toml", gate={"top_k": 4})                       a file
    moeclipse.train("models/OLMoE", data={"files": ["corpus.txt"]})     a Hugging Face folder
    moeclipse.train(config)                                             a configuration

Contract. All that is wrong is told at once, in one ConfigError, before anything starts. The process is one
rank: under torchrun the one that the environment names, else the only one; `moeclipse train --ranks N`
starts several. Nothing is printed: a run is in its folder (`summary["directory"]`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moeclipse.core.config import ConfigLayer, Sourced, keys_of, unknown_key
from moeclipse.core.errors import ConfigError
from moeclipse.hf.config_file import HUB, is_model_folder
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.run_figures import RunSummary
from moeclipse.train.presets import merge, preset_names


def train(
    source: TrainConfig | str | Path = "", /, *, resume: str = "off", **sections: Mapping[str, object]
) -> RunSummary:
    """Train as this rank; returns the summary. `resume`: off, auto, or a checkpoint's path.

    `source`: a configuration, the name of a preset, a TOML file or a Hugging Face folder; left out: the
    preset `tiny`. `sections`: keys by section, as in a file.
    """
    config = configured(source, sections)
    from moeclipse.train.run.trainer import train as run

    return run(config, resume=resume)


def configured(source: TrainConfig | str | Path, sections: Mapping[str, Mapping[str, object]]) -> TrainConfig:
    """The checked configuration of a call."""
    layer = layer_of(sections)
    if isinstance(source, TrainConfig):
        from moeclipse.core.config import validate, with_values

        return validate(with_values(source, {key: given.value for key, given in layer.items()}))
    name = str(source)
    if not name or name in preset_names():
        return merge(preset=name or None, flags=layer).built.with_warnings()
    if is_model_folder(Path(name)) or (HUB.fullmatch(name) and not Path(name).exists()):
        return merge(flags={**layer, "model.from_hf": Sourced(name, "moeclipse.train")}).built.with_warnings()
    if not Path(name).is_file():
        names = ", ".join(preset_names())
        raise ConfigError(f"{name}: neither a file nor a Hugging Face folder, nor a preset ({names})")
    return merge(name, flags=layer).built.with_warnings()


def layer_of(sections: Mapping[str, Mapping[str, object]]) -> ConfigLayer:
    """`gate={"top_k": 2}` as the layer that a file with [gate] top_k = 2 is."""
    known, problems, layer = keys_of(TrainConfig), [], {}
    names = sorted({key.partition(".")[0] for key in known})
    for section, values in sections.items():
        if section not in names or not isinstance(values, Mapping):
            wanted = (
                f"a mapping of keys, not {values!r}" if section in names else f"one of {', '.join(names)}"
            )
            problems.append(f"{section}: expected {wanted} (moeclipse.train)")
            continue
        for key, value in values.items():
            full = f"{section}.{key}"
            if full in known:
                layer[full] = Sourced(value, "moeclipse.train")
            else:
                problems.append(f"{unknown_key(full, known)} (moeclipse.train)")
    if problems:
        raise ConfigError(problems)
    return layer
