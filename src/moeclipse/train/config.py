"""The configuration of a run: one tree, each section owned by its room.

Sections never fail to build; `problems` lists everything that is wrong with them, so that all of it
is reported at once, on every rank, before any rank waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import ClassVar, Literal

from moeclipse.balance.config import PlacementConfig
from moeclipse.comm.config import ParallelConfig
from moeclipse.core.config import keys_of, named_in, problems_of, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.hf.read import folder_values
from moeclipse.model.config import ModelConfig
from moeclipse.model.lora_config import LoraConfig
from moeclipse.moe.config import LAYER_KEYS, GateConfig, MoEConfig, layer_problems
from moeclipse.pipeline.config import PipelineConfig
from moeclipse.pipeline.overlap import StageLayout, lay_out
from moeclipse.train.data.data_config import DataConfig as DataConfig
from moeclipse.train.data.data_config import EvalConfig
from moeclipse.train.observe.metrics_config import MetricsConfig as MetricsConfig
from moeclipse.train.optim.memory_config import (
    MemoryConfig,
    activation_problems,
    expert_weight_problems,
    travel_problems,
)
from moeclipse.train.optim.optim_config import OptimConfig, type_problems
from moeclipse.train.optim.quant_blocks import block_problems
from moeclipse.train.run.survival_config import CheckpointConfig, IntegrityConfig
from moeclipse.train.weights.base_rules import BASE_KEYS, few_bits_problems, lora_problems
from moeclipse.train.weights.init_config import InitConfig, upcycle_problems

MAX_SAMPLE = 64
MAX_NAME = 200
"""Bytes of a run's name: file systems take 255, and what stands beside a run has a longer name."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and how long it takes."""

    name: str = ""
    """Folder below `dir`; empty: preset and time."""
    dir: str = "runs"
    steps: int = 200
    seed: int = 0
    init_from: str = ""
    """A checkpoint's or a run's folder whose weights a new run begins from, with an optimizer of its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    graphs: Literal["auto", "off"] = "auto"
    """Microbatches as CUDA graphs on one rank, and on several what stands between exchanges: same numbers,
    fewer launches."""
    deterministic: bool | Literal["auto"] = "auto"
    """Equal runs give equal bits: no clock and no free memory decides what changes one; on CUDA with a slower
    backward of attention, too, or an error where torch has no such kernel. "auto": on CPUs."""
    tuned_from: str = ""
    """A run's folder, or its choices.json: what it chose or measured is taken over, not chosen again."""
    tune: bool = False
    """Try choices for longer, write choices.json for runs to come, and train nothing (`--tune`)."""
    sample: int = 0
    """Lines that the model writes when it has been trained, shown behind the summary; 0: none."""
    shared: bool = False
    """Others may read what a run writes, as the umask says; else files are 0600 and folders 0700."""
    wait_s: float = 120.0
    """How long `--resume auto` waits for another job that still uses the run's folder."""

    def problems(self) -> Iterator[str]:
        if self.steps < 1:
            yield f"run.steps ({self.steps}) must be at least 1"
        if not 0 <= self.sample <= MAX_SAMPLE:
            yield f"run.sample ({self.sample}) must be between 0 and {MAX_SAMPLE} lines"
        if "/" in self.name or self.name in (".", "..") or not self.name.isprintable():
            yield f"run.name ({self.name!r}) must be a plain folder name; the folder above it is run.dir"
        if not 0 <= self.wait_s < math.inf:
            yield f"run.wait_s ({self.wait_s}) must be a number of seconds, 0 or more"
        if (size := len(self.name.encode(errors="replace"))) > MAX_NAME:
            yield f"run.name ({self.name[:20]!r} ...) has {size} bytes; give at most {MAX_NAME}"
        if "\0" in self.dir:
            yield f"run.dir ({self.dir!r}) must be the path of a folder"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    run: RunConfig = field(default_factory=RunConfig)
    init: InitConfig = field(default_factory=InitConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    integrity: IntegrityConfig = field(default_factory=IntegrityConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    RENAMED: ClassVar[Mapping[str, str]] = {
        "placement.check_every": "integrity.every",
        "checkpoint.beside": "checkpoint.asynchronous",
        "run.choices": "run.tuned_from",
    }
    """Old dotted key -> present one (`core/renames`, docs/compatibility.md)."""
    values_beneath = staticmethod(folder_values)  # for `with_values`

    def runs_program(self, pp: int, num_ranks: int) -> bool:
        """Whether microbatches go through a program; gathered tokens are run again by autograd."""
        return self.pipeline.runs_program(pp, 1 if self.moe.schedule == "gathered" else num_ranks)

    def problems(self) -> Iterator[str]:
        """What is wrong between sections; each section lists its own problems.
        A rule is asked only where the keys it reads are sound: otherwise that has been told already, and the
        rule could not even compute with such numbers.
        """
        broken = self.broken_keys()
        for keys, rule in RULES:
            if broken.isdisjoint(keys):
                yield from rule(self)

    def broken_keys(self) -> set[str]:
        """Keys that their own sections complain about."""
        told = [
            text for part in fields(self) for text in problems_of(getattr(self, part.name), f"{part.name}.")
        ]
        return set(named_in(" ".join(told), keys_of(type(self)))) if told else set()

    @property
    def num_expert_layers(self) -> int:
        return self.model.num_expert_layers

    @property
    def expert_ranks(self) -> int:
        """Ranks that can share the experts of a layer: more than there are experts only with replicas."""
        if self.placement.slots:
            with suppress(ConfigError):
                return self.placement.placements(self.moe.num_experts)[0].num_ranks
        if self.placement.moves and self.parallel.ep != "auto":
            return max(self.moe.num_experts, self.parallel.ep * self.parallel.tp)
        return self.moe.num_experts


def expert_problems(config: TrainConfig) -> Iterator[str]:
    """What no layer with experts can be built from."""
    if config.num_expert_layers:
        yield from layer_problems(config.moe, config.gate, config.parallel.tp)


def optim_problems(config: TrainConfig) -> Iterator[str]:
    """What the optimizer cannot do for a model of this type."""
    yield from type_problems(config.optim, config.model.dtype)
    yield from travel_problems(config.memory, config.optim, config.placement, config.parallel.pp)
    if config.memory.main_grad == "host" and config.runs_program(config.parallel.pp, 1):
        yield (
            "memory.main_grad = 'host' needs one rank whose microbatches go one after the other: set "
            "parallel.pp to 1, pipeline.schedule to 'auto' and pipeline.overlap to 'off'"
        )
    if config.memory.activations == "host":
        yield from activation_problems(config.pipeline, config.model)
    if config.memory.weights == "host":
        given = (config.memory, config.optim, config.placement, config.pipeline, config.model, config.lora)
        yield from expert_weight_problems(*given, config.moe.expert_bias, config.parallel.pp)
    if config.optim.state == "8bit" and config.parallel.tp > 1:
        yield from block_problems(config.model, config.moe, config.parallel.tp)


def data_problems(config: TrainConfig) -> Iterator[str]:
    """What does not fit between samples, microbatches and the model."""
    data, model = config.data, config.model
    if data.batch_size < config.optim.accumulate:
        yield (
            f"data.batch_size ({data.batch_size}) must be at least "
            f"optim.accumulate ({config.optim.accumulate}): a microbatch needs a sample"
        )
    if not (data.tokenizer or data.files or data.source) and model.vocab_size < 256:
        yield f"model.vocab_size ({model.vocab_size}) must be at least 256 for bytes"
    if config.eval.asked_for and (model.memory > 0 or data.order == "stream"):
        yield (
            "eval.files and eval.share cannot go with model.memory or data.order = 'stream': what is "
            "evaluated has no text before it; leave them empty"
        )
    if model.memory > 0 and data.order != "stream":
        yield (
            f"model.memory ({model.memory}) needs data.order = 'stream': row b of a step must go on "
            "with the text of row b of the step before"
        )


def placement_problems(config: TrainConfig) -> Iterator[str]:
    """What does not fit between the placement, the experts and the ranks, as far as these are known."""
    placement, parallel, moe = config.placement, config.parallel, config.moe
    if not config.num_expert_layers:
        return
    folds = parallel.tp if moe.expert_tp == "folded" else 1
    num_ranks = None if parallel.ep == "auto" else parallel.ep * folds
    found = list(placement.start_problems(moe.num_experts, num_ranks, config.num_expert_layers))
    yield from found
    replicated = False
    if placement.slots and not found:
        tables = placement.placements(moe.num_experts, num_ranks)
        replicated = any(table.num_replicas > table.num_experts for table in tables)
    moves = placement.moves and not placement.at_ease  # which gives way (`train/placement/may_move`)
    if (moves or replicated) and config.gate.max_leaving < 1:
        yield (
            f"gate.max_leaving ({config.gate.max_leaving}) needs placement.planner = 'static' and experts "
            "without replicas: which are near would change with every plan or split, and the routing with it"
        )
    lends = moe.shadow not in ("off", "auto", ())
    if (moves or replicated) and placement.reduce == "fedavg" and lends:
        yield (
            f"moe.shadow ({moe.shadow!r}) cannot go with placement.reduce = 'fedavg': rows of a shadowed "
            "expert count for its owner, so shadows would change what each replica learns; set it to 'off'"
        )


def pipeline_problems(config: TrainConfig) -> Iterator[str]:
    """What cannot be scheduled."""
    pipeline = config.pipeline
    if config.parallel.pp > 1 and pipeline.recompute == "norms":
        yield "pipeline.recompute = 'norms' cannot go with stages; choose 'attn', 'mlp', 'moe' or 'full'"
    if config.model.memory and pipeline.recompute == "norms":
        yield "pipeline.recompute = 'norms' cannot go with model.memory, which keeps what attention reads"
    if config.moe.schedule == "gathered" and pipeline.recompute == "mlp":
        yield "pipeline.recompute = 'mlp' cannot go with moe.schedule = 'gathered'; choose 'moe'"
    if not config.runs_program(config.parallel.pp, num_ranks=2):  # how many there are is not known here
        return
    if config.moe.schedule == "gathered":
        why = "whose programs place parts of an exchange; set parallel.pp to 1 and leave pipeline.* out"
        yield f"moe.schedule = 'gathered' cannot go with stages or overlapped microbatches, {why}"
    if config.data.batch_size < config.optim.accumulate:
        return  # told already, and a schedule of so many microbatches may be absurd
    try:
        layout = lay_out(pipeline, config.model.num_layers, config.parallel.pp, config.optim.accumulate)
    except ConfigError as error:
        yield from error.problems
    else:
        yield from planner_problems(config, layout)
        if layout.num_chains > 1 and config.model.memory:
            yield (
                f"model.memory ({config.model.memory}) cannot go with pipeline.schedule = "
                f"{layout.schedule!r}: two ranks would remember rows of one layer; take 'dualpipev'"
            )
    cut = pipeline.overlap == "pair+self" and pipeline.chunks not in ("auto", 1)
    if cut and (whole := needs_whole_microbatches(config)):
        yield (
            f"pipeline.chunks ({pipeline.chunks}) cannot go with {whole}, which counts rows over the whole "
            "microbatch; set it to 1, and moe.schedule = 'smart', which cuts rows behind the gate"
        )


def needs_whole_microbatches(config: TrainConfig) -> str:
    """The key for which a microbatch must not be cut by samples, because it counts rows over all of it."""
    if config.gate.capacity_factor:
        return "gate.capacity_factor"
    if config.gate.max_leaving < 1:
        return "gate.max_leaving"
    return "placement.reduce = 'fedavg'" if config.placement.reduce == "fedavg" else ""


def planner_problems(config: TrainConfig, layout: StageLayout | None) -> Iterator[str]:
    """Ranks of a pipeline plan together, so each must hold experts; `layout` is None without a pipeline."""
    if layout is None or not config.placement.moves or config.placement.at_ease:
        return
    if layout.num_chains > 1:
        yield (
            f"placement.planner = {config.placement.planner!r} cannot go with pipeline.schedule = "
            f"{layout.schedule!r}, in which two ranks of the pipeline hold each layer and would have to move "
            "its experts together; set placement.planner = 'static', or take 'dualpipev'"
        )
    dense, ranks = config.model.num_dense_layers, sorted(set(layout.rank_of))
    held = {rank: chain.from_iterable(layout.held_by(rank).values()) for rank in ranks}
    empty = [rank for rank in ranks if all(map(config.model.is_dense, held[rank]))]
    if empty and len(ranks) > 1:
        yield (
            f"placement.planner = {config.placement.planner!r} needs a layer with experts in every stage, "
            f"but rank {empty[0]} of the pipeline holds none; lower model.num_dense_layers ({dense}) or "
            f"parallel.pp, or set placement.planner = 'static'"
        )


def tensor_problems(config: TrainConfig) -> Iterator[str]:
    """What cannot be cut over tp."""
    tp, model, moe = config.parallel.tp, config.model, config.moe
    if tp == 1:
        return
    heads = "num_kv_heads" if model.attention == "gqa" else "num_heads"
    widths = {f"model.{heads}": getattr(model, heads), "model.vocab_size": model.vocab_size}
    if model.held_mixers & {"gated_delta", "kimi_delta"}:
        widths["model.delta_key_heads"] = model.delta_key_heads
    if "attention" not in model.held_mixers:
        del widths[f"model.{heads}"]
    if model.num_expert_layers < model.num_layers:
        widths["model.d_ff"] = model.d_ff
    if moe.expert_tp == "sharded" and model.num_expert_layers:
        widths["moe.d_ff"] = moe.d_ff
        if moe.shared_d_ff:
            widths["moe.shared_d_ff"] = moe.shared_d_ff
    for name, width in widths.items():
        if width < tp:
            yield f"{name} ({width}) must be at least parallel.tp ({tp}): every rank holds a part of it"
    if config.parallel.sequence_parallel and model.memory % tp:
        yield (
            f"model.memory ({model.memory}) must be a multiple of parallel.tp ({tp}) with "
            "parallel.sequence_parallel; change it, or set parallel.sequence_parallel = false"
        )
    if config.parallel.sequence_parallel and config.data.seq_len % tp:
        yield (
            f"data.seq_len ({config.data.seq_len}) must be a multiple of parallel.tp ({tp}) with "
            "parallel.sequence_parallel; change it, or set parallel.sequence_parallel = false"
        )


STAGE_KEYS = ("parallel.pp", "model.num_layers", "model.num_dense_layers", "model.dense_layers")
LAYOUT_KEYS = (
    *("parallel.dp", "parallel.ep", "parallel.tp", "parallel.pp", "moe.num_experts", "moe.expert_tp"),
    *("placement.slots", "placement.slots_per_rank", "placement.planner"),
)
RULES: tuple[tuple[tuple[str, ...], Callable[[TrainConfig], Iterator[str]]], ...] = (
    ((*LAYER_KEYS, *STAGE_KEYS[1:], "parallel.tp"), expert_problems),
    (("metrics.trace", "run.steps"), lambda c: c.metrics.trace_problems(c.run.steps)),
    (
        ("lora.rank", "lora.targets", "model.memory", "model.mixers", "parallel.tp", *LAYOUT_KEYS[2:]),
        lambda c: lora_problems(c.lora, c.model, c.moe, c.placement, c.parallel.tp),
    ),
    (
        (*BASE_KEYS, "parallel.tp", "init.upcycle", *STAGE_KEYS[1:]),
        lambda c: few_bits_problems(c.model, c.moe, c.lora, c.placement, c.parallel.tp, c.init.upcycle),
    ),
    (
        ("init.upcycle", "run.init_from", *STAGE_KEYS[1:]),
        lambda c: upcycle_problems(c.init, c.run.init_from, c.num_expert_layers, c.moe),
    ),
    (
        (
            *("data.batch_size", "data.files", "data.source", "data.tokenizer", "data.order"),
            "optim.accumulate",
            *("model.vocab_size", "model.memory", "eval.files", "eval.share"),
        ),
        data_problems,
    ),
    (
        (
            *("parallel.tp", "parallel.sequence_parallel", "moe.expert_tp", "moe.d_ff", "data.seq_len"),
            *(*STAGE_KEYS[1:], "model.num_heads", "model.num_kv_heads"),
            *("model.attention", "model.vocab_size", "model.d_ff", "model.memory"),
            *("model.mixers", "model.delta_key_heads"),
        ),
        tensor_problems,
    ),
    (
        (
            *(*STAGE_KEYS, "placement.planner", "gate.capacity_factor", "gate.max_leaving"),
            "placement.reduce",
            *("data.batch_size", "optim.accumulate"),
            *(f"pipeline.{part.name}" for part in fields(PipelineConfig)),
        ),
        pipeline_problems,
    ),
    (
        (
            *("model.dtype", "optim.state", "optim.master", "optim.main_grad", "parallel.tp", "moe.d_ff"),
            *("memory.place", "optim.clip", "optim.clip_norm", "parallel.pp", *LAYOUT_KEYS[-3:]),
            *("model.num_heads", "model.num_kv_heads", "model.head_dim", "model.v_head_dim", "model.d_ff"),
            *("model.mixers", "model.delta_key_heads", "model.delta_value_heads", "model.delta_value_dim"),
            *("model.delta_key_dim", *STAGE_KEYS[1:]),
        ),
        optim_problems,
    ),
    ((*LAYOUT_KEYS, *STAGE_KEYS, "gate.max_leaving", "placement.reduce", "moe.shadow"), placement_problems),
)
"""What must hold between sections, and the keys that each rule reads."""


def layout_problems(config: TrainConfig, num_ranks: int) -> Iterator[str]:
    """What does not fit between a configuration and this many ranks."""
    if not config.broken_keys().isdisjoint(LAYOUT_KEYS):
        return  # told already
    try:
        _, ep = config.parallel.sizes(num_ranks, config.expert_ranks, config.moe.expert_tp)
    except ValueError as error:
        yield str(error)
        return
    for name in ("main_grad", "weights") if num_ranks > 1 else ():
        if getattr(config.memory, name) == "host":
            yield f"memory.{name} = 'host' needs one rank, not {num_ranks}; set it to 'device', or --ranks 1"
    if config.parallel.ep == "auto":
        known = set(problems_of(config))
        settled = with_values(config, {"parallel.ep": ep})
        yield from (problem for problem in problems_of(settled) if problem not in known)
