"""Hostile templates: ended, named, and no burden on whoever asked."""

from __future__ import annotations

import io
import json
import resource
from typing import Any, BinaryIO

import pytest

from moeclipse.core.errors import DataError
from moeclipse.train.documents import template_process
from moeclipse.train.documents.chat import ChatTemplate
from moeclipse.train.documents.template_process import (
    TOGETHER,
    Refused,
    TemplateProcess,
    answer,
    tried,
    write,
)

SAID, OTHER = ([{"role": "user", "content": letter}] for letter in "ab")
LONG = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    LONG: "computed for more than",
    "{{ 10 ** (10 ** 9) }}": "computed for more than|ended its process|MiB",
    "{{ ('a' * 99999999) | reverse | list | length }}": "computed|MiB|ended its process",
    "{{ 'a' * 999999999999 }}": "MiB|memory|ended",
    "{{ ('a' * 400000000) | length }}": "took more than 256 MiB",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "too deeply",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "too deeply|nested|parentheses|ended its process",
    "{% for a in range(9999) %}{{ 'a' * 99999 }}{% endfor %}": "MiB|characters|computed",
    "{{ '%9999999999d' % 1 }}": "MiB|ended|large|big|memory",
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process imports the module anew: what it may take is told it in its program."""
    change = "import moeclipse.train.documents.template_process as m; m.SECONDS = 0.3; m.MEMORY = 1 << 28; "
    monkeypatch.setattr(template_process, "PROGRAM", change + "m.serve()")


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.usefixtures("short")
def test_a_template_is_ended_and_named(text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=f"/models/a/chat_template.jinja.*({HOSTILE[text]})"):
        ChatTemplate(text, {}, "/models/a/chat_template.jinja").render([("data.jsonl, line 3", SAID)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_text_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MOST_TEXT", 10)
    assert tried(lambda length: "a" * length, 10) == "a" * 10
    assert tried(lambda length: "a" * length, 11) == {"error": "its text has more than 10 characters"}


@pytest.mark.usefixtures("short")
def test_the_next_conversation_has_a_process_again() -> None:
    process = TemplateProcess("{% if messages[0].content == 'a' %}" + LONG + "{% endif %}fine", {})
    for _ in range(2):
        with pytest.raises(ValueError, match="computed for more than"):
            process.render([(SAID, False)])
        assert process.render([(OTHER, False)]) == ["fine"]


@pytest.mark.usefixtures("short")
def test_among_many_the_one_that_does_it_is_named() -> None:
    process = TemplateProcess("{% if messages[0].content == 'a' %}" + LONG + "{% endif %}fine", {})
    with pytest.raises(Refused, match="computed for more than") as caught:
        process.render([*[(OTHER, False)] * 70, (SAID, False), *[(OTHER, False)] * 9])
    assert caught.value.number == 70
    assert process.render([(OTHER, False)] * 3) == ["fine"] * 3


def test_many_go_together_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word to another process takes longer than a short text."""
    sent: list[int] = []

    def counted(file: BinaryIO, data: bytes) -> None:
        sent.append(len(data))
        write(file, data)

    monkeypatch.setattr(template_process, "write", counted)
    process = TemplateProcess("{{ messages[0].content }}", {})
    texts = [f"text {n}" for n in range(2000)] + ["x" * (3 * TOGETHER), "y"]
    asked = [([{"role": "user", "content": text}], False) for text in texts]
    sent.clear()
    assert process.render(asked) == texts
    whole = sum(len(json.dumps({"messages": one, "begins": begins})) for one, begins in asked)
    assert len(sent) <= 3 + 2 * whole / TOGETHER
    assert sorted(sent)[-2] <= TOGETHER + 2 * 2000, "only one that is larger by itself"


def test_what_templates_see_and_say() -> None:
    process = TemplateProcess(
        "{{ bos }}{{ messages | tojson }}{{ add_generation_prompt }}", {"bos": "\ud800é"}
    )
    assert process.render([(SAID, True)]) == ['\ud800é[{"role": "user", "content": "a"}]True']
    assert process._process is not None
    kept: Any = process._process
    del process
    assert kept.poll() is not None, "it ends with its owner"


class FullPipe(io.BytesIO):
    """Takes what a pipe holds; then no memory is left to go on."""

    def write(self, data: Any) -> int:
        taken = super().write(bytes(data)[:64])
        if len(data) > taken:
            raise MemoryError
        return taken


def test_a_reply_that_breaks_off_is_the_last_one() -> None:
    """Another behind its half was read as the rest of it: a traceback about UTF-8."""
    pipe = FullPipe()
    with pytest.raises(MemoryError):
        answer(pipe, [{"text": 100 * "a"}])
    told = json.dumps([{"text": 100 * "a"}]).encode()
    assert pipe.getvalue() == len(told).to_bytes(8, "little") + told[:64]
