"""Text from a model: prompts in, what follows them out, token by token.

    model = moeclipse.load_model("runs/NAME")                  # or a checkpoint, or a Hugging Face folder
    texts = model.generate(["def f(", "import "], max_tokens=40, temperature=0.8)
    for piece in model.stream(["def f("], stop=("\\n\\n",)):
        print(piece.text, end="", flush=True)

Idea. All rows go on together, one token a step (`model/decode`). On several ranks each rank of the data axis
reads some of the prompts, and rows of all of them meet at the experts; ranks of a tp group read the same
ones. After each step every rank hears what all rows wrote, so all of them know alike who has ended.

Contract. A text depends on its prompt, its number among the prompts, the seed and the options: not on the
other prompts, nor on the layout but for rounding. Collective: every rank calls with the same arguments, and
takes all that `stream` gives.

Several adapters beside one model: its base is in memory once, and one of them at a time is in its place.

All have one shape (rank, scale and targets): they change places in the parameters that the model has for
them, so that a text of one costs what it costs alone. Names are the caller's; empty is the base without any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from moeclipse.comm.async_ops.lane import gather_to_host
from moeclipse.comm.mesh import Mesh
from moeclipse.comm.start import choose_device
from moeclipse.core.config import problems_of
from moeclipse.core.errors import ConfigError
from moeclipse.core.shares import even_bounds
from moeclipse.hf.peft import adapter_lora, read_adapter
from moeclipse.model.config import Base
from moeclipse.model.decode import Decoder, writing
from moeclipse.model.sampling import choose_tokens
from moeclipse.model.sampling_config import GenerateConfig as GenerateConfig
from moeclipse.model.sampling_config import SamplingConfig
from moeclipse.model.transformer import Transformer
from moeclipse.moe.tokens import Tokens
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.data.vocabulary import GrowingText, Vocabulary
from moeclipse.train.generate.decode_graph import DecodeGraph, obstacle, room_for
from moeclipse.train.ranks import PatientRanks
from moeclipse.train.step.dtype import choose_dtype
from moeclipse.train.step.graphs import CudaCapture
from moeclipse.train.weights.base import BaseSource, DecodedWeights
from moeclipse.train.weights.base_rules import misfits
from moeclipse.train.weights.lora import Adapted
from moeclipse.train.weights.open_model import FoundModel, find_model, load_into, open_weights_of

USUAL_TOKENS = 200
PATIENCE_S = 600.0
"""How long ranks wait for one that still reads weights."""
Ended = Literal["", "end", "stop", "length", "time"]


@dataclass(frozen=True, kw_only=True)
class TextPiece:
    """What came to a row."""

    row: int
    text: str
    ended: Ended = ""
    """end: the model ended it; stop: a stop string; length, time: that was all it had."""


class LanguageModel:
    """A model that writes, made by `load_model`, or around one that is being trained."""

    def __init__(
        self,
        model: Transformer,
        vocabulary: Vocabulary,
        *,
        context: int = 0,
        segment: int = 0,
        ends: frozenset[int] = frozenset(),
        adapters: Adapters | None = None,
    ) -> None:
        """`context`: tokens of its longest text, 0: any. `segment`: of a model with memory."""
        self.model, self.vocabulary, self.adapters = model, vocabulary, adapters
        self.context, self.segment, self.ends = context, segment, ends
        self._graph: DecodeGraph | None = None
        """Of the last texts, for the next: capturing takes as long as writing a hundred tokens."""

    def use(self, adapter: str) -> None:
        """Write with this one of its adapters from now on; empty: with none."""
        if self.adapters is None:
            raise ConfigError(f"adapter {adapter!r}: the model was loaded without adapters")
        self._graph = None
        self.adapters.put(adapter, self.model)

    def loss(self, text: str) -> float:
        """Mean cross-entropy of the tokens of a text behind the first. Collective, with the same text."""
        ids = torch.tensor(self.tokens_of([text]), device=self.model.mesh.device)
        if ids.shape[1] < 2:
            raise ConfigError("a text of one token has no loss; give it more")
        mesh, count = self.model.mesh, ids.shape[1] - 1
        place = mesh.data_index
        tokens = Tokens(mesh=mesh, first=place * count, total=mesh.num_data * count, group=mesh.data)
        with writing(self.model):
            return float(self.model(ids[:, :-1], ids[:, 1:], tokens).loss_sum) / count

    def generate(self, prompts: str | Sequence[str], **options: Any) -> list[str]:
        """What follows each prompt; options are those of `GenerateConfig`."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        texts = [""] * len(prompts)
        for piece in self.stream(prompts, **options):
            texts[piece.row] += piece.text
        return texts

    def stream(
        self, prompts: str | Sequence[str], *, until: float | None = None, **options: object
    ) -> Iterator[TextPiece]:
        """The same in pieces, as they come. `until`: a time of `time.monotonic` at which all rows end."""
        config = given_options(options)
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self.stream_tokens(self.tokens_of(prompts, chat=config.chat), config, until)

    def tokens_of(self, prompts: Sequence[str], *, chat: bool = False) -> list[list[int]]:
        """Raises ConfigError for prompts that have no token, or tokens that the model has not."""
        if not prompts:
            raise ConfigError("there is no prompt; give at least one")
        size, found = self.model.config.vocab_size, []
        for number, prompt in enumerate(prompts):
            ids = self.vocabulary.encode_chat(prompt) if chat and prompt else self.vocabulary.encode(prompt)
            if not ids:
                raise ConfigError(f"prompt {number + 1} is empty; give it at least one character")
            if max(ids) >= size:
                raise ConfigError(
                    f"prompt {number + 1} has token {max(ids)}, but the model's vocabulary has {size}: the "
                    "tokenizer belongs to another model"
                )
            found.append(ids)
        return found

    def budgets(self, prompts: Sequence[Sequence[int]], config: GenerateConfig) -> list[int]:
        """Tokens that each row may write."""
        context = config.context or self.context
        longest = max(map(len, prompts))
        asked = 0 if config.max_tokens == "auto" else config.max_tokens
        if context and longest + asked > context:
            more = f" and max_tokens ({asked})" if asked else ""
            raise ConfigError(
                f"a prompt of {longest} tokens{more} is more than the {context} tokens of the model's "
                "longest text; ask for less, or go beyond what it was trained on with a larger context"
            )
        if config.max_tokens != "auto":
            return [asked] * len(prompts)
        return [min(USUAL_TOKENS, context - len(ids)) if context else USUAL_TOKENS for ids in prompts]

    def stream_tokens(
        self, prompts: Sequence[Sequence[int]], config: GenerateConfig, until: float | None = None
    ) -> Iterator[TextPiece]:
        """For prompts that are tokens already; what cannot be done is said here, not with the first piece."""
        return self._pieces(prompts, config, until, self.budgets(prompts, config))

    def _pieces(
        self,
        prompts: Sequence[Sequence[int]],
        config: GenerateConfig,
        until: float | None,
        budgets: Sequence[int],
    ) -> Iterator[TextPiece]:
        rows = [GrowingText(self.vocabulary, ids, config.stop) for ids in prompts]
        length = max(len(ids) + budget for ids, budget in zip(prompts, budgets, strict=True))
        # Nobody else has it meanwhile: texts may be written in turns.
        graph, self._graph = self._graph, None
        steps = Steps(self.model, prompts, config, length, self.segment, graph)
        try:
            yield from self._rows(rows, steps, until, budgets)
        finally:
            if not any(parameter.requires_grad for parameter in self.model.parameters()):
                self._graph = steps.graph

    def _rows(
        self, rows: Sequence[GrowingText], steps: Steps, until: float | None, budgets: Sequence[int]
    ) -> Iterator[TextPiece]:
        going: set[int] = set()
        for row, budget in enumerate(budgets):
            if budget:
                going.add(row)
            else:
                yield TextPiece(row=row, text="", ended="length")
        tokens: list[int] = []
        while going:
            tokens, late = steps.next(tokens, going, until is not None and time.monotonic() > until)
            for row in sorted(going):
                text, token = rows[row], tokens[row]
                piece = "" if token in self.ends else text.add(token)
                ended: Ended = "end" if token in self.ends else "stop" if text.stopped else ""
                if not ended and (late or len(text.ids) == budgets[row]):
                    ended = "time" if late else "length"
                if ended:
                    going.discard(row)
                    piece += text.end()
                if piece or ended:
                    yield TextPiece(row=row, text=piece, ended=ended)


class Steps:
    """One token more for all rows, over all ranks."""

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        config: SamplingConfig,
        length: int,
        segment: int,
        graph: DecodeGraph | None = None,
    ) -> None:
        """`graph`: one that may serve these texts, too."""
        mesh, self.config, self.prompts = model.mesh, config, prompts
        self.model, self.mesh = model, mesh
        self.bounds = even_bounds(len(prompts), mesh.num_data)
        self.mine = range(*self.bounds[mesh.data_index : mesh.data_index + 2])
        # Sequence parallelism wants as many rows as tp divides: some read along, and nobody looks.
        unit = model.tp.size if model.tp.parts_tokens else 1
        self.idle = -len(self.mine) % unit
        num_rows = len(self.mine) + self.idle
        self.graph = graph if graph is not None and graph.serves(num_rows, length) else None
        if self.graph is None:
            self.decoder = Decoder(model, num_rows, room_for(length), segment=segment)
        else:
            self.decoder = self.graph.decoder
            self.decoder.begin()
        self.place = 0

    def next(self, tokens: Sequence[int], going: set[int], late: bool) -> tuple[list[int], bool]:
        """(what every row writes next, whether time is over on any rank), after these tokens."""
        if not tokens:
            new = [list(self.prompts[row]) for row in self.mine]
        else:
            new = [[tokens[row]] if row in going else [] for row in self.mine]
        new += [[0] if not tokens else []] * self.idle
        with torch.no_grad(), self.mesh.recorder.apart("a text is written"):
            logits_BV = self._read(new, first=not tokens)[: len(self.mine)]
            chosen = choose_tokens(logits_BV, self.config, self.mine, self.place)
            self.place += 1
            return self._tell(chosen, late)

    def _read(self, new: list[list[int]], *, first: bool) -> torch.Tensor:
        """Prompts as they are; then, where it can be, each step as a graph."""
        if self.graph is not None and not first:
            return self.graph.read(new)
        with writing(self.model):
            logits_BV = self.decoder.read(new)
            if self.graph is None and first and not obstacle(self.decoder):
                self.graph = DecodeGraph(self.decoder, CudaCapture(self.mesh.device))
            return logits_BV

    def _tell(self, chosen_B: torch.Tensor, late: bool) -> tuple[list[int], bool]:
        mesh = self.mesh
        if mesh.num_ranks == 1:
            return [int(token) for token in chosen_B.tolist()], late
        widest = -(-len(self.prompts) // mesh.num_data)
        told = torch.zeros(1 + widest, dtype=torch.int64, device=mesh.device)
        told[0] = late
        told[1 : 1 + len(chosen_B)] = chosen_B
        everyone = gather_to_host(mesh.a2a, mesh.world, told, "tokens of a text").get()
        tokens: list[int] = []
        for data, (first, stop) in enumerate(pairwise(self.bounds)):
            tokens += [int(token) for token in everyone[data * mesh.tp][1 : 1 + stop - first]]
        return tokens, any(row[0] for row in everyone)


def given_options(options: dict[str, Any]) -> GenerateConfig:
    known = [field.name for field in fields(GenerateConfig)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(f"generate has no option {unknown[0]!r}; it takes {', '.join(known)}")
    if isinstance(options.get("stop"), str):
        options = options | {"stop": (options["stop"],)}
    config = GenerateConfig(**options)
    problems = list(problems_of(config))
    if problems:
        raise ConfigError(problems)
    return config


def load_model(
    path: str,
    *,
    mesh: Mesh | None = None,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: str = "",
    peer: Literal["auto", "on", "off"] = "auto",
    note: Callable[[str], None] = lambda _: None,
    base: Base | None = None,
    dense_base: Base | None = None,
    adapters: Mapping[str, str] | None = None,
) -> LanguageModel:
    """The model of a run, a checkpoint or a Hugging Face folder; collective over the ranks of `mesh`.

    `base`, `dense_base`: how weights are kept (`model.base`); left out: as in the run. `adapters`: folders in
    PEFT's format by names, all of one shape; `use` chooses among them, and the first is chosen.
    """
    found = with_base(find_model(path), base, dense_base)
    many = None if not adapters else Adapters(found, adapters)
    vocabulary = found.vocabulary(tokenizer)
    mesh = mesh or Mesh.single(choose_device(device))
    kind = choose_dtype(found.dtype if dtype == "auto" else dtype, mesh.device)
    ranks = PatientRanks(mesh, PATIENCE_S)
    weights = open_weights_of(found, ranks)
    note(f"weights of {getattr(weights, 'path', path)}")
    shapes = found.shapes
    tp = TensorParallel.of(mesh, peer=peer)
    lora = found.lora if many is None else many.lora
    model = Transformer(shapes.model, shapes.moe, shapes.gate, mesh=mesh, tp=tp, dtype=kind, lora=lora)
    plain = DecodedWeights(weights) if isinstance(weights, Checkpoint) else weights
    load_into(model, Adapted(BaseSource(plain, model), {} if many is None else many.first))
    model.requires_grad_(False)
    known: dict[str, Any] = {"context": found.context, "segment": found.segment, "ends": found.ends}
    return LanguageModel(model, vocabulary, adapters=many, **known)


def with_base(found: FoundModel, base: Base | None, dense_base: Base | None) -> FoundModel:
    """The same with weights that are kept otherwise."""
    model = found.shapes.model
    kept = replace(
        model,
        base=model.base if base is None else base,
        dense_base=model.dense_base if dense_base is None else dense_base,
    )
    if problems := list(misfits(kept, found.shapes.moe)):
        raise ConfigError(problems)
    return replace(found, shapes=replace(found.shapes, model=kept))


class Adapters:
    """Read from folders in PEFT's format, for a model that has none of its own."""

    def __init__(self, found: FoundModel, folders: Mapping[str, str]) -> None:
        if found.lora.rank:
            raise ConfigError(f"{found.path} has adapters of its own; give the model that they stand beside")
        model, moe, names = found.shapes.model, found.shapes.moe, found.names
        told = {name: adapter_lora(Path(folder), model, names) for name, folder in folders.items()}
        first, *others = told
        for name in others:
            if told[name] != told[first]:
                raise ConfigError(
                    f"adapters {first!r} and {name!r} differ in rank, scale or targets, and only one shape "
                    "has a place in the model; load them one by one"
                )
        self.lora = told[first]
        self.tensors = {
            name: read_adapter(Path(folder), model, moe, self.lora, names) for name, folder in folders.items()
        }
        self.first = self.tensors[first]
        self.tensors |= {"": {name: torch.zeros_like(tensor) for name, tensor in self.first.items()}}

    def put(self, name: str, model: nn.Module) -> None:
        if name not in self.tensors:
            raise ConfigError(
                f"there is no adapter {name!r}; there are {', '.join(filter(None, self.tensors))}"
            )
        load_into(model, Adapted(None, self.tensors[name]))
