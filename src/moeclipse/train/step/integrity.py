"""Weights and optimizer state are what they were: flipped bits are found, and named by rank and tensor.

Memory, links and kernels sometimes change a bit without a word. Most of what a run holds can be checked
against something else it holds. In checked steps, before the update, this is done:

    weights         every rank that holds a copy has the digest of the rank that owns it       across ranks
    experts         replicas of an expert likewise (`replica_differences`)                     across ranks
    buffers         gates' biases and the like are the same on all ranks of a stage            across ranks
    optimizer       a digest taken after the last update is found again                        on each rank
    master weights  rounded, they are the weights that were sent out                           on each rank

The owner of a shard has both the digest of its own past and the copies of others to be compared with, so that
even of two holders it is known which one is wrong.

Contract. What one rank finds, all ranks raise, as one CorruptionError, and no rank applies the update.
Digests are compared, not tensors; only after a difference are tensors named, one by one.

The last step of a run is checked, and copies are compared before each save. Other steps are checked every so
many (`integrity.every`), or as often as SHARE of the run's time allows (`auto`): rank 0 measures what a check
takes, decides, and tells the others with the numbers of a step.

Hazard. Between two updates a fault shows; an update spreads it, so that afterwards all copies agree. What is
seen is thus what happened in the checked step: `every = 1` sees all of it, `every = 100` a hundredth, at its
price.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from moeclipse.comm.async_ops.lane import gather_to_host
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CorruptionError
from moeclipse.ops.digest import digest, digest_rows
from moeclipse.ops.low_bits import LowBits
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.adamw import AdamW
from moeclipse.train.optim.buckets import Bucket, BucketSegment
from moeclipse.train.optim.shard_state import STATES
from moeclipse.train.placement.expert_buckets import ExpertBucket
from moeclipse.train.placement.model_placement import ModelPlacement
from moeclipse.train.placement.placed_layer import PlacedLayer
from moeclipse.train.step.results import SIGNALS

Named = dict[str, torch.Tensor]
SHARE = 0.005
"""Of a run's seconds, that checks may take with `every = "auto"`."""
TOGETHER = 1 << 26
"""Numbers that are digested at once: of state in few bits they are a copy."""
CHECK = 8
"""What rank 0 tells the others with a step: the next one is to be checked."""


class Integrity:
    def __init__(
        self,
        config: TrainConfig,
        optim: AdamW,
        placement: ModelPlacement,
        mesh: Mesh,
        buffers: Callable[[], list[tuple[str, torch.Tensor]]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config, self.optim, self.placement, self.mesh = config.integrity, optim, placement, mesh
        self.buffers = buffers
        self._state: dict[str, int] | None = None
        """Digests of this rank's optimizer state after the last update, where the next step is checked."""
        self.num_steps, self._clock, self._begun = config.run.steps, clock, clock()
        self._asked = -1
        """The step that rank 0 wants checked."""
        self.spent_s, self._check_s = 0.0, 0.0
        """What all checks took, and the newest one with the digests before it."""
        self.remember(0)

    def is_due(self, step: int) -> bool:
        every = self.config.every
        if not every:
            return False
        if step + 1 == self.num_steps:
            return True
        return step == self._asked if every == "auto" else (step + 1) % every == 0

    def signal(self, others: int) -> int:
        """What this rank says: whether one check more stays within its share of the time, beside `others`."""
        within = self.spent_s + self._check_s <= SHARE * (self._clock() - self._begun)
        return others | CHECK * (self.config.every == "auto" and within)

    def hear(self, step: int, rows: list[list[float]]) -> list[list[float]]:
        """What all ranks said of a step, which hears of it: rank 0 decides about the next one."""
        self._asked = step + 1 if int(rows[0][SIGNALS]) & CHECK else -1
        return rows

    @contextmanager
    def _timed(self, *, begins: bool) -> Iterator[None]:
        self._wait_for_device()  # for what was computed before
        start = self._clock()
        yield
        self._wait_for_device()
        took = self._clock() - start
        self.spent_s += took
        self._check_s = took + (0.0 if begins else self._check_s)

    def _wait_for_device(self) -> None:
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)

    @torch.no_grad()
    def remember(self, next_step: int) -> None:
        """After an update, or a load: what the state must be before the next one."""
        self._state = None
        if self.is_due(next_step):
            with self._timed(begins=True):
                self._state = self._state_digests()

    @torch.no_grad()
    def look(self, step: int) -> list[str]:
        """What is wrong as far as this rank knows. Collective in each group that holds copies."""
        if not self.is_due(step):
            return []
        with self._timed(begins=False):
            return self._look(step)

    def _look(self, step: int) -> list[str]:
        changed = self._changed_state()
        found = [f"rank {self.mesh.rank}: {name} has changed since the last update" for name in changed]
        found += self._wrong_masters()
        found += self._wrong_copies(bool(changed))
        if self.placement.replicas_are_equal(step):
            found += replica_differences(self.placement.layers)
        buffers = dict(self.buffers())
        found += self._compare(self.mesh.dense_grads, buffers, "a buffer of", lambda _: None)
        return found

    @torch.no_grad()
    def before_save(self) -> None:
        """CorruptionError where copies differ: such a state is not saved. Collective."""
        if not self.config.every:
            return
        found = [*self._wrong_masters(), *self._wrong_copies(False)]
        if self.placement.config.reduce == "sum":
            found += replica_differences(self.placement.layers)
        found += self._compare(self.mesh.dense_grads, dict(self.buffers()), "a buffer of", lambda _: None)
        everyone = [text for texts in self.mesh.gather_objects(found) for text in texts]
        if everyone:
            raise self._error(everyone, "nothing was saved")

    def raise_together(self, found: list[str]) -> None:
        """CorruptionError with what all ranks found. Collective."""
        everyone = [text for texts in self.mesh.gather_objects(found) for text in texts]
        raise self._error(everyone, "the update was not applied")

    def _error(self, everyone: list[str], so: str) -> CorruptionError:
        named = "; ".join(dict.fromkeys(everyone))
        return CorruptionError(
            f"weights or optimizer state were corrupted: {named}; {so}. Look at the "
            "memory of that rank's machine (ECC, Xid errors), and resume from the last checkpoint without it"
        )

    # --- on this rank ------------------------------------------------------------------------------------

    def _states(self) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Names, and a row for each of them."""
        for bucket, state in zip(self.optim.buckets, self.optim.states, strict=True):
            for run in runs_of(bucket):
                stop = run[-1].offset + run[-1].length
                for kind in STATES:
                    yield _named(kind, run), state.values(kind, run[0].offset, stop).view(len(run), -1)
        for bucket in self.optim.buckets.frozen:
            weight = bucket.weights(bucket.params.dtype)
            for run in runs_of(bucket):
                part = weight[run[0].offset : run[-1].offset + run[-1].length]
                yield _named("weight", run), part.view(len(run), -1)

    def _state_digests(self) -> dict[str, int]:
        names: list[str] = []
        digests = []
        for more, rows in self._states():
            names += more
            digests.append(digest_rows(rows).to(self.mesh.device))
        return dict(zip(names, torch.cat(digests).tolist(), strict=True)) if digests else {}

    def _changed_state(self) -> list[str]:
        if self._state is None:
            return []
        now = self._state_digests()
        return [name for name, number in now.items() if self._state.get(name, number) != number]

    def _wrong_masters(self) -> Iterator[str]:
        """Where weights are rounded copies of master weights, they must still be that."""
        names: list[str] = []
        differing: list[torch.Tensor] = []
        for bucket, state in zip(self.optim.buckets, self.optim.states, strict=True):
            if isinstance(state.weight, LowBits):
                continue  # whatever they are beside, they round to it; digests know what it was
            if state.weight.dtype == bucket.params.dtype and not isinstance(bucket, ExpertBucket):
                continue  # they are one tensor
            held = bucket.weights(bucket.params.dtype)
            for run in runs_of(bucket):
                part = slice(run[0].offset, run[-1].offset + run[-1].length)
                differs = held[part] != state.weight[part].to(held)
                names += [segment.entry.name for segment in run]
                differing.append(differs.view(len(run), -1).any(1))
        found = torch.cat(differing).tolist() if differing else []  # the host waits once
        for name, differs in zip(names, found, strict=True):
            if differs:
                yield f"rank {self.mesh.rank}: {name} is not what its master weights round to"

    # --- across ranks ------------------------------------------------------------------------------------

    def _wrong_copies(self, changed: bool) -> list[str]:
        """Shards as their owners and as all others hold them: one exchange for each group of holders."""
        by_group: dict[str, list[Bucket]] = {}
        for bucket in (*self.optim.buckets, *self.optim.buckets.frozen):
            if not isinstance(bucket, ExpertBucket) and bucket.group.size > 1:
                by_group.setdefault(bucket.group.name, []).append(bucket)
        found: list[str] = []
        for buckets in by_group.values():
            group = buckets[0].group
            shards = {
                f"{number} {owner}": bucket.params[bucket.bounds[owner] : bucket.bounds[owner + 1]]
                for number, bucket in enumerate(buckets)
                for owner in range(group.size)
            }
            for key in self._differing(group, shards, f"digests of weights, {group.name}"):
                number, owner = map(int, key.split())
                found += self._name_copies(buckets[number], owner, changed)
        return found

    def _name_copies(self, bucket: Bucket, owner: int, changed: bool) -> list[str]:
        """The tensors of a shard that differ, and on whom."""
        first, last = bucket.bounds[owner], bucket.bounds[owner + 1]
        parts: Named = {}
        for entry in bucket.entries:
            start, stop = max(entry.offset, first), min(entry.offset + entry.numel, last)
            if start < stop:
                parts[f"{entry.name}[{entry.start + start - entry.offset}:]"] = bucket.params[start:stop]
        # The owner knows whether its own part is as the last update left it; all must know that, too.
        mine = torch.tensor([int(changed and bucket.group.index == owner)], device=self.mesh.device)
        doubtful = gather_to_host(self.mesh.grads, bucket.group, mine, "who was changed").get()[owner][0]
        return self._compare(bucket.group, parts, "", lambda _: None if doubtful else owner)

    def _compare(
        self, group: Group, tensors: Named, what: str, owner_of: Callable[[str], int | None]
    ) -> list[str]:
        """Tensors that all members hold; `owner_of` one may say whose copy counts."""
        found = []
        for name, numbers in self._differing(group, tensors, "digests of tensors").items():
            owner = owner_of(name)
            sides: dict[int, list[int]] = {}
            for rank, number in zip(group.ranks, numbers, strict=True):
                sides.setdefault(number, []).append(rank)
            by_size = sorted(sides.values(), key=len, reverse=True)
            if owner is not None:
                right = sides[numbers[owner]]
            elif len(by_size[0]) > len(by_size[1]):
                right = by_size[0]
            else:
                right = []
            wrong = [rank for rank in group.ranks if rank not in right]
            label = f"{what} {name}".strip()
            if right:
                who = " and ".join(f"rank {rank}" for rank in wrong)
                found.append(f"{who}: {label} differs from that of {_ranks(right)}")
            else:
                found.append(f"{_ranks(wrong)} disagree about {label}")
        return found

    def _differing(self, group: Group, tensors: Named, label: str) -> dict[str, list[int]]:
        """The digests of all members, for each tensor on which they differ."""
        if group.size == 1 or not tensors:
            return {}
        mine = torch.stack([digest(values) for values in tensors.values()])
        rows = gather_to_host(self.mesh.grads, group, mine, label).get()
        columns = zip(tensors, zip(*rows, strict=True), strict=True)
        return {name: list(numbers) for name, numbers in columns if len(set(numbers)) > 1}


def runs_of(bucket: Bucket) -> Iterator[list[BucketSegment]]:
    """Neighbours of one length, as a layer's experts are: one kernel digests them all."""
    run: list[BucketSegment] = []
    for segment in bucket.segments(everything=True):
        joins = run and segment.length == run[-1].length and segment.offset == run[-1].offset + segment.length
        if run and (not joins or segment.length * (len(run) + 1) > TOGETHER):
            yield run
            run = []
        run.append(segment)
    if run:
        yield run


def _named(kind: str, run: list[BucketSegment]) -> list[str]:
    return [f"{kind}/{segment.entry.name}[{segment.start}:]" for segment in run]


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"


def replica_differences(layers: Sequence[PlacedLayer]) -> list[str]:
    """Collective over the ranks of a stage; what differs, in the same words on all of them."""
    if not layers:
        return []
    group, mesh = layers[0].buckets[0].group, layers[0].buckets[0].mesh
    width = max(placed.placement.max_slots for placed in layers)
    mine = torch.zeros(len(layers), width, dtype=torch.int64, device=mesh.device)
    for number, placed in enumerate(layers):
        for turn, bucket in enumerate(placed.buckets):
            mine[number, : bucket.num_slots] += (2 * turn + 1) * bucket.digests()
    everyone = gather_to_host(mesh.grads, group, mine, "digests of replicas").get()
    found: list[str] = []
    for number, placed in enumerate(layers):
        placement = placed.placement
        for expert, holders in enumerate(placement.holders):
            ranks_of: dict[int, list[int]] = {}
            for copy in range(placed.ownership.copies):
                for rank in holders:
                    index = copy * placement.num_ranks + rank
                    digest = everyone[index][number][placement.slots[rank].index(expert)]
                    ranks_of.setdefault(digest, []).append(group.ranks[index])
            if len(ranks_of) > 1:
                sides = " and ".join(str(ranks) for ranks in sorted(ranks_of.values(), key=len, reverse=True))
                found.append(f"layer {placed.number}, expert {expert}: ranks {sides} hold other weights")
    return found
