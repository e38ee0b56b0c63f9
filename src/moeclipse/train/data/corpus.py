"""A corpus: one long row of tokens, read by position.

Idea. Whatever was given (the standard library's sources, text files, token files), training sees the files
one after the other, in a fixed order, as tokens 0 ... len - 1. Only what a sample needs is read: large files
are memory-mapped, small ones are joined in memory.

Contract. `read(start, stop)` gives int64 tokens, each checked to be at least 0 and below `vocab_size`.
`fingerprint()` depends on the tokens alone, not on where the files lie.

Documents (records, compressed files, text through a tokenizer) become tokens once (`train/documents`); then
it is also known where each of them ends.

Hazards. Files must not change while a run reads them.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import numpy as np

from moeclipse.core.errors import DataError
from moeclipse.core.outside import open_file, read_bytes, regular
from moeclipse.train.data.data_config import DataConfig
from moeclipse.train.data.standard_library import standard_library
from moeclipse.train.documents.cache import DocumentTokens, Tell, tokens_of
from moeclipse.train.documents.formats import TOKEN_SUFFIXES, FileKind, check_kind, kind_of, need
from moeclipse.train.documents.recipe import recipe_of
from moeclipse.train.documents.tokenizer import tokenizer_file

SMALL_FILE = 1 << 20
"""Files below this many bytes are read at once: mapping thousands of them would use up file handles."""
MAX_MAPPED = 128
"""Mapped files that are kept open; the least recently used one is closed first."""
PROBE_TOKENS = 1 << 25
"""A corpus up to this size is checked, hashed and counted whole; of a larger one, so many tokens are."""
PROBE_WINDOW = 1 << 14
SCANNED = 1 << 22
"""Tokens that are looked at together where documents of token files are searched."""


@dataclass(frozen=True, kw_only=True)
class CorpusPart:
    """A stretch of the corpus: an array in memory, or a file to map when it is needed."""

    source: str
    num_tokens: int
    array: np.ndarray | None = None
    dtype: str = "uint8"
    """Of the file's elements; "npy" where the file says it itself."""

    def open(self) -> np.ndarray:
        if self.array is not None:
            return self.array
        try:
            if self.dtype == "npy":
                return np.load(regular(self.source), mmap_mode="r", allow_pickle=False)
            return np.memmap(regular(self.source), dtype=self.dtype, mode="r", shape=(self.num_tokens,))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.source} could not be read again: {error}; "
                f"files must stay as they are while a run reads them"
            ) from error


class Corpus:
    """Tokens by position; see the module's text for the contract."""

    def __init__(
        self,
        parts: Sequence[CorpusPart],
        *,
        vocab_size: int,
        what: str,
        documents: DocumentTokens | None = None,
    ) -> None:
        self.documents = documents
        """Where documents end, as far as that is known."""
        self.parts = [part for part in parts if part.num_tokens]
        self.vocab_size = vocab_size
        self.what = what
        self._starts = [0, *accumulate(part.num_tokens for part in self.parts)]
        self._open: dict[int, np.ndarray] = {}
        if not self.parts:
            raise DataError(f"the corpus is empty: {what} holds no token; give other files in data.files")
        self._probe()

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start ... stop - 1 as int64."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} ... {stop - 1} are not all inside a corpus of {len(self)}")
        tokens = np.empty(stop - start, dtype=np.int64)
        position, number = start, bisect_right(self._starts, start) - 1
        while position < stop:
            end = min(stop, self._starts[number + 1])
            first = position - self._starts[number]
            tokens[position - start : end - start] = self._array(number)[first : first + end - position]
            position, number = end, number + 1
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            self._refuse(tokens, start)
        return tokens

    def fingerprint(self) -> dict[str, object]:
        """Number of tokens and a hash of them (of evenly spaced windows when there are many)."""
        return {"num_tokens": len(self), "sha256": self._sha256}

    def unigram_entropy(self) -> float:
        """Nats per token of a model that knows only how often each token occurs: the loss to beat."""
        share = self.frequencies()
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())

    def frequencies(self) -> np.ndarray:
        """How often each token occurs, as a share of all."""
        share: np.ndarray = self._counts / self._counts.sum()
        return share

    def find_documents(self, end: int) -> None:
        """Documents of token files: each ends behind the token `end`, the last one with the corpus."""
        found = [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(self), SCANNED):
            tokens = self.read(start, min(start + SCANNED, len(self)))
            found.append(np.flatnonzero(tokens == end) + start + 1)
        ends = np.concatenate(found)
        if not len(ends) or ends[-1] < len(self):
            ends = np.append(ends, len(self))
        self.documents = DocumentTokens(tokens=np.zeros(0, dtype=np.uint8), ends=ends, in_file=[])

    def _array(self, number: int) -> np.ndarray:
        array = self._open.pop(number, None)
        if array is None:
            array = self.parts[number].open()
            if len(self._open) >= MAX_MAPPED:
                del self._open[next(iter(self._open))]
        self._open[number] = array
        return array

    def _probe(self) -> None:
        """Checks, hashes and counts the corpus, or as much of it as PROBE_TOKENS says."""
        digest = hashlib.sha256()
        self._counts = np.zeros(self.vocab_size, dtype=np.int64)
        for start in self._windows():
            tokens = self.read(start, min(start + PROBE_WINDOW, len(self)))
            digest.update(tokens.astype("<u4").tobytes())
            counts = np.bincount(tokens)
            self._counts[: counts.size] += counts
        self._sha256 = digest.hexdigest()

    def _windows(self) -> Iterable[int]:
        if len(self) <= PROBE_TOKENS:
            return range(0, len(self), PROBE_WINDOW)
        count = PROBE_TOKENS // PROBE_WINDOW
        return [i * (len(self) - PROBE_WINDOW) // (count - 1) for i in range(count)]

    def _refuse(self, tokens: np.ndarray, start: int) -> None:
        bad = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
        number = bisect_right(self._starts, start + bad) - 1
        raise DataError(
            f"{self.parts[number].source} holds token {int(tokens[bad])} at position "
            f"{start + bad - self._starts[number]}, but model.vocab_size is {self.vocab_size}: tokens must "
            f"be at least 0 and below it; raise model.vocab_size, or give files with a smaller vocabulary"
        )


@dataclass(frozen=True, kw_only=True)
class CorpusFiles:
    """Files that a configuration names, not yet read."""

    files: list[Path]
    kind: str
    """.npy, .bin or text."""
    what: str
    kinds: list[FileKind]
    """What the name of each file promises."""

    @property
    def plain(self) -> bool:
        """Texts whose bytes are tokens as they stand."""
        return all(kind == FileKind("text") for kind in self.kinds)


def find_corpus(config: DataConfig) -> CorpusFiles:
    """All that can be said without reading a file; a DataError says what is wrong."""
    if not config.files:
        root = Path(sysconfig.get_path("stdlib"))
        files, what = standard_library(root), f"Python's standard library ({root})"
        if not files:
            raise DataError(
                f"no *.py file below {root}: this Python keeps no sources; give files in data.files"
            )
    else:
        files, what = find_files(config.files), f"data.files = {list(config.files)}"
    kinds = [kind_of(path) for path in files]
    sorts: set[str] = {kind.form if kind.form in TOKEN_SUFFIXES else "text" for kind in kinds}
    if len(sorts) > 1:
        raise DataError(
            f"{what} matches {' and '.join(sorted(sorts))} files: give files of one kind, "
            f"text or .npy tokens or .bin tokens; matched {_some(files)}"
        )
    kind = sorts.pop()
    for path, known in zip(files, kinds, strict=True):
        if known.packing == ".zst":
            need("zstandard", path)
        elif known.form == "parquet":
            need("pyarrow", path)
    if kind in TOKEN_SUFFIXES and config.tokenizer:
        raise DataError(
            f"data.tokenizer is {config.tokenizer!r}, but {what} matches token files ({kind}): "
            f"they are tokens already; leave data.tokenizer empty, or give text files"
        )
    if config.tokenizer:
        find_tokenizer(config.tokenizer)
    return CorpusFiles(files=files, kind=kind, what=what, kinds=kinds)


def open_corpus(config: DataConfig, vocab_size: int, tell: Tell = lambda _done, _all: None) -> Corpus:
    """The corpus that a configuration names; a DataError says what is wrong with it.

    `tell` is called while documents are tokenised, with the bytes that were read and all of them.
    """
    found = find_corpus(config)
    files, kind = found.files, found.kind
    documents = None
    if kind == ".npy":
        parts = [_npy_part(path) for path in files]
    elif kind == ".bin":
        parts = [_raw_part(path, config.token_dtype) for path in files]
    elif is_made_of_documents(config, found):
        tokenizer = find_tokenizer(config.tokenizer) if config.tokenizer else None
        recipe = recipe_of(config, tokenizer, vocab_size, total_size(files), plain=found.plain)
        documents = tokens_of(
            files, found.kinds, recipe, config.cache, max_record=config.max_record, tell=tell
        )
        parts = list(_parts_of(documents, files))
    else:
        for path, known in zip(files, found.kinds, strict=True):
            check_kind(path, known)
        parts = list(_joined(_raw_part(path, "uint8") for path in files))
    corpus = Corpus(parts, vocab_size=vocab_size, what=found.what, documents=documents)
    if found.kind in TOKEN_SUFFIXES and config.documents == "packed" and config.end_of_text.isdecimal():
        corpus.find_documents(int(config.end_of_text))
    return corpus


def is_made_of_documents(config: DataConfig, found: CorpusFiles) -> bool:
    """Whether files must be turned into tokens before they are read."""
    if found.kind in TOKEN_SUFFIXES:
        return False
    packed = config.documents == "packed" or config.kind == "chat"
    return bool(config.tokenizer) or packed or not found.plain or config.end_of_text not in ("", "auto")


def total_size(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _parts_of(documents: DocumentTokens, files: Sequence[Path]) -> Iterator[CorpusPart]:
    """Tokens by the file they come from, so that an error can name it."""
    first = 0
    for path, count in zip(files, documents.in_file, strict=True):
        array = documents.tokens[first : first + count]
        yield CorpusPart(source=str(path), num_tokens=count, array=array)
        first += count


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files that the globs match: patterns in the order given, names sorted, each file once."""
    found: dict[Path, None] = {}
    problems = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        # A name that exists is meant as it stands, also when it holds a `[`.
        matches = [path] if path.exists() else [Path(name) for name in glob.glob(str(path), recursive=True)]
        files = sorted((match for match in matches if match.is_file()), key=lambda match: match.as_posix())
        if path.is_dir():
            problems.append(f"{pattern!r} is a folder; write {str(Path(pattern) / '**' / '*.txt')!r}")
        elif not files:
            is_glob = glob.has_magic(pattern)
            problems.append(f"{pattern!r} matches no file" if is_glob else f"{pattern!r} does not exist")
        found.update(dict.fromkeys(files))
    if problems:
        raise DataError(
            f"data.files: {'; '.join(problems)}; give paths or globs of files, "
            f"relative to the folder the run is started in ({Path.cwd()})"
        )
    return list(found)


def _some(files: Sequence[Path]) -> str:
    names = ", ".join(str(path) for path in files[:3])
    return names if len(files) <= 3 else f"{names} and {len(files) - 3} more"


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, most=SMALL_FILE)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"data file {path} could not be read: {why}; check its permissions") from error


def _raw_part(path: Path, dtype: str) -> CorpusPart:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(
            f"data file {path} could not be read: {error.strerror}; check its permissions"
        ) from error
    item = np.dtype(dtype).itemsize
    if size % item:
        raise DataError(
            f"{path} has {size} bytes, no multiple of {item}, the size of data.token_dtype ({dtype}); "
            f"set data.token_dtype to what the file was written with, or write it again"
        )
    if size < SMALL_FILE:
        array = np.frombuffer(_read(path), dtype=dtype)
        return CorpusPart(source=str(path), num_tokens=array.size, array=array)
    return CorpusPart(source=str(path), num_tokens=size // item, dtype=dtype)


def _npy_part(path: Path) -> CorpusPart:
    try:
        array = np.load(regular(path), mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("it is an archive of arrays")
    except Exception as error:  # numpy has many kinds for a damaged header
        raise DataError(
            f"{path} is not a readable .npy file: {error}; write it with numpy.save(path, tokens)"
        ) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds {array.dtype} of shape {array.shape}, but tokens are one row of integers; "
            f"write it with numpy.save(path, tokens.reshape(-1).astype('uint16'))"
        )
    if array.nbytes < SMALL_FILE:
        return CorpusPart(source=str(path), num_tokens=array.size, array=np.array(array))
    return CorpusPart(source=str(path), num_tokens=array.size, dtype="npy")


def _joined(parts: Iterable[CorpusPart]) -> Iterator[CorpusPart]:
    """Neighbouring small text files as one array, so that a read seldom crosses parts."""
    small: list[CorpusPart] = []

    def flush() -> Iterator[CorpusPart]:
        if small:
            array = np.concatenate([part.array for part in small if part.array is not None])
            source = small[0].source if len(small) == 1 else f"{small[0].source} ... {small[-1].source}"
            yield CorpusPart(source=source, num_tokens=array.size, array=array)
            small.clear()

    for part in parts:
        if part.array is None:
            yield from flush()
            yield part
        else:
            small.append(part)
    yield from flush()


def find_tokenizer(tokenizer: str) -> Path:
    """The file, where there are it and a package that reads it."""
    if find_spec("tokenizers") is None:
        raise DataError(
            f"data.tokenizer is {tokenizer!r}, but the `tokenizers` package is not installed; "
            f"run: pip install moeclipse[hf]"
        )
    path = tokenizer_file(tokenizer)
    if path is None:
        if Path(tokenizer).expanduser().is_dir():
            raise DataError(
                f"data.tokenizer: folder {tokenizer!r} has no tokenizer.json; save one there with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
            )
        raise DataError(
            f"data.tokenizer: {tokenizer!r} does not exist; give the path of a tokenizer.json file"
        )
    return path
