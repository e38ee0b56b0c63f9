"""Files of documents: what kind each is, and its documents as bytes, in their order.

    text        .txt and every other name: one document, in pieces of whole lines where it is very long
    jsonl       a record a line; the line is handed on, whoever tokenises it reads its field
    parquet     a record a row; only the wanted column is read
    .gz .zst    behind one of the first two: unpacked while it is read

Contract. What a file says of itself in its first bytes wins over its name: a file that is not what its name
promises is a DataError before anything of it is taken for text. Nothing holds a whole file in memory, but for
a text below PIECE: files are read in pieces, in time that grows with their size, and a record has a largest
size (`data.max_record`). What is packed more tightly than any text can be is refused when it shows.

Hazard. What a page of Parquet unpacks to stands in the file's own table, which is looked at; in one that lies
about it, Arrow takes as much memory for a page as the page itself says, up to 2 GiB.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from moeclipse.core.errors import DataError
from moeclipse.core.outside import open_file, regular

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

Form = Literal["text", "jsonl", "parquet", ".npy", ".bin"]
TOKEN_SUFFIXES = (".npy", ".bin")
PIECE = 1 << 26
"""A text of more bytes is cut behind a line, so that no piece of it has many more."""
BATCH = 1 << 20
"""Bytes of documents that are tokenised together."""
MAX_RECORD = 1 << 26
"""Bytes of a record, where nobody says otherwise."""
EXPANSION, FREE = 256, 1 << 26
"""What is packed may hold so many times its bytes; the first FREE bytes may be packed as they like."""
PACKED_PIECE = 1 << 12
"""Bytes that are unpacked together: zstd makes up to 32,768 of each."""
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
        with open_file(path) as file:
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


def batches_of(
    path: Path, number: int, kind: FileKind, field: str, chat: bool, max_record: int = MAX_RECORD
) -> Iterator[RawBatch]:
    """All documents of a file, BATCH bytes at a time."""
    check_kind(path, kind)
    if kind.form == "parquet":
        yield from _parquet(path, number, field, chat, max_record)
        return
    try:
        with open_file(path) as packed, _unpacked(packed, kind, path) as file:
            if kind.form == "jsonl":
                yield from _lines(file, packed, number, path, max_record)
            else:
                yield from _text(file, packed, number)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}; copy it again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"{path} is damaged: {error}; copy it again") from error


def _unpacked(file: IO[bytes], kind: FileKind, path: Path) -> IO[bytes] | Watched:
    if kind.packing == ".gz":
        return Watched(gzip.GzipFile(fileobj=file), file, path)
    if kind.packing == ".zst":
        need("zstandard", path)
        return Watched(ZstdReader(file), file, path)
    return file


class Watched(io.RawIOBase):
    """What is unpacked, as long as it may be a text."""

    def __init__(self, unpacked: gzip.GzipFile | ZstdReader, packed: IO[bytes], path: Path) -> None:
        self._unpacked, self._packed, self._path, self._made = unpacked, packed, path, 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._unpacked.read(size)
        self._made += len(data)
        check_expansion(self._path, self._packed.tell(), self._made)
        return data


def check_expansion(path: Path, packed: int, unpacked: int) -> None:
    if unpacked > FREE and unpacked > EXPANSION * packed:
        raise DataError(
            f"{path}: {packed} of its bytes hold more than {EXPANSION} times as many, which no text does; "
            "if it is one, unpack the file and give it as it is"
        )


class ZstdReader:
    """Bytes behind zstd, frame by frame; EOFError where the last frame is not whole."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._file, self._begin = file, zstandard.ZstdDecompressor().decompressobj
        self._frame, self._inside, self._packed = self._begin(), False, b""
        self._ready, self._at = b"", 0

    def read(self, size: int) -> bytes:
        parts, wanted = [], size
        while wanted and (self._at < len(self._ready) or self._fill()):
            part = self._ready[self._at : self._at + wanted]
            self._at, wanted = self._at + len(part), wanted - len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fill(self) -> bool:
        """Whether there was more to unpack."""
        packed = self._packed or self._file.read(PACKED_PIECE)
        if not packed:
            if self._inside:
                raise EOFError("it ends inside a frame")
            return False
        self._ready, self._at, self._packed = self._frame.decompress(packed), 0, b""
        self._inside = not self._frame.eof
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, self._begin()
        return True


def need(package: str, path: Path) -> None:
    """DataError where a package of the extra `data` is not there."""
    if find_spec(package) is None:
        raise DataError(f"{path} needs the `{package}` package; run: pip install moeclipse[data]")


def _text(file: IO[bytes] | Watched, packed: IO[bytes], number: int) -> Iterator[RawBatch]:
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


def _lines(
    file: IO[bytes] | Watched, packed: IO[bytes], number: int, path: Path, max_record: int
) -> Iterator[RawBatch]:
    first, size = 0, 0
    begun: list[bytes] = []  # of a line whose end is still to come
    while True:
        block = file.read(BATCH)
        end = block.rfind(b"\n") + 1
        begun.append(block[:end] if end else block)
        size += len(begun[-1])
        if end or not block:
            raw = b"".join(begun).split(b"\n")
            raw = raw[:-1] if not raw[-1] else raw
            for line, record in enumerate(raw, start=first + 1):
                check_record(len(record), f"{path}, line {line}", max_record)
            if raw:
                yield RawBatch(file=number, form="jsonl", first=first, raw=raw, read=packed.tell())
            first += len(raw)
            begun, size = [block[end:]], len(block) - end
        check_record(size, f"{path}, line {first + 1}", max_record)
        if not block:
            return


def check_record(size: int, where: str, max_record: int) -> None:
    if size > max_record:
        raise DataError(
            f"{where} has more than data.max_record ({max_record}) bytes; cut the record, or raise the key"
        )


def _parquet(path: Path, number: int, field: str, chat: bool, max_record: int) -> Iterator[RawBatch]:
    need("pyarrow", path)
    import pyarrow
    import pyarrow.parquet

    form: Literal["text", "jsonl"] = "jsonl" if chat else "text"
    try:
        size = path.stat().st_size
        about = pyarrow.parquet.read_metadata(regular(path))
        words = _leaves(about, path, size, field)
        # As dictionaries: a text that many rows refer to is held once.
        with pyarrow.parquet.ParquetFile(regular(path), pre_buffer=False, read_dictionary=words) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"{path} has no column {field!r}; it has {', '.join(names)}: "
                    "set data.field to one of them"
                )
            first, rows, made = 0, max(table.metadata.num_rows, 1), 0
            # One thread: documents go to processes that tokenise, and no fork survives threads of a library.
            for batch in table.iter_batches(batch_size=256, columns=[field], use_threads=False):
                for column in _pieces(batch.column(0), path, first, max_record):
                    raw = list(_column(column.to_pylist(), path, first, field, chat))
                    first += len(raw)
                    made += sum(map(len, raw))
                    check_expansion(path, size, made)
                    read = size * first // rows
                    yield RawBatch(file=number, form=form, first=first - len(raw), raw=raw, read=read)
    except (pyarrow.ArrowException, OSError, OverflowError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}; copy it again") from error


def _leaves(about: pyarrow.parquet.FileMetaData, path: Path, size: int, field: str) -> list[str]:
    """The columns of text that `field` is made of, none of which holds more than a file of this size can."""
    leaves = [about.schema.column(number) for number in range(about.num_columns)]
    mine = [
        number
        for number, leaf in enumerate(leaves)
        if leaf.path == field or leaf.path.startswith(f"{field}.")
    ]
    for group in range(about.num_row_groups):
        unpacked = [about.row_group(group).column(number).total_uncompressed_size for number in mine]
        check_expansion(path, size, sum(unpacked))
    return [leaves[number].path for number in mine if leaves[number].physical_type == "BYTE_ARRAY"]


def _pieces(column: pyarrow.Array, path: Path, first: int, max_record: int) -> Iterator[pyarrow.Array]:
    """The rows of a column, together where they are small."""
    if expanded(column) <= BATCH:
        yield column
        return
    for row in range(len(column)):
        one = column.slice(row, 1)
        check_record(expanded(one), f"{path}, row {first + row}", max_record)
        yield one


def expanded(column: pyarrow.Array) -> int:
    """Bytes of all that rows refer to."""
    import pyarrow
    import pyarrow.compute

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        compute: Any = pyarrow.compute  # its functions are made when it is imported
        sizes = compute.binary_length(column.dictionary)
        whole = compute.sum(compute.take(sizes, column.indices).cast("int64"))
        return int(whole.as_py() or 0)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return len(column) + expanded(column.flatten())
    if pyarrow.types.is_struct(kind):
        return sum(map(expanded, column.flatten()))
    return int(column.nbytes)


def _column(values: Iterable[object], path: Path, first: int, field: str, chat: bool) -> Iterator[bytes]:
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
