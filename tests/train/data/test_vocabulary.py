"""Text that is shown while it is written: whole characters, nothing of a stop string, nothing taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.core.errors import DataError
from moeclipse.train.data.vocabulary import (
    ByteVocabulary,
    GrowingText,
    TokenizerVocabulary,
    held_back,
    tokenizer_of,
)


def written(text: GrowingText, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        if text.stopped:
            break
        pieces.append(text.add(token))
    return [*pieces, text.end()]


def test_a_character_is_shown_when_it_is_whole() -> None:
    bytes_of = ByteVocabulary()
    assert written(GrowingText(bytes_of, bytes_of.encode("é")), bytes_of.encode("a€b")) == [
        *("a", "", "", "€", "b", "")
    ]
    broken = written(GrowingText(bytes_of, [65]), [0xE2, 0x82, 0x41])
    assert "".join(broken) == "\ufffdA"
    assert broken[0] == ""
    assert written(GrowingText(bytes_of, [65]), [0xE2]) == ["", "\ufffd"], "the end decides"
    assert bytes_of.decode([65, 300]) == "A\ufffd"


def test_a_text_ends_before_its_stop_string() -> None:
    bytes_of = ByteVocabulary()
    text = GrowingText(bytes_of, [65], ["END", "\n\n"])
    pieces = written(text, bytes_of.encode("xEEN\nyENDz"))
    assert pieces == ["x", "", "E", "", "EN", "\ny", "", "", "", ""], "one newline may be the first of two"
    assert text.stopped
    assert text.shown == "xEEN\ny"


@settings(max_examples=60)
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.text(max_size=5))
def test_pieces_are_the_text(text: str, stops: list[str], prompt: str) -> None:
    bytes_of = ByteVocabulary()
    text = text.encode("utf-8", errors="replace").decode()
    pieces = written(GrowingText(bytes_of, bytes_of.encode(prompt), stops), bytes_of.encode(text))
    # Tokens come one by one, so the first stop string that is complete counts.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    first = min(ends)[0] if ends else len(text)
    cut = min((text[:first].find(stop) for stop in stops if stop in text[:first]), default=len(text))
    assert "".join(pieces) == text[:cut]


def test_what_may_be_a_beginning_is_held_back() -> None:
    assert held_back("abc", ["cde", "bcx"]) == 2
    assert held_back("abc", ["abc"]) == 0, "a whole one is found, not held back"
    assert held_back("", ["a"]) == 0


def test_a_tokenizer_with_spaces_before_words(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = {"<s>": 0, "▁the": 1, "▁cat": 2, "▁sat": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    file = tokenizer_of(tmp_path)
    assert TokenizerVocabulary(file, special=False).encode("the cat") == [1, 2]
    special = TokenizerVocabulary(file, special=True)
    assert special.encode("the cat") == [0, 1, 2]
    assert special.size == 4
    assert written(GrowingText(special, [0, 1]), [2, 3]) == [" cat", " sat", ""], "the space is the word's"
    assert tokenizer_of(tmp_path / "none") == ""
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DataError, match="is not a `tokenizers` JSON file"):
        TokenizerVocabulary(str(tmp_path / "broken.json"), special=False)
