"""Tokens that were made once: a folder named after documents and recipe, mapped by every run that needs it.

    FOLDER/tokens-1f.../tokens.bin     all tokens, one document behind the other
                        ends.bin       where each document ends: int64, growing
                        counted.bin    of conversations: 1 for each token that the assistant said
                        cache.json     sizes, digests, tokens of each file
    FOLDER/digests/...                 what files of documents hold, so that unchanged ones are hashed once

Contract. The name is a digest of the content of all files, in their order, and of the recipe: other files,
another tokenizer or another version of this format are another folder. A folder is there whole or not at all;
one process makes it while others on the machine wait. What was damaged since is made again.

Hazard. Of large files only parts are read to see whether they are as they were written: sizes, and blocks
from end to end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeclipse.core.errors import DataError
from moeclipse.core.outside import open_file, read_json, regular
from moeclipse.train.checkpoints.disk import DISK, remove_tree
from moeclipse.train.documents.formats import (
    MAX_RECORD,
    FileKind,
    RawBatch,
    batches_of,
    check_kind,
    unreadable,
)
from moeclipse.train.documents.tokenizer import Encoded, Recipe
from moeclipse.train.documents.workers import Encoder, Here, Workers
from moeclipse.train.weights.staging import StagedFolder

VERSION = 1
IN_MEMORY = 1 << 22
"""Documents of fewer bytes are tokenised when they are needed: that is faster than to look for a folder."""
PACKED = 16
"""Bytes of documents that are expected of a byte that is packed."""
BLOCKS, BLOCK = 64, 1 << 16
"""What is read of a large file to see that it is as it was written."""
Tell = Callable[[int, int], None]
"""Told (bytes of documents that were read, all bytes)."""


@dataclass(frozen=True, kw_only=True)
class DocumentTokens:
    """Documents as tokens, one behind the other."""

    tokens: np.ndarray
    ends: np.ndarray
    """int64: where each document ends."""
    in_file: list[int]
    """Tokens of each file."""
    counted: np.ndarray | None = None
    """uint8: of conversations, 1 for each token that the assistant said."""


class Collected:
    """What is known of the documents besides their tokens, while these go by."""

    def __init__(self, num_files: int) -> None:
        self.in_file = [0] * num_files
        self._lengths: list[np.ndarray] = []
        self._counted = [np.zeros(0, dtype=np.uint8)]
        self._open = 0

    def passing(
        self, made: Iterable[tuple[RawBatch, Encoded]], tell: Tell, total: int
    ) -> Iterator[np.ndarray]:
        before, last = 0, (-1, 0)
        for batch, encoded in made:
            self.in_file[batch.file] += len(encoded.tokens)
            self._counted.append(encoded.counted)
            lengths = encoded.lengths.copy()
            if len(lengths):
                lengths[0] += self._open
                self._open = int(lengths[-1]) if batch.open else 0
                lengths = lengths[:-1] if batch.open else lengths
                self._lengths.append(lengths[lengths > 0])
            before += last[1] if last[0] != batch.file else 0
            last = (batch.file, batch.read)
            tell(min(before + batch.read, total), total)
            yield encoded.tokens

    def counted(self) -> np.ndarray:
        return np.concatenate(self._counted)

    def ends(self) -> np.ndarray:
        lengths = np.concatenate([*self._lengths, np.zeros(0, dtype=np.int64)])
        return np.cumsum(lengths, dtype=np.int64)


def tokens_of(
    files: Sequence[Path],
    kinds: Sequence[FileKind],
    recipe: Recipe,
    cache: str,
    *,
    max_record: int = MAX_RECORD,
    tell: Tell = lambda _done, _all: None,
) -> DocumentTokens:
    """The documents of these files as tokens: made now, or mapped from where they were made before."""
    for path, kind in zip(files, kinds, strict=True):
        check_kind(path, kind)
    sizes = [path.stat().st_size for path in files]
    raw = raw_batches(files, kinds, recipe, max_record)
    if sum(map(may_hold, sizes, kinds)) < IN_MEMORY:
        collected = Collected(len(files))
        made = Here(recipe, [str(path) for path in files]).map(raw)
        parts = [part.astype(recipe.dtype) for part in collected.passing(made, tell, sum(sizes))]
        tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=recipe.dtype)
        counted = collected.counted() if recipe.chat else None
        return DocumentTokens(
            tokens=tokens, ends=collected.ends(), in_file=collected.in_file, counted=counted
        )
    folder = Path(cache).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / f"tokens-{name_of(files, kinds, recipe, folder)[:24]}"
        with locked(out.with_name(f".{out.name}.lock")):
            found = opened(out, recipe, len(files))
            return found if found is not None else make(out, files, raw, recipe, sizes, tell)
    except OSError as error:
        raise DataError(
            f"data.cache: {folder} cannot be used: {error.strerror or error}; give another folder"
        ) from error


def may_hold(size: int, kind: FileKind) -> int:
    """Bytes of documents in a file of this size, as a guess on the high side."""
    return size * (PACKED if kind.packing or kind.form == "parquet" else 1)


def raw_batches(
    files: Sequence[Path], kinds: Sequence[FileKind], recipe: Recipe, max_record: int
) -> Iterator[RawBatch]:
    for number, (path, kind) in enumerate(zip(files, kinds, strict=True)):
        yield from batches_of(path, number, kind, recipe.field, recipe.chat, max_record)


def make(
    out: Path,
    files: Sequence[Path],
    raw: Iterable[RawBatch],
    recipe: Recipe,
    sizes: Sequence[int],
    tell: Tell,
) -> DocumentTokens:
    partial = out.with_name(f".{out.name}.partial")
    for left in (out, partial):  # damaged, or not finished
        if left.exists():
            remove_tree(DISK, left)
    staged, collected = StagedFolder(out, out.name), Collected(len(files))
    with encoder_for(recipe, [str(path) for path in files]) as encoder:
        passing = collected.passing(encoder.map(raw), tell, sum(sizes))
        staged.add(
            "tokens.bin", lambda: (memoryview(part.astype(recipe.dtype).tobytes()) for part in passing)
        )
    staged.add_bytes("ends.bin", collected.ends().tobytes())
    if recipe.chat:
        staged.add_bytes("counted.bin", collected.counted().tobytes())
    about = {
        "version": VERSION,
        "recipe": recipe.key(),
        "in_file": collected.in_file,
        "files": {
            name: {"size": staged.files[name].size, "blocks": blocks(staged.path / name)}
            for name in names_of(recipe)
        },
    }
    staged.add_bytes("cache.json", json.dumps(about, indent=1).encode())
    staged.commit()
    found = opened(out, recipe, len(files))
    if found is None:
        raise DataError(f"data.cache: {out} could not be read after it was written; check the disk")
    return found


def names_of(recipe: Recipe) -> list[str]:
    return [*(["counted.bin"] if recipe.chat else []), "ends.bin", "tokens.bin"]


def encoder_for(recipe: Recipe, paths: Sequence[str]) -> Encoder:
    """A process for each core; none where there is one."""
    count = num_workers()
    return Workers(recipe, paths, count) if count > 1 else Here(recipe, paths)


def num_workers() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def opened(out: Path, recipe: Recipe, num_files: int) -> DocumentTokens | None:
    """What an earlier run made; None where there is nothing, or it is not as it was written."""
    try:
        about = read_json(out / "cache.json", inside=out)
        for name, known in about["files"].items():
            path = out / name
            if path.stat().st_size != known["size"] or blocks(path) != known["blocks"]:
                return None
        if about["version"] != VERSION or about["recipe"] != recipe.key():
            return None
        if sorted(about["files"]) != names_of(recipe):
            return None
        in_file = [int(number) for number in about["in_file"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    tokens, ends = mapped(out / "tokens.bin", recipe.dtype), mapped(out / "ends.bin", "int64")
    if len(in_file) != num_files or min(in_file) < 0 or sum(in_file) != len(tokens):
        return None  # with fewer the rest would never be read, and nobody would know
    counted = mapped(out / "counted.bin", "uint8") if recipe.chat else None
    return DocumentTokens(tokens=tokens, ends=ends, in_file=in_file, counted=counted)


def mapped(path: Path, dtype: str) -> np.ndarray:
    if not path.stat().st_size:
        return np.zeros(0, dtype=dtype)
    return np.memmap(regular(path), dtype=dtype, mode="r")


def blocks(path: Path) -> str:
    """A digest of blocks from end to end; of all of a small file."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with open_file(path) as file:
        for number in range(BLOCKS if size > BLOCKS * BLOCK else 1):
            file.seek(number * (size - BLOCK) // (BLOCKS - 1) if number else 0)
            digest.update(file.read(BLOCK if size > BLOCKS * BLOCK else size))
    return digest.hexdigest()


def name_of(files: Sequence[Path], kinds: Sequence[FileKind], recipe: Recipe, folder: Path) -> str:
    """A digest of all that the tokens depend on."""
    held = [
        [content_of(path, folder), kind.form, kind.packing] for path, kind in zip(files, kinds, strict=True)
    ]
    about = {"version": VERSION, "recipe": recipe.key(), "files": held}
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def content_of(path: Path, folder: Path) -> str:
    """The SHA-256 of a file; known already where size, time and place are those of the last time."""
    state = path.stat()
    place = str(path.absolute())
    now = [place, state.st_size, state.st_mtime_ns, state.st_ino]
    name = hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()[:24]
    memo = folder / "digests" / f"{name}.json"
    try:
        before = read_json(memo)
        if before["file"] == now:
            return str(before["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        with open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error
    memo.parent.mkdir(exist_ok=True)
    fresh = memo.with_name(f".{memo.name}.{os.getpid()}")
    fresh.write_text(json.dumps({"file": now, "sha256": digest}))
    os.replace(fresh, memo)
    return digest


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone on this machine; the lock ends with the process that holds it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
