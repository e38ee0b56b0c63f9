"""Samples of several corpora, each with its share: where sample g of a run comes from, as a pure function.

Samples come in cycles of CYCLE. In each, source i has its share of the places, to the nearest place, and they
are dealt out by a shuffle of the cycle (evenly spread, where nothing is shuffled). The n-th place of a source
is its own n-th sample, in its own epochs. So shares are exact over a cycle, and who reads what still follows
from (seed, g) alone.

Contract. Windows are counted through: those of the second source begin where the first one's end.

The loss of each source of a step is added up by samples, and told beside the loss of all. Sums have (loss,
aux loss, dropped rows) in front, and behind them the loss of each source if there are several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import DataError
from moeclipse.train.data.conversations import Conversations
from moeclipse.train.data.corpus import open_corpus
from moeclipse.train.data.data_config import DataConfig, parts_of, source_name
from moeclipse.train.data.packing import PackedSamples
from moeclipse.train.data.samples import Batches, SampleRows, Samples, SampleSource, permute, shuffle_key

CYCLE = 10_000
OF_SOURCES = "sources"
"""Tells the key of a cycle from that of an epoch."""
IN_FRONT = 3
"""Sums before those of sources."""


class Described(Protocol):
    """All that is read."""

    what: str

    def unigram_entropy(self) -> float: ...


class Mixture:
    """Several sources, as batches read them."""

    def __init__(
        self, sources: Sequence[Samples], names: Sequence[str], weights: Sequence[float], *, what: str
    ) -> None:
        self.sources, self.names, self.what = list(sources), tuple(names), what
        first = sources[0]
        self.seq_len, self.seed, self.shuffle = first.seq_len, first.seed, first.shuffle
        self.even = all(source.even for source in sources)
        self.counts = places_of(weights)
        for name, count in zip(names, self.counts, strict=True):
            if not count:
                raise DataError(
                    f"data.source {name!r} has a weight below 1 / {CYCLE} of all; raise it, or leave it out"
                )
        self._places = np.concatenate([[0], np.cumsum(self.counts)])
        self._offsets = np.concatenate([[0], np.cumsum([source.num_windows for source in sources])])
        at = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        self._spread = np.argsort(at, kind="stable")

    def windows(self, global_index: np.ndarray) -> np.ndarray:
        cycle, place = np.divmod(np.asarray(global_index, dtype=np.int64), CYCLE)
        if self.shuffle:
            for number in np.unique(cycle):
                mine = cycle == number
                key = shuffle_key(self.seed, f"{OF_SOURCES} {number}")
                place[mine] = permute(place[mine], CYCLE, key)
        else:
            place = self._spread[place]
        source = np.searchsorted(self._places, place, side="right") - 1
        windows = np.empty_like(place)
        for number, samples in enumerate(self.sources):
            mine = source == number
            own = cycle[mine] * self.counts[number] + place[mine] - self._places[number]
            windows[mine] = samples.windows(own) + self._offsets[number]
        return windows

    def source_of(self, windows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._offsets, windows, side="right") - 1

    def rows(self, windows: np.ndarray) -> SampleRows:
        source = self.source_of(windows)
        shape = (len(windows), self.seq_len)
        inputs, targets = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        documents = None if self.even else np.zeros(shape, dtype=np.int64)
        for number in np.unique(source):
            mine = source == number
            rows = self.sources[number].rows(windows[mine] - self._offsets[number])
            inputs[mine], targets[mine] = rows.inputs, rows.targets
            if documents is not None and rows.documents is not None:
                documents[mine] = rows.documents
        return SampleRows(inputs=inputs, targets=targets, documents=documents)

    def counted(self, windows: np.ndarray) -> np.ndarray:
        source, counted = self.source_of(windows), np.zeros(len(windows), dtype=np.int64)
        for number in np.unique(source):
            mine = source == number
            counted[mine] = self.sources[number].counted(windows[mine] - self._offsets[number])
        return counted

    def held_windows(self) -> np.ndarray:
        parts = zip(self.sources, self._offsets[:-1], strict=True)
        return np.concatenate([source.held_windows() + offset for source, offset in parts])

    def fingerprint(self) -> dict[str, object]:
        parts = zip(self.names, self.counts, self.sources, strict=True)
        return {"source": {name: {"share": count, **one.fingerprint()} for name, count, one in parts}}

    @property
    def notes(self) -> list[str]:
        parts = zip(self.names, self.sources, strict=True)
        return [f"{name}: {note}" for name, source in parts for note in source.notes]

    def unigram_entropy(self) -> float:
        """Of all sources by their shares."""
        shares = np.array(self.counts)[:, None] / CYCLE
        mixed = (shares * np.stack([source.corpus.frequencies() for source in self.sources])).sum(axis=0)
        mixed = mixed[mixed > 0]
        return float(-(mixed * np.log(mixed)).sum())


def places_of(weights: Sequence[float]) -> list[int]:
    """Places of each source in a cycle, which they fill: largest remainders first."""
    exact = np.array(weights) / sum(weights) * CYCLE
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: CYCLE - int(counts.sum())]] += 1
    return [int(count) for count in counts]


def open_samples(config: DataConfig, vocab_size: int, seed: int, held_out: float = 0.0) -> Samples | Mixture:
    """What a configuration reads, as samples."""

    def samples(part: DataConfig) -> Samples:
        kind = PackedSamples if config.documents == "packed" else Samples
        kind = Conversations if part.kind == "chat" else kind
        return kind(open_corpus(part, vocab_size), config.seq_len, seed, config.shuffle, held_out)

    if not config.source:
        return samples(config)
    parts = parts_of(config)
    names = [source_name(source, number) for number, source in enumerate(config.source)]
    weights = [source.weight for source in config.source]
    return Mixture([samples(part) for part in parts], names, weights, what=f"sources {', '.join(names)}")


def corpus_of(samples: SampleSource) -> Described:
    """What says `what` and `unigram_entropy` of all that is read."""
    return samples.corpus if isinstance(samples, Samples) else cast(Described, samples)


def zero_sums(batches: Batches, mesh: Mesh) -> torch.Tensor:
    """Where a step begins to add."""
    several = len(batches.samples.names) if len(batches.samples.names) > 1 else 0
    return torch.zeros(IN_FRONT + several, dtype=torch.float64, device=mesh.device)


def add_by_source(sums: torch.Tensor, loss_T: torch.Tensor, sources: torch.Tensor, mesh: Mesh) -> None:
    """The losses of samples to those of their sources; tp ranks have the same ones, and one of them adds."""
    if mesh.tp_index == 0 and len(sources):
        of_sample = loss_T.double().view(len(sources), -1).sum(1)
        sums.index_add_(0, sources.to(sums.device), of_sample)


def told_by_source(batches: Batches, step: int, sums: Sequence[float]) -> dict[str, object]:
    """Loss and number of targets of each source that a step has read of, from sums over all ranks."""
    parts = zip(batches.samples.names, sums, batches.counted_by_source(step), strict=True)
    return {"sources": {name: {"loss": one / count, "targets": count} for name, one, count in parts if count}}
