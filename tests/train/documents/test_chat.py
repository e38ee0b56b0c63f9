"""Conversations by their template: the text and the assistant's part of it, as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeclipse.core.errors import DataError
from moeclipse.train.config import DataConfig
from moeclipse.train.data.corpus import open_corpus
from moeclipse.train.documents.chat import (
    BEGIN,
    END,
    ChatTemplate,
    common,
    messages_of,
    spans_of,
    special_tokens,
    template_beside,
    template_file,
)

PLAIN = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SAID = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3 é w4"},
    {"role": "user", "content": "w5"},
    {"role": "assistant", "content": "w6 w7"},
]


def said(template: str, messages: list[dict[str, str]]) -> tuple[str, list[str]]:
    text, spans = ChatTemplate(template, {"bos_token": "<s>"}).render([("here", messages)])[0]
    return text, [text[first:last] for first, last in spans]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_with_their_ends(template: str) -> None:
    text, answers = said(template, SAID)
    assert text == (
        "<s><|user|>w1 w2<|end|><|assistant|>w3 é w4<|end|><|user|>w5<|end|><|assistant|>w6 w7<|end|>"
    )
    assert answers == ["w3 é w4<|end|>", "w6 w7<|end|>"]
    assert said(template, SAID[:1])[1] == []


def test_templates_that_do_not_take_it() -> None:
    for template, says in [
        ("{{ raise_exception('roles must alternate') }}", "does not take it: roles must alternate"),
        ("{{ messages[0].content.x.y }}", "does not take it"),
        ("{{ ().__class__.__bases__ }}", "does not take it: .*unsafe"),
        # Earlier answers are rendered without their thoughts.
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "cannot be told"),
    ]:
        with pytest.raises(DataError, match=f"here: .*{says}"):
            said(template, SAID)
    with pytest.raises(DataError, match=r"chat template of data.tokenizer is not valid"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_many_conversations_are_told_apart(template: str) -> None:
    many = [(f"line {n}", SAID[: 1 + n % 4]) for n in range(9)]
    made = ChatTemplate(template, {"bos_token": "<s>"})
    assert made.render(many) == [made.render([one])[0] for one in many]
    assert made.render([]) == []
    refuses = template + "{% if messages[-1].content == 'no' %}{{ raise_exception('I will not') }}{% endif %}"
    with pytest.raises(DataError, match=r"^line 5: .* I will not$"):
        ChatTemplate(refuses, {}).render([*many[:5], ("line 5", [{"role": "user", "content": "no"}]), *many])


def test_what_templates_may_use() -> None:
    text, _ = said(
        "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}{{ strftime_now('%Y') }}", [SAID[0]]
    )
    assert text.startswith('{"role": "user", "content": "w1 w2"}2')


def test_spans_and_beginnings() -> None:
    assert spans_of("abc") == ("abc", [])
    assert spans_of(f"a{BEGIN}bc{END}d{BEGIN}e{END}") == ("abcde", [(1, 3), (4, 5)])
    assert common("abc", "abd") == 2
    assert common("ab", "abd") == common("abd", "ab") == 2


def test_where_templates_are_found(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    assert template_beside(path, {"chat_template": "x"}) == "x"
    assert template_file(path) == str(tmp_path / "tokenizer_config.json"), "which errors name"
    assert template_beside(path, {"chat_template": named}) == "a"
    for settings in ({}, {"chat_template": []}, {"chat_template": 3}):
        with pytest.raises(DataError, match="has no chat template; give a tokenizer folder"):
            template_beside(path, settings)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert template_beside(path, {"chat_template": "x"}) == "file"
    assert template_file(path) == str(tmp_path / "chat_template.jinja")
    specials = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    assert special_tokens(specials) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": "x"}, "has no list of messages in 'messages'; its fields are text"),
        ({"messages": []}, "has no list of messages"),
        ({"messages": ["x"]}, "a message is"),
        ({"messages": [{"content": "x"}]}, "a message is"),
        ({"messages": [{"role": "user", "content": BEGIN}]}, "a character that is none"),
    ],
)
def test_records_that_are_no_conversation(record: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=f"here.*{says}"):
        messages_of(record, "messages", "here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as transformers saves it."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    specials = ["<s>", "<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["w1 w2 w3 w4 w5 w6 w7"] * 4, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", chat_template=MARKED
    )
    path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(path)
    return path


def test_tokens_and_their_part_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": said}) for said in (SAID, SAID[:2])))
    config = DataConfig(files=(str(tmp_path / "a.jsonl"),), tokenizer=str(folder), kind="chat")
    corpus = open_corpus(config, 400)
    assert corpus.documents is not None
    assert corpus.documents.counted is not None
    first = 0
    for number, messages in enumerate((SAID, SAID[:2])):
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        last = int(corpus.documents.ends[number])
        assert corpus.read(first, last).tolist() == expected["input_ids"]
        np.testing.assert_array_equal(corpus.documents.counted[first:last], expected["assistant_masks"])
        assert 0 < sum(expected["assistant_masks"]) < last - first
        first = last
    alone = DataConfig(files=(str(tmp_path / "a.jsonl"),), kind="chat")
    with pytest.raises(DataError, match=r"data.kind = 'chat' needs data.tokenizer"):
        open_corpus(alone, 400)
