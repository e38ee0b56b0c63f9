"""A folder of a Hugging Face model, read slice by slice.

    folder = HfFolder.open(path)                  config, names and shapes are checked; no weight is read
    folder.read("weight/embedding", 0, 4096)      elements of a flattened logical tensor of ours

Idea. It answers the same call as a checkpoint (`train/checkpoints`), so whoever loads a shard under some
layout does not care where weights come from, and a rank reads the slices it holds and nothing else.

Contract. `open` raises CheckpointError, in one line, for whatever cannot be a whole model: files that are
missing, truncated or mixed up, shapes that contradict `config.json`, tensors that nobody asked for. Tensors
of layers behind the last (drafts of further tokens) are `extra`: they travel with a conversion and take no
part in training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moeclipse.core.config import with_values
from moeclipse.core.errors import CheckpointError
from moeclipse.core.outside import MOST_INDEX, read_table, regular, table, told_of
from moeclipse.hf.config_file import config_of
from moeclipse.hf.manifest import check_manifest
from moeclipse.hf.names import table_of
from moeclipse.hf.quantised import EXPANDED, Packed, packed_tensors
from moeclipse.hf.read import ReadConfig, read_config
from moeclipse.hf.row_ranges import LogicalTensor, RowRange
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
COLUMNS = re.compile(r"(?P<name>.*)\[:, (?P<first>\d+):(?P<stop>\d+)\]")
LAYER = re.compile(r"model\.layers\.(\d+)\.")
COMPUTED = re.compile(r".*rotary_emb\.inv_freq")
"""Tensors that old files hold and that follow from the configuration."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The sections of a configuration that say what a model is."""

    model: ModelConfig
    moe: MoEConfig
    gate: GateConfig

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Shapes:
        return with_values(cls(model=ModelConfig(), moe=MoEConfig(), gate=GateConfig()), values)


@dataclass(frozen=True, kw_only=True)
class StoredAs:
    """Where a tensor of the folder lies."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class HfFolder:
    """Made by `open`."""

    def __init__(self, path: Path, read: ReadConfig, stored: Mapping[str, StoredAs]) -> None:
        self.path, self.family, self.values, self.theirs = path, read.family, read.values, read.theirs
        self.shapes = Shapes.of(read.values)
        shapes = {key: (found.shape, found.dtype) for key, found in stored.items()}
        self.packed = packed_tensors(shapes, read.theirs, str(path))
        self.files, self.stored = stored, expanded(stored, self.packed)
        given = (self.shapes.model, self.shapes.moe, self.shapes.gate)
        self.table = table_of(read.family.names, self.stored, *given)
        self._files: dict[str, Any] = {}

    @classmethod
    def open(cls, path: str | Path, share: int = 0, num_shares: int = 1, *, dense: bool = False) -> HfFolder:
        """Files that we wrote are verified by their SHA-256: `share` of `num_shares` of them.

        `dense`: a model without experts is wanted.
        """
        folder = cls.look(path, dense=dense)
        check_manifest(folder.path, share, num_shares)
        return folder

    @classmethod
    def look(cls, path: str | Path, *, dense: bool = False) -> HfFolder:
        """The same without a look at SHA-256: headers alone are read."""
        path = Path(path)
        read = read_config(config_of(path), str(path), dense=dense)
        folder = cls(path, read, stored_tensors(path))
        folder._check()
        return folder

    def _check(self) -> None:
        wanted = {part.key: part for tensor in self.table.values() for part in tensor.parts}
        missing = sorted(wanted.keys() - self.stored.keys())
        if missing:
            raise CheckpointError(
                f"{self.path} lacks {len(missing)} of {len(wanted)} tensors that its config.json asks for, "
                f"such as {missing[0]}; download the model again, or mend config.json"
            )
        for key, part in wanted.items():
            found = self.stored[key].shape
            if found != part.shape:
                raise CheckpointError(
                    f"{self.path}: {key} has shape {list(found)}, but config.json asks for "
                    f"{list(part.shape)}; the configuration and the weights belong to different models"
                )
        unknown = [key for key in sorted(self.stored.keys() - wanted.keys()) if not self._is_extra(key)]
        if unknown:
            raise CheckpointError(
                f"{self.path} holds {len(unknown)} tensors that a {self.family.title} of this config.json "
                f"has not, such as {unknown[0]}; the configuration and the weights belong to different models"
            )

    def _is_extra(self, key: str) -> bool:
        layer = LAYER.match(key)
        behind = layer is not None and int(layer[1]) >= self.shapes.model.num_layers
        announced = self.theirs.get("num_nextn_predict_layers") or self.theirs.get("num_mtp_layers")
        tied = key == "lm_head.weight" and self.shapes.model.tie_embeddings
        return (
            tied
            or bool(COMPUTED.fullmatch(key))
            or key.startswith(("mtp.", "model.mtp"))
            or (behind and bool(announced))
        )

    @property
    def extra(self) -> list[str]:
        """Tensors that take no part in training, and travel with a conversion."""
        used = {part.key for tensor in self.table.values() for part in tensor.parts}
        return sorted(key for key in self.stored.keys() - used if not COMPUTED.fullmatch(key))

    @property
    def names(self) -> list[str]:
        return sorted(self.table)

    def __contains__(self, name: str) -> bool:
        return name in self.table

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, or of its columns for `NAME[:, 32:64]`."""
        columns = COLUMNS.fullmatch(name)
        tensor = self._tensor(columns["name"] if columns else name)
        left, right = (int(columns["first"]), int(columns["stop"])) if columns else (0, tensor.width)
        width = right - left
        stop = tensor.rows * width if stop is None else stop
        first, last = start // width, -(-stop // width)
        rows = self.rows(tensor, first, last, left, right)
        return rows.reshape(-1)[start - first * width : stop - first * width]

    def _tensor(self, name: str) -> LogicalTensor:
        if name not in self.table:
            raise CheckpointError(f"{self.path} has no tensor for {name!r}; it is another model")
        return self.table[name]

    def rows(self, tensor: LogicalTensor, first: int, last: int, left: int, right: int) -> torch.Tensor:
        """Rows [first, last) and columns [left, right) of a logical tensor."""
        found, begin = [], 0
        for part in tensor.parts:
            a, b = max(first, begin) - begin, min(last, begin + part.rows) - begin
            if a < b:
                found.append(self._rows_of_part(part, a, b, left, right, len(tensor.shape) == 1))
            begin += part.rows
        if not found:
            return torch.empty(0, right - left)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _rows_of_part(
        self, part: RowRange, a: int, b: int, left: int, right: int, vector: bool
    ) -> torch.Tensor:
        where = slice(part.first + part.step * a, part.first + part.step * (b - 1) + 1)
        if vector:
            return self.slice_of(part.key, part.index(where, None)).reshape(-1)[:: part.step, None]
        found = self.slice_of(part.key, part.index(where, slice(left, right)))
        return found.t()[:: part.step] if part.transposed else found[:: part.step]

    def slice_of(self, key: str, index: tuple[Any, ...]) -> torch.Tensor:
        """A slice of a tensor of the folder, expanded where it is quantised; only its bytes are read."""
        packed = self.packed.get(key)
        return self._raw(key, index) if packed is None else packed.expand(index, self._raw)

    def _raw(self, key: str, index: tuple[Any, ...]) -> torch.Tensor:
        file = self.files[key].file
        try:
            result: torch.Tensor = self._file(file).get_slice(key)[index]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: {file} cannot be read: {error}") from error
        return result

    def blocks(self, name: str, kind: str) -> dict[str, torch.Tensor] | None:
        """Codes and scales of a logical matrix as they lie in the files; None: it is not quantised so."""
        found = []
        for part in (parts := self._tensor(name).parts):
            packed = self.packed.get(part.key)
            if packed is None or packed.kind != kind:
                return None
            if why := packed.why_not_kept(part.rows, last=part is parts[-1]):
                raise CheckpointError(f"{self.path}: {part.key} cannot be kept as {kind}: {why}")
            found.append(packed.rows(part.entry, part.first, part.step, part.rows, self._raw))
        return {"codes": torch.cat([codes for codes, _ in found]), "scales": torch.cat([s for _, s in found])}

    def whole(self, key: str) -> torch.Tensor:
        """A tensor of the folder under its own name."""
        if key in self.packed:
            full, shape = (slice(None), slice(None)), self.stored[key].shape
            if len(shape) == 2:
                return self.slice_of(key, full)
            return torch.stack([self.slice_of(key, (entry, *full)) for entry in range(shape[0])])
        tensor: torch.Tensor = self._file(self.files[key].file).get_tensor(key)
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(regular(self.path / name, inside=self.path), framework="pt")
        return self._files[name]


def expanded(stored: Mapping[str, StoredAs], packed: Mapping[str, Packed]) -> dict[str, StoredAs]:
    """The tensors of a folder as if none was quantised."""
    halves = {half for tensor in packed.values() for half in tensor.parts}
    found = {key: as_it_is for key, as_it_is in stored.items() if key not in halves}
    for key, tensor in packed.items():
        found[key] = StoredAs(file=stored[tensor.parts[0]].file, shape=tensor.shape, dtype=EXPANDED)
    return found


def stored_tensors(path: Path) -> dict[str, StoredAs]:
    """Every tensor of the folder by its name, from the headers of its files."""
    index = placed_by_index(path)
    stored: dict[str, StoredAs] = {}
    for file in sorted(set(index.values())) if index is not None else [ONE_FILE]:
        for key, found in header_of(path, file).items():
            if index is not None and index.get(key) != file:
                placed = f"puts it in {index[key]}" if key in index else "does not know it"
                raise CheckpointError(
                    f"{path}: {file} holds {key}, but {INDEX} {placed}; files of different models are mixed"
                )
            stored[key] = found
    lost = sorted(set(index or ()) - stored.keys())
    if index is not None and lost:
        raise CheckpointError(
            f"{path}: {INDEX} puts {lost[0]} in {index[lost[0]]}, which does not hold it; files of "
            "different models are mixed, or one is of an older version"
        )
    return stored


def placed_by_index(path: Path) -> dict[str, str] | None:
    """Name -> file; None where all is in one file."""
    try:
        tree = read_table(path / INDEX, most=MOST_INDEX, inside=path, numbers=False)
        placed = {key: str(file) for key, file in table(tree.get("weight_map")).items()}
    except FileNotFoundError:
        if not (path / ONE_FILE).exists():
            raise CheckpointError(
                f"{path} has neither {INDEX} nor {ONE_FILE}; only safetensors are read"
            ) from None
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{told_of(path / INDEX, error)}; download it again") from None
    for file in placed.values():
        if Path(file).name != file or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(
                f"{path}/{INDEX} names {file!r}, which is not a plain name inside the folder"
            )
    return placed


def header_of(path: Path, file: str) -> dict[str, StoredAs]:
    try:
        with safe_open(regular(path / file, inside=path), framework="pt") as opened:
            found = {}
            for key in opened.keys():  # noqa: SIM118  (it is no mapping)
                part = opened.get_slice(key)
                found[key] = StoredAs(file=file, shape=tuple(part.get_shape()), dtype=str(part.get_dtype()))
            return found
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {file} is missing; download it again") from None
    except (SafetensorError, OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(f"{path}: {file} is truncated or damaged ({why}); download it again") from None
