"""`moeclipse generate`: text from a run, a checkpoint or a Hugging Face model, shown as it is written.

One rank is this process. With `--ranks N` the launcher of `moeclipse train` starts N of them; under torchrun
this process is the rank that the environment names. Rank 0 shows the texts: each is streamed, one after the
other in the order of prompts, although all are written at once.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from moeclipse.cli.failures import await_culprit, describe, show_failure, write_failure
from moeclipse.core.config import build, flag_layer
from moeclipse.core.errors import ConfigError
from moeclipse.core.shown import say, visible
from moeclipse.model.sampling_config import GenerateConfig

if TYPE_CHECKING:
    from moeclipse.comm.mesh import Mesh
    from moeclipse.train.generate.text import TextPiece
    from moeclipse.train.weights.open_model import FoundModel

HELP = """usage: moeclipse generate MODEL --prompt TEXT [TEXT ...] [flags]

  MODEL                a run's folder, a checkpoint, or a folder of a Hugging Face model
  --prompt TEXT ...    what the text begins with; several are continued at once

  --max-tokens N       tokens to write after each prompt (200, or what the model's context leaves)
  --temperature X      1.0; lower is more careful, 0 always takes the most likely token
  --top-k N            choose among the N most likely tokens (0: all)
  --top-p X            choose among the fewest tokens that hold this probability (1.0: all)
  --stop TEXT ...      end before any of these strings
  --chat               prompts are what a user says; the tokenizer's chat template frames them
  --seed N             another number, another text (0)
  --context N          longest text in tokens, prompt included (what the model was trained on)
  --tokenizer FILE     a tokenizer.json, where the model has none
  --adapter DIR ...    folders in PEFT's format, beside a model without adapters; each writes in turn
  --base NAME          how experts' matrices are kept: auto (as in the run), bf16, nf4, mxfp4 or fp8
  --dense-base NAME    the same for those of attention, dense layers and shared experts
  --dtype NAME         auto (the run's), float32, bfloat16, float16 or float64
  --device NAME        auto, cpu or cuda
  --ranks N            share the experts out over N processes of this machine (1)
  --tp N               so many ranks share each dense weight matrix (1)
"""
MARK = "\033[2m{}\033[0m"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerateConfig):
    """What the command takes."""

    model: str = ""
    """A run's folder, a checkpoint, or a folder of a Hugging Face model."""
    prompt: tuple[str, ...] = ()
    """What the texts begin with."""
    tokenizer: str = ""
    """A tokenizer.json, where the model has none."""
    adapter: tuple[str, ...] = ()
    """Folders in PEFT's format, each of which writes."""
    base: Literal["auto", "bf16", "nf4", "mxfp4", "fp8"] = "auto"
    """How experts' matrices are kept; auto: as in the run."""
    dense_base: Literal["auto", "bf16", "nf4", "mxfp4", "fp8"] = "auto"
    """The same for dense ones."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Of weights; auto: that of the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: int = 1
    """Processes to start here."""
    tp: int = 1
    """Ranks that share each dense weight matrix."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.model:
            yield "which model? give the folder of a run or of a Hugging Face model before --prompt"
        if not self.prompt:
            yield "there is no prompt; add --prompt TEXT"
        if any(not text for text in self.prompt):
            yield "a prompt is empty; give it at least one character"
        for name in ("ranks", "tp"):
            if getattr(self, name) < 1:
                yield f"{name} ({getattr(self, name)}) must be at least 1"

    @property
    def writing(self) -> dict[str, Any]:
        """The options of the texts themselves."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(GenerateConfig)}


NO_FOLDER = "{}: there is no such folder; give a run, a checkpoint or a Hugging Face model"


def main(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        say(HELP.rstrip())
        return 0
    layer, problems = flag_layer(GenerateOptions, words, positional="model")
    built = build(GenerateOptions, [layer], problems)
    if built.problems:
        raise ConfigError(built.problems)
    options = built.config
    if not Path(options.model).is_dir():
        raise ConfigError(NO_FOLDER.format(options.model))
    from moeclipse.train.weights.open_model import find_model

    found = find_model(options.model)
    joined = "WORLD_SIZE" in os.environ
    num_ranks = int(os.environ["WORLD_SIZE"]) if joined else options.ranks
    layout(found, num_ranks, options.tp)
    if joined and num_ranks > 1:
        return write_as_rank(options, found)
    if num_ranks > 1:
        from moeclipse.cli.launch import launch_words

        return launch_words(["generate", *words], num_ranks)
    show(options, None, sys.stdout)
    return 0


def layout(found: FoundModel, num_ranks: int, tp: int) -> tuple[int, int]:
    """(dp, ep): experts over as many ranks as there can be."""
    from moeclipse.comm.config import ParallelConfig

    moe, model = found.shapes.moe, found.shapes.model
    heads = model.num_kv_heads if model.attention == "gqa" else model.num_heads
    if model.held_mixers & {"gated_delta", "kimi_delta"}:
        heads = min(heads, model.delta_key_heads)
    if tp > heads:
        raise ConfigError(
            f"tp ({tp}) must be at most {heads}, the model's heads of keys: every rank holds one"
        )
    try:
        return ParallelConfig(tp=tp).sizes(num_ranks, moe.num_experts, moe.expert_tp)
    except ValueError as error:
        raise ConfigError(str(error).replace("parallel.", "")) from None


def write_as_rank(options: GenerateOptions, found: FoundModel) -> int:
    """As one of several ranks."""
    from moeclipse.cli.launch import LAUNCHER
    from moeclipse.comm.mesh import Mesh
    from moeclipse.comm.start import RankPlace, choose_device, start, stop

    place = RankPlace.read()
    try:
        device = choose_device(options.device, place.local_rank)
        watch = start(place, device=device)
        try:
            dp, ep = layout(found, place.num_ranks, options.tp)
            mesh = Mesh(dp=dp, ep=ep, tp=options.tp, rank=place.rank, device=device, watch=watch)
            show(options, mesh, sys.stdout if place.rank == 0 else None)
        except BaseException as error:
            watch.publish(str(error))
            raise
        finally:
            stop()
    except Exception as error:
        failure = describe(error, place.rank)
        write_failure(failure)
        if failure.victim:
            await_culprit()
        if LAUNCHER not in os.environ:
            show_failure(failure, named=True)
        return failure.code
    return 0


def show(options: GenerateOptions, mesh: Mesh | None, out: TextIO | None) -> None:
    """Load, write, and print on the rank that has somewhere to print."""
    from moeclipse.train.generate.text import load_model

    given: dict[str, Any] = {"device": options.device, "dtype": options.dtype, "tokenizer": options.tokenizer}
    kept = {"base": options.base, "dense_base": options.dense_base}
    given |= {name: kind for name, kind in kept.items() if kind != "auto"}
    model = load_model(options.model, mesh=mesh, adapters={name: name for name in options.adapter}, **given)
    for name in options.adapter or ("",):
        if name:
            model.use(name)
        pieces = model.stream(options.prompt, **options.writing)
        if out is None:
            for _ in pieces:
                pass
            continue
        if len(options.adapter) > 1:
            out.write(f"=== {visible(name)}\n")
        for text in in_order(options.prompt, pieces, dim=out.isatty()):
            out.write(text)
            out.flush()


def in_order(prompts: tuple[str, ...], pieces: Iterable[TextPiece], *, dim: bool) -> Iterator[str]:
    """What to print, piece by piece: the texts in order, each behind its prompt; later ones wait.

    `dim`: on a terminal, which prompts are dimmed on, and which texts must not drive.
    """
    waiting, ended, shown = [""] * len(prompts), [False] * len(prompts), 0
    yield head(prompts, 0, dim=dim)
    for piece in pieces:
        waiting[piece.row] += piece.text
        ended[piece.row] |= bool(piece.ended)
        while shown < len(prompts):
            text, waiting[shown] = waiting[shown], ""
            if text:
                yield visible(text, lines=True) if dim else text
            if not ended[shown]:
                break
            shown += 1
            yield "\n" if shown == len(prompts) else f"\n{head(prompts, shown, dim=dim)}"


def head(prompts: tuple[str, ...], number: int, *, dim: bool) -> str:
    """The prompt, told apart from the text where the terminal can; several are numbered."""
    title = f"--- {number + 1} of {len(prompts)}\n" if len(prompts) > 1 else ""
    return title + (MARK.format(visible(prompts[number], lines=True)) if dim else prompts[number])
