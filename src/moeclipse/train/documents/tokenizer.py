"""From documents to tokens: bytes as they are, or through a tokenizer, with an end behind each document.

A `Recipe` says all that tokens depend on besides the documents; it is plain JSON, so that other processes
make the same tokens of it and a cache can be named after it.

Contract. `encode` gives, for documents that follow each other, their tokens in one row and the length of
each. It raises DataError with file and place of what it cannot read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeclipse.core.errors import DataError
from moeclipse.core.outside import parse_json, read_bytes, read_table, told_of
from moeclipse.train.documents.chat import ChatTemplate, messages_of
from moeclipse.train.documents.formats import RawBatch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENIZER = 1 << 28
"""Bytes of a tokenizer.json; those of large vocabularies have some thirty million."""
BYTE_END = 0
"""Behind a document of bytes: text has no such byte."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Tokens of documents that follow each other."""

    tokens: np.ndarray
    """uint32."""
    lengths: np.ndarray
    """int64, of each document."""
    counted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.uint8))
    """Of conversations: 1 for each token that the assistant said."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How tokens are made of documents."""

    tokenizer: str = ""
    """Path of a `tokenizers` JSON file; empty: bytes."""
    digest: str = ""
    """Of that file and of what stands beside it."""
    field: str = "text"
    end: int = -1
    """The token behind each document; -1: none."""
    dtype: str = "uint8"
    """Of stored tokens: wide enough for the whole vocabulary."""
    lenient: bool = False
    """Bytes that are no UTF-8 are replaced, not refused."""
    template: str = ""
    """Records are conversations, which this chat template renders; empty: they are texts."""
    template_file: str = ""
    """Where it stands."""
    specials: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tokens that the template calls by name."""

    @property
    def chat(self) -> bool:
        return bool(self.template)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        return cls(**parse_json(text))

    def key(self) -> dict[str, object]:
        """All that tokens depend on: not where a tokenizer lies."""
        key: dict[str, object] = {**asdict(self), "tokenizer": bool(self.tokenizer)}
        del key["template_file"]
        return key


def tokenizer_file(tokenizer: str) -> Path | None:
    """The JSON file that a path means; None where there is none."""
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    return path if path.is_file() else None


def settings_beside(path: Path) -> dict[str, object]:
    """What a Hugging Face folder says of its tokenizer; nothing where the file stands alone."""
    try:
        # Its `model_max_length` is often 1e30, as an integer.
        return read_table(path.parent / "tokenizer_config.json", inside=path.parent, numbers=False)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        where = path.parent / "tokenizer_config.json"
        raise DataError(f"data.tokenizer: {told_of(where, error)}; download it again") from None


def digest_of(path: Path) -> str:
    try:
        digest = hashlib.sha256(read_bytes(path, most=MOST_TOKENIZER))
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            beside = path.parent / name
            digest.update(read_bytes(beside, inside=path.parent) if beside.is_file() else b"")
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {told_of(path, error)}; download it again") from None
    return digest.hexdigest()


def load_tokenizer(path: Path, given: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(read_bytes(path, most=MOST_TOKENIZER))
    except Exception as error:  # the package raises plain Exception
        raise DataError(
            f"data.tokenizer: {given!r} is not a `tokenizers` JSON file: {error}; "
            f"save one with Tokenizer.save(path)"
        ) from error


def end_token(end_of_text: str, tokenizer: Tokenizer | None, path: Path | None, *, wanted: bool) -> int:
    """The number of the token behind each document; -1: none. `wanted`: what "auto" means here."""
    if not end_of_text or (end_of_text == "auto" and not wanted):
        return -1
    if end_of_text.isdecimal():
        return int(end_of_text)
    if tokenizer is None or path is None:
        if end_of_text == "auto":
            return BYTE_END
        raise DataError(
            f"data.end_of_text is {end_of_text!r}, but bytes have no names; give a number below 256"
        )
    name: Any = end_of_text
    if end_of_text == "auto":
        name = settings_beside(path).get("eos_token")
        name = name.get("content") if isinstance(name, dict) else name
        if not isinstance(name, str):
            raise DataError(
                f"data.end_of_text: {path} does not say which token ends a text; give its name "
                '(data.end_of_text = "<|endoftext|>"), or "" for none'
            )
    number = tokenizer.token_to_id(name)
    if number is None:
        raise DataError(f"data.end_of_text: {path} has no token {name!r}; give the name or number of one")
    return int(number)


class DocumentEncoder:
    """Tokens of documents, by a recipe."""

    def __init__(self, recipe: Recipe, *, many: bool = False) -> None:
        """`many`: documents go through the tokenizer together, which may start threads of its own."""
        self.recipe, self.many = recipe, many

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(Path(self.recipe.tokenizer), self.recipe.tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.recipe.template, self.recipe.specials, self.recipe.template_file)

    def encode(self, batch: RawBatch, path: str) -> Encoded:
        """The documents of a batch; `path` is what their file is called in an error."""
        if self.recipe.chat:
            return self._conversations(batch, path)
        if not self.recipe.tokenizer and batch.form == "text":  # bytes need not be UTF-8
            return self._joined([np.frombuffer(raw, dtype=np.uint8) for raw in batch.raw], batch.open)
        read = (self._text(raw, batch, number, path) for number, raw in enumerate(batch.raw))
        texts = [text for text in read if text is not None]
        if not self.recipe.tokenizer:
            return self._joined([np.frombuffer(text.encode(), dtype=np.uint8) for text in texts], batch.open)
        if self.many:
            found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        else:
            found = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._joined([one.ids for one in found], batch.open)

    def _conversations(self, batch: RawBatch, path: str) -> Encoded:
        rows, counted, conversations = [], [], []
        for number, raw in enumerate(batch.raw):
            where = f"{path}, line {batch.first + number + 1}"
            line = self._decoded(raw, where)
            if not line.strip():
                continue
            conversations.append((where, messages_of(record_of(line, where), self.recipe.field, where)))
        for text, spans in self.template.render(conversations):
            found = self.tokenizer.encode(text, add_special_tokens=False)
            rows.append(found.ids)
            counted.append(said_in(found.offsets, spans))
            if self.recipe.end >= 0:
                counted.append(np.zeros(1, dtype=np.uint8))
        made = self._joined(rows, False)
        return replace(made, counted=np.concatenate([*counted, np.zeros(0, dtype=np.uint8)]))

    def _decoded(self, raw: bytes, where: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 text (byte {error.start}); convert the file") from error

    def _joined(self, rows: Sequence[Sequence[int] | np.ndarray], goes_on: bool) -> Encoded:
        """Rows one behind the other, each with its end; the last one without, where it `goes_on`."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        end = self.recipe.end
        if end >= 0 and len(rows):
            lengths += 1
            lengths[-1] -= goes_on
        tokens = np.full(int(lengths.sum()), max(end, 0), dtype=np.uint32)
        first = 0
        for row, length in zip(rows, lengths.tolist(), strict=True):
            tokens[first : first + len(row)] = row
            first += length
        return Encoded(tokens=tokens, lengths=lengths)

    def _text(self, raw: bytes, batch: RawBatch, number: int, path: str) -> str | None:
        if batch.form == "jsonl":
            where = f"{path}, line {batch.first + number + 1}"
            line = self._decoded(raw, where)
            return field_of(line, self.recipe.field, where) if line.strip() else None
        try:
            return raw.decode("utf-8", errors="replace" if self.recipe.lenient else "strict")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text (byte {batch.offset + error.start}), which data.tokenizer needs; "
                f"convert it, or leave data.tokenizer empty to train on bytes"
            ) from error


def said_in(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """1 for each token that begins inside a span."""
    begins = np.array([first for first, _ in offsets], dtype=np.int64)
    said = np.zeros(len(begins), dtype=np.uint8)
    for first, last in spans:
        said[(begins >= first) & (begins < last)] = 1
    return said


def field_of(line: str, field: str, where: str) -> str:
    """The text of a record."""
    found = record_of(line, where).get(field)
    if found is None:
        names = ", ".join(map(str, record_of(line, where))) or "none"
        raise DataError(
            f"{where} has no field {field!r}; its fields are {names}: set data.field to one of them"
        )
    if not isinstance(found, str):
        raise DataError(
            f"{where}: {field} is {type(found).__name__}, not text; set data.field to a field of text"
        )
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {field} holds half a character (\\u{ord(found[error.start]):04x} at {error.start}), "
            "which no UTF-8 text can hold; write the record again"
        ) from error
    return found


def record_of(line: str, where: str) -> dict[str, object]:
    try:
        found = parse_json(line, numbers=False)
    except ValueError as error:
        raise DataError(f"{told_of(where, error)}; each line holds one record") from error
    if not isinstance(found, dict):
        raise DataError(f"{where} is {type(found).__name__}, not a record; each line holds one, as {{...}}")
    return found
