"""Several adapters beside one model: its base is in memory once, and one of them at a time is in its place.

All have one shape (rank, scale and targets): they change places in the parameters that the model has for
them, so that a text of one costs what it costs alone. Names are the caller's; empty is the base without any.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from moeclipse.core.errors import ConfigError
from moeclipse.hf.peft import adapter_lora, read_adapter
from moeclipse.train.weights.load import load_into
from moeclipse.train.weights.lora import Adapted
from moeclipse.train.weights.open_model import FoundModel


class Adapters:
    """Read from folders in PEFT's format, for a model that has none of its own."""

    def __init__(self, found: FoundModel, folders: Mapping[str, str]) -> None:
        if found.lora.rank:
            raise ConfigError(f"{found.path} has adapters of its own; give the model that they stand beside")
        model, moe, names = found.shapes.model, found.shapes.moe, found.names
        told = {name: adapter_lora(Path(folder), model, names) for name, folder in folders.items()}
        first, *others = told
        for name in others:
            if told[name] != told[first]:
                raise ConfigError(
                    f"adapters {first!r} and {name!r} differ in rank, scale or targets, and only one shape "
                    "has a place in the model; load them one by one"
                )
        self.lora = told[first]
        self.tensors = {
            name: read_adapter(Path(folder), model, moe, self.lora, names) for name, folder in folders.items()
        }
        self.first = self.tensors[first]
        self.tensors |= {"": {name: torch.zeros_like(tensor) for name, tensor in self.first.items()}}

    def put(self, name: str, model: nn.Module) -> None:
        if name not in self.tensors:
            raise ConfigError(
                f"there is no adapter {name!r}; there are {', '.join(filter(None, self.tensors))}"
            )
        load_into(model, Adapted(None, self.tensors[name]))
