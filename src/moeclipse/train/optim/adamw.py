"""AdamW whose state is sharded: each rank updates its shards and sends out the result.

    g = gradient summed over ranks, times the clip factor
    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = w - lr (m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps) + decay w)

Weights are updated in fp32 (fp64 for fp64 models) and rounded to the parameters' type when they are sent out;
where the types are equal the master weights are the parameters themselves. With `optim.master = "none"` there
are no others, and they are rounded by chance: the same bits in any layout. In which form all of it is kept is
told by `train/optim/shard_state`. Vectors (norms) do not decay. A step with a non-finite loss or gradient is
skipped on all ranks alike.

The norm may be a number on the device: the update is launched before the host knows it, and a norm that is
not finite leaves weights and state as they are. `take_back` then tells the count of updates so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from moeclipse.core.errors import CheckpointError
from moeclipse.ops.adam import BLOCK, AdamStep, adam, sum_of_squares
from moeclipse.ops.low_bits import LowBits
from moeclipse.ops.random import key_of
from moeclipse.ops.rounding import Stretch, Stretches
from moeclipse.train.checkpoints.checkpoint import Checkpoint, Piece
from moeclipse.train.optim.buckets import Bucket, Buckets, BucketSegment
from moeclipse.train.optim.column_shards import ColumnShard
from moeclipse.train.optim.deferred import DeferredUpdates
from moeclipse.train.optim.host_states import HostStates
from moeclipse.train.optim.optim_config import OptimConfig
from moeclipse.train.optim.shard_state import STATES as STATES
from moeclipse.train.optim.shard_state import ShardState


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """Linear warm-up, then as `optim.schedule` says: down to min_lr_ratio at the last step, or level.

    A function of these numbers alone, so a resumed run goes on exactly. What is level does not ask when the
    run ends: a run of wsd that is given more steps before its decay begins has lost nothing.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    floor, span = config.min_lr_ratio, max(num_steps - 1 - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    if config.schedule == "wsd":
        falls = max(round(config.decay_share * num_steps), 1)
        progress = min(max(1 - (num_steps - 1 - step) / falls, 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (floor + (1 - floor) * left)


def stretch_of(segment: BucketSegment, seed: int) -> Stretch:
    """A segment by rows and columns of its logical tensor, however that is stored."""
    entry, column_shard = segment.entry, ColumnShard.parse(segment.entry.name)
    name = entry.name if column_shard is None else column_shard.name
    return Stretch(
        offset=segment.offset,
        length=segment.length,
        key=key_of(seed, name),
        start=segment.start,
        columns=entry.shape[-1] if column_shard is None else column_shard.width,
        left=0 if column_shard is None else column_shard.first,
    )


class Readable(Protocol):
    """Where weights come from: a checkpoint, or a folder of a Hugging Face model."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor | None:
        """Elements [start, stop) of a flattened logical tensor; None: what is there stays."""
        ...

    def __contains__(self, name: str) -> bool: ...


class TravellingGrads(Protocol):
    """Gradients that are elsewhere until their updates (`train/optim/host_grads`)."""

    num_bytes: int

    def arrived(self, number: int, /) -> None: ...
    def updated(self, number: int, /) -> None: ...


class TravellingWeights(Protocol):
    """Weights that lie on the host between steps (`train/step/host_weights`)."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...
    def arrived(self, bucket: Bucket, /) -> None: ...
    def updated(self, bucket: Bucket, /) -> None: ...
    def settle(self) -> None: ...
    def forget(self) -> None: ...


class AdamW:
    def __init__(
        self,
        buckets: Buckets,
        config: OptimConfig,
        seed: int = 0,
        host: HostStates | None = None,
        weights: TravellingWeights | None = None,
    ) -> None:
        """`seed`: of rounding by chance. `host`, `weights`: some of the state, of these lies on the host."""
        self.buckets, self.config, self.seed, self.host = buckets, config, seed, host
        self.updates = 0
        self.notes: list[str] = []
        """What is to be said of the state that was loaded."""
        self.deferred: DeferredUpdates | None = None
        """Updates wait for the next step's forward."""
        self.grads: TravellingGrads | None = None
        """Where gradients lie until then, if not on the device."""
        self.weights = weights
        make = ShardState.of if host is None else host.take
        self._states = [make(bucket, config) for bucket in buckets]

    @property
    def states(self) -> list[ShardState]:
        """Of all buckets, for whoever reads or writes them beside updates: none of it is under way."""
        if self.deferred is not None:
            self.deferred.finish()
        if self.host is not None:
            self.host.settle()
        if self.weights is not None:
            self.weights.settle()
        return self._states

    def sum_of_squares(self, shards: list[torch.Tensor]) -> torch.Tensor:
        """Of this rank's shards; over all ranks each gradient element counts once."""
        return self.sum_of_squares_of(self.buckets.buckets, shards)

    def sum_of_squares_of(self, buckets: Sequence[Bucket], shards: Sequence[torch.Tensor]) -> torch.Tensor:
        owned = [shard for bucket, shard in zip(buckets, shards, strict=True) if bucket.owned]
        return sum_of_squares(owned or [self._nothing])

    @property
    def _nothing(self) -> torch.Tensor:
        """A gradient of no element: a stage may have nothing to train."""
        bucket = next(iter((*self.buckets, *self.buckets.frozen)))
        return bucket.grads[:0]

    def step(
        self, shards: list[torch.Tensor], lr: float, norm: float | torch.Tensor, scale: float = 1.0
    ) -> None:
        """`shards` are gradients times `scale`, `norm` is that of the gradients themselves."""
        self.update(shards, lr, norm, scale)
        self.publish()

    @torch.no_grad()
    def update(
        self, shards: list[torch.Tensor], lr: float, norm: float | torch.Tensor, scale: float = 1.0
    ) -> None:
        """This rank's part of a step; nobody else hears of it yet."""
        self.updates += 1
        factor = self.factor(norm, scale)
        if self.deferred is not None:
            self.deferred.hold(shards, lr, factor)
            return
        for number, grad in enumerate(shards):
            self.update_bucket(number, grad, lr, factor)

    @torch.no_grad()
    def update_bucket(self, number: int, grad: torch.Tensor, lr: float, factor: torch.Tensor) -> None:
        """One bucket's part of the update that `updates` counts; they come in their order."""
        bucket, state, config = self.buckets.buckets[number], self._states[number], self.config
        if self.grads is not None:
            self.grads.arrived(number)
        if self.host is not None:
            state = self.host.arrived(bucket) or state
        if self.weights is not None:
            self.weights.arrived(bucket)
        if grad.numel():
            step = AdamStep(
                lr=lr * bucket.lr_factor,
                beta1=config.beta1,
                beta2=config.beta2,
                eps=config.eps,
                decay=config.weight_decay if bucket.decay else 0.0,
                number=self.updates,
            )
            chance = None
            if state.needs_chance:
                chance = (self._stretches(bucket, state), key_of(self.seed, self.updates, "rounding"))
            rounded = bucket.rounded if bucket.narrow and config.master != "none" else None
            if isinstance(state.weight, LowBits):
                rounded = bucket.rounded if bucket.lent else bucket.weights(bucket.params.dtype)
            adam(state.weight, state.adam_m, state.adam_v, grad, factor, step, rounded, chance)
            if isinstance(state.weight, LowBits) and rounded is not None:
                bucket.store(rounded)
        if self.grads is not None:
            self.grads.updated(number)
        if self.weights is not None:
            self.weights.updated(bucket)
        if self.host is not None:
            self.host.updated(bucket)

    def _stretches(self, bucket: Bucket, state: ShardState) -> Stretches:
        if state.stretches is None:
            found = [stretch_of(segment, self.seed) for segment in bucket.segments(everything=True)]
            found.sort(key=lambda stretch: stretch.offset)
            state.stretches = Stretches(found, len(state), bucket.params.device, BLOCK)
        return state.stretches

    @torch.no_grad()
    def publish(self) -> None:
        """Send the new weights out."""
        published, alone = [], self.config.master == "none"
        for bucket, state in zip(self.buckets, self._states, strict=True):
            if not bucket.shared:
                continue
            # The others were rounded, or stored, by the update.
            if isinstance(state.weight, torch.Tensor) and (alone or bucket.rounded is None):
                bucket.store(state.weight)
            published.append(bucket.publish())
        for result in published:
            result.get()

    def take_back(self) -> None:
        """The last update had a norm that was not finite: it changed nothing, and does not count."""
        self.updates -= 1
        if self.deferred is not None:
            self.deferred.drop()

    def begin_fetching(self) -> None:
        """State of the next updates is under way from here on."""
        if self.host is not None:
            self.host.begin_step()

    def factor(self, norm: float | torch.Tensor, scale: float) -> torch.Tensor:
        """What gradients are multiplied by, on the device; NaN where the norm is not finite."""
        if not isinstance(norm, torch.Tensor):
            norm = torch.full((), norm, dtype=torch.float64, device=self._nothing.device)
        clip = self.config.clip_norm
        factor = clip / norm.clamp(min=clip) if clip else torch.ones_like(norm)
        return torch.where(norm.isfinite(), factor / scale, math.nan)

    @property
    def num_bytes(self) -> int:
        """Of all pieces at most, without making any: some forms of state have to be widened for it."""
        kept = sum(len(state) * state.type_of(kind).itemsize for state in self._states for kind in STATES)
        return kept + sum(bucket.params.nbytes for bucket in self.buckets.frozen)

    def pieces(self) -> Iterator[Piece]:
        """All that this rank owns, as pieces of logical tensors."""
        for bucket, state in zip(self.buckets, self.states, strict=True):
            for segment in bucket.segments():
                for kind in STATES:
                    yield Piece(
                        name=f"{kind}/{segment.entry.name}",
                        shape=segment.entry.shape,
                        start=segment.start,
                        data=state.piece(kind, segment.offset, segment.offset + segment.length),
                    )
        for bucket in self.buckets.frozen:
            weight = bucket.weights(bucket.params.dtype)
            for segment in bucket.segments():
                yield Piece(
                    name=f"weight/{segment.entry.name}",
                    shape=segment.entry.shape,
                    start=segment.start,
                    data=weight[segment.offset : segment.offset + segment.length],
                )

    def load(self, checkpoint: Checkpoint, updates: int) -> None:
        """Take this rank's shards out of a checkpoint of any layout and send the weights out."""
        changed: dict[str, str] = {}
        for bucket, state in zip(self.buckets, self.states, strict=True):
            for segment in bucket.segments(everything=True):
                column_shard = ColumnShard.parse(segment.entry.name)
                name = segment.entry.name if column_shard is None else column_shard.name
                if f"weight/{name}" in checkpoint and f"adam_m/{name}" not in checkpoint:
                    raise CheckpointError(
                        f"{checkpoint.path} has no optimizer state of {name}: it was frozen in the run that "
                        "saved it; freeze it (optim.frozen), or begin a new run with --init-from"
                    )
                for kind in STATES:
                    saved, kept = checkpoint.dtype(f"{kind}/{name}"), state.type_of(kind)
                    if saved != kept:
                        changed[kind] = f"{kind} from {saved} to {kept}".replace("torch.", "")
        self.notes = (
            [f"the checkpoint's state is converted: {', '.join(changed.values())}"] if changed else []
        )
        self.updates = updates
        self._take(checkpoint, STATES)

    def load_weights(self, source: Readable) -> None:
        """The weights alone: moments and counts stay as they begin."""
        self._take(source, ("weight",))

    @torch.no_grad()
    def _take(self, source: Readable, kinds: Sequence[str]) -> None:
        if self.host is not None:
            self.host.forget()
        if self.weights is not None:
            self.weights.forget()
        for bucket, state in zip(self.buckets, self.states, strict=True):
            for kind in kinds:
                values = state.room(kind)
                read_shard(source, kind, bucket, values)
                state.put(kind, values)
                if kind == "weight":
                    bucket.store(values)
        for bucket in self.buckets.frozen:
            weight = bucket.weights(bucket.params.dtype)
            read_shard(source, "weight", bucket, weight)
            bucket.store(weight)
        for result in [bucket.publish() for bucket in (*self.buckets, *self.buckets.frozen)]:
            result.get()


def read_shard(source: Readable, kind: str, bucket: Bucket, into: torch.Tensor) -> None:
    """This rank's shard of a bucket."""
    for segment in bucket.segments(everything=True):
        stop = segment.start + segment.length
        data = source.read(f"{kind}/{segment.entry.name}", segment.start, stop)
        if data is not None:
            into[segment.offset : segment.offset + segment.length] = data
