"""What is read, and how documents become samples."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One of several things to read from."""

    files: tuple[str, ...] = ()
    """As data.files."""
    name: str = ""
    """What records call it; empty: source-0, source-1 ..."""
    weight: float = 1.0
    """Its share of all samples, as a part of the sum of weights."""
    field: str = ""
    """As data.field."""
    kind: Literal["", "text", "chat"] = ""
    """As data.kind; empty: the same."""


def source_problems(sources: tuple[SourceConfig, ...], key: str) -> Iterator[str]:
    for number, source in enumerate(sources):
        where = f"{key}[{number}]"
        if not source.files or "" in source.files or any("\0" in name for name in source.files):
            yield f"{where}.files ({list(source.files)}) must name files"
        if not 0 < source.weight < math.inf:
            yield f"{where}.weight ({source.weight}) must be positive; leave a source out that is not read"
    names = [source_name(source, number) for number, source in enumerate(sources)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"{key}: two of them are called {name!r}; give each a name of its own"


def source_name(source: SourceConfig, number: int) -> str:
    return source.name or f"source-{number}"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how it is cut into samples."""

    files: tuple[str, ...] = ()
    """Globs of .txt, .jsonl (.gz, .zst), .parquet, or tokens (.npy, .bin); empty: the standard library."""
    tokenizer: str = ""
    """A `tokenizers` JSON file, or a Hugging Face folder that holds one; empty: bytes."""
    token_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Element type of .bin files."""
    field: str = ""
    """Where records (.jsonl, .parquet) have their text; empty: "text", of conversations "messages"."""
    kind: Literal["text", "chat"] = "text"
    """chat: records are conversations, rendered by the tokenizer's template; the assistant's tokens count."""
    end_of_text: str = "auto"
    """Token behind each document, by name or number; "": none; auto: the tokenizer's own, byte 0 of bytes."""
    documents: Literal["joined", "packed"] = "joined"
    """joined: one long text; packed: positions begin anew in each, and none sees another."""
    source: tuple[SourceConfig, ...] = ()
    """Tables [[data.source]], in the place of data.files: each with files, a weight and a loss of its own."""
    max_record: int = 1 << 26
    """Bytes that a record (a line of .jsonl, a row of .parquet) may have at most."""
    cache: str = "~/.cache/moeclipse"
    """Folder of tokens that were made once."""
    seq_len: int = 128
    batch_size: int = 16
    """Samples per step over all ranks: it does not change with the number of ranks."""
    shuffle: bool = True
    order: Literal["samples", "stream"] = "samples"
    """samples: each stands alone; stream: row b of a step goes on where row b of the step before ended."""

    def problems(self) -> Iterator[str]:
        for name in ("seq_len", "batch_size", "max_record"):
            if getattr(self, name) < 1:
                yield f"data.{name} ({getattr(self, name)}) must be at least 1"
        for name in (self.tokenizer, *self.files):
            if "\0" in name:
                key = "data.tokenizer" if name == self.tokenizer else "data.files"
                yield f"{key} ({name!r}) must be the path of a file"
        if "" in self.files:
            yield "data.files holds an empty name; give paths or globs of files, or an empty list"
        yield from source_problems(self.source, "data.source")
        if not self.tokenizer and any(part.kind == "chat" for part in parts_of(self)):
            yield "data.kind = 'chat' needs data.tokenizer: a folder that has a chat template, too"
        if self.source and self.files:
            yield "data.files and data.source both name what is read; leave one out"
        for key, value in (
            ("data.source", self.source),
            ("data.documents", self.documents == "packed"),
            ("data.kind", self.kind == "chat"),
        ):
            if value and self.order == "stream":
                yield f"{key} cannot go with data.order = 'stream', which reads one long text; leave one out"
        if "\0" in self.cache or not self.cache:
            yield f"data.cache ({self.cache!r}) must be the path of a folder"


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Text that training does not read, and when the loss on it is computed."""

    files: tuple[str, ...] = ()
    """As data.files; nothing of what training reads is held back then."""
    share: float = 0.0
    """Share of the samples of each source that training leaves out, where there are no files."""
    every: int = 100
    """Steps between evaluations; the last step is evaluated, too."""
    samples: int = 0
    """At most so many of each source, from end to end; 0: all."""
    keep_best: bool = True
    """Save a step with the lowest loss so far, and keep it."""

    @property
    def asked_for(self) -> bool:
        return bool(self.files) or self.share > 0

    @property
    def held_out(self) -> float:
        """The share that training leaves out."""
        return 0.0 if self.files else self.share

    def problems(self) -> Iterator[str]:
        if not 0 <= self.share < 1:
            yield f"eval.share ({self.share}) must be at least 0 and below 1"
        if self.every < 1:
            yield f"eval.every ({self.every}) must be at least 1; without eval.files and eval.share: never"
        if self.samples < 0:
            yield f"eval.samples ({self.samples}) must not be negative; 0: all"
        if "" in self.files or any("\0" in name for name in self.files):
            yield f"eval.files ({list(self.files)}) must name files"


def parts_of(config: DataConfig) -> list[DataConfig]:
    """A configuration for each source; itself where there are none."""
    return [
        replace(
            config,
            files=source.files,
            field=source.field or config.field,
            kind=source.kind or config.kind,
            source=(),
        )
        for source in config.source
    ] or [config]


def eval_part(config: DataConfig, held_out: EvalConfig) -> DataConfig:
    """What `eval.files` are read by."""
    return replace(config, files=held_out.files, source=(), shuffle=False)


def all_parts(config: DataConfig, held_out: EvalConfig) -> list[DataConfig]:
    """Everything that a run reads."""
    return [*parts_of(config), *([eval_part(config, held_out)] if held_out.files else [])]
