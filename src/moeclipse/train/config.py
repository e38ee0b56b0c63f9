"""The configuration of a run: one tree, each section owned by its room.

Sections never fail to build; `problems` lists everything that is wrong with them, so that all of it
is reported at once, on every rank, before any rank waits for another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from moeclipse.balance.config import PlacementConfig
from moeclipse.comm.config import ParallelConfig
from moeclipse.core.errors import ConfigError
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import GateConfig, MoEConfig, gate_problems
from moeclipse.pipeline.config import PipelineConfig
from moeclipse.pipeline.overlap import lay_out


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run lives and how long it takes."""

    name: str = ""
    """Folder below `dir`; empty: preset and time."""
    dir: str = "runs"
    steps: int = 200
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def problems(self) -> Iterator[str]:
        if self.steps < 1:
            yield f"run.steps ({self.steps}) must be at least 1"
        if "/" in self.name or self.name in (".", ".."):
            yield f"run.name ({self.name!r}) must be a plain folder name; the folder above it is run.dir"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how it is cut into samples."""

    files: tuple[str, ...] = ()
    """Globs of text files, or of token files (.npy, .bin); empty: the standard library's sources as bytes."""
    tokenizer: str = ""
    """A `tokenizers` JSON file; empty: bytes."""
    token_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"
    """Element type of .bin files."""
    seq_len: int = 128
    batch_size: int = 16
    """Samples per step over all ranks: it does not change with the number of ranks."""
    shuffle: bool = True
    order: Literal["samples", "stream"] = "samples"
    """samples: each stands alone; stream: row b of a step goes on where row b of the step before ended."""

    def problems(self) -> Iterator[str]:
        for name in ("seq_len", "batch_size"):
            if getattr(self, name) < 1:
                yield f"data.{name} ({getattr(self, name)}) must be at least 1"


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with warm-up and cosine decay, its state sharded over ranks."""

    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Bound on the global gradient norm; 0: no clipping."""
    accumulate: int = 1
    """Microbatches per step."""
    bucket_mb: float = 25.0
    """Gradients are reduced in buckets of about this size, while backward goes on."""
    max_bad_steps: int = 10
    """So many steps in a row with a non-finite loss or gradient end the run."""
    loss_scale: float | Literal["auto"] = "auto"
    """The loss is multiplied by it before backward; auto: found while training in float16, 1 otherwise."""

    def problems(self) -> Iterator[str]:
        if self.lr <= 0:
            yield f"optim.lr ({self.lr}) must be positive"
        if not 0 <= self.min_lr_ratio <= 1:
            yield f"optim.min_lr_ratio ({self.min_lr_ratio}) must be between 0 and 1"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"optim.{name} ({getattr(self, name)}) must be at least 0 and below 1"
        for name in ("weight_decay", "clip_norm", "warmup_steps"):
            if getattr(self, name) < 0:
                yield f"optim.{name} ({getattr(self, name)}) must not be negative"
        for name in ("accumulate", "max_bad_steps"):
            if getattr(self, name) < 1:
                yield f"optim.{name} ({getattr(self, name)}) must be at least 1"
        if self.loss_scale != "auto" and not 0 < self.loss_scale < math.inf:
            yield f"optim.loss_scale ({self.loss_scale}) must be auto or a positive number"
        if self.eps <= 0 or self.bucket_mb <= 0:
            yield f"optim.eps ({self.eps}) and optim.bucket_mb ({self.bucket_mb}) must be positive"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 0
    """Save after so many steps; 0: at the end only."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    at_end: bool = True
    """Save after the last step."""
    deadline_s: float = 1800.0
    """How long ranks wait for the slowest one while a checkpoint is written or verified."""

    def problems(self) -> Iterator[str]:
        if self.every < 0:
            yield f"checkpoint.every ({self.every}) must not be negative"
        if self.keep < 1:
            yield f"checkpoint.keep ({self.keep}) must be at least 1"
        if self.deadline_s <= 0:
            yield f"checkpoint.deadline_s ({self.deadline_s}) must be positive"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    tensorboard: bool = False
    """Also write TensorBoard events (needs the `tensorboard` extra)."""
    warmup_steps: int = 3
    """First steps left out of the summary's times."""

    def problems(self) -> Iterator[str]:
        if self.warmup_steps < 0:
            yield f"metrics.warmup_steps ({self.warmup_steps}) must not be negative"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def problems(self) -> Iterator[str]:
        """What is wrong between sections; each section lists its own problems."""
        if self.moe.num_experts >= 1:
            yield from gate_problems(self.gate, self.moe.num_experts)
        if 1 <= self.data.batch_size < self.optim.accumulate:
            yield (
                f"data.batch_size ({self.data.batch_size}) must be at least "
                f"optim.accumulate ({self.optim.accumulate}): a microbatch needs a sample"
            )
        if not self.data.tokenizer and not self.data.files and self.model.vocab_size < 256:
            yield f"model.vocab_size ({self.model.vocab_size}) must be at least 256 for bytes"
        if self.model.memory > 0 and self.data.order != "stream":
            yield (
                f"model.memory ({self.model.memory}) needs data.order = 'stream': row b of a step must go on "
                "with the text of row b of the step before"
            )
        if self.parallel.tp > 1:
            yield from tensor_problems(self)
        if self.parallel.pp > 1 or self.pipeline.used:
            yield from pipeline_problems(self)
        yield from placement_problems(self)

    @property
    def expert_ranks(self) -> int:
        """Ranks that can share the experts of a layer: more than there are experts only with replicas."""
        if self.placement.slots:
            with suppress(ConfigError):
                return self.placement.placements(self.moe.num_experts)[0].num_ranks
        if self.placement.moves and self.parallel.ep != "auto":
            return max(self.moe.num_experts, self.parallel.ep * self.parallel.tp)
        return self.moe.num_experts


def placement_problems(config: TrainConfig) -> Iterator[str]:
    """What does not fit between the placement, the experts and the ranks, as far as these are known."""
    placement, parallel, moe = config.placement, config.parallel, config.moe
    folds = parallel.tp if moe.expert_tp == "folded" else 1
    num_ranks = None if parallel.ep == "auto" else parallel.ep * folds
    if moe.num_experts < 1:
        return
    replicated = False
    try:
        if placement.slots:
            tables = placement.placements(moe.num_experts, num_ranks)
            replicated = any(table.num_replicas > table.num_experts for table in tables)
        elif num_ranks is not None:
            placement.start(moe.num_experts, num_ranks, 0)
    except ConfigError as error:
        yield from error.problems
    if (placement.moves or replicated) and config.gate.max_leaving < 1:
        yield (
            f"gate.max_leaving ({config.gate.max_leaving}) needs placement.planner = 'static' and experts "
            "without replicas: which are near would change with every plan or split, and the routing with it"
        )


def pipeline_problems(config: TrainConfig) -> Iterator[str]:
    """What cannot be scheduled."""
    pipeline, gate = config.pipeline, config.gate
    if list(pipeline.problems()) or config.parallel.pp < 1 or config.optim.accumulate < 1:
        return  # told already
    try:
        lay_out(pipeline, config.model.num_layers, config.parallel.pp, config.optim.accumulate)
    except ConfigError as error:
        yield str(error)
    cut = pipeline.overlap == "pair+self" and pipeline.chunks not in ("auto", 1)
    if cut and (gate.capacity_factor or gate.max_leaving < 1):
        whole = "gate.capacity_factor" if gate.capacity_factor else "gate.max_leaving"
        yield (
            f"pipeline.chunks ({pipeline.chunks}) cannot go with {whole}, which counts rows over the whole "
            "microbatch; set it to 1, and moe.schedule = 'smart', which cuts rows behind the gate"
        )


def tensor_problems(config: TrainConfig) -> Iterator[str]:
    """What cannot be cut over tp."""
    tp, model, moe = config.parallel.tp, config.model, config.moe
    heads = "num_kv_heads" if model.attention == "gqa" else "num_heads"
    widths = {f"model.{heads}": getattr(model, heads), "model.vocab_size": model.vocab_size}
    if model.num_dense_layers:
        widths["model.d_ff"] = model.d_ff
    if moe.expert_tp == "sharded" and model.num_dense_layers < model.num_layers:
        widths["moe.d_ff"] = moe.d_ff
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
