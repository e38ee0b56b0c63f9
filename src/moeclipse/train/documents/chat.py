"""Conversations as text, by the tokenizer's own chat template, and which of it the assistant said.

A template is a Jinja text that turns `messages`, a list of {"role", "content"}, into what the model reads.
What the assistant said is known in one of two ways:

    {% generation %} ... {% endgeneration %}   the template says it itself
    otherwise                                  each answer is what it adds to the conversation before it,
                                               rendered up to the point where the assistant begins

Contract. `render` gives the text and spans [first, last) of characters that the assistant said, in order. A
conversation that its template does not take, or whose answers cannot be told apart, is a DataError.
Templates come with models of others: they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moeclipse.core.errors import DataError

BEGIN, END = "\U0010fffe", "\U0010ffff"
"""Around what the assistant said, inside this module: no text has these characters."""
Span = tuple[int, int]


def template_beside(path: Path, settings: Mapping[str, Any]) -> str:
    """The chat template of a tokenizer file, from what stands beside it."""
    beside = path.parent / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
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


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Names that templates use: bos_token, eos_token and the like."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


class ChatTemplate:
    def __init__(self, text: str, specials: Mapping[str, str]) -> None:
        if find_spec("jinja2") is None:
            raise DataError("data.kind = 'chat' needs the `jinja2` package; run: pip install moeclipse[data]")
        self.marks = "{%" in text and "endgeneration" in text
        self._template = compiled(text)
        self._specials = dict(specials)

    def render(self, messages: Sequence[Mapping[str, Any]], where: str) -> tuple[str, list[Span]]:
        """The text of a conversation, and what of it the assistant said; `where` names it in an error."""
        text = self._rendered(messages, where)
        if self.marks:
            return spans_of(text)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self._rendered(messages[:number], where, begins=True)
                after = self._rendered(messages[: number + 1], where)
                last = common(after, text)
                if not text.startswith(before) or last <= len(before):
                    raise DataError(
                        f"{where}: the chat template renders answer {number} in another way inside the "
                        "conversation, so its tokens cannot be told; use one with {% generation %}"
                    )
                spans.append((len(before), last))
        return text, spans

    def opening(self, question: str) -> str:
        """What stands before the assistant's answer to a user who says this."""
        return self._rendered([{"role": "user", "content": question}], "the prompt", begins=True)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], where: str, *, begins: bool = False) -> str:
        try:
            text: str = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=begins, **self._specials
            )
        except Exception as error:  # a template may do anything
            raise DataError(f"{where}: the chat template does not take it: {error}") from error
        return text


def compiled(text: str) -> Any:
    """As transformers compiles templates."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012  (Jinja asks for a set)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    extensions: list[Any] = [Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template of data.tokenizer is not valid: {error}") from error


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


def messages_of(record: Mapping[str, Any], field: str, where: str) -> list[dict[str, Any]]:
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
