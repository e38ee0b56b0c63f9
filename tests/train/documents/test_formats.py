"""Files of documents: what each is, its documents in order, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from apart import apart
from moeclipse.core.errors import DataError
from moeclipse.core.forking import library_threads
from moeclipse.train.documents import formats
from moeclipse.train.documents.formats import FileKind, batches_of, check_kind, kind_of


def raw_of(path: Path, field: str = "text", chat: bool = False) -> list[bytes]:
    return [raw for batch in batches_of(path, 0, kind_of(path), field, chat) for raw in batch.raw]


def parquet(path: Path, **columns: list[Any]) -> Path:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files.write_table(arrow.table(columns), path, row_group_size=3)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", FileKind("text")),
        ("a", FileKind("text")),
        ("a.py", FileKind("text")),
        ("a.txt.gz", FileKind("text", ".gz")),
        ("a.v2.jsonl", FileKind("jsonl")),
        ("a.JSONL.GZ", FileKind("jsonl", ".gz")),
        ("a.jsonl.zst", FileKind("jsonl", ".zst")),
        ("a.parquet", FileKind("parquet")),
        ("a.npy", FileKind(".npy")),
        ("a.bin", FileKind(".bin")),
    ],
)
def test_names(name: str, kind: FileKind) -> None:
    assert kind_of(Path(name)) == kind


def packed(path: Path, data: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data[: len(data) // 2]) + gzip.compress(data[len(data) // 2 :]))
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        parts = (data[: len(data) // 2], data[len(data) // 2 :])
        path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in parts))
    else:
        path.write_bytes(data)
    return path


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("last", [b"\n", b""])
def test_lines_come_whole_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, last: bytes
) -> None:
    monkeypatch.setattr(formats, "BATCH", 50)
    lines = [json.dumps({"text": "x" * (n % 40)}).encode() for n in range(100)]
    path = packed(tmp_path / f"a.jsonl{ending}", b"\n".join(lines) + last)
    batches = list(batches_of(path, 3, kind_of(path), "text", False))
    assert [raw for batch in batches for raw in batch.raw] == lines
    assert len(batches) > 10
    assert {batch.file for batch in batches} == {3}
    first = 0
    for batch in batches:
        assert batch.first == first
        first += len(batch.raw)
    assert batches[-1].read == path.stat().st_size


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_text_is_one_document(tmp_path: Path, ending: str) -> None:
    data = b"one\n\ntwo \xff\n" * 20
    assert raw_of(packed(tmp_path / f"a.txt{ending}", data)) == [data]


def test_a_long_text_comes_in_pieces_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "PIECE", 16)
    data = b"".join(b"line %d\n" % n for n in range(30)) + b"x" * 40 + b"\nend"
    path = packed(tmp_path / "a.txt", data)
    batches = list(batches_of(path, 0, kind_of(path), "text", False))
    pieces = [batch.raw[0] for batch in batches]
    assert b"".join(pieces) == data
    assert [batch.open for batch in batches] == [True] * (len(batches) - 1) + [False]
    assert all(piece.endswith(b"\n") for piece in pieces[:10])
    assert [batch.offset for batch in batches][:3] == [0, len(pieces[0]), len(pieces[0]) + len(pieces[1])]


def test_columns_of_parquet(tmp_path: Path) -> None:
    texts = [f"text {n} é" for n in range(1000)]
    path = parquet(tmp_path / "a.parquet", number=list(range(1000)), content=texts)
    threads = library_threads()
    assert raw_of(path, "content") == [text.encode() for text in texts]
    assert library_threads() == threads, "ranks may be forked behind it"
    with pytest.raises(DataError, match=r"no column 'text'; it has number, content: set data.field"):
        raw_of(path)
    with pytest.raises(DataError, match=r"row 0: number is int, not text"):
        raw_of(path, "number")


def test_rows_of_parquet_as_records(tmp_path: Path) -> None:
    said = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    path = parquet(tmp_path / "a.parquet", messages=said)
    assert [json.loads(raw) for raw in raw_of(path, "messages", chat=True)] == [
        {"messages": one} for one in said
    ]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.txt", b"PAR1....", "is a Parquet file, not text; give it as a name that ends in .parquet"),
        ("a.txt", gzip.compress(b"x", mtime=0), "compressed by gzip, not text; give it as a name .* in .gz"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd...", "compressed by zstd, not text; .* .zst"),
        ("a.txt", b"\x93NUMPY..", "a .npy file, not text"),
        ("a.txt", b"PK\x03\x04", "a zip archive, not text; give it as text in UTF-8"),
        ("a.txt", b"\xff\xfea\0", "UTF-16 text, not text"),
        ("a.jsonl.gz", b'{"text": "x"}', "is not compressed by gzip, as its name says"),
        ("a.txt.zst", b"text", "is not compressed by zstd, as its name says"),
        ("a.parquet", b"text", "is not a Parquet file, as its name says"),
    ],
)
def test_files_that_are_not_what_they_seem(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=says):
        check_kind(path, kind_of(path))
    with pytest.raises(DataError, match=says):
        raw_of(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_damaged_files(tmp_path: Path, name: str) -> None:
    whole = tmp_path / name
    if name.endswith("parquet"):
        parquet(whole, text=["x"] * 1000)
    else:
        packed(whole, b'{"text": "x"}\n' * 10_000)
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) - 7])
    with pytest.raises(DataError, match=r"damaged|not a readable Parquet"):
        raw_of(whole)


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"needs the `pyarrow` package; run: pip install moeclipse\[data\]"):
        raw_of(tmp_path / "a.parquet")


def test_an_empty_file_has_no_words(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert raw_of(tmp_path / "a.jsonl") == []
    with pytest.raises(DataError, match=r"data file .* could not be read"):
        raw_of(tmp_path / "none.txt")


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_a_record_has_a_largest_size(tmp_path: Path, ending: str) -> None:
    path = packed(tmp_path / f"a.jsonl{ending}", b"{}\n" + b"x" * 999 + b"\n" + b"y" * 1001 + b"\n{}\n")
    read = batches_of(path, 0, kind_of(path), "text", False, max_record=1000)
    with pytest.raises(DataError, match=r"a.jsonl\S*, line 3 has more than data.max_record \(1000\) bytes"):
        list(read)


def test_a_long_line_is_read_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of many blocks: each of its bytes is copied a few times, not once for each block.

    Seconds of the processor: 0.2 on a fast machine; a minute if each block copied what came before it.
    """
    monkeypatch.setattr(formats, "BATCH", 1 << 7)
    path = packed(tmp_path / "a.jsonl", b"a\n" + b"x" * (8 << 20) + b"\nb")

    def too_long(*_: object) -> None:
        raise AssertionError("65 thousand blocks of eight million bytes take minutes")

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, 10)
    try:
        assert [len(raw) for raw in raw_of(path)] == [1, 8 << 20, 1]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    with pytest.raises(DataError, match="line 2 has more than"):
        list(batches_of(path, 0, kind_of(path), "text", False, max_record=1 << 20))


@apart
def read_bombs(folder: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    data = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 24)) * 100
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("a.txt.zst", "a.jsonl.zst"):
        (folder / name).write_bytes(data)
        batches = batches_of(folder / name, 0, kind_of(folder / name), "text", False, 1 << 40)
        with pytest.raises(DataError, match="times as many, which no text does; if it is one, unpack"):
            assert all(batch.raw for batch in batches)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 << 10


def test_what_no_text_can_hold_is_refused_when_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    read_bombs(tmp_path)


@apart
def read_referring_rows(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    def write(name: str, values: Any) -> Path:
        pyarrow.parquet.write_table(
            pyarrow.table({"text": values}),
            folder / name,
            compression="zstd",
            dictionary_pagesize_limit=1 << 30,
            store_schema=False,  # a reader is not told that these were dictionaries
        )
        return folder / name

    once = pyarrow.array(["a" * (8 << 20)])
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 256, pyarrow.int32()), once)
    said = [[{"role": "user", "content": "a" * (1 << 20)}] * 10]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = write("rows.parquet", rows)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match="which no text does"):
        raw_of(path)
    with pytest.raises(DataError, match=r"row 0 has more than data.max_record \(1000000\)"):
        list(batches_of(path, 0, kind_of(path), "text", False, 1_000_000))
    path = write("said.parquet", said)
    with pytest.raises(DataError, match=r"row 0 has more than data.max_record \(5000000\)"):
        list(batches_of(path, 0, kind_of(path), "text", True, 5_000_000))
    path = write("plain.parquet", pyarrow.array([f"{n}" + "a" * (8 << 20) for n in range(9)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pyarrow.parquet, "ParquetFile", None
        )  # its own table says so, before a page is unpacked
        with pytest.raises(DataError, match="which no text does"):
            raw_of(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800 << 10


def test_rows_that_refer_to_one_text_are_not_held_many_times(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    read_referring_rows(tmp_path)


def test_a_pipe_is_no_corpus(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match="it is a pipe, not a regular file"):
        raw_of(tmp_path / "a.txt")
