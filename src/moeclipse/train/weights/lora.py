"""Adapters of a run: where they begin, and what they come to when they are merged.

weights of a base model  + adapters at zero, or of a PEFT folder  -> a run (`Adapted`)
a run's checkpoint       W + (alpha / rank) B A                   -> a Hugging Face model (`MergedWeights`)
a run's checkpoint       A and B                                  -> a PEFT folder (`save_adapter`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save

from moeclipse.core.errors import CheckpointError
from moeclipse.hf.folder import Shapes
from moeclipse.hf.names import EACH, Names
from moeclipse.hf.peft import CONFIG, WEIGHTS, adapter_config, read_adapter, to_peft
from moeclipse.hf.read import read_config
from moeclipse.model.lora_config import ADAPTER, LoraConfig, is_adapter
from moeclipse.ops.precision import WIDE
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.checkpoints.manifest import RunState
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.adamw import Readable
from moeclipse.train.optim.column_shards import ColumnShard
from moeclipse.train.weights.base import DecodedWeights
from moeclipse.train.weights.staging import StagedFolder

LINEAR = re.compile(
    r"(?P<before>weight/layers\.\d+\.attention\.)(?P<name>[qkvo]|q_down|q_up|kv_down|kv_up)\.weight"
)
EXPERT = re.compile(r"(?P<before>weight/layers\.\d+\.moe\.experts\.\d+\.)(?P<name>up|down)")


class Adapted:
    """A `Readable`: weights of a base model, and of adapters that are given; others stay as they are."""

    def __init__(self, base: Readable | None, adapters: Mapping[str, torch.Tensor]) -> None:
        """Without a base all other weights stay as they are."""
        self.base, self.adapters = base, adapters

    @classmethod
    def of(cls, base: Readable, config: TrainConfig, names: Names | None = None) -> Readable:
        """The base itself, where the run has no adapters. `names`: of the family, where it is one's."""
        if not config.lora.rank:
            return base
        given = config.lora.adapter
        model = (config.model, config.moe, config.lora, names or EACH)
        return cls(base, read_adapter(Path(given), *model) if given else {})

    def __contains__(self, name: str) -> bool:
        return name in self.adapters or (self.base is not None and name in self.base)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor | None:
        column_shard = ColumnShard.parse(name)
        plain = name if column_shard is None else column_shard.name
        if plain in self.adapters:
            whole = self.adapters[plain]
            part = whole if column_shard is None else whole[:, column_shard.first : column_shard.stop]
            return part.flatten()[start:stop]
        if self.base is None or (is_adapter(plain) and plain not in self.base):
            return None
        return self.base.read(name, start, stop)


def lora_of(state: RunState) -> LoraConfig:
    """The adapters of a checkpoint; rank 0: it has none."""
    told = (state.get("fingerprint") or {}).get("lora")
    if not told:
        return LoraConfig()
    rslora = bool(told.get("rslora"))
    return LoraConfig(rank=told["rank"], alpha=told["alpha"], rslora=rslora, targets=tuple(told["targets"]))


class MergedWeights:
    """A checkpoint's weights with what its adapters add."""

    def __init__(self, checkpoint: DecodedWeights | Checkpoint) -> None:
        self.checkpoint, self.lora = checkpoint, lora_of(checkpoint.state)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Whole rows."""
        values = self.checkpoint.read(name, start, stop)
        halves = self._adapter(name)
        if halves is None:
            return values
        a_RI, b_OR = (self.checkpoint.read(half).view(self.checkpoint.shape(half)) for half in halves)
        wide, width = WIDE[torch.promote_types(values.dtype, a_RI.dtype)], a_RI.shape[1]
        rows = slice(start // width, stop // width)
        more = self.lora.scale * (b_OR[rows].to(wide) @ a_RI.to(wide))
        return values.to(wide) + more.flatten()

    def _adapter(self, name: str) -> tuple[str, str] | None:
        if not self.lora.rank:
            return None
        if (found := LINEAR.fullmatch(name)) is not None and self.lora.has(found["name"]):
            before = f"{found['before']}adapters.{ADAPTER}{found['name']}."
            return f"{before}a.weight", f"{before}b.weight"
        if (found := EXPERT.fullmatch(name)) is not None and self.lora.has(found["name"]):
            before = f"{found['before']}{ADAPTER}{found['name']}"
            return f"{before}_a", f"{before}_b"
        return None


def save_adapter(checkpoint: Checkpoint, out: Path) -> int:
    """A PEFT folder of a checkpoint's adapters; returns how many tensors it has."""
    lora, told = lora_of(checkpoint.state), checkpoint.state.get("hf")
    if not lora.rank or not told:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has no adapters beside a Hugging Face model; begin a run with "
            "--model.from-hf and --lora.rank"
        )
    read = read_config(told["config"], str(checkpoint.path))
    shapes, names = Shapes.of(read.values), read.family.names

    def whole(name: str) -> torch.Tensor:
        return checkpoint.read(name).view(checkpoint.shape(name))

    tensors = to_peft(shapes.model, shapes.moe, lora, names, whole)
    config = adapter_config(shapes.model, lora, names, str(told["config"].get("_name_or_path", "")))
    staged = StagedFolder(out, f"adapter of {checkpoint.path.absolute()}")
    staged.add_bytes(CONFIG, json.dumps(config, indent=2).encode() + b"\n")
    staged.add_bytes(WEIGHTS, save(tensors, {"format": "pt"}))
    staged.commit()
    return len(tensors)
