"""What is wrong with names and weights, told before ranks start and a run has a folder.

    optim.frozen, optim.lr_factors    patterns against the names of a model whose weights are nowhere
    run.init_from, init.upcycle       what a checkpoint says of itself against the run's model
    lora.adapter                      the adapter's settings, names and shapes against the run's

Only what a checkpoint says is read here; whether its files are whole, ranks find out together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CheckpointError
from moeclipse.core.outside import MOST_INDEX, read_json
from moeclipse.hf.config_file import config_of, is_model_folder
from moeclipse.hf.folder import HfFolder
from moeclipse.hf.names import EACH
from moeclipse.hf.peft import look_at_adapter
from moeclipse.hf.read import read_config
from moeclipse.model.transformer import Transformer
from moeclipse.train.checkpoints.folder import INDEX, checkpoints_in
from moeclipse.train.checkpoints.manifest import RunState
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.parameter_groups import ParameterGroups
from moeclipse.train.weights.init_from import other_shape
from moeclipse.train.weights.upcycle import dense_shape, folder_differences, misfits

NO_START = "there is no checkpoint in it; give the folder of a checkpoint, of a run, or of a model"


def weight_problems(config: TrainConfig) -> Iterator[str]:
    """Of a configuration that has no other problem."""
    if config.optim.frozen or config.optim.lr_factors:
        yield from pattern_problems(config)
    if path := config.run.init_from:
        for line in start_problems(config, Path(path)):
            yield f"run.init_from ({path}): {line}"
    if config.lora.rank and config.lora.adapter:
        yield from adapter_problems(config)


def pattern_problems(config: TrainConfig) -> list[str]:
    nowhere = Mesh.single(torch.device("meta"))
    model = Transformer(config.model, config.moe, config.gate, mesh=nowhere, lora=config.lora)
    return ParameterGroups.of(config.optim, config.lora).problems_of(model)


def start_problems(config: TrainConfig, path: Path) -> Iterator[str]:
    upcycles = config.init.upcycle != "off"
    if upcycles and is_model_folder(path):
        try:
            folder = HfFolder.look(path, dense=True)
        except CheckpointError as error:
            yield str(error)
            return
        yield from (*folder_differences(folder, config, path), *misfits(folder.shapes.model, config))
        return
    try:
        state = state_of(path)
    except CheckpointError as error:
        yield str(error)
        return
    if upcycles:
        try:
            dense, lines = dense_shape(state, config, path)
        except CheckpointError as error:
            yield str(error)
            return
        yield from (*lines, *misfits(dense, config))
    else:
        yield from other_shape(state, config, str(path))


def state_of(path: Path) -> RunState:
    """What a checkpoint, or the newest one of a run that can be read, says of itself."""
    folders = [entry.path for entry in checkpoints_in(path / "checkpoints")] or [path]
    for folder in folders:
        try:
            state = read_json(folder / INDEX, most=MOST_INDEX, numbers=False)["state"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(state, Mapping):
            return cast(RunState, state)
    damaged = (folders[0] / INDEX).exists()
    raise CheckpointError(f"no checkpoint in it can be read, such as {folders[0]}" if damaged else NO_START)


def adapter_problems(config: TrainConfig) -> Iterator[str]:
    """The names of an adapter's tensors are those of the family that the base model is of."""
    names, source = EACH, config.model.from_hf
    try:
        if source:
            names = read_config(config_of(Path(source)), source).family.names
        elif (source := config.run.init_from) and (told := state_of(Path(source)).get("hf")):
            names = read_config(told["config"], source).family.names
        look_at_adapter(Path(config.lora.adapter), config.model, config.moe, config.lora, names)
    except CheckpointError as error:
        yield f"lora.adapter: {error}"
