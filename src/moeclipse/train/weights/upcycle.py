"""Upcycling: a dense model's weights as those of a model with experts.

    copy     every expert is the dense block
    split    expert e is part e mod P of its hidden width, P = d_ff / moe.d_ff; its output counts P times

Idea. `Upcycled` answers the call of a checkpoint in the names of the new model and reads the dense one's
slices for it, so each rank reads what it holds and nothing else. Attention, norms, embedding and head are
taken as they are; gates begin as in any run, or, where every part is chosen, at zero: all count alike.

Contract. Without noise, copies under scores that sum to `gate.scale` compute what the dense model does, and
so do parts that are all chosen. Noise depends on (seed, layer, expert, element) alone, never on the layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.hf.folder import HfFolder
from moeclipse.hf.read import contradictions
from moeclipse.model.config import ModelConfig
from moeclipse.ops.precision import WIDE
from moeclipse.ops.random import key_of, normal
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.checkpoints.manifest import RunState
from moeclipse.train.config import TrainConfig
from moeclipse.train.fingerprint import differences, fingerprint_of, in_present_terms
from moeclipse.train.optim.adamw import Readable
from moeclipse.train.optim.column_shards import ColumnShard
from moeclipse.train.ranks import Ranks, RanksFailed, together
from moeclipse.train.step.learner import Learner
from moeclipse.train.weights.init_config import FREE, is_kept

EXPERT = re.compile(r"weight/layers\.(?P<layer>\d+)\.moe\.experts\.(?P<expert>\d+)\.(?P<kind>up|down)")
GATE = re.compile(r"weight/layers\.\d+\.moe\.gate\..*")


class Upcycled:
    """A `Readable`."""

    def __init__(self, source: Readable, dense: ModelConfig, config: TrainConfig) -> None:
        """`dense`: the shape of the source; `config`: the run's."""
        self.source, self.dense = source, dense
        self.width, self.d_model = config.moe.d_ff, config.model.d_model
        self.pieces = dense.d_ff // config.moe.d_ff
        self.factor = self.pieces / config.gate.scale
        self.std, self.seed = config.init.noise * config.model.init_std, config.run.seed
        self.counts_alike = self.pieces > 1 and config.gate.top_k == config.moe.num_experts

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor | None:
        """As that of a checkpoint; None: what the model begins with stays."""
        column_shard = ColumnShard.parse(name)
        found = EXPERT.fullmatch(name if column_shard is None else column_shard.name)
        if found is not None:
            columns = (0, self.width) if column_shard is None else (column_shard.first, column_shard.stop)
            which = (int(found["layer"]), int(found["expert"]), found["kind"])
            return self._expert(*which, columns, start, stop)
        if GATE.fullmatch(name):
            return torch.zeros(stop - start) if self.counts_alike and stop is not None else None
        return self.source.read(name, start, stop)

    def _expert(
        self, layer: int, expert: int, kind: str, columns: tuple[int, int], start: int, stop: int | None
    ) -> torch.Tensor:
        piece = expert % self.pieces
        if kind == "up":
            stop = 2 * self.width * self.d_model if stop is None else stop
            values = self._up(f"weight/layers.{layer}.dense.up.weight", piece, start, stop)
            index = torch.arange(start, stop)
        else:
            left, right = (column + piece * self.width for column in columns)
            wide = right - left
            stop = self.d_model * wide if stop is None else stop
            name = f"weight/layers.{layer}.dense.down.weight"
            whole = wide == self.dense.d_ff
            values = self._values(name if whole else ColumnShard(name, left, right).key, start, stop)
            place = torch.arange(start, stop)
            index = place // wide * self.width + columns[0] + place % wide
        if self.std:
            key = key_of(self.seed, layer, "upcycled", expert, kind)
            values = values.to(WIDE[values.dtype]) + self.std * normal(key, index)
        if kind == "down" and self.factor != 1:
            values = values.to(WIDE[values.dtype]) * self.factor
        return values

    def _up(self, name: str, piece: int, start: int, stop: int) -> torch.Tensor:
        """Elements of the rows of one part: those of the gate, then those that it multiplies."""
        half = self.width * self.d_model
        found = []
        for which in (0, 1):
            first, last = max(start, which * half), min(stop, (which + 1) * half)
            if first < last:
                move = which * (self.dense.d_ff * self.d_model - half) + piece * half
                found.append(self._values(name, first + move, last + move))
        return torch.cat(found) if len(found) != 1 else found[0]

    def _values(self, name: str, start: int, stop: int) -> torch.Tensor:
        values = self.source.read(name, start, stop)
        assert values is not None
        return values


@dataclass(frozen=True, kw_only=True)
class DenseSource:
    """Where weights come from, what they are of, and where that differs from the run's model."""

    weights: Readable
    shape: ModelConfig
    differences: tuple[str, ...]


def upcycled(path: str, learner: Learner, ranks: Ranks, checkpoint: Checkpoint | None = None) -> Upcycled:
    """Of a Hugging Face folder, or of an opened checkpoint. Collective; ConfigError where it does not fit."""
    config = learner.config
    if checkpoint is None:
        source = of_folder(path, config, ranks)
    else:
        source = of_checkpoint(checkpoint, config)
    lines = [*source.differences, *misfits(source.shape, config)]
    if lines:
        raise ConfigError([f"run.init_from ({path}): {line}" for line in lines])
    return Upcycled(source.weights, source.shape, config)


def of_folder(path: str, config: TrainConfig, ranks: Ranks) -> DenseSource:
    folders: list[HfFolder] = []

    def open_it() -> None:
        folders.append(HfFolder.open(path, ranks.rank, ranks.num_ranks, dense=True))

    try:
        together(ranks, open_it, str)
    except RanksFailed as error:
        raise CheckpointError(str(error)) from None
    folder = folders[0]
    differences = tuple(folder_differences(folder, config, path))
    return DenseSource(weights=folder, shape=folder.shapes.model, differences=differences)


def folder_differences(folder: HfFolder, config: TrainConfig, path: str | Path) -> list[str]:
    """Where the shape of a dense folder's model is not the run's, apart from what upcycling changes."""
    values = {key: value for key, value in folder.values.items() if is_kept(key)}
    return list(contradictions(values, config, str(path)))


def of_checkpoint(checkpoint: Checkpoint, config: TrainConfig) -> DenseSource:
    shape, lines = dense_shape(checkpoint.state, config, checkpoint.path)
    return DenseSource(weights=checkpoint, shape=shape, differences=tuple(lines))


def dense_shape(state: RunState, config: TrainConfig, path: str | Path) -> tuple[ModelConfig, list[str]]:
    """(the dense model of a checkpoint with this state, where that differs from the run's)."""
    if "fingerprint" not in state:
        raise CheckpointError(f"{path} holds no run's model; upcycle a dense run, or a Hugging Face folder")
    expected = fingerprint_of(config, torch.float32)
    stored = in_present_terms(state["fingerprint"], expected, TrainConfig())
    left_out = (*FREE, "dtype", "init_std")

    def kept(model: Mapping[str, object]) -> dict[str, object]:
        return {key: value for key, value in model.items() if key not in left_out}

    told = {f"model.{key}": value for key, value in stored["model"].items() if key in FREE}
    told = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
    lines = differences({"model": kept(stored["model"])}, {"model": kept(expected["model"])})
    return with_values(config, told).model, lines


def misfits(dense: ModelConfig, config: TrainConfig) -> Iterator[str]:
    """What of the new model cannot be made of the dense one."""
    model, moe = config.model, config.moe
    given = [layer for layer in model.expert_layers if not dense.is_dense(layer)]
    if given:
        yield f"layer {given[0]} has experts already; upcycling makes them of dense blocks"
    if len(model.expert_layers) < model.num_layers and dense.d_ff != model.d_ff:
        yield f"model.d_ff ({model.d_ff}) of layers that stay dense must be {dense.d_ff}"
    if config.init.upcycle == "copy" and moe.d_ff != dense.d_ff:
        yield f"moe.d_ff ({moe.d_ff}) must be {dense.d_ff}, the width of the dense blocks that are copied"
    if config.init.upcycle == "split":
        pieces = dense.d_ff // moe.d_ff
        if pieces < 2 or dense.d_ff % moe.d_ff:
            yield f"moe.d_ff ({moe.d_ff}) must be a part of {dense.d_ff}, the width of the dense blocks"
        elif moe.num_experts % pieces:
            yield (
                f"moe.num_experts ({moe.num_experts}) must be a multiple of {pieces}, into which moe.d_ff "
                f"({moe.d_ff}) cuts the dense blocks"
            )
