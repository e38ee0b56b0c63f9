"""Samples and batches: what every rank reads at every step, as a pure function of a global index.

Idea. Sample g of a run (g = 0, 1, 2 ...) belongs to epoch g // len and to place g % len in that epoch's
shuffled order. Step s takes the global samples [s * B, (s + 1) * B); microbatch m is a contiguous part of
them, and a data rank's share a contiguous part of the microbatch. So the number of ranks, the number of
microbatches and restarts change who reads a sample, never which samples a step is made of.

With `data.order = "stream"` the corpus is cut into B streams of equal length instead: row b of a step is the
window behind that of row b of the step before, until the streams end and a new epoch begins. A shuffle then
changes which row reads which stream in an epoch. Windows left over (fewer than B) are not read.

Contract. Nothing here has state that must be saved except the step; `Batches.state` adds what must be the
same for that number to mean the same samples, and `check_state` compares it.

Shapes: n samples of this rank, S = seq_len.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from moeclipse.core.errors import CheckpointError, ConfigError, DataError
from moeclipse.train.corpus import Corpus
from moeclipse.train.fingerprint import differences
from moeclipse.train.shuffle import permute, shuffle_key

Order = Literal["samples", "stream"]


class Samples:
    """Windows of seq_len + 1 tokens at stride seq_len, so that every target is predicted once per epoch."""

    def __init__(self, corpus: Corpus, seq_len: int, seed: int, shuffle: bool = True) -> None:
        if seq_len < 1:
            raise ConfigError(f"data.seq_len ({seq_len}) must be at least 1")
        if len(corpus) < seq_len + 1:
            raise DataError(
                f"the corpus ({corpus.what}) has {len(corpus)} tokens, but one sample needs "
                f"data.seq_len + 1 = {seq_len + 1}; give more files, or lower data.seq_len"
            )
        self.corpus, self.seq_len, self.seed, self.shuffle = corpus, seq_len, seed, shuffle
        self.set_epoch(0)

    def __len__(self) -> int:
        return (len(self.corpus) - 1) // self.seq_len

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
        if not self.shuffle:
            return place
        for number in np.unique(epoch):
            mine = epoch == number
            place[mine] = permute(place[mine], len(self), shuffle_key(self.seed, int(number)))
        return place


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
    """int64 [n, seq_len]: the token after each input."""
    first_token: int
    """Position of this rank's first token among the microbatch's tokens on all ranks."""
    total_tokens: int
    """Tokens of the microbatch on all ranks."""

    @property
    def num_tokens(self) -> int:
        return self.targets.numel()


class Batches:
    """Cuts the global order of samples into steps, microbatches and shares of data ranks."""

    def __init__(
        self, samples: Samples, batch_size: int, accumulate: int = 1, order: Order = "samples"
    ) -> None:
        if batch_size < 1 or not 1 <= accumulate <= batch_size:
            raise ConfigError(
                f"data.batch_size ({batch_size}) must be at least 1 and at least optim.accumulate "
                f"({accumulate}), which must be at least 1: a microbatch needs a sample"
            )
        self.samples, self.batch_size, self.accumulate = samples, batch_size, accumulate
        self.streams = Streams(samples, batch_size) if order == "stream" else None

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
        batch_rows = np.arange(first + my_first, first + my_stop)
        if self.streams is None:
            windows = self.samples.windows(step * self.batch_size + batch_rows)
        else:
            windows = self.streams.windows(step, batch_rows)
        rows = torch.from_numpy(self.samples.read(windows))
        return Microbatch(
            inputs=rows[:, :-1].contiguous(),
            targets=rows[:, 1:].contiguous(),
            first_token=my_first * self.samples.seq_len,
            total_tokens=(stop - first) * self.samples.seq_len,
        )

    def state(self, step: int) -> dict[str, Any]:
        """The data position before `step`, JSON-able, with all that gives the number its meaning."""
        return {"next_sample": step * self.batch_size, **self._fingerprint()}

    def check_state(self, state: Mapping[str, Any], step: int) -> None:
        """Fails unless this run would read, from `step` on, what the saved run would have read."""
        lines = differences(state, self.state(step), prefix="data")
        if lines:
            raise CheckpointError(
                f"the data changed since the checkpoint: {'; '.join(lines)}; resume with the data and the "
                f"settings the run was started with, or start a new run"
            )

    def _fingerprint(self) -> dict[str, Any]:
        samples = self.samples
        return {
            "batch_size": self.batch_size,
            "seq_len": samples.seq_len,
            "seed": samples.seed,
            "shuffle": samples.shuffle,
            "corpus": samples.corpus.fingerprint(),
            **({} if self.streams is None else {"order": "stream"}),
        }


def even_part(total: int, parts: int, number: int) -> tuple[int, int]:
    """[first, stop) of one of `parts` contiguous parts of range(total); sizes differ by one at most."""
    return number * total // parts, (number + 1) * total // parts
