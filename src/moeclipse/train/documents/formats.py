"""Files of documents: what kind each is, and its documents as bytes, in their order.

    text        .txt and every other name: one document, in pieces of whole lines where it is very long
    jsonl       a record a line; the line is handed on, whoever tokenises it reads its field
    parquet     a record a row; only the wanted column is read
    .gz .zst    behind one of the first two: unpacked while it is read

Contract. What a file says of itself in its first bytes wins over its name: a file that is not what its name
promises is a DataError before anything of it is taken for text. Nothing holds a whole file in memory, but for
a text below PIECE.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

from moeclipse.core.errors import DataError

Form = Literal["text", "jsonl", "parquet", ".npy", ".bin"]
TOKEN_SUFFIXES = (".npy", ".bin")
PIECE = 1 << 26
"""A text of more bytes is cut behind a line, so that no piece of it has many more."""
BATCH = 1 << 20
"""Bytes of documents that are tokenised together."""
MAGIC = {
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ\0": "compressed by xz",
    b"PK\x03\x04": "a zip archive",
    b"\x93NUMPY": "a .npy file",
    b"ARROW1": "an Arrow file",
    b"%PDF-": "a PDF",
    b"SQLite format 3\0": "a database",
    b"\x89HDF": "an HDF5 file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
"""First bytes of what is no UTF-8 text."""
NAMES = {
    "a Parquet file": ".parquet",
    "compressed by gzip": ".gz",
    "compressed by zstd": ".zst",
    "a .npy file": ".npy",
}
"""The ending under which such a file could be read."""


@dataclass(frozen=True)
class FileKind:
    """What the name of a file promises."""

    form: Form
    packing: Literal["", ".gz", ".zst"] = ""


def kind_of(path: Path) -> FileKind:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packing: Any = suffixes.pop() if suffixes and suffixes[-1] in (".gz", ".zst") else ""
    last = suffixes[-1] if suffixes else ""
    if last in (".jsonl", ".ndjson"):
        return FileKind("jsonl", packing)
    if last == ".parquet" and not packing:
        return FileKind("parquet")
    if path.suffix in TOKEN_SUFFIXES:
        return FileKind(".npy" if path.suffix == ".npy" else ".bin")
    return FileKind("text", packing)


def check_kind(path: Path, kind: FileKind) -> None:
    """DataError where the first bytes of a file of documents say that it is something else."""
    first = _first_bytes(path)
    if not first:
        return
    found = next((what for magic, what in MAGIC.items() if first.startswith(magic)), "")
    promised = {".gz": "compressed by gzip", ".zst": "compressed by zstd"}.get(kind.packing, "")
    if kind.form == "parquet":
        promised = "a Parquet file"
    if found == promised:
        return
    if promised:
        raise DataError(f"{path} is not {promised}, as its name says; give it the ending of what it is")
    renamed = f"a name that ends in {NAMES[found]}" if found in NAMES else "text in UTF-8, .jsonl or .parquet"
    raise DataError(f"{path} is {found}, not text; give it as {renamed}")


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data file {path} could not be read: {error.strerror or error}; check its permissions")


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Documents of one file that follow each other."""

    file: int
    """Its number among all files."""
    form: Literal["text", "jsonl"]
    first: int
    """Number of the first record, from 0: of jsonl its line."""
    raw: list[bytes]
    read: int
    """Bytes of the file that have been read so far."""
    open: bool = False
    """The last document goes on in the next batch: a piece of a long text."""
    offset: int = 0
    """Of a piece: bytes of its document before it."""


def batches_of(path: Path, number: int, kind: FileKind, field: str, chat: bool) -> Iterator[RawBatch]:
    """All documents of a file, BATCH bytes at a time."""
    check_kind(path, kind)
    if kind.form == "parquet":
        yield from _parquet(path, number, field, chat)
        return
    try:
        with path.open("rb") as packed, _unpacked(packed, kind, path) as file:
            read = _lines if kind.form == "jsonl" else _text
            yield from read(file, packed, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}; copy it again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"{path} is damaged: {error}; copy it again") from error


def _unpacked(file: IO[bytes], kind: FileKind, path: Path) -> Any:
    if kind.packing == ".gz":
        return gzip.GzipFile(fileobj=file)
    if kind.packing == ".zst":
        need("zstandard", path)
        return ZstdReader(file)
    return file


class ZstdReader:
    """Bytes behind zstd, frame by frame; EOFError where the last frame is not whole."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._file, self._begin = file, zstandard.ZstdDecompressor().decompressobj
        self._frame, self._inside, self._ready = self._begin(), False, b""

    def __enter__(self) -> ZstdReader:
        return self

    def __exit__(self, *_: object) -> None:
        """The file is its owner's to close."""

    def read(self, size: int) -> bytes:
        parts = [self._ready]
        have = len(self._ready)
        while have < size and (packed := self._file.read(BATCH)):
            while packed:
                part = self._frame.decompress(packed)
                parts.append(part)
                have, self._inside, packed = have + len(part), not self._frame.eof, b""
                if self._frame.eof:
                    packed, self._frame = self._frame.unused_data, self._begin()
        if have < size and self._inside:
            raise EOFError("it ends inside a frame")
        whole = b"".join(parts)
        self._ready = whole[size:]
        return whole[:size]


def need(package: str, path: Path) -> None:
    """DataError where a package of the extra `data` is not there."""
    if find_spec(package) is None:
        raise DataError(f"{path} needs the `{package}` package; run: pip install moeclipse[data]")


def _text(file: IO[bytes], packed: IO[bytes], number: int) -> Iterator[RawBatch]:
    """One document; of a long one, pieces that end behind a line."""
    rest, offset, more = b"", 0, True
    while more:
        block = file.read(PIECE)
        more, data = len(block) == PIECE, rest + block
        end = data.rfind(b"\n") + 1 if more else len(data)
        end = end or len(data)
        rest, piece = data[end:], data[:end]
        yield RawBatch(
            file=number, form="text", first=0, raw=[piece], read=packed.tell(), open=more, offset=offset
        )
        offset += end


def _lines(file: IO[bytes], packed: IO[bytes], number: int) -> Iterator[RawBatch]:
    first, rest = 0, b""
    while True:
        block = file.read(BATCH)
        data = rest + block
        end = data.rfind(b"\n") + 1 if block else len(data)
        rest = data[end:]
        if end:
            raw = data[:end].split(b"\n")
            raw = raw[:-1] if not raw[-1] else raw
            yield RawBatch(file=number, form="jsonl", first=first, raw=raw, read=packed.tell())
            first += len(raw)
        if not block:
            return


def _parquet(path: Path, number: int, field: str, chat: bool) -> Iterator[RawBatch]:
    need("pyarrow", path)
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"{path} has no column {field!r}; it has {', '.join(names)}: "
                    "set data.field to one of them"
                )
            first, rows = 0, max(table.metadata.num_rows, 1)
            # One thread: documents go to processes that tokenise, and no fork survives threads of a library.
            for batch in table.iter_batches(batch_size=256, columns=[field], use_threads=False):
                values = batch.column(0).to_pylist()
                raw = list(_column(values, path, first, field, chat))
                first += len(raw)
                form: Literal["text", "jsonl"] = "jsonl" if chat else "text"
                read = size * first // rows
                yield RawBatch(file=number, form=form, first=first - len(raw), raw=raw, read=read)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}; copy it again") from error


def _column(values: Iterable[Any], path: Path, first: int, field: str, chat: bool) -> Iterator[bytes]:
    for row, value in enumerate(values, start=first):
        if chat:
            yield json.dumps({field: value}).encode()
        elif isinstance(value, str):
            yield value.encode()
        else:
            raise DataError(
                f"{path}, row {row}: {field} is {type(value).__name__}, not text; "
                "set data.field to a column of text"
            )
