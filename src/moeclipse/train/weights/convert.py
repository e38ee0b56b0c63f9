"""Weights from a Hugging Face folder to a checkpoint, and from a checkpoint to a Hugging Face folder.

Both stream: to a checkpoint layer by layer, to a folder tensor by tensor. Both are staged
(`train/weights/staging`): an interrupted conversion goes on where it was, and a folder with the wanted name
is whole. What came from a folder and was not trained goes back bit by bit.

A converted checkpoint holds weights and no state of an optimizer: a run begins from it (`run.init_from`), and
none is resumed from it. In `state["hf"]` it remembers the folder's config.json and the types of its tensors;
so does a run that began from a folder, and this is what turns its checkpoints into folders again. For one
that began from nothing the family is found by its configuration (`hf/compose`). Quantised tensors are
expanded, and stay so, also where a run kept its base in few bits; adapters are merged.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from moeclipse.core.config import to_flat
from moeclipse.core.errors import CheckpointError
from moeclipse.core.outside import read_bytes
from moeclipse.hf.compose import compose, named
from moeclipse.hf.config_file import CONFIG, small_files
from moeclipse.hf.folder import HfFolder, Shapes
from moeclipse.hf.manifest import MANIFEST as HF_MANIFEST
from moeclipse.hf.manifest import encode
from moeclipse.hf.names import tensor_table
from moeclipse.hf.read import read_config
from moeclipse.hf.row_ranges import LogicalTensor
from moeclipse.hf.write import (
    CODES,
    SHARD_BYTES,
    Outline,
    assemble,
    chunks_of,
    index_of,
    shards_of,
    sources_of,
)
from moeclipse.model.lora_config import is_adapter
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.checkpoints.disk import DISK, Disk
from moeclipse.train.checkpoints.folder import INDEX, MANIFEST
from moeclipse.train.checkpoints.manifest import HfState, build_index, encode_manifest
from moeclipse.train.checkpoints.shard import DTYPES, Piece, Shard
from moeclipse.train.weights.base import DecodedWeights
from moeclipse.train.weights.lora import MergedWeights
from moeclipse.train.weights.open_model import FoundModel, of_checkpoint, tokenizer_parts
from moeclipse.train.weights.staging import StagedFolder

EXTRA = "extra/"
"""Before the names of tensors that take no part in training."""
OF_TRAINING = (".noise_weight",)
"""Ends of the names of weights that nothing reads outside of training."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion did."""

    path: Path
    family: str
    num_tensors: int
    num_bytes: int
    kept: int
    """Files that an earlier attempt had written."""


def hf_state(folder: HfFolder) -> HfState:
    kinds = Counter(found.dtype for found in folder.stored.values())
    usual = kinds.most_common(1)[0][0]
    others = {key: found.dtype for key, found in folder.stored.items() if found.dtype != usual}
    config = {key: value for key, value in folder.theirs.items() if key != "quantization_config"}
    return {"config": config, "dtype": usual, "dtypes": others}


# --- from a folder ---------------------------------------------------------------------------------------


def from_hf(
    source: Path, out: Path, *, dtype: str = "keep", tokenizer: bool = True, disk: Disk = DISK
) -> Converted:
    folder = HfFolder.open(source)
    small = small_files(source, tokenizer=tokenizer)
    staged = StagedFolder(out, job_of("checkpoint", dtype, identity(folder)), disk)
    records, num_bytes = [], 0
    for file, names in files_of(folder):
        kinds = {name: stored_dtype(folder, name, dtype) for name in names}
        shard = Shard(
            Piece(
                name=name,
                shape=shape_of(folder, name),
                start=0,
                data=torch.empty(shape_of(folder, name), dtype=kind, device="meta").flatten(),
            )
            for name, kind in kinds.items()
        )
        staged.add(file, partial(layer_chunks, folder, kinds))
        records.append((file, shard.records()))
        num_bytes += shard.num_bytes
    state = {"weights_only": True, "hf": hf_state(folder)}
    for name, data in small.items():
        staged.add_bytes(name, data)
    index = build_index(records, state)
    staged.add_bytes(INDEX, index.encode())
    staged.add_bytes(MANIFEST, encode_manifest(staged.files))
    count = sum(len(pieces) for _, pieces in records)
    path = staged.commit()
    return Converted(
        path=path, family=folder.family.title, num_tensors=count, num_bytes=num_bytes, kept=staged.kept
    )


def files_of(folder: HfFolder) -> Iterator[tuple[str, list[str]]]:
    """(file, its tensors): one for each layer, one for what is outside, one for what takes no part."""

    def layer(name: str) -> int:
        words = name.split("/", 1)[1].split(".")
        return int(words[1]) if words[0] == "layers" else -1

    for number, names in groupby(sorted(folder.table, key=lambda name: (layer(name), name)), key=layer):
        yield ("outside.safetensors" if number < 0 else f"layer-{number:05d}.safetensors"), list(names)
    if folder.extra:
        yield "extra.safetensors", [EXTRA + key for key in folder.extra]


def shape_of(folder: HfFolder, name: str) -> tuple[int, ...]:
    if name.startswith(EXTRA):
        return folder.stored[name.removeprefix(EXTRA)].shape
    return folder.table[name].shape


def stored_dtype(folder: HfFolder, name: str, wanted: str) -> torch.dtype:
    keys = (
        [name.removeprefix(EXTRA)]
        if name.startswith(EXTRA)
        else [part.key for part in folder.table[name].parts]
    )
    kinds = sorted({folder.stored[key].dtype for key in keys})
    if len(kinds) > 1 or kinds[0] not in DTYPES:
        raise CheckpointError(
            f"{folder.path}: {keys[0]} is stored as {' and '.join(kinds)}, which is not read; "
            f"give a folder with one of {', '.join(CODES.values())}"
        )
    found = DTYPES[kinds[0]]
    changes = wanted != "keep" and found.is_floating_point and name.startswith("weight/")
    return getattr(torch, wanted) if changes else found


def layer_chunks(folder: HfFolder, kinds: Mapping[str, torch.dtype]) -> Iterator[memoryview]:
    """The bytes of one file; its tensors are read now."""

    def data(name: str, kind: torch.dtype) -> torch.Tensor:
        raw = folder.whole(name.removeprefix(EXTRA)) if name.startswith(EXTRA) else folder.read(name)
        return raw.to(kind).contiguous().flatten()

    return Shard(
        Piece(name=name, shape=shape_of(folder, name), start=0, data=data(name, kind))
        for name, kind in kinds.items()
    ).chunks()


def identity(folder: HfFolder) -> list[object]:
    """What tells this folder from another, without reading it all."""
    files = sorted({found.file for found in folder.files.values()})
    sizes = [
        (file, (folder.path / file).stat().st_size, (folder.path / file).stat().st_mtime_ns) for file in files
    ]
    return [str(folder.path.absolute()), dict(folder.theirs), sizes]


def job_of(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


# --- to a folder -----------------------------------------------------------------------------------------


def to_hf(
    checkpoint: Checkpoint,
    out: Path,
    *,
    dtype: str = "keep",
    tokenizer: Path | None = None,
    family: str = "",
    most: int = SHARD_BYTES,
    disk: Disk = DISK,
) -> Converted:
    """`tokenizer`: a folder whose tokenizer files are copied; left out: those that the checkpoint carries.

    `family`: another than the one it came from, or than the first that holds its configuration.
    """
    told = checkpoint.state.get("hf")
    parts: dict[str, bytes] = {}
    if not told or (family and named(family).model_type != told["config"].get("model_type")):
        found = of_checkpoint(checkpoint.path)
        told = told_of_scratch(found, checkpoint, family)
        parts = {} if tokenizer else tokenizer_parts(found)
    read = read_config(told["config"], str(checkpoint.path))
    shapes = Shapes.of(read.values)
    table = tensor_table(read.family.names, shapes.model, shapes.moe, shapes.gate)
    weights = DecodedWeights(checkpoint)
    check_tensors(weights, table, whole=not checkpoint.state.get("hf"))
    sources, merged = sources_of(table), MergedWeights(weights)
    extra = [name.removeprefix(EXTRA) for name in checkpoint.names if name.startswith(EXTRA)]

    def outline(key: str) -> Outline:
        kind = DTYPES[told["dtypes"].get(key, told["dtype"])]
        if dtype != "keep" and key in sources and not sources[key][0].name.startswith("buffer/"):
            kind = getattr(torch, dtype)
        shape = sources[key][0].part.shape if key in sources else checkpoint.shape(EXTRA + key)
        return Outline(key=key, shape=shape, dtype=kind)

    def load(tensor: Outline) -> torch.Tensor:
        if tensor.key in sources:
            return assemble(sources[tensor.key], merged.read, tensor.dtype)
        return checkpoint.read(EXTRA + tensor.key).view(tensor.shape)

    shards = shards_of([outline(key) for key in (*sources, *extra)], most)
    origin = tokenizer or checkpoint.path
    manifest = hashlib.sha256(read_bytes(checkpoint.path / MANIFEST)).hexdigest()
    facts = [str(checkpoint.path.absolute()), manifest, dtype, most, str(origin), read.family.model_type]
    staged = StagedFolder(out, job_of("folder", *facts), disk)
    for file, tensors in shards.items():
        staged.add(file, partial(chunks_of, tensors, load))
    for name, data in (index_of(shards) | parts | small_parts(told["config"], dtype, origin)).items():
        staged.add_bytes(name, data)
    hashes = {name: written.sha256 for name, written in staged.files.items()}
    staged.add_bytes(HF_MANIFEST, encode(hashes))
    return Converted(
        path=staged.commit(),
        family=read.family.title,
        num_tensors=sum(map(len, shards.values())),
        num_bytes=sum(tensor.num_bytes for group in shards.values() for tensor in group),
        kept=staged.kept,
    )


def told_of_scratch(found: FoundModel, checkpoint: Checkpoint, family: str) -> HfState:
    """What `hf_state` would say of a model that never was a folder."""
    shapes, ends = found.shapes, sorted(found.ends)
    context = found.context or found.segment
    run = checkpoint.path.parent.parent
    fit = compose(to_flat(shapes), context=context, family=family, where=str(run))
    kind = str((checkpoint.state.get("fingerprint") or {}).get("model", {}).get("dtype", "float32"))
    tokens = {"bos_token_id": None, "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    config = {**fit.config, **tokens, "pad_token_id": None, "dtype": kind, "use_cache": True}
    return {"config": config, "dtype": CODES[getattr(torch, kind)], "dtypes": {}}


def check_tensors(
    checkpoint: DecodedWeights, table: Mapping[str, LogicalTensor], *, whole: bool = False
) -> None:
    """All that the folder needs is there, in its shape; `whole`: and nothing else to compute with."""
    for name, tensor in table.items():
        if name not in checkpoint:
            raise CheckpointError(f"checkpoint {checkpoint.path} has no tensor {name!r}; it is another model")
        if checkpoint.shape(name) != tensor.shape:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: {name} has shape {list(checkpoint.shape(name))}, its "
                f"config.json asks for {list(tensor.shape)}"
            )
    for name in checkpoint.checkpoint.names if whole else ():
        known = name in table or name.rpartition(".")[0] in table  # itself, or a part of it in few bits
        known = known or is_adapter(name) or name.endswith(OF_TRAINING)
        choice = name.startswith("buffer/") and name.endswith(".bias_E")
        if (
            known
            or not name.startswith(("weight/", "buffer/"))
            or (choice and not checkpoint.read(name).any())
        ):
            continue
        why = "is not zero" if choice else "has no place"
        raise CheckpointError(f"checkpoint {checkpoint.path}: {name} {why} in a model of this family")


def small_parts(config: Mapping[str, object], dtype: str, origin: Path) -> dict[str, bytes]:
    """config.json, with the type of the weights, and the tokenizer."""
    tree = dict(config)
    if dtype != "keep":
        tree["dtype"] = dtype
        tree.pop("torch_dtype", None)
    found = small_files(origin, tokenizer=False)
    return {CONFIG: json.dumps(tree, indent=2).encode() + b"\n", **found}
