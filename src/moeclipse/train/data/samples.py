"""Samples and batches: what every rank reads at every step, as a pure function of a global index.

Idea. Sample g of a run (g = 0, 1, 2 ...) belongs to epoch g // len and to place g % len in that epoch's
shuffled order. Step s takes the global samples [s * B, (s + 1) * B); microbatch m is a contiguous part of
them, and a data rank's share a contiguous part of the microbatch. So the number of ranks, the number of
microbatches and restarts change who reads a sample, never which samples a step is made of.

A sample is a window of the corpus (`Samples`); a window with documents in it (`train/data/packing`) also says
which token belongs to which, and has places where nothing is to be predicted. Of several corpora
(`train/data/sources`) windows are counted through.

With `data.order = "stream"` the corpus is cut into B streams of equal length instead: row b of a step is the
window behind that of row b of the step before, until the streams end and a new epoch begins. A shuffle then
changes which row reads which stream in an epoch. Windows left over (fewer than B) are not read.

Contract. Nothing here has state that must be saved except the step; `Batches.state` adds what must be the
same for that number to mean the same samples, and `check_state` compares it.

The shuffle needs no memory: a keyed permutation of range(n), computed index by index. An index is written as
two digits (left, right) of bases a and b with a * b just above n. A round adds to one digit a hash of the
other, modulo its base: that can be undone, so any number of rounds is a permutation of range(a * b). An index
that lands at n or above is sent through again until it falls inside ("cycle walking"); because a * b - n < a,
that is rare. Hazard: changing one of its constants changes the order of samples, and with it what a resumed
run sees; a test pins the values.

Shapes: n samples of this rank, S = seq_len.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal, Protocol

import numpy as np
import torch

from moeclipse.core.errors import CheckpointError, ConfigError, DataError
from moeclipse.train.data.corpus import Corpus
from moeclipse.train.fingerprint import differences

HELD_OUT = -1
"""In the place of an epoch: the order whose end is held out, the same in all epochs."""
Order = Literal["samples", "stream"]
ROUNDS = 8
# Finaliser of a 64-bit hash: odd multipliers with an irregular bit pattern.
MULTIPLY_1 = np.uint64(0x9FB21C651E98DF25)
MULTIPLY_2 = np.uint64(0xD6E8FEB86659FD93)
SHIFT = np.uint64(32)


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """Samples as a model reads them, int64 [n, seq_len] each."""

    inputs: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None = None
    """Numbers of documents; None: a sample is one."""


class Samples:
    """Windows of seq_len + 1 tokens at stride seq_len, so that every target is predicted once per epoch."""

    names: Sequence[str] = ("",)
    """Of the sources that samples come from."""
    even = True
    """Every sample has seq_len targets, and no documents."""
    notes: Sequence[str] = ()
    """What whoever starts a run should know of them."""

    def __init__(
        self, corpus: Corpus, seq_len: int, seed: int, shuffle: bool = True, held_out: float = 0.0
    ) -> None:
        """`held_out`: the share of windows that no epoch reads, for evaluation; at least one, if any."""
        if seq_len < 1:
            raise ConfigError(f"data.seq_len ({seq_len}) must be at least 1")
        self.corpus, self.seq_len, self.seed, self.shuffle = corpus, seq_len, seed, shuffle
        self.num_windows = self._count()
        self.num_held = max(1, round(held_out * self.num_windows)) if held_out else 0
        if self.num_windows - self.num_held < 1:
            raise DataError(
                f"the corpus ({corpus.what}) has {self.num_windows} samples, of which "
                f"eval.share = {held_out} leaves none; give more files, or lower data.seq_len"
            )
        self.set_epoch(0)

    def _count(self) -> int:
        if len(self.corpus) < self.seq_len + 1:
            raise DataError(
                f"the corpus ({self.corpus.what}) has {len(self.corpus)} tokens, but one sample needs "
                f"data.seq_len + 1 = {self.seq_len + 1}; give more files, or lower data.seq_len"
            )
        return (len(self.corpus) - 1) // self.seq_len

    def __len__(self) -> int:
        return self.num_windows - self.num_held

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order that `samples[i]` follows; the same epoch always gives the same order."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index` of the chosen epoch: int64 [seq_len + 1], inputs and the targets shifted by one."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not inside an epoch of {len(self)}")
        return self.take(np.array([self.epoch * len(self) + index]))[0]

    def take(self, global_index: np.ndarray) -> np.ndarray:
        """Samples by global index, int64 [n, seq_len + 1]; they may belong to several epochs."""
        return self.read(self.windows(np.asarray(global_index, dtype=np.int64)))

    def read(self, windows: np.ndarray) -> np.ndarray:
        """These windows of the corpus, int64 [n, seq_len + 1]."""
        rows = np.empty((len(windows), self.seq_len + 1), dtype=np.int64)
        for row, window in zip(rows, windows, strict=True):
            start = int(window) * self.seq_len
            row[:] = self.corpus.read(start, start + self.seq_len + 1)
        return rows

    def windows(self, global_index: np.ndarray) -> np.ndarray:
        """Which window of the corpus each global sample is."""
        epoch, place = np.divmod(global_index, len(self))
        if self.shuffle:
            for number in np.unique(epoch):
                mine = epoch == number
                place[mine] = permute(place[mine], len(self), shuffle_key(self.seed, int(number)))
        return self._not_held(place)

    def held_windows(self) -> np.ndarray:
        """Those that no epoch reads."""
        return self._not_held(np.arange(len(self), self.num_windows))

    def _not_held(self, place: np.ndarray) -> np.ndarray:
        """Windows in the order whose end is held out."""
        if not self.num_held:
            return place
        return permute(place, self.num_windows, shuffle_key(self.seed, HELD_OUT))

    def rows(self, windows: np.ndarray) -> SampleRows:
        """These windows as inputs and targets."""
        tokens = self.read(windows)
        return SampleRows(inputs=tokens[:, :-1], targets=tokens[:, 1:])

    def counted(self, windows: np.ndarray) -> np.ndarray:
        """How many targets each of these windows has."""
        return np.full(len(windows), self.seq_len, dtype=np.int64)

    def source_of(self, windows: np.ndarray) -> np.ndarray:
        """The number of the source of each window."""
        return np.zeros(len(windows), dtype=np.int64)

    def fingerprint(self) -> dict[str, object]:
        """What must be the same for a window to be the same."""
        held = {"held_out": self.num_held} if self.num_held else {}
        return {"corpus": self.corpus.fingerprint(), **held}


class SampleSource(Protocol):
    """What batches are made of: samples of one corpus, or of several (`train/data/sources`)."""

    @property
    def seq_len(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def even(self) -> bool: ...
    @property
    def notes(self) -> Sequence[str]: ...
    def windows(self, global_index: np.ndarray) -> np.ndarray: ...
    def rows(self, windows: np.ndarray) -> SampleRows: ...
    def counted(self, windows: np.ndarray) -> np.ndarray: ...
    def source_of(self, windows: np.ndarray) -> np.ndarray: ...
    def held_windows(self) -> np.ndarray: ...
    def fingerprint(self) -> dict[str, object]: ...


class Streams:
    """The corpus as one text for each row of a batch."""

    def __init__(self, samples: Samples, batch_size: int) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.length = len(samples) // batch_size
        if not self.length:
            raise DataError(
                f"data.order = 'stream' needs a sample for each of data.batch_size ({batch_size}) streams, "
                f"but the corpus ({samples.corpus.what}) has {len(samples)}; give more files, or lower "
                "data.batch_size or data.seq_len"
            )

    def windows(self, step: int, rows: np.ndarray) -> np.ndarray:
        """Which window of the corpus each row of a step's batch reads."""
        epoch, place = divmod(step, self.length)
        if self.samples.shuffle:
            rows = permute(rows, self.batch_size, shuffle_key(self.samples.seed, epoch))
        return rows * self.length + place

    def continues(self, step: int) -> bool:
        """Whether every row goes on where it stood in the step before."""
        return step % self.length > 0


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One rank's share of a microbatch, and where it lies in the whole."""

    inputs: torch.Tensor
    """int64 [n, seq_len]; n may be 0."""
    targets: torch.Tensor
    """int64 [n, seq_len]: the token after each input; -1 where nothing is to be predicted."""
    first_token: int
    """Position of this rank's first token among the microbatch's tokens on all ranks."""
    total_tokens: int
    """Tokens of the microbatch on all ranks."""
    documents: torch.Tensor | None = None
    """int64 [n, seq_len]: which document each token is in; None: a sample is one."""
    sources: torch.Tensor | None = None
    """int64 [n]: where each sample comes from, if there are several sources."""

    @property
    def num_tokens(self) -> int:
        return self.targets.numel()


class Batches:
    """Cuts the global order of samples into steps, microbatches and shares of data ranks."""

    def __init__(
        self, samples: SampleSource, batch_size: int, accumulate: int = 1, order: Order = "samples"
    ) -> None:
        if batch_size < 1 or not 1 <= accumulate <= batch_size:
            raise ConfigError(
                f"data.batch_size ({batch_size}) must be at least 1 and at least optim.accumulate "
                f"({accumulate}), which must be at least 1: a microbatch needs a sample"
            )
        self.samples, self.batch_size, self.accumulate = samples, batch_size, accumulate
        self.streams: Streams | None = None
        if order == "stream":
            assert isinstance(samples, Samples), "several sources have no one order to go on in"
            self.streams = Streams(samples, batch_size)
        self._counted: tuple[int, list[int]] = (-1, [])

    def rows(self, m: int, data_rank: int = 0, num_data_ranks: int = 1) -> tuple[int, int, int]:
        """Of microbatch m: its first row in the batch, and [first, stop) of a data rank's rows in it."""
        first, stop = even_part(self.batch_size, self.accumulate, m)
        return first, *even_part(stop - first, num_data_ranks, data_rank)

    def continues(self, step: int) -> bool:
        """Whether row b goes on with the text of row b of the step before."""
        return self.streams is not None and self.streams.continues(step)

    def microbatch(self, step: int, m: int, data_rank: int = 0, num_data_ranks: int = 1) -> Microbatch:
        """Microbatch m of a step (counted from 0) as rank data_rank of num_data_ranks reads it."""
        if not (step >= 0 and 0 <= m < self.accumulate and 0 <= data_rank < num_data_ranks):
            raise IndexError(
                f"no microbatch {m} of {self.accumulate} at step {step} "
                f"for data rank {data_rank} of {num_data_ranks}"
            )
        first, stop = even_part(self.batch_size, self.accumulate, m)
        my_first, my_stop = even_part(stop - first, num_data_ranks, data_rank)
        windows = self._windows(step, np.arange(first + my_first, first + my_stop))
        return as_microbatch(self.samples, windows, my_first, stop - first)

    def _windows(self, step: int, batch_rows: np.ndarray) -> np.ndarray:
        if self.streams is not None:
            return self.streams.windows(step, batch_rows)
        return self.samples.windows(step * self.batch_size + batch_rows)

    def counted(self, step: int) -> int:
        """Targets of a step on all ranks: what its loss is a mean over. At least 1."""
        if self.samples.even:
            return self.batch_size * self.samples.seq_len
        return max(1, sum(self.counted_by_source(step)))

    def counted_by_source(self, step: int) -> list[int]:
        """The same for each source; every rank knows it of all samples."""
        if self._counted[0] != step:
            windows = self._windows(step, np.arange(self.batch_size))
            weights = self.samples.counted(windows)
            sums = np.zeros(len(self.samples.names), dtype=np.int64)
            np.add.at(sums, self.samples.source_of(windows), weights)
            self._counted = (step, sums.tolist())
        return self._counted[1]

    def state(self, step: int) -> dict[str, object]:
        """The data position before `step`, JSON-able, with all that gives the number its meaning."""
        return {"next_sample": step * self.batch_size, **self._fingerprint()}

    def check_state(self, state: Mapping[str, object], step: int) -> None:
        """Fails unless this run would read, from `step` on, what the saved run would have read."""
        lines = differences(state, self.state(step), prefix="data")
        if lines:
            raise CheckpointError(
                f"the data changed since the checkpoint: {'; '.join(lines)}; resume with the data and the "
                f"settings the run was started with, or start a new run"
            )

    def _fingerprint(self) -> dict[str, object]:
        samples = self.samples
        return {
            "batch_size": self.batch_size,
            "seq_len": samples.seq_len,
            "seed": samples.seed,
            "shuffle": samples.shuffle,
            **samples.fingerprint(),
            **({} if self.streams is None else {"order": "stream"}),
        }


def as_microbatch(samples: SampleSource, windows: np.ndarray, first_row: int, num_rows: int) -> Microbatch:
    """These windows as a rank's share of a microbatch of `num_rows`, of which it begins at `first_row`."""
    rows = samples.rows(windows)
    several = len(samples.names) > 1
    return Microbatch(
        inputs=torch.from_numpy(rows.inputs).contiguous(),
        targets=torch.from_numpy(rows.targets).contiguous(),
        first_token=first_row * samples.seq_len,
        total_tokens=num_rows * samples.seq_len,
        documents=None if rows.documents is None else torch.from_numpy(rows.documents).contiguous(),
        sources=torch.from_numpy(samples.source_of(windows)) if several else None,
    )


def even_part(total: int, parts: int, number: int) -> tuple[int, int]:
    """[first, stop) of one of `parts` contiguous parts of range(total); sizes differ by one at most."""
    return number * total // parts, (number + 1) * total // parts


def shuffle_key(seed: int, epoch: int | str) -> np.ndarray:
    """One 64-bit number per round, [ROUNDS], from the seed and the epoch, or what else is shuffled."""
    digest = hashlib.blake2b(
        f"moeclipse shuffle, seed {seed}, epoch {epoch}".encode(), digest_size=64
    ).digest()
    return np.frombuffer(digest, dtype="<u8", count=ROUNDS).astype(np.uint64)


def permute(index: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """Where the permutation of range(n) under `key` sends each of `index` (int64, any shape)."""
    result = np.array(index, dtype=np.int64)
    if n <= 0 or (result.size and not (result.min() >= 0 and result.max() < n)):
        raise IndexError(f"indices must be at least 0 and below {n}")
    flat = result.reshape(-1)
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    outside = np.arange(flat.size)
    while outside.size:
        flat[outside] = _permute_digits(flat[outside], a, b, key)
        outside = outside[flat[outside] >= n]
    return result


def _permute_digits(index: np.ndarray, a: int, b: int, key: np.ndarray) -> np.ndarray:
    left: np.ndarray = (index // b).astype(np.uint64)
    right: np.ndarray = (index % b).astype(np.uint64)
    for number in range(0, ROUNDS, 2):
        left = (left + _mix(right, key[number]) % np.uint64(a)) % np.uint64(a)
        right = (right + _mix(left, key[number + 1]) % np.uint64(b)) % np.uint64(b)
    return (left * np.uint64(b) + right).astype(np.int64)


def _mix(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """A 64-bit hash of x under one round's key; unsigned arithmetic wraps around on purpose."""
    x = x ^ key
    x = (x ^ (x >> SHIFT)) * MULTIPLY_1
    x = (x ^ (x >> SHIFT)) * MULTIPLY_2
    return x ^ (x >> SHIFT)
