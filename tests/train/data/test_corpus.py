"""Corpora: what is found, in which order, how it is read, and what bad input gets."""

from __future__ import annotations

import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.core.errors import DataError
from moeclipse.train.config import DataConfig
from moeclipse.train.data import corpus as corpus_module
from moeclipse.train.data.corpus import Corpus, CorpusPart, find_corpus, open_corpus
from moeclipse.train.data.standard_library import standard_library


def text(folder: Path, **files: str) -> str:
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    return str(folder / "*.txt")


def in_memory(*arrays: list[int], vocab_size: int = 256) -> Corpus:
    parts = [
        CorpusPart(source=f"part {i}", num_tokens=len(a), array=np.array(a, dtype=np.uint16))
        for i, a in enumerate(arrays)
    ]
    return Corpus(parts, vocab_size=vocab_size, what="arrays")


# ---- what is found


def test_the_default_is_the_standard_library_as_bytes() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    corpus = open_corpus(DataConfig(), vocab_size=256)
    files = standard_library(root)
    assert len(corpus) == sum(path.stat().st_size for path in files) > 1_000_000
    assert not any("site-packages" in path.parts for path in files)
    assert root / "os.py" in files
    first = files[0].read_bytes()[:50]
    assert bytes(corpus.read(0, len(first)).astype(np.uint8)) == first
    assert 2 < corpus.unigram_entropy() < math.log(256)


def test_a_python_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"no \*.py file below .* give files in data.files"):
        open_corpus(DataConfig(), 256)


def test_globs_keep_their_order_and_give_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    text(tmp_path / "z", late="4")
    text(tmp_path, b="2", a="1", c="3")
    config = DataConfig(files=(str(tmp_path / "b.txt"), str(tmp_path / "**" / "*.txt")))
    corpus = open_corpus(config, 256)
    assert bytes(corpus.read(0, len(corpus)).astype(np.uint8)) == b"2134"


def test_a_name_with_brackets_is_found_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "part[1].txt").write_text("hello")
    assert len(open_corpus(DataConfig(files=(str(tmp_path / "part[1].txt"),)), 256)) == 5


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    text(tmp_path, a="abc")
    assert len(open_corpus(DataConfig(files=("~/a.txt",)), 256)) == 3


# ---- token files


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64", ">u2"])
def test_npy_files(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(100).astype(dtype))
    np.save(tmp_path / "b.npy", np.arange(100, 150).astype(dtype))
    corpus = open_corpus(DataConfig(files=(str(tmp_path / "*.npy"),)), 150)
    tokens = corpus.read(0, 150)
    assert tokens.dtype == np.int64
    np.testing.assert_array_equal(tokens, np.arange(150))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bin_files(tmp_path: Path, dtype: str) -> None:
    np.arange(200).astype(dtype).tofile(tmp_path / "a.bin")
    config = DataConfig(files=(str(tmp_path / "a.bin"),), token_dtype=dtype)  # type: ignore[arg-type]
    np.testing.assert_array_equal(open_corpus(config, 200).read(17, 180), np.arange(17, 180))


@pytest.mark.parametrize("suffix", [".npy", ".bin", ".txt"])
def test_large_files_are_mapped_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    tokens = (np.arange(3000) % 251).astype(np.uint8 if suffix == ".txt" else np.uint16)
    path = tmp_path / f"large{suffix}"
    np.save(path, tokens) if suffix == ".npy" else tokens.tofile(path)
    monkeypatch.setattr(corpus_module, "SMALL_FILE", 100)
    monkeypatch.setattr(Path, "read_bytes", None)
    corpus = open_corpus(DataConfig(files=(str(path),)), 256)
    assert [part.array for part in corpus.parts] == [None]
    np.testing.assert_array_equal(corpus.read(0, 3000), tokens)
    assert isinstance(corpus._array(0), np.memmap)


def test_more_large_files_than_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SMALL_FILE", 0)
    monkeypatch.setattr(corpus_module, "MAX_MAPPED", 5)
    for number in range(30):
        np.full(10, number, dtype=np.uint16).tofile(tmp_path / f"{number:02d}.bin")
    before = len(os.listdir("/proc/self/fd"))
    corpus = open_corpus(DataConfig(files=(str(tmp_path / "*.bin"),)), 30)
    np.testing.assert_array_equal(corpus.read(5, 300), np.repeat(np.arange(30), 10)[5:])
    assert len(os.listdir("/proc/self/fd")) <= before + 5


def test_small_and_large_text_files_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SMALL_FILE", 4)
    pattern = text(tmp_path, a="1", b="22", c="33333", d="", e="4", f="55555")
    corpus = open_corpus(DataConfig(files=(pattern,)), 256)
    assert bytes(corpus.read(0, len(corpus)).astype(np.uint8)) == b"12233333455555"
    assert [part.num_tokens for part in corpus.parts] == [3, 5, 1, 5]


# ---- reading


@settings(deadline=None)
@given(
    arrays=st.lists(st.lists(st.integers(0, 255), max_size=8), min_size=1, max_size=8).filter(any),
    data=st.data(),
)
def test_read_is_a_slice_of_the_joined_parts(arrays: list[list[int]], data: st.DataObject) -> None:
    corpus = in_memory(*arrays)
    joined = [token for array in arrays for token in array]
    start = data.draw(st.integers(0, len(joined)))
    stop = data.draw(st.integers(start, len(joined)))
    assert corpus.read(start, stop).tolist() == joined[start:stop]


def test_read_outside() -> None:
    with pytest.raises(IndexError, match=r"tokens 1 ... 3 are not all inside a corpus of 3"):
        in_memory([1, 2, 3]).read(1, 4)


def test_fingerprint_follows_tokens_not_files() -> None:
    whole = in_memory([1, 2, 3, 4]).fingerprint()
    assert whole == in_memory([1, 2], [], [3, 4]).fingerprint()
    assert whole != in_memory([1, 2, 4, 3]).fingerprint()
    assert whole["num_tokens"] == 4


def test_a_large_corpus_is_probed_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "PROBE_TOKENS", 64)
    monkeypatch.setattr(corpus_module, "PROBE_WINDOW", 8)
    tokens = list(np.random.default_rng(0).integers(0, 200, 1000))
    corpus = in_memory(tokens)
    assert next(iter(corpus._windows())) == 0
    assert list(corpus._windows())[-1] == 1000 - 8
    assert len(list(corpus._windows())) == 8
    changed = [*tokens[:-1], (tokens[-1] + 1) % 200]
    assert corpus.fingerprint() != in_memory(changed).fingerprint()
    # What the probe did not see is checked when it is read.
    hidden = [*tokens[:50], 255, *tokens[51:]]
    late = in_memory(hidden, vocab_size=200)
    with pytest.raises(DataError, match="part 0 holds token 255 at position 50"):
        late.read(45, 55)


def test_unigram_entropy() -> None:
    assert in_memory([7, 7, 7]).unigram_entropy() == 0
    assert in_memory([0, 1], [2, 3]).unigram_entropy() == pytest.approx(math.log(4))
    p = np.array([0.75, 0.25])
    assert in_memory([5, 5, 9, 5]).unigram_entropy() == pytest.approx(-(p * np.log(p)).sum())


# ---- tokenizers


def tokenizer_file(folder: Path, words: int = 20) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{i}": i for i in range(words)} | {"?": words}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_text_through_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = DataConfig(
        files=(text(tmp_path, a="w1 w2", b="w3 other w4"),), tokenizer=tokenizer_file(tmp_path)
    )
    corpus = open_corpus(config, vocab_size=21)
    assert corpus.read(0, 5).tolist() == [1, 2, 3, 20, 4]
    with pytest.raises(DataError, match=r"b.txt holds token 20 at position 1, but model.vocab_size is 20"):
        open_corpus(config, vocab_size=20)


def test_a_tokenizer_with_a_large_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = DataConfig(files=(text(tmp_path, a="w70000 w1"),), tokenizer=tokenizer_file(tmp_path, 70_001))
    assert open_corpus(config, vocab_size=80_000).read(0, 2).tolist() == [70_000, 1]


def test_missing_tokenizers_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeclipse.train.data.corpus.find_spec", lambda name: None)
    config = DataConfig(files=(text(tmp_path, a="x"),), tokenizer="t.json")
    for step in (find_corpus, lambda config: open_corpus(config, 256)):
        with pytest.raises(DataError, match=r"not installed; run: pip install moeclipse\[hf\]"):
            step(config)


def test_bad_tokenizers(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pattern = text(tmp_path, a="x")
    with pytest.raises(DataError, match=r"'nowhere.json' does not exist; give the path of a tokenizer.json"):
        open_corpus(DataConfig(files=(pattern,), tokenizer="nowhere.json"), 256)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad.json' is not a `tokenizers` JSON file"):
        open_corpus(DataConfig(files=(pattern,), tokenizer=str(tmp_path / "bad.json")), 256)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_bytes(b"w1 \xff w2")
    config = DataConfig(files=(str(tmp_path / "a.txt"),), tokenizer=tokenizer_file(tmp_path))
    with pytest.raises(DataError, match=r"a.txt is not UTF-8 text \(byte 3\).*leave data.tokenizer empty"):
        open_corpus(config, 256)


# ---- bad input


def refused(config: DataConfig, match: str, vocab_size: int = 256) -> None:
    with pytest.raises(DataError, match=match):
        open_corpus(config, vocab_size)


def test_missing_file(tmp_path: Path) -> None:
    path = str(tmp_path / "nothing.txt")
    refused(
        DataConfig(files=(path,)), "nothing.txt' does not exist; give paths or globs of files, relative to"
    )


def test_all_patterns_without_a_match_are_listed(tmp_path: Path) -> None:
    files = (str(tmp_path / "*.txt"), str(tmp_path), str(tmp_path / "x.bin"))
    refused(
        DataConfig(files=files), r"\*.txt' matches no file; .* is a folder; write .*x.bin' does not exist"
    )


def test_empty_corpus(tmp_path: Path) -> None:
    refused(
        DataConfig(files=(text(tmp_path, a="", b=""),)), "the corpus is empty: data.files = .* holds no token"
    )


@pytest.mark.parametrize("other", ["b.npy", "b.bin"])
def test_mixed_kinds(tmp_path: Path, other: str) -> None:
    text(tmp_path, a="x")
    (tmp_path / other).write_bytes(b"")
    refused(
        DataConfig(files=(str(tmp_path / "*"),)),
        rf"matches {other[1:]} and text files: give files of one kind",
    )


def test_a_tokenizer_with_token_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5))
    config = DataConfig(files=(str(tmp_path / "a.npy"),), tokenizer="t.json")
    refused(config, "data.tokenizer is 't.json', but .* token files .* leave data.tokenizer empty")


def test_tokens_outside_the_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 300]))
    files = (str(tmp_path / "a.npy"),)
    refused(DataConfig(files=files), "a.npy holds token 300 at position 2, but model.vocab_size is 256")
    np.save(tmp_path / "a.npy", np.array([1, -2, 3]))
    refused(DataConfig(files=files), "a.npy holds token -2 at position 1")


def test_bytes_outside_the_vocabulary(tmp_path: Path) -> None:
    refused(
        DataConfig(files=(text(tmp_path, a="az"),)), "a.txt holds token 122 at position 1", vocab_size=100
    )


@pytest.mark.parametrize(
    ("array", "found"),
    [(np.zeros(3), "float64 of shape"), (np.zeros((2, 2), dtype=int), r"int64 of shape \(2, 2\)")],
)
def test_npy_files_that_hold_no_row_of_integers(tmp_path: Path, array: np.ndarray, found: str) -> None:
    np.save(tmp_path / "a.npy", array)
    refused(DataConfig(files=(str(tmp_path / "a.npy"),)), f"{found}.*but tokens are one row of integers")


def test_npy_files_that_are_none(tmp_path: Path) -> None:
    files = (str(tmp_path / "a.npy"),)
    (tmp_path / "a.npy").write_bytes(b"not numpy")
    refused(DataConfig(files=files), "a.npy is not a readable .npy file.*write it with numpy.save")
    np.save(tmp_path / "a.npy", np.array([{"pickle": 1}], dtype=object), allow_pickle=True)
    refused(DataConfig(files=files), "a.npy is not a readable .npy file")


def test_a_bin_file_of_another_type(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"123")
    refused(
        DataConfig(files=(str(tmp_path / "a.bin"),)), r"3 bytes, no multiple of 2, .*token_dtype \(uint16\)"
    )


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = text(tmp_path, a="x")

    def refuse(path: Path, *args: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("moeclipse.core.outside.os.open", refuse)
    refused(DataConfig(files=(pattern,)), "a.txt could not be read: Permission denied; check its permissions")


def test_a_file_that_vanishes_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "SMALL_FILE", 0)
    monkeypatch.setattr(corpus_module, "MAX_MAPPED", 1)
    for name in "ab":
        np.arange(10, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    corpus = open_corpus(DataConfig(files=(str(tmp_path / "*.bin"),)), 256)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a.bin could not be read again.*files must stay as they are"):
        corpus.read(0, 5)


# ---- documents


def test_records_with_their_ends(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "ab"}\n\n{"body": "c"}\n')
    corpus = open_corpus(DataConfig(files=(str(tmp_path / "a.jsonl"),), field="body"), 256)
    assert bytes(corpus.read(0, 5).astype(np.uint8)) == b"ab\0c\0"
    assert corpus.documents is not None
    assert corpus.documents.ends.tolist() == [3, 5]
    refused(DataConfig(files=(str(tmp_path / "a.jsonl"),)), r"a.jsonl, line 1 has no field 'text'")


def test_an_end_between_texts_is_asked_for(tmp_path: Path) -> None:
    config = DataConfig(files=(text(tmp_path, a="ab", b="c"),), end_of_text="7")
    assert open_corpus(config, 256).read(0, 5).tolist() == [97, 98, 7, 99, 7]
    refused(config, r"data.end_of_text: there are tokens up to 255, but model.vocab_size is 7", vocab_size=7)


def test_files_that_are_no_text_are_not_taken_for_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x1f\x8b" + bytes(100))
    refused(DataConfig(files=(str(tmp_path / "a.txt"),)), r"compressed by gzip, not text")


def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = DataConfig(files=(text(tmp_path, a="w1 w2"),), tokenizer=str(tmp_path))
    refused(config, r"has no tokenizer.json; save one there")
    tokenizer_file(tmp_path)
    assert open_corpus(config, 21).read(0, 2).tolist() == [1, 2]
