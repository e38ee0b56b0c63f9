"""Conversations as text, by the tokenizer's own chat template, and which of it the assistant said.

A template is a Jinja text that turns `messages`, a list of {"role", "content"}, into what the model reads.
What the assistant said is known in one of two ways:

    {% generation %} ... {% endgeneration %}   the template says it itself
    otherwise                                  each answer is what it adds to the conversation before it,
                                               rendered up to the point where the assistant begins

Contract. `render` gives texts and spans [first, last) of characters that the assistant said, in order. A
conversation that its template does not take, or whose answers cannot be told apart, is a DataError.
Templates come with models of others: they run in Jinja's sandbox, in a process of their own, within bounds of
time, memory and output (`train/documents/template_process`). An error names the template's file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeclipse.core.errors import DataError
from moeclipse.core.outside import read_text, told_of
from moeclipse.train.documents.template_process import BEGIN, END, Asked, Refused, TemplateProcess

Span = tuple[int, int]
Messages = Sequence[Mapping[str, Any]]
Conversation = tuple[str, Messages]
"""What an error calls it, and what was said."""


def template_beside(path: Path, settings: Mapping[str, object]) -> str:
    """The chat template of a tokenizer file, from what stands beside it."""
    beside = path.parent / "chat_template.jinja"
    if beside.is_file():
        try:
            return read_text(beside, inside=path.parent)
        except (OSError, ValueError) as error:
            raise DataError(f"data.tokenizer: {told_of(beside, error)}; download it again") from None
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise DataError(
            f"data.kind = 'chat': {path.parent} has no chat template; give a tokenizer folder whose "
            "tokenizer_config.json has `chat_template`, or that holds chat_template.jinja"
        )
    return found


def template_file(path: Path) -> str:
    """Where the chat template of a tokenizer file stands."""
    beside = path.parent / "chat_template.jinja"
    return str(beside if beside.is_file() else path.parent / "tokenizer_config.json")


def special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """Names that templates use: bos_token, eos_token and the like."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


class ChatTemplate:
    def __init__(self, text: str, specials: Mapping[str, str], file: str = "") -> None:
        """`file`: where the template stands, for errors."""
        if find_spec("jinja2") is None:
            raise DataError("data.kind = 'chat' needs the `jinja2` package; run: pip install moeclipse[data]")
        self.marks = "{%" in text and "endgeneration" in text
        self.name = f"the chat template in {file}" if file else "the chat template"
        try:
            self._process = TemplateProcess(text, specials)
        except ValueError as error:
            raise DataError(f"{self.name} of data.tokenizer is not valid: {error}") from None

    def render(self, conversations: Sequence[Conversation]) -> list[tuple[str, list[Span]]]:
        """The text of each, and what of it the assistant said."""
        asked, places = [], []
        for where, messages in conversations:
            mine = [(messages, False), *([] if self.marks else beginnings(messages))]
            asked += mine
            places += [where] * len(mine)
        texts = iter(self._rendered(asked, places))
        if self.marks:
            return [spans_of(text) for text in texts]
        return [(text := next(texts), self._spans(text, texts, *one)) for one in conversations]

    def _spans(self, text: str, texts: Iterator[str], where: str, messages: Messages) -> list[Span]:
        """`texts`: of `beginnings`, in their order."""
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = next(texts)
                last = common(next(texts), text) if number + 1 < len(messages) else len(text)
                if not text.startswith(before) or last <= len(before):
                    raise DataError(
                        f"{where}: {self.name} renders answer {number} in another way inside the "
                        "conversation, so its tokens cannot be told; use one with {% generation %}"
                    )
                spans.append((len(before), last))
        return spans

    def opening(self, question: str) -> str:
        """What stands before the assistant's answer to a user who says this."""
        return self._rendered([([{"role": "user", "content": question}], True)], ["the prompt"])[0]

    def _rendered(self, asked: Sequence[Asked], places: Sequence[str]) -> list[str]:
        try:
            return self._process.render(asked)
        except Refused as error:
            raise DataError(f"{places[error.number]}: {self.name} does not take it: {error}") from None


def beginnings(messages: Messages) -> Iterator[Asked]:
    """What is asked to find each answer: all before it, and all up to its end, where that is not all."""
    for number, message in enumerate(messages):
        if message.get("role") == "assistant":
            yield messages[:number], True
            if number + 1 < len(messages):
                yield messages[: number + 1], False


def spans_of(marked: str) -> tuple[str, list[Span]]:
    """A text without its marks, and what stood between them."""
    parts, spans, length = [], [], 0
    for number, piece in enumerate(marked.split(BEGIN)):
        said, _, rest = piece.partition(END) if number else ("", "", piece)
        if number:
            spans.append((length, length + len(said)))
        parts += [said, rest]
        length += len(said) + len(rest)
    return "".join(parts), spans


def common(a: str, b: str) -> int:
    """Characters that both begin with."""
    if b.startswith(a):
        return len(a)
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def messages_of(record: Mapping[str, object], field: str, where: str) -> list[dict[str, object]]:
    """The conversation in a record."""
    found = record.get(field)
    if not isinstance(found, list) or not found:
        names = ", ".join(map(str, record)) or "none"
        raise DataError(
            f"{where} has no list of messages in {field!r}; its fields are {names}: set data.field to one"
        )
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: a message is {{'role': ..., 'content': ...}}, not {message!r:.80}")
    if any(BEGIN in str(one.get("content")) or END in str(one.get("content")) for one in found):
        raise DataError(f"{where}: a message holds a character that is none (U+10FFFE or U+10FFFF)")
    return found
