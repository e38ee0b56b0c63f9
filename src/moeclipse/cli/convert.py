"""`moeclipse convert`: weights from a Hugging Face folder to a checkpoint, and back.

Which way is seen from the first folder: one with config.json is a Hugging Face model, one with manifest.json
(or a run, or its folder of checkpoints: the newest whole one) is a checkpoint.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moeclipse.cli.words import read
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.core.program import command
from moeclipse.core.shown import say
from moeclipse.hf.compose import named
from moeclipse.hf.config_file import is_model_folder

if TYPE_CHECKING:  # torch is loaded when all that can be wrong without it is known
    from moeclipse.train.checkpoints.checkpoint import Checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Turn a Hugging Face model into a checkpoint, or a run into a Hugging Face model."""

    folders: tuple[Path, ...]
    """A folder of a Hugging Face model (config.json, *.safetensors), a checkpoint, or a run; and the folder
    to write, which must not exist. A conversion that was interrupted goes on."""
    family: str = ""
    """To a Hugging Face model: which (mixtral, qwen3_moe, ...); left out: the one that it came from, or the
    first that holds a model trained from scratch."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Of the weights; keep: as they are stored, or as they were in the model a run began from."""
    tokenizer: Path | None = None
    """To a Hugging Face model: take the tokenizer files from this folder."""
    no_tokenizer: bool = False
    """From a Hugging Face model: it may lack a tokenizer."""
    adapter: bool = False
    """From a run with adapters: write these alone, in PEFT's format, instead of merging them."""

    def problems(self) -> Iterator[str]:
        if len(self.folders) != 2:
            see = f"see {command('convert', '--help')}"
            yield f"convert takes two folders, SOURCE and OUT, not {len(self.folders)}; {see}"
        if self.tokenizer is not None and not self.tokenizer.is_dir():
            yield f"tokenizer ({str(self.tokenizer)!r}): no such folder"
        if self.family:
            try:
                named(self.family)
            except ConfigError as error:
                yield from error.problems


def main(words: list[str]) -> int:
    options = read(ConvertOptions, words, "convert", positional="folders", usage="SOURCE OUT")
    if problems := list(options.problems()):
        raise ConfigError(problems)
    source, out = options.folders
    if not source.exists():
        raise ConfigError(f"{source}: there is no such folder")
    if out.exists():
        raise ConfigError(f"{out} exists; choose another folder")
    return convert(options, source, out)


def convert(options: ConvertOptions, source: Path, out: Path) -> int:
    from moeclipse.train.weights.convert import from_hf, to_hf
    from moeclipse.train.weights.lora import save_adapter

    began = time.monotonic()
    if options.adapter:
        count = save_adapter(find_checkpoint(source), out)
        say(f"adapters: {count} tensors, written to {out}")
        return 0
    if is_model_folder(source):
        done = from_hf(source, out, dtype=options.dtype, tokenizer=not options.no_tokenizer)
    else:
        checkpoint = find_checkpoint(source)
        done = to_hf(checkpoint, out, tokenizer=options.tokenizer, dtype=options.dtype, family=options.family)
    kept = f", {done.kept} files kept from an earlier attempt" if done.kept else ""
    seconds = time.monotonic() - began
    say(
        f"{done.family}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, written to {done.path} "
        f"in {seconds:.1f} s{kept}"
    )
    return 0


def find_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, or the newest whole one of a run."""
    from moeclipse.train.checkpoints.checkpoint import Checkpoint, newest
    from moeclipse.train.checkpoints.folder import MANIFEST
    from moeclipse.train.ranks import OneRank

    ranks = OneRank()
    damaged: list[str] = []
    for folder in (path / "checkpoints", path):
        search = newest(folder, ranks) if folder.is_dir() else None
        if search is not None and search.checkpoint is not None:
            return search.checkpoint
        damaged += search.passed_over if search is not None else ()
    if (path / MANIFEST).is_file():
        return Checkpoint.open(path, ranks)
    why = f"no whole checkpoint: {'; '.join(damaged)}" if damaged else "no checkpoint"
    raise CheckpointError(f"{path} has {why}; give the folder of a run, of a checkpoint, or of a model")
