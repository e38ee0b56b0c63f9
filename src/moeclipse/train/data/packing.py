"""Several documents in a sample: none sees another, and nothing is predicted across an end.

A window is cut out of the row of all documents, as ever; a document that goes on behind it goes on in the
next window as a document of its own. Of each window it is also known

    documents    the number of the document that each token is in: [[0, 0, 0, 1, 1]]
    targets      NO_TARGET where the next token belongs to another document

so the loss and its gradients are those of the pieces of documents, each alone in a sample of its own length.

Contract. Numbers count from 0 in each window; where they change, a document begins. `counted` needs no token.
"""

from __future__ import annotations

import numpy as np

from moeclipse.core.errors import DataError
from moeclipse.tensor.vocab import NO_TARGET
from moeclipse.train.data.corpus import Corpus
from moeclipse.train.data.samples import SampleRows, Samples


class PackedSamples(Samples):
    """Windows with documents in them."""

    even = False

    def __init__(
        self, corpus: Corpus, seq_len: int, seed: int, shuffle: bool = True, held_out: float = 0.0
    ) -> None:
        if corpus.documents is None:
            raise DataError(
                f"data.documents = 'packed' needs to know where documents end, but {corpus.what} holds "
                "tokens alone; give the token behind each document in data.end_of_text"
            )
        self.ends = corpus.documents.ends
        super().__init__(corpus, seq_len, seed, shuffle, held_out)

    def rows(self, windows: np.ndarray) -> SampleRows:
        tokens = self.read(windows)
        documents = np.zeros_like(tokens)
        for row, window in zip(documents, windows, strict=True):
            start = int(window) * self.seq_len
            first, last = self._ends_in(start)
            row[self.ends[first:last] - start] = 1
        documents = documents.cumsum(axis=1)
        same = documents[:, 1:] == documents[:, :-1]
        targets = np.where(same, tokens[:, 1:], NO_TARGET)
        return SampleRows(inputs=tokens[:, :-1], targets=targets, documents=documents[:, :-1])

    def _ends_in(self, start: int) -> tuple[int, int]:
        """Which documents end inside a window, so that another one goes on there."""
        first, last = np.searchsorted(self.ends, [start, start + self.seq_len], side="right")
        return int(first), int(last)

    def counted(self, windows: np.ndarray) -> np.ndarray:
        start = np.asarray(windows) * self.seq_len
        first = np.searchsorted(self.ends, start, side="right")
        last = np.searchsorted(self.ends, start + self.seq_len, side="right")
        counted: np.ndarray = self.seq_len - (last - first)
        return counted

    def fingerprint(self) -> dict[str, object]:
        return {**super().fingerprint(), "documents": "packed", "num_documents": len(self.ends)}
