"""Checkpoints: saved by any layout, read by any other, whole or not there at all.

Idea. A checkpoint speaks of logical tensors. Each rank hands over the pieces it owns (a range of a tensor's
flattened elements); reading assembles any range from whatever pieces overlap it. So layouts never meet.
Columns of a matrix are stored as a matrix of their own (`column_shards`); readers need not know.

Contract.
* `save` writes into a hidden folder, fsyncs every file, writes the manifest last, and commits by one rename.
  A kill at any moment leaves the previous checkpoint as it was. Older ones are removed after the commit.
* A rank that fails says so to all others before the commit: every rank raises the same CheckpointError.
* `Checkpoint.open` verifies every file before it hands out a tensor; the hashing is shared by the ranks.

Hazards. `save`, `Checkpoint.open` and `newest` are collective: all ranks call them, in the same order, with
the same arguments, on a folder that all of them see. `read` is not collective.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from moeclipse.core.errors import CheckpointError, StorageError
from moeclipse.core.outside import regular
from moeclipse.train.checkpoints.folder import MANIFEST, checkpoints_in
from moeclipse.train.checkpoints.manifest import Index, RunState, StoredPiece, StoredTensor, inspect
from moeclipse.train.checkpoints.save import save
from moeclipse.train.checkpoints.shard import DTYPES, Piece
from moeclipse.train.fingerprint import differences
from moeclipse.train.optim.column_shards import ColumnShard, are_whole, by_matrix, read_columns
from moeclipse.train.ranks import OneRank, Ranks

__all__ = ["Checkpoint", "Newest", "OneRank", "Piece", "Ranks", "check_model", "newest", "save"]

MAX_OPEN = 64
"""Files of a checkpoint that are kept open; one of a thousand ranks has a thousand files."""


class Checkpoint:
    """A verified checkpoint, made by `open` or `newest`; any rank may then `read` at any time."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.state = cast(RunState, dict(index.state))
        self._tensors = index.tensors
        self._column_shards = by_matrix(index.tensors)
        self._files: dict[str, safe_open] = {}

    @classmethod
    def open(cls, path: str | Path, ranks: Ranks) -> Checkpoint:
        """Verifies the whole checkpoint, then opens it. Collective; fails on all ranks or on none."""
        checkpoint, damage = _verify(Path(path), ranks)
        if checkpoint is None:
            raise CheckpointError(
                f"checkpoint {path} cannot be loaded: {'; '.join(damage)}; "
                f"give the path of a whole checkpoint, or resume with `auto` to take the newest whole one"
            )
        return checkpoint

    @property
    def names(self) -> list[str]:
        """Logical tensors; a matrix that is stored by columns is named once."""
        return sorted(
            {
                column_shard.name if (column_shard := ColumnShard.parse(name)) else name
                for name in self._tensors
            }
        )

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._column_shards

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._column_shards and name not in self._tensors:
            column_shards = self._column_shards[name]
            return (*self._tensor(column_shards[0].key).shape[:-1], column_shards[-1].stop)
        return self._tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        stored = (
            self._column_shards[name][0].key
            if name in self._column_shards and name not in self._tensors
            else name
        )
        return DTYPES[self._tensor(stored).dtype]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, on the CPU; only their bytes are read.

        `NAME[:, 32:64]` reads columns of a matrix, whichever way it is stored.
        """
        if name not in self._tensors:
            column_shard = ColumnShard.parse(name)
            if column_shard is not None and column_shard.name in self:
                return self._read_columns(column_shard, start, stop)
            if name in self._column_shards:
                return self._read_columns(ColumnShard(name, 0, self.shape(name)[-1]), start, stop)
        tensor = self._tensor(name)
        stop = prod(tensor.shape) if stop is None else stop
        if not 0 <= start <= stop <= prod(tensor.shape):
            raise IndexError(
                f"{name}: [{start}, {stop}) is not inside a tensor of shape {list(tensor.shape)}"
            )
        result = torch.empty(stop - start, dtype=DTYPES[tensor.dtype])
        number = bisect_right(tensor.pieces, start, key=lambda piece: piece.start) - 1
        position = start
        while position < stop:
            piece = tensor.pieces[number]
            end = min(stop, piece.stop)
            part = self._read_piece(piece, position - piece.start, end - piece.start)
            if part.dtype != result.dtype or part.numel() != end - position:
                raise CheckpointError(
                    f"{self.path}: {piece.file} does not hold {piece.key!r} as the index says"
                )
            result[position - start : end - start] = part
            position, number = end, number + 1
        return result

    def _read_columns(self, wanted: ColumnShard, start: int, stop: int | None) -> torch.Tensor:
        *above, width = self.shape(wanted.name)
        rows = prod(above)
        stop = rows * wanted.width if stop is None else stop
        if not 0 <= wanted.first < wanted.stop <= width or not 0 <= start <= stop <= rows * wanted.width:
            raise IndexError(
                f"{wanted.key}: [{start}, {stop}) is not inside a matrix of shape [{rows}, {width}]"
            )
        dtype = self.dtype(wanted.name)
        if wanted.name in self._tensors:
            whole = ColumnShard(wanted.name, 0, width)
            return read_columns(
                lambda _, a, b: self.read(wanted.name, a, b), [whole], wanted, start, stop, dtype
            )
        column_shards = self._column_shards[wanted.name]
        if not are_whole(column_shards):
            raise CheckpointError(
                f"checkpoint {self.path} lacks columns of {wanted.name!r}: it holds "
                f"{', '.join(shard.key for shard in column_shards)}; it is damaged or was saved by another "
                "program"
            )
        return read_columns(self.read, column_shards, wanted, start, stop, dtype)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            near = difflib.get_close_matches(name, self._tensors, n=1)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise CheckpointError(
                f"checkpoint {self.path} has no tensor {name!r}{hint}; it was saved from another model"
            )
        return self._tensors[name]

    def _read_piece(self, piece: StoredPiece, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a piece. A file is cut by rows: take those that cover the range."""
        try:
            rows = self._file(piece.file).get_slice(piece.key)
            shape = rows.get_shape()
            if not shape:
                return self._file(piece.file).get_tensor(piece.key).reshape(-1)[start:stop]
            width = max(1, prod(shape[1:]))
            first, last = start // width, -(-stop // width)
            return rows[first:last].reshape(-1)[start - first * width : stop - first * width]
        except (SafetensorError, OSError, IndexError) as error:
            raise StorageError(
                f"{self.path}: {piece.file} cannot be read: {error}; it changed after it was verified"
            ) from error

    def _file(self, name: str) -> safe_open:
        file = self._files.pop(name, None)
        if file is None:
            file = safe_open(regular(self.path / name, inside=self.path), framework="pt")
            if len(self._files) >= MAX_OPEN:
                del self._files[next(iter(self._files))]
        self._files[name] = file
        return file


@dataclass(frozen=True, kw_only=True)
class Newest:
    """What a search found. `checkpoint` is None where no whole one is there."""

    checkpoint: Checkpoint | None
    passed_over: tuple[str, ...]
    """Newer ones that are damaged, newest first: which, and what is wrong with them."""


def newest(folder: str | Path, ranks: Ranks) -> Newest:
    """The newest whole checkpoint in `folder`. Collective; all ranks find the same one."""
    # Rank 0's list counts: a listing taken at another moment may differ.
    mine = [entry.path.name for entry in checkpoints_in(Path(folder))] if ranks.rank == 0 else []
    passed_over: list[str] = []
    for name in ranks.gather_objects(mine)[0]:
        checkpoint, damage = _verify(Path(folder) / name, ranks)
        if checkpoint is not None:
            return Newest(checkpoint=checkpoint, passed_over=tuple(passed_over))
        passed_over.append(f"{name}: {'; '.join(damage)}")
    return Newest(checkpoint=None, passed_over=tuple(passed_over))


def _verify(path: Path, ranks: Ranks) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint, or everything that is wrong with it; the same answer on all ranks."""
    found = inspect(path, ranks.rank, ranks.num_ranks)
    everyone = ranks.gather_objects({"damage": list(found.damage), "manifest": found.manifest_sha256})
    damage = list(dict.fromkeys(text for one in everyone for text in one["damage"]))
    if not damage and len({one["manifest"] for one in everyone}) > 1:
        damage.append(f"ranks see different files under {MANIFEST}: the folder must be shared by all hosts")
    if damage or found.index is None:
        return None, sorted(damage)
    return Checkpoint(path, found.index), []


def check_model(fingerprint: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Fails, naming each field, unless the fingerprint that was saved is the expected one."""
    lines = differences(fingerprint, expected)
    if lines:
        raise CheckpointError(
            f"the checkpoint belongs to another model: {'; '.join(lines)}; "
            f"resume with the configuration it was saved with, or start a new run"
        )


def check_state(state: Mapping[str, object], kinds: Mapping[str, type], path: Path) -> None:
    """Fails, naming each of them, unless every key is there and of its kind."""
    wrong = [key for key, kind in kinds.items() if type(state.get(key)) is not kind]
    if wrong:
        raise CheckpointError(
            f"checkpoint {path} is damaged or no run's: its state lacks {', '.join(wrong)}; "
            "resume from another one"
        )
