"""The name that `train/data/corpus` had in version 0.1 (docs/compatibility.md)."""

from moeclipse.train.data.corpus import Corpus, open_corpus

__all__ = ["Corpus", "open_corpus"]
