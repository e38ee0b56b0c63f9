"""What a checkpoint's folder must contain: the index of tensors and the manifest of files.

    index.json      logical tensor -> shape, dtype, pieces {file, key, start, stop}; and the JSON `state`
    manifest.json   size and SHA-256 of every other file, and a SHA-256 of the manifest itself

Contract. `inspect` changes nothing, raises nothing and names every damage it finds: which file, and whether
it is missing, truncated or different. What it accepts can be read without looking outside the folder: files
are plain names that the manifest lists, each a regular file, and the pieces of a tensor cover it exactly
once. The folder itself is the user's to name, and may be reached by a link.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from moeclipse.core.errors import CheckpointError
from moeclipse.core.outside import parse_json
from moeclipse.train.checkpoints.disk import Written, file_damage, open_regular
from moeclipse.train.checkpoints.folder import INDEX, MANIFEST, checkpoints_in
from moeclipse.train.checkpoints.shard import DTYPES, PieceRecord

FORMAT = "moeclipse checkpoint"
VERSION = 1
MAX_MANIFEST = 1 << 28
"""Bytes; a file takes some 150 of them, so this is a checkpoint of more than a million ranks."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What foreign JSON can raise on its way into our terms."""


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """Elements [start, stop) of a tensor lie in `file` under `key`."""

    file: str
    key: str
    start: int
    stop: int


class PieceEntry(TypedDict):
    """The same as JSON."""

    file: str
    key: str
    start: int
    stop: int


class TensorEntry(TypedDict):
    shape: list[int]
    dtype: str
    pieces: list[PieceEntry]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]
    """Ordered by start; together exactly [0, number of elements)."""


class HfState(TypedDict):
    """What a checkpoint must know to become a Hugging Face folder again."""

    config: dict[str, Any]
    dtype: str
    dtypes: dict[str, str]


class RunState(TypedDict):
    """What a checkpoint of a run says besides tensors (`train/step/checkpointed_state`)."""

    step: int
    updates: int
    bad_steps: int
    loss_scale: NotRequired[dict[str, float]]
    seed: int
    data: dict[str, Any]
    fingerprint: NotRequired[dict[str, Any]]
    exchange: list[Any]
    placement: NotRequired[Any]
    plan: NotRequired[Any]
    hf: NotRequired[HfState]


@dataclass(frozen=True, kw_only=True)
class Index:
    tensors: Mapping[str, StoredTensor]
    state: Mapping[str, object]

    def encode(self) -> bytes:
        tensors = {
            name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "pieces": [vars(piece) for piece in tensor.pieces],
            }
            for name, tensor in sorted(self.tensors.items())
        }
        return json.dumps({"state": self.state, "tensors": tensors}, indent=1).encode()


def build_index(records: Iterable[tuple[str, list[PieceRecord]]], state: Mapping[str, object]) -> Index:
    """The index from (file, piece records) of all ranks; every tensor must be covered exactly once."""
    merged: dict[str, TensorEntry] = {}
    for file, pieces in records:
        for piece in pieces:
            fresh: TensorEntry = {"shape": piece["shape"], "dtype": piece["dtype"], "pieces": []}
            known = merged.setdefault(piece["name"], fresh)
            if (fresh["shape"], fresh["dtype"]) != (known["shape"], known["dtype"]):
                raise CheckpointError(
                    f"tensor {piece['name']!r} is {known['dtype']} {known['shape']} on one rank and "
                    f"{piece['dtype']} {piece['shape']} on another; all ranks must agree"
                )
            if piece["stop"] > piece["start"]:
                part: PieceEntry = {
                    "file": file,
                    "key": piece["key"],
                    "start": piece["start"],
                    "stop": piece["stop"],
                }
                known["pieces"].append(part)
    return Index(tensors={name: _tensor(name, entry) for name, entry in merged.items()}, state=state)


def _tensor(name: str, entry: TensorEntry) -> StoredTensor:
    pieces = sorted((StoredPiece(**piece) for piece in entry["pieces"]), key=lambda piece: piece.start)
    numel = prod(entry["shape"])
    numbers = [*entry["shape"], *(edge for piece in pieces for edge in (piece.start, piece.stop))]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise CheckpointError(f"tensor {name!r} has sizes or positions that are not whole numbers: {numbers}")
    edges = [(0, 0), *((piece.start, piece.stop) for piece in pieces), (numel, numel)]
    for (_, before), (start, stop) in pairwise(edges):
        if before != start or stop > numel:
            fault = "missing" if before < start else "given twice"
            first, last = min(before, start), max(before, start)
            raise CheckpointError(
                f"tensor {name!r} of shape {list(entry['shape'])}: elements [{first}, {last}) are {fault}; "
                f"its pieces must cover it exactly once"
            )
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"tensor {name!r} has the unknown dtype {entry['dtype']!r}")
    return StoredTensor(shape=tuple(entry["shape"]), dtype=entry["dtype"], pieces=tuple(pieces))


def encode_manifest(files: Mapping[str, Written]) -> bytes:
    """The manifest's bytes; there is exactly one way to write it, so that any changed byte shows."""
    body = {"format": FORMAT, "version": VERSION, "files": {n: vars(f) for n, f in sorted(files.items())}}
    return _encode(body)


def _encode(body: Mapping[str, object]) -> bytes:
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "checksum": checksum}, indent=1, sort_keys=True).encode() + b"\n"


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What one rank found; `index` and `manifest_sha256` are missing when it could not read them."""

    damage: tuple[str, ...]
    index: Index | None = None
    manifest_sha256: str = ""


def inspect(path: Path, share: int = 0, num_shares: int = 1) -> Inspection:
    """Reads manifest and index, and verifies shards share, share + num_shares, ... of a checkpoint."""
    try:
        raw = _read_manifest(path)
        files = _decode_manifest(raw)
        index = _decode_index(_verified_index(path, files), files)
    except FileNotFoundError as error:
        return Inspection(damage=(_missing(path, Path(error.filename).name),))
    except OSError as error:
        return Inspection(damage=(f"{Path(error.filename or path).name} cannot be read: {error.strerror}",))
    except CheckpointError as error:
        return Inspection(damage=(str(error),))
    shards = sorted(set(files) - {INDEX})[share::num_shares]
    damage = [text for name in shards if (text := file_damage(path / name, files[name]))]
    return Inspection(damage=tuple(damage), index=index, manifest_sha256=hashlib.sha256(raw).hexdigest())


def _read_manifest(path: Path) -> bytes:
    with open_regular(path / MANIFEST) as file:
        raw = file.read(MAX_MANIFEST + 1)
    if len(raw) > MAX_MANIFEST:
        raise CheckpointError(f"{MANIFEST} has grown beyond {MAX_MANIFEST} bytes, which none needs")
    return raw


def _missing(path: Path, name: str) -> str:
    if not path.is_dir():
        return "there is no such folder"
    inside = checkpoints_in(path)
    if inside:
        return f"it holds checkpoints but is none itself; give {inside[0].path}"
    return f"{name} is missing"


def _decode_manifest(raw: bytes) -> dict[str, Written]:
    try:
        tree = parse_json(raw, numbers=False)
        version = tree["version"] if tree["format"] == FORMAT else None
        body = {key: value for key, value in tree.items() if key != "checksum"}
        whole = _encode(body) == raw
        files = {
            str(name): Written(size=entry["size"], sha256=entry["sha256"])
            for name, entry in tree["files"].items()
        }
    except UNREADABLE:
        raise CheckpointError(f"{MANIFEST} is truncated or has changed (it is not readable)") from None
    if not whole:
        raise CheckpointError(f"{MANIFEST} has changed (it differs from its own checksum)")
    if version != VERSION:
        raise CheckpointError(
            f"{MANIFEST} has format version {version}; this MoEclipse reads version {VERSION}"
        )
    for name, file in files.items():
        if type(file.size) is not int or file.size < 0 or not isinstance(file.sha256, str):
            raise CheckpointError(
                f"{MANIFEST} gives {name!r} the size {file.size!r} and the SHA-256 {file.sha256!r}, "
                "which are not a number of bytes and a text"
            )
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise CheckpointError(
                f"{MANIFEST} names the file {name!r}, which is not a plain name inside the folder"
            )
    if INDEX not in files:
        raise CheckpointError(f"{MANIFEST} does not list {INDEX}")
    return files


def _verified_index(path: Path, files: Mapping[str, Written]) -> bytes:
    damage = file_damage(path / INDEX, files[INDEX])
    if damage:
        raise CheckpointError(damage)
    with open_regular(path / INDEX) as file:
        return file.read()


def _decode_index(raw: bytes, files: Mapping[str, Written]) -> Index:
    try:
        tree = parse_json(raw, numbers=False)
        tensors = {name: _tensor(name, entry) for name, entry in tree["tensors"].items()}
        index = Index(tensors=tensors, state=dict(tree["state"]))
    except UNREADABLE as error:
        raise CheckpointError(f"{INDEX} is not a checkpoint's index: {error!r}") from None
    for name, tensor in index.tensors.items():
        for piece in tensor.pieces:
            if piece.file not in files or piece.file == INDEX:
                raise CheckpointError(
                    f"{INDEX} places tensor {name!r} in {piece.file!r}, which is no file of this checkpoint"
                )
    return index
