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

from moeclipse.core.config import build, flag_layer
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.core.program import command
from moeclipse.core.shown import say
from moeclipse.hf.compose import named

if TYPE_CHECKING:  # torch is loaded when all that can be wrong without it is known
    from moeclipse.train.checkpoints.checkpoint import Checkpoint

HELP = """usage: moeclipse convert SOURCE OUT [options]

  SOURCE               a folder of a Hugging Face model (config.json, *.safetensors), a checkpoint, or a run
  OUT                  the folder to write; it must not exist. A conversion that was interrupted goes on.

  --family NAME        to a Hugging Face model: which (mixtral, qwen3_moe, ...); left out: the one that it
                       came from, or the first that holds a model trained from scratch
  --dtype NAME         of the weights: keep (the default), float32, bfloat16 or float16
  --tokenizer DIR      to a Hugging Face model: take the tokenizer files from this folder
  --no-tokenizer       from a Hugging Face model: it may lack a tokenizer
  --adapter            from a run with adapters: write these alone, in PEFT's format, instead of merging them
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What the command takes besides the two folders."""

    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Of the weights; keep: as they are stored, or as they were in the model a run began from."""
    tokenizer: str = ""
    """A folder with tokenizer files."""
    family: str = ""
    """Of the Hugging Face model that is written."""
    no_tokenizer: bool = False
    """A source without a tokenizer is converted all the same."""
    adapter: bool = False
    """Adapters alone, in PEFT's format."""

    def problems(self) -> Iterator[str]:
        if self.tokenizer and not Path(self.tokenizer).is_dir():
            yield f"tokenizer ({self.tokenizer!r}): no such folder"


def main(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        say(HELP.rstrip())
        return 0
    options, source, out = read_words(words)
    if not source.exists():
        raise ConfigError(f"{source}: there is no such folder")
    if out.exists():
        raise ConfigError(f"{out} exists; choose another folder")
    try:
        return convert(options, source, out)
    except CheckpointError as error:  # all that it reads was given on the command line
        raise ConfigError(str(error)) from error


def convert(options: ConvertOptions, source: Path, out: Path) -> int:
    from moeclipse.train.weights.convert import from_hf, to_hf
    from moeclipse.train.weights.lora import save_adapter

    began = time.monotonic()
    if options.adapter:
        count = save_adapter(find_checkpoint(source), out)
        say(f"adapters: {count} tensors, written to {out}")
        return 0
    if (source / "config.json").exists() and not (source / "manifest.json").exists():
        done = from_hf(source, out, dtype=options.dtype, tokenizer=not options.no_tokenizer)
    else:
        tokenizer = Path(options.tokenizer) if options.tokenizer else None
        checkpoint = find_checkpoint(source)
        done = to_hf(checkpoint, out, tokenizer=tokenizer, dtype=options.dtype, family=options.family)
    kept = f", {done.kept} files kept from an earlier attempt" if done.kept else ""
    seconds = time.monotonic() - began
    say(
        f"{done.family}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, written to {done.path} "
        f"in {seconds:.1f} s{kept}"
    )
    return 0


def read_words(words: list[str]) -> tuple[ConvertOptions, Path, Path]:
    folders: list[str] = []
    flags: list[str] = []
    for place, word in enumerate(words):
        takes_value = place > 0 and words[place - 1] in ("--dtype", "--tokenizer", "--family")
        (flags if word.startswith("-") or takes_value else folders).append(word)
    layer, problems = flag_layer(ConvertOptions, flags)
    options = build(ConvertOptions, [layer], problems)
    found = list(options.problems)
    if len(folders) != 2:
        found.append(
            f"convert takes two folders, SOURCE and OUT, not {len(folders)}; "
            f"see {command('convert', '--help')}"
        )
    if options.config.family:
        try:
            named(options.config.family)
        except ConfigError as error:
            found += error.problems
    if found:
        raise ConfigError(found)
    return options.config, Path(folders[0]), Path(folders[1])


def find_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, or the newest whole one of a run."""
    from moeclipse.train.checkpoints.checkpoint import Checkpoint, newest
    from moeclipse.train.ranks import OneRank

    ranks = OneRank()
    for folder in (path / "checkpoints", path):
        search = newest(folder, ranks) if folder.is_dir() else None
        if search is not None and search.checkpoint is not None:
            return search.checkpoint
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such folder")
    return Checkpoint.open(path, ranks)
