"""Tokens of documents: bytes, a tokenizer's own, the end behind each, and records that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeclipse.core.errors import DataError
from moeclipse.train.documents.formats import RawBatch
from moeclipse.train.documents.tokenizer import (
    DocumentEncoder,
    Recipe,
    digest_of,
    end_token,
    load_tokenizer,
    tokenizer_file,
)


def word_tokenizer(folder: Path, words: int = 20, **beside: Any) -> Path:
    """w0 ... as 0 ..., then `?`, `<end>`; `beside`: what tokenizer_config.json says."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {f"w{i}": i for i in range(words)} | {"?": words, "<end>": words + 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    if beside:
        (folder / "tokenizer_config.json").write_text(json.dumps(beside))
    return folder / "tokenizer.json"


def batch(*raw: bytes, form: Any = "text", **more: Any) -> RawBatch:
    return RawBatch(file=0, form=form, first=0, raw=list(raw), read=0, **more)


def test_bytes_with_and_without_an_end() -> None:
    made = DocumentEncoder(Recipe()).encode(batch(b"ab", b"", b"c\xff"), "a")
    assert made.tokens.tolist() == [97, 98, 99, 255]
    assert made.lengths.tolist() == [2, 0, 2]
    made = DocumentEncoder(Recipe(end=0)).encode(batch(b"ab", b"", b"c"), "a")
    assert made.tokens.tolist() == [97, 98, 0, 0, 99, 0]
    assert made.lengths.tolist() == [3, 1, 2]
    made = DocumentEncoder(Recipe(end=0)).encode(batch(b"ab", open=True), "a")
    assert made.tokens.tolist() == [97, 98]


@pytest.mark.parametrize("many", [False, True])
def test_records_through_a_tokenizer(tmp_path: Path, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    path = word_tokenizer(tmp_path)
    encoder = DocumentEncoder(Recipe(tokenizer=str(path), field="body", end=21, dtype="uint8"), many=many)
    lines = [json.dumps({"body": text}).encode() for text in ("w1 w2", "", "w3 none")]
    made = encoder.encode(batch(*lines[:1], b"  ", *lines[1:], form="jsonl"), "a")
    assert made.tokens.tolist() == [1, 2, 21, 21, 3, 20, 21]
    assert made.lengths.tolist() == [3, 1, 3]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", r"a.jsonl, line 7 is not JSON: .*; each line holds one record"),
        (b"[1]", r"a.jsonl, line 7 is list, not a record"),
        (
            b'{"body": "x", "id": 3}',
            r"a.jsonl, line 7 has no field 'text'; its fields are body, id: set data.field",
        ),
        (b'{"text": 3}', r"a.jsonl, line 7: text is int, not text"),
        (b'{"text": "\xff"}', r"a.jsonl, line 7 is not UTF-8 text \(byte 10\)"),
        (b'{"text": "\\ud800"}', r"a.jsonl, line 7: text holds half a character \(.ud800 at 0\)"),
        (b"[" * 100_000, r"a.jsonl, line 7 is nested deeper than 64 levels"),
    ],
)
def test_records_that_cannot_be_read(line: bytes, says: str) -> None:
    given = RawBatch(file=0, form="jsonl", first=5, raw=[b'{"text": "x"}', line], read=0)
    with pytest.raises(DataError, match=says):
        DocumentEncoder(Recipe()).encode(given, "a.jsonl")


def test_the_place_of_a_wrong_byte_in_a_later_piece(tmp_path: Path) -> None:
    encoder = DocumentEncoder(Recipe(tokenizer=str(word_tokenizer(tmp_path))))
    with pytest.raises(DataError, match=r"a.txt is not UTF-8 text \(byte 103\)"):
        encoder.encode(batch(b"w1 \xff", offset=100), "a.txt")
    lenient = DocumentEncoder(Recipe(tokenizer=str(word_tokenizer(tmp_path)), lenient=True))
    assert lenient.encode(batch(b"w1 \xff"), "a.txt").tokens.tolist() == [1, 20]


def test_a_folder_or_a_file(tmp_path: Path) -> None:
    assert tokenizer_file(str(tmp_path)) is None
    path = word_tokenizer(tmp_path)
    assert tokenizer_file(str(tmp_path)) == tokenizer_file(str(path)) == path
    assert tokenizer_file(str(tmp_path / "none.json")) is None


def test_which_token_ends_a_text(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path)
    tokenizer = load_tokenizer(path, "t")

    def end(name: str, wanted: bool = True) -> int:
        return end_token(name, tokenizer, path, wanted=wanted)

    assert end("") == -1
    assert end("auto", wanted=False) == -1
    assert end("17") == 17
    assert end("<end>") == end("<end>", wanted=False) == 21
    with pytest.raises(DataError, match=r"has no token '<eos>'; give the name or number"):
        end("<eos>")
    with pytest.raises(DataError, match=r"does not say which token ends a text"):
        end("auto")
    for said in ("<end>", {"content": "<end>"}):
        word_tokenizer(tmp_path, eos_token=said)
        assert end("auto") == 21
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(DataError, match=r"tokenizer_config.json is not JSON: .*; download it again"):
        end("auto")
    assert end_token("auto", None, None, wanted=True) == 0
    with pytest.raises(DataError, match=r"bytes have no names"):
        end_token("<end>", None, None, wanted=True)


def test_a_recipe_is_known_by_what_it_does(tmp_path: Path) -> None:
    path = word_tokenizer(tmp_path)
    recipe = Recipe(tokenizer=str(path), digest=digest_of(path), field="x", end=3)
    assert Recipe.from_json(recipe.to_json()) == recipe
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "tokenizer.json").write_bytes(path.read_bytes())
    other = Recipe(
        tokenizer=str(moved / "tokenizer.json"), digest=digest_of(moved / "tokenizer.json"), field="x", end=3
    )
    assert recipe.key() == other.key()
    (moved / "tokenizer_config.json").write_text("{}")
    assert digest_of(moved / "tokenizer.json") != digest_of(path)
    assert np.uint32 == DocumentEncoder(recipe).encode(batch(b"w1"), "a").tokens.dtype
