"""Conversations in samples: whole, counted where the assistant speaks, cut where they are too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import DataError
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.data.conversations import Conversations, first_of_samples
from moeclipse.train.data.corpus import Corpus, CorpusPart
from moeclipse.train.data.data_config import SourceConfig
from moeclipse.train.data.samples import Batches
from moeclipse.train.documents.cache import DocumentTokens
from moeclipse.train.step.learner import Learner


def corpus_of(lengths: list[int], seed: int = 0) -> Corpus:
    """Tokens tell their own positions, from 1: padding is 0. Some of them are the assistant's."""
    tokens, rng = 1 + np.arange(sum(lengths)), np.random.default_rng(seed)
    counted = rng.integers(0, 2, len(tokens)).astype(np.uint8)
    known = DocumentTokens(tokens=tokens, ends=np.cumsum(lengths), in_file=[len(tokens)], counted=counted)
    part = CorpusPart(source="a", num_tokens=len(tokens), array=tokens)
    return Corpus([part], vocab_size=1 << 20, what="conversations", documents=known)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=30), seq_len=st.integers(1, 9))
def test_every_conversation_is_in_one_sample_and_its_answers_are_targets(
    lengths: list[int], seq_len: int
) -> None:
    corpus = corpus_of(lengths)
    samples = Conversations(corpus, seq_len, seed=0)
    windows = np.arange(len(samples))
    rows = samples.rows(windows)
    assert rows.documents is not None
    assert corpus.documents is not None
    assert corpus.documents.counted is not None
    starts = np.cumsum([0, *lengths[:-1]])
    expected = {
        int(start + n) + 1
        for start, length in zip(starts, lengths, strict=True)
        for n in range(1, min(length, seq_len + 1))
        if corpus.documents.counted[start + n]
    }
    found = rows.targets[rows.targets >= 0]
    assert sorted(found.tolist()) == sorted(expected), "each answer once, and nothing else"
    np.testing.assert_array_equal(samples.counted(windows), (rows.targets >= 0).sum(axis=1))
    at = np.nonzero(rows.targets >= 0)
    assert (rows.inputs[at] + 1 == rows.targets[at]).all(), "predicted from the token before it"
    document = np.repeat(np.arange(len(lengths)), lengths)
    for inputs, documents in zip(rows.inputs, rows.documents, strict=True):
        real = inputs > 0
        of = document[inputs[real] - 1]
        np.testing.assert_array_equal(documents[real][:, None] == documents[real], of[:, None] == of)
        assert not np.isin(documents[~real], documents[real]).any(), "padding is nobody's"


def test_as_many_as_fit() -> None:
    assert first_of_samples(np.array([3, 3, 4, 10, 1]), 10).tolist() == [0, 3, 4, 5]


def test_long_ones_are_cut_and_told() -> None:
    samples = Conversations(corpus_of([3, 30, 2, 9]), 8, seed=0)
    assert samples.num_cut == 1
    known = samples.corpus.documents
    assert known is not None
    assert known.counted is not None
    lost = int(known.counted[3 + 9 : 33].sum())
    assert samples.notes == [
        "1 of 4 conversations are longer than data.seq_len + 1 = 9 tokens and are cut there: "
        f"{lost} tokens of the assistant are not learned"
    ]
    assert Conversations(corpus_of([3, 9]), 8, seed=0).notes == ()
    assert Batches(samples, 1).state(0)["kind"] == "chat"
    with pytest.raises(DataError, match="needs records with messages"):
        Conversations(Corpus(samples.corpus.parts, vocab_size=1 << 20, what="x"), 8, seed=0)


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end] {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
SMALL: dict[str, Any] = {
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.head_dim": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.dtype": "float64",
    "model.vocab_size": 64,
    "moe.num_experts": 4,
    "moe.d_ff": 9,
    "data.seq_len": 24,
    "data.batch_size": 4,
    "optim.accumulate": 2,
    "optim.bucket_mb": 0.01,
    "run.steps": 4,
}


def curve(mesh: Mesh, config: TrainConfig) -> list[Any]:
    learner = Learner(config, mesh)
    return [[record["loss"], record["sources"]] for record in (learner.step(step) for step in range(2))]


def test_chat_beside_text_on_one_rank_and_two(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["?", "[user]", "[assistant]", "[end]", *(f"w{n}" for n in range(40))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings_ = {"chat_template": TEMPLATE, "eos_token": "[end]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    rng = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(f"w{n}" for n in rng.integers(0, 40, count))

    with (tmp_path / "chat.jsonl").open("w") as file:
        for _ in range(30):
            said = [{"role": role, "content": text(4)} for role in ("user", "assistant")]
            file.write(json.dumps({"messages": said}) + "\n")
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text(20)}) for _ in range(30)))
    sources = (
        SourceConfig(name="chat", files=(str(tmp_path / "chat.jsonl"),), kind="chat"),
        SourceConfig(name="text", files=(str(tmp_path / "text.jsonl"),)),
    )
    keys = {"data.source": sources, "data.tokenizer": str(tmp_path)}
    config = with_values(TrainConfig(), {**SMALL, **keys})
    alone = run_alone(curve, config)
    for found in run_ranks(2, curve, config):
        for (loss, parts), (expected, apart) in zip(found, alone, strict=True):
            assert loss == pytest.approx(expected, rel=1e-12)
            assert {name: part["targets"] for name, part in parts.items()} == {
                name: part["targets"] for name, part in apart.items()
            }
