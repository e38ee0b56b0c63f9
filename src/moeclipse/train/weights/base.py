"""Frozen weights in few bits, between what stores them and what computes with them.

    BaseSource        a model in few bits  <-  numbers of a folder or checkpoint, quantised while they come
                                           <-  blocks of a folder that has them already, as they are
    DecodedWeights    numbers              <-  a checkpoint in few bits

A checkpoint keeps codes and factors under the name of their matrix (`...experts.5.up.codes`), each expert on
its own, so that it is read under any layout, to the bit; nf4 would not give the same codes a second time.

Contract. One matrix is in memory at a time, never a model of them. Whoever shares weights with others reads
its own part and sends it to them (`train/optim/adamw`), so that copies are equal whatever rounded them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from moeclipse.core.errors import CheckpointError
from moeclipse.ops.frozen import Frozen, Parts, decode, encode, kind_of, shape_of
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.optim.adamw import Readable
from moeclipse.train.optim.column_shards import ColumnShard

EXPERT = re.compile(r"\.experts\.\d+\.")
PARTS = ("codes", "factors", "scales", "offsets")


class BaseSource:
    """A `Readable` for a model some of whose matrices are Frozen; other names are `source`'s."""

    def __init__(self, source: Readable, model: nn.Module) -> None:
        self.source = source
        self.frozen = {f"weight/{n}": part for n, part in model.named_modules() if isinstance(part, Frozen)}
        self.stack = ""
        self.parts: dict[str, Parts] = {}
        """Of the matrices of one stack: which of their parts is asked for first is not known here."""

    def __contains__(self, name: str) -> bool:
        found = self._matrix(name)
        return name in self.source or (found is not None and found[0] in self.source)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor | None:
        found = self._matrix(name)
        if found is None or name in self.source:
            return self.source.read(name, start, stop)
        plain, part, frozen = found
        stack = EXPERT.sub(".experts.", plain)
        if stack != self.stack:
            self.stack, self.parts = stack, {}
        if plain not in self.parts:
            self.parts[plain] = self._quantised(plain, frozen)
        return self.parts[plain][part].flatten()[start:stop]

    def _matrix(self, name: str) -> tuple[str, str, Frozen] | None:
        """(its plain name, the part that is asked for, the Frozen that wants it)."""
        plain, _, part = name.rpartition(".")
        frozen = self.frozen.get(EXPERT.sub(".experts.", plain)) if part in PARTS else None
        return None if frozen is None else (plain, part, frozen)

    def _quantised(self, name: str, frozen: Frozen) -> Parts:
        blocks: Any = getattr(self.source, "blocks", None)
        stored: Parts | None = None if blocks is None else blocks(name, frozen.kind)
        if stored is not None:
            return stored
        values = self.source.read(name)
        if values is None:
            raise CheckpointError(f"{name} is nowhere to be read from; it is another model")
        try:
            return encode(frozen.kind, values.view(*frozen.shape[-2:]).to(frozen.device))
        except ValueError as error:
            raise CheckpointError(f"{name} cannot be kept as {frozen.kind}: {error}") from None


class DecodedWeights:
    """A checkpoint as if none of its matrices were in few bits; the last of them is kept."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.path, self.state = checkpoint, checkpoint.path, checkpoint.state
        self._last: tuple[str, torch.Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint or f"{name}.codes" in self.checkpoint

    def _parts(self, name: str) -> dict[str, str]:
        return {part: f"{name}.{part}" for part in PARTS if f"{name}.{part}" in self.checkpoint}

    def _kind(self, name: str) -> str:
        return kind_of({part: self.checkpoint.dtype(key) for part, key in self._parts(name).items()})

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self.checkpoint:
            return self.checkpoint.shape(name)
        return shape_of(self._kind(name), self.checkpoint.shape(f"{name}.codes"))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        columns = ColumnShard.parse(name)
        if columns is not None and f"{columns.name}.codes" in self.checkpoint:
            whole = self.read(columns.name).view(-1, self.shape(columns.name)[-1])
            return whole[:, columns.first : columns.stop].flatten()[start:stop]
        if name in self.checkpoint or f"{name}.codes" not in self.checkpoint:
            return self.checkpoint.read(name, start, stop)
        if self._last is None or self._last[0] != name:
            checkpoint = self.checkpoint
            parts = {
                part: checkpoint.read(key).view(checkpoint.shape(key))
                for part, key in self._parts(name).items()
            }
            self._last = (name, decode(self._kind(name), self.shape(name), parts).flatten())
        return self._last[1][start:stop]
