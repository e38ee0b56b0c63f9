"""Text to tokens and back, for models of bytes and of a tokenizer.

Idea. A text that is being written is shown as soon as it is certain. Some tokens are parts of a character,
and some characters may be the beginning of a stop string: both are held back until the next tokens decide.

Contract. What was shown is never taken back. All shown pieces together are the text, up to its first stop
string. Bytes that are no UTF-8 are shown as U+FFFD once no further byte can mend them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moeclipse.core.errors import ConfigError, DataError
from moeclipse.core.outside import read_bytes
from moeclipse.train.data.corpus import find_tokenizer
from moeclipse.train.documents.chat import (
    ChatTemplate,
    special_tokens,
    template_beside,
    template_file,
)
from moeclipse.train.documents.tokenizer import MOST_TOKENIZER, settings_beside

UNFINISHED = "\ufffd"
CONTEXT = 16
"""Tokens of a prompt that are decoded with what follows: some tokens mean another text at a beginning."""


class Vocabulary(Protocol):
    """What text and tokens have to do with each other."""

    size: int

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, question: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class ByteVocabulary:
    """A token is a byte of UTF-8."""

    size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_chat(self, question: str) -> list[int]:  # noqa: ARG002  (part of the protocol)
        raise ConfigError("a model of bytes has no chat template; leave chat out")

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens beyond 255, which a larger vocabulary may have, are shown as one character."""
        pieces = bytes(token if token < 256 else 0xFF for token in ids)
        return codecs.decode(pieces, "utf-8", "replace")


class TokenizerVocabulary:
    """A `tokenizers` JSON file."""

    def __init__(self, file: str, *, special: bool) -> None:
        """`special`: texts begin with what the tokenizer puts there, as Hugging Face models want it."""
        path = find_tokenizer(file)
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_buffer(read_bytes(path, most=MOST_TOKENIZER))
        except Exception as error:  # the package raises plain Exception
            raise DataError(f"{path} is not a `tokenizers` JSON file: {error}") from error
        self.path, self.special, self.size = path, special, self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=self.special).ids
        return ids

    def encode_chat(self, question: str) -> list[int]:
        """What a user says, framed by the tokenizer's template, which has all special tokens itself."""
        settings = settings_beside(self.path)
        text, specials = template_beside(self.path, settings), special_tokens(settings)
        template = ChatTemplate(text, specials, template_file(self.path))
        ids: list[int] = self._tokenizer.encode(template.opening(question), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def tokenizer_of(folder: Path) -> str:
    """The tokenizer of a Hugging Face folder; empty: it has none that we read."""
    file = folder / "tokenizer.json"
    return str(file) if file.is_file() else ""


class GrowingText:
    """What one row has written."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._vocabulary, self._stops = vocabulary, [stop for stop in stops if stop]
        self._before = list(prompt[-CONTEXT:])
        self._skip = len(vocabulary.decode(self._before))
        self.ids: list[int] = []
        self.shown = ""
        self.stopped = False
        """A stop string has been written; the text ends before it."""

    def add(self, token: int) -> str:
        """What can be shown now that was not before."""
        self.ids.append(token)
        return self._show(self._text(), last=False)

    def end(self) -> str:
        """What was held back, when nothing follows."""
        return "" if self.stopped else self._show(self._text(), last=True)

    def _text(self) -> str:
        return self._vocabulary.decode([*self._before, *self.ids])[self._skip :]

    def _show(self, text: str, *, last: bool) -> str:
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, text = True, text[: min(found)]
        elif not last:
            text = text.rstrip(UNFINISHED)
            text = text[: len(text) - held_back(text, self._stops)]
        more, self.shown = text[len(self.shown) :], max(text, self.shown, key=len)
        return more


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text with which a stop string may have begun."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
