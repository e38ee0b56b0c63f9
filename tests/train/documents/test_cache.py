"""Tokens that were made once: the same as made here, found again, made again where they are damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeclipse.core.errors import DataError
from moeclipse.train.documents import cache, formats
from moeclipse.train.documents.cache import DocumentTokens, blocks, content_of, locked, opened, tokens_of
from moeclipse.train.documents.formats import kind_of
from moeclipse.train.documents.tokenizer import Recipe


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Records, an empty file and a text of several pieces."""
    lines = [json.dumps({"text": f"document {n} " * (n % 5)}) for n in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("a line\n" * 50)
    return [tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large enough for the cache, and cut."""
    monkeypatch.setattr(cache, "IN_MEMORY", 1)
    monkeypatch.setattr(cache, "num_workers", lambda: 1)
    monkeypatch.setattr(formats, "BATCH", 1000)
    monkeypatch.setattr(formats, "PIECE", 64)


def made(files: list[Path], folder: Path, recipe: Recipe | None = None, **more: Any) -> DocumentTokens:
    return tokens_of(files, [kind_of(path) for path in files], recipe or Recipe(end=0), str(folder), **more)


def test_documents_end_where_they_should(files: list[Path], tmp_path: Path) -> None:
    found = made(files, tmp_path / "cache")
    assert not (tmp_path / "cache").exists(), "so little is not worth a folder"
    texts = [f"document {n} " * (n % 5) for n in range(300)] + ["", "a line\n" * 50]
    assert bytes(found.tokens) == b"".join(text.encode() + b"\0" for text in texts)
    np.testing.assert_array_equal(found.ends, np.cumsum([len(text) + 1 for text in texts]))
    assert found.in_file == [sum(len(text) + 1 for text in texts[:300]), 1, 351]
    without = made(files, tmp_path / "cache", Recipe())
    lengths = [len(text) for text in texts if text]
    np.testing.assert_array_equal(without.ends, np.cumsum(lengths))


@pytest.mark.usefixtures("small")
def test_a_cache_holds_the_same_and_is_found_again(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "num_workers", lambda: 2)
    told: list[tuple[int, int]] = []
    first = made(files, tmp_path / "cache", tell=lambda *now: told.append(now))
    total = sum(path.stat().st_size for path in files)
    assert told[-1] == (total, total)
    assert [now for now, _ in told] == sorted(now for now, _ in told)
    monkeypatch.setattr(cache, "make", None)  # nothing is made any more
    again = made(files, tmp_path / "cache")
    moved = [path.rename(path.with_name(f"moved-{path.name}")) for path in files]
    elsewhere = made(moved, tmp_path / "cache")
    monkeypatch.setattr(cache, "IN_MEMORY", 1 << 30)
    here = made(moved, tmp_path / "cache")
    for found in (first, again, elsewhere):
        assert isinstance(found.tokens, np.memmap)
        np.testing.assert_array_equal(found.tokens, here.tokens)
        np.testing.assert_array_equal(found.ends, here.ends)
        assert found.in_file == here.in_file


@pytest.mark.usefixtures("small")
def test_other_content_or_another_recipe_is_another_folder(files: list[Path], tmp_path: Path) -> None:
    def folders() -> int:
        return len(list((tmp_path / "cache").glob("tokens-*")))

    made(files, tmp_path / "cache")
    made(files, tmp_path / "cache", Recipe(end=1))
    made(files[::-1], tmp_path / "cache")
    assert folders() == 3
    text, time = files[2].read_text(), files[2].stat().st_mtime_ns
    files[2].write_text(text.replace("line", "LINE", 1))
    os.utime(files[2], ns=(time + 1, time + 1))
    assert b"LINE" in bytes(made(files, tmp_path / "cache").tokens)
    assert folders() == 4


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "damage", ["flip", "cut", "manifest", "version", "count", "files", "none", "partial"]
)
def test_a_damaged_cache_is_made_again(files: list[Path], tmp_path: Path, damage: str) -> None:
    recipe = Recipe(end=0)
    before = bytes(made(files, tmp_path / "cache").tokens)
    (folder,) = (tmp_path / "cache").glob("tokens-*")
    tokens = folder / "tokens.bin"
    if damage == "flip":
        tokens.write_bytes(before[:99] + bytes([before[99] ^ 1]) + before[100:])
    elif damage == "cut":
        tokens.write_bytes(before[:-1])
    elif damage == "manifest":
        (folder / "cache.json").write_text("[]")
    elif damage == "version":
        text = (folder / "cache.json").read_text()
        (folder / "cache.json").write_text(text.replace('"version": 1', '"version": 0'))
    elif damage in ("count", "files"):
        about = json.loads((folder / "cache.json").read_text())
        changed = (
            {"files": {}}
            if damage == "files"
            else {"in_file": [about["in_file"][0] - 1, *about["in_file"][1:]]}
        )
        (folder / "cache.json").write_text(json.dumps(about | changed))
    elif damage == "none":
        tokens.unlink()
    else:  # a process died in the middle
        folder.rename(folder.with_name(f".{folder.name}.partial"))
    assert opened(folder, recipe, len(files)) is None
    assert bytes(made(files, tmp_path / "cache").tokens) == before
    assert opened(folder, recipe, len(files)) is not None


@pytest.mark.usefixtures("small")
def test_a_bad_record_leaves_no_cache(files: list[Path], tmp_path: Path) -> None:
    with files[0].open("a") as file:
        file.write("\n{")
    with pytest.raises(DataError, match=r"a.jsonl, line 301 is not JSON"):
        made(files, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("tokens-*"))


@pytest.mark.usefixtures("small")
def test_a_folder_that_cannot_be_used(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data.cache: .*file/cache cannot be used.*give another folder"):
        made(files, tmp_path / "file" / "cache")


def test_blocks_see_both_ends_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "BLOCKS", 4)
    monkeypatch.setattr(cache, "BLOCK", 8)
    path = tmp_path / "a"
    digests = set()
    for place in (None, 0, 7, 99):
        data = bytearray(100)
        if place is not None:
            data[place] = 1
        path.write_bytes(data)
        digests.add(blocks(path))
    assert len(digests) == 4


def test_unchanged_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = content_of(path, tmp_path)
    monkeypatch.setattr("hashlib.file_digest", None)
    assert content_of(path, tmp_path) == first
    monkeypatch.undo()
    (memo,) = (tmp_path / "digests").glob("*.json")
    memo.write_text("{")
    assert content_of(path, tmp_path) == first


def test_one_at_a_time(tmp_path: Path) -> None:
    import fcntl

    with locked(tmp_path / "lock"), (tmp_path / "lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
