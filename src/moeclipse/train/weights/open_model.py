"""Where a model lies: a run, a checkpoint of one, a converted checkpoint, or a Hugging Face folder.

Idea. What a model is, how its text becomes tokens and how long its texts were stands in different files of
each; `find_model` reads them all into one `FoundModel`, without a weight. `open_weights_of` then opens the
weights, verified, on all ranks together.

Contract. Whatever is missing or does not fit is a ConfigError, CheckpointError or DataError of one line. A
run is read by its own config.toml; what its Hugging Face source or its data were need not be there any more,
but for the tokenizer.

A model that is only read takes what it holds out of a checkpoint or a folder (`load_into`). Training loads
through its optimizer, which owns master weights (`train/optim/adamw`). Whoever only reads a model has none;
each rank reads the slices that its layout asks for, and nothing has to be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeclipse.core.config import build, problems_of, read_toml, table_layer
from moeclipse.core.errors import CheckpointError, ConfigError, DataError
from moeclipse.core.outside import MOST_INDEX, read_bytes, read_json, read_table, told_of
from moeclipse.hf.config_file import byte_tokenizer, config_of, small_files
from moeclipse.hf.folder import HfFolder, Shapes
from moeclipse.hf.names import EACH, Names
from moeclipse.hf.read import read_config
from moeclipse.model.lora_config import NO_LORA, LoraConfig
from moeclipse.moe.config import ExchangeConfig, MoEConfig
from moeclipse.moe.own_loop.standalone import moe_layers
from moeclipse.tensor.cut import cut_of
from moeclipse.train.checkpoints.checkpoint import Checkpoint, newest
from moeclipse.train.checkpoints.folder import INDEX, MANIFEST
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.data_config import DataConfig, parts_of
from moeclipse.train.data.vocabulary import ByteVocabulary, TokenizerVocabulary, Vocabulary, tokenizer_of
from moeclipse.train.documents.tokenizer import MOST_TOKENIZER, end_token, load_tokenizer, tokenizer_file
from moeclipse.train.optim.adamw import Readable
from moeclipse.train.optim.bucket_contents import BucketEntry, entries_of
from moeclipse.train.ranks import Ranks, RanksFailed, together

ENDS = "eos_token_id"
OF_TOKENS = (".npy", ".bin")
"""Files that hold tokens already."""


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """All but the weights."""

    path: Path
    """Of the weights: a folder of checkpoints, a checkpoint, or a Hugging Face folder."""
    shapes: Shapes
    lora: LoraConfig = NO_LORA
    """Adapters beside the weights."""
    tokenizer: str
    """A tokenizer's file; empty: bytes."""
    why_no_text: str = ""
    """Why prompts cannot be tokens without a tokenizer."""
    context: int
    """Tokens of the longest text that the model knows; 0: any."""
    segment: int = 0
    """Of a model with memory (`model/segment_memory`)."""
    ends: frozenset[int] = frozenset()
    """Tokens that end a text."""
    names: Names = EACH
    """What its family calls its parts."""
    special: bool = False
    """Texts begin with what the tokenizer puts there."""
    dtype: str = "auto"

    def vocabulary(self, tokenizer: str = "") -> Vocabulary:
        """`tokenizer`: another file than the model's own."""
        size = self.shapes.model.vocab_size
        if tokenizer or self.tokenizer:
            return TokenizerVocabulary(tokenizer or self.tokenizer, special=self.special)
        if self.why_no_text:
            raise ConfigError(f"{self.path}: {self.why_no_text}; give its tokenizer.json with --tokenizer")
        if size < ByteVocabulary.size:
            raise ConfigError(f"{self.path}: a vocabulary of {size} is too small for bytes; give --tokenizer")
        return ByteVocabulary()


def find_model(path: str | Path) -> FoundModel:
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(
            f"{path}: there is no such folder; give a run, a checkpoint or a Hugging Face model"
        )
    if (path / "config.toml").is_file():
        return of_run(path / "config.toml", path / "checkpoints")
    if (path / MANIFEST).is_file():
        return of_checkpoint(path)
    if (path / "config.json").is_file():
        return of_folder(path)
    raise ConfigError(
        f"{path} is neither a run (config.toml), nor a checkpoint ({MANIFEST}), nor a Hugging Face model "
        "(config.json)"
    )


def of_run(file: Path, weights: Path) -> FoundModel:
    table = read_toml(file)
    table.pop("preset", None)
    layer, problems = table_layer(TrainConfig, table, str(file))
    built = build(TrainConfig, [layer], problems)
    config = built.config
    problems += [text for part in (config.model, config.moe, config.gate) for text in problems_of(part)]
    if problems:
        raise ConfigError(problems)
    return of_configuration(config, weights)


def of_configuration(config: TrainConfig, weights: Path) -> FoundModel:
    """The model that a run trains."""
    source, found = Path(config.model.from_hf), None
    if config.model.from_hf and (source / "config.json").is_file():
        found = of_folder(source)
    data, why = config.data, ""
    files = [name for part in parts_of(data) for name in part.files]
    if any(name.endswith(OF_TOKENS) for name in files) and not data.tokenizer:
        why = "this run was trained on files of tokens, not of text"
    long = data.seq_len if found is None else max(found.context, data.seq_len)
    return FoundModel(
        path=weights,
        shapes=plain(Shapes(model=config.model, moe=config.moe, gate=config.gate)),
        lora=config.lora,
        tokenizer=data.tokenizer,
        why_no_text=why,
        context=0 if config.model.memory else long,
        segment=data.seq_len if config.model.memory else 0,
        ends=end_of_texts(data) if found is None else found.ends | end_of_texts(data),
        names=EACH if found is None else found.names,
        special=found is not None,
        dtype=config.model.dtype,
    )


def end_of_texts(data: DataConfig) -> frozenset[int]:
    """The token that stood behind each document; none where its name is not known here."""
    with suppress(DataError):
        path = tokenizer_file(data.tokenizer) if data.tokenizer else None
        tokenizer = load_tokenizer(path, data.tokenizer) if path is not None else None
        number = end_token(data.end_of_text, tokenizer, path, wanted=True)
        return frozenset() if number < 0 else frozenset({number})
    return frozenset()


def of_checkpoint(path: Path) -> FoundModel:
    """One of a run stands in its `checkpoints`; a converted one says itself what it is."""
    if (file := path.parent.parent / "config.toml").is_file():
        return of_run(file, path)
    try:
        told = read_json(path / INDEX, most=MOST_INDEX, numbers=False)["state"].get("hf")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}/{INDEX} cannot be read: {error!r}") from None
    if not told:
        raise CheckpointError(
            f"checkpoint {path} stands alone, and what model it is stands in the config.toml of its run; "
            "give the run's folder"
        )
    if not isinstance(told, dict) or not isinstance(config := told.get("config"), dict):
        raise CheckpointError(f"{path}/{INDEX} cannot be read: state.hf.config is no table")
    return of_config(path, config)


def of_folder(path: Path) -> FoundModel:
    return of_config(path, config_of(path))


def of_config(path: Path, theirs: Mapping[str, Any]) -> FoundModel:
    read = read_config(theirs, str(path))
    told: dict[str, Any] = dict(theirs)
    if (path / "generation_config.json").is_file():
        try:
            generation = read_table(path / "generation_config.json", inside=path, numbers=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(told_of(path / "generation_config.json", error)) from None
        told |= {ENDS: generation.get(ENDS, told.get(ENDS))}
    ends = told.get(ENDS)
    numbers = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(number) is int for number in numbers):
        raise CheckpointError(f"{path}: {ENDS} must be the number of a token or several, not {ends!r}")
    return FoundModel(
        path=path,
        shapes=plain(Shapes.of(read.values)),
        tokenizer=tokenizer_of(path),
        why_no_text="it has no tokenizer.json",
        context=int(theirs.get("max_position_embeddings") or theirs.get("model_max_length") or 0),
        names=read.family.names,
        ends=frozenset(map(int, numbers)),
        special=True,
    )


def plain(shapes: Shapes) -> Shapes:
    """How rows travelled in training is no part of a model; few rows travel best at once."""
    usual = {name: value for name, value in vars(ExchangeConfig()).items() if name != "kernels"}
    moe: MoEConfig = replace(shapes.moe, **usual)
    return replace(shapes, moe=moe)


def open_weights_of(found: FoundModel, ranks: Ranks) -> Readable:
    """Collective: fails on all ranks or on none."""
    if found.path.name == "checkpoints":
        search = newest(found.path, ranks)
        if search.checkpoint is None:
            damaged = f": {'; '.join(search.passed_over)}" if search.passed_over else ""
            raise CheckpointError(f"{found.path.parent} has no whole checkpoint{damaged}")
        return search.checkpoint
    if (found.path / MANIFEST).is_file():
        return Checkpoint.open(found.path, ranks)
    folders: list[HfFolder] = []
    try:
        together(ranks, lambda: folders.append(HfFolder.open(found.path, ranks.rank, ranks.num_ranks)))
    except RanksFailed as error:
        raise CheckpointError(str(error)) from None
    return folders[0]


def tokenizer_parts(found: FoundModel) -> dict[str, bytes]:
    """Files of a Hugging Face folder that say how this model's tokens are made; of bytes, one of our own."""
    if found.tokenizer:
        path = tokenizer_file(found.tokenizer)
        if path is None:
            raise CheckpointError(
                f"{found.tokenizer}: the run's tokenizer is gone; give another with --tokenizer"
            )
        beside = small_files(path.parent, tokenizer=False) if path.name == "tokenizer.json" else {}
        return beside | {"tokenizer.json": read_bytes(path, most=MOST_TOKENIZER)}
    return {} if found.why_no_text else byte_tokenizer()


def load_into(model: nn.Module, source: Readable) -> None:
    """All parameters, and the buffers that `source` has."""
    with torch.no_grad():
        for parameter, entries in parameters_by_name(model):
            flat = parameter.view(-1)
            for entry in entries:
                stop = entry.start + entry.numel
                data = source.read(f"weight/{entry.name}", entry.start, stop)
                if data is not None:  # a new part of a model begins as it was made
                    flat[entry.offset : entry.offset + entry.numel] = data.to(flat.device, flat.dtype)
        kept = set(model.state_dict())
        for name, buffer in model.named_buffers():
            data = source.read(f"buffer/{name}") if name in kept and f"buffer/{name}" in source else None
            if data is not None:
                buffer.copy_(data.view(buffer.shape))


def parameters_by_name(model: nn.Module) -> list[tuple[nn.Parameter, list[BucketEntry]]]:
    """Each parameter, and the parts of logical tensors that it is made of."""
    stacked = {
        id(parameter): (f"{name}." if name else "", layer, key)
        for name, layer in moe_layers(model)
        for key, parameter in layer.experts.named_parameters()
    }
    found = []
    for name, parameter in model.named_parameters():
        if id(parameter) in stacked:
            prefix, layer, key = stacked[id(parameter)]
            shape = tuple(parameter.shape[1:])
            entries = [
                entry
                for slot, expert in enumerate(layer.experts.ids)
                for entry in entries_of(
                    f"{prefix}experts.{expert}.{key}", shape, slot * prod(shape), cut_of(parameter)
                )
            ]
        else:
            entries = list(entries_of(name, tuple(parameter.shape), 0, cut_of(parameter)))
        found.append((parameter, entries))
    return found
