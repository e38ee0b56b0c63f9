"""Conversations in samples: whole ones, as many as fit, each a document of its own.

A conversation is not cut where a sample happens to end: samples take conversations in their order while there
is room for seq_len + 1 tokens, and what is left over is padding, a document without a target. One that is
longer than a sample is cut behind its first seq_len + 1 tokens; how many are, and what is lost, is told.

Targets are the tokens that the assistant said (`train/documents/chat`); nothing else is predicted.
"""

from __future__ import annotations

import numpy as np

from moeclipse.core.errors import DataError
from moeclipse.tensor.vocab import NO_TARGET
from moeclipse.train.data.corpus import Corpus
from moeclipse.train.data.samples import SampleRows, Samples

PADDING = 0
"""Any token: nobody sees it, and it predicts nothing."""


class Conversations(Samples):
    """Samples of whole conversations."""

    even = False

    def __init__(
        self, corpus: Corpus, seq_len: int, seed: int, shuffle: bool = True, held_out: float = 0.0
    ) -> None:
        known = corpus.documents
        if known is None or known.counted is None:
            raise DataError(f"data.kind = 'chat' needs records with messages, which {corpus.what} has not")
        self.starts, self.said = np.concatenate([[0], known.ends[:-1]]), known.counted
        lengths = np.diff(known.ends, prepend=0)
        self.lengths = np.minimum(lengths, seq_len + 1)
        self.firsts = first_of_samples(self.lengths, seq_len + 1)
        super().__init__(corpus, seq_len, seed, shuffle, held_out)
        self.num_cut = int((lengths > seq_len + 1).sum())
        if self.num_cut:
            kept = self.starts + self.lengths
            ends = zip(kept[lengths > seq_len + 1], known.ends[lengths > seq_len + 1], strict=True)
            lost = sum(int(self.said[first:last].sum()) for first, last in ends)
            self.notes = [
                f"{self.num_cut} of {len(lengths)} conversations are longer than data.seq_len + 1 = "
                f"{seq_len + 1} tokens and are cut there: {lost} tokens of the assistant are not learned"
            ]

    def _count(self) -> int:
        return len(self.firsts) - 1

    def _inside(self, window: int) -> range:
        """The conversations of a sample."""
        return range(int(self.firsts[window]), int(self.firsts[window + 1]))

    def read(self, windows: np.ndarray) -> np.ndarray:
        return self._read(windows)[0]

    def _read(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, numbers of conversations, and what counts: [n, seq_len + 1] each."""
        shape = (len(windows), self.seq_len + 1)
        tokens, documents = np.full(shape, PADDING, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        counted = np.zeros(shape, dtype=bool)
        for row, window in enumerate(windows):
            inside, at = self._inside(int(window)), 0
            for number, conversation in enumerate(inside):
                start, length = int(self.starts[conversation]), int(self.lengths[conversation])
                here = slice(at, at + length)
                tokens[row, here] = self.corpus.read(start, start + length)
                counted[row, here] = self.said[start : start + length]
                counted[row, at] = False  # nothing stands before it
                documents[row, here] = number
                at += length
            documents[row, at:] = len(inside)
        return tokens, documents, counted

    def rows(self, windows: np.ndarray) -> SampleRows:
        tokens, documents, counted = self._read(windows)
        targets = np.where(counted[:, 1:], tokens[:, 1:], NO_TARGET)
        return SampleRows(inputs=tokens[:, :-1], targets=targets, documents=documents[:, :-1])

    def counted(self, windows: np.ndarray) -> np.ndarray:
        sums = np.zeros(len(windows), dtype=np.int64)
        for row, window in enumerate(windows):
            for conversation in self._inside(int(window)):
                start = int(self.starts[conversation])
                sums[row] += int(self.said[start + 1 : start + int(self.lengths[conversation])].sum())
        return sums

    def fingerprint(self) -> dict[str, object]:
        return {**super().fingerprint(), "kind": "chat", "num_documents": len(self.starts)}


def first_of_samples(lengths: np.ndarray, room: int) -> np.ndarray:
    """The first conversation of each sample, and behind the last one how many there are."""
    ends = np.cumsum(lengths)
    firsts, before = [0], 0
    while firsts[-1] < len(lengths):
        firsts.append(int(np.searchsorted(ends, before + room, side="right")))
        before = int(ends[firsts[-1] - 1])
    return np.array(firsts, dtype=np.int64)
