"""Documents packed into samples: exactly what they are one by one, in every layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import DataError
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import DataConfig, TrainConfig
from moeclipse.train.data.corpus import Corpus, CorpusPart, open_corpus
from moeclipse.train.data.packing import PackedSamples
from moeclipse.train.data.samples import Batches
from moeclipse.train.documents.cache import DocumentTokens
from moeclipse.train.step.learner import Learner
from pieces import Pieces, join, reduced

BOUND = 1e-12
SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.d_model": 16,
    "model.head_dim": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.num_dense_layers": 0,
    "model.dtype": "float64",
    "model.init_std": 0.1,
    "model.vocab_size": 257,
    "moe.num_experts": 4,
    "moe.d_ff": 9,
    "data.documents": "packed",
    "data.seq_len": 16,
    "data.batch_size": 6,
    "optim.accumulate": 2,
    "optim.bucket_mb": 0.01,
    "run.steps": 20,
}


def corpus_of(lengths: list[int]) -> Corpus:
    """Documents of so many tokens, which tell their own positions."""
    tokens, ends = np.arange(sum(lengths)), np.cumsum(lengths)
    known = DocumentTokens(tokens=tokens, ends=ends, in_file=[len(tokens)])
    part = CorpusPart(source="a", num_tokens=len(tokens), array=tokens)
    return Corpus([part], vocab_size=1 << 20, what="documents", documents=known)


def records(folder: Path, count: int = 60) -> str:
    """Documents of 0 to 30 bytes."""
    rng = np.random.default_rng(0)
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(count):
            text = "".join(chr(c) for c in rng.integers(97, 123, rng.integers(0, 30)))
            file.write(json.dumps({"text": text}) + "\n")
    return str(folder / "a.jsonl")


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=8, max_size=30), seq_len=st.integers(1, 7))
def test_targets_and_documents_are_those_of_the_pieces(lengths: list[int], seq_len: int) -> None:
    samples = PackedSamples(corpus_of(lengths), seq_len, seed=0)
    document = np.repeat(np.arange(len(lengths)), lengths)
    windows = np.arange(len(samples))
    rows = samples.rows(windows)
    assert rows.documents is not None
    for window, inputs, targets, documents in zip(
        windows, rows.inputs, rows.targets, rows.documents, strict=True
    ):
        here = np.arange(window * seq_len, (window + 1) * seq_len)
        np.testing.assert_array_equal(inputs, here)
        np.testing.assert_array_equal(documents, document[here] - document[here[0]])
        np.testing.assert_array_equal(targets, np.where(document[here + 1] == document[here], here + 1, -1))
    np.testing.assert_array_equal(samples.counted(windows), (rows.targets >= 0).sum(axis=1))


def test_a_step_counts_what_all_ranks_have_to_predict() -> None:
    batches = Batches(PackedSamples(corpus_of([3, 9, 1, 1, 30, 6] * 9), 8, seed=0), 5, 2)
    for step in (0, 1, 5, 1):
        parts = [batches.microbatch(step, m, rank, 3) for m in range(2) for rank in range(3)]
        assert batches.counted(step) == sum(int((part.targets >= 0).sum()) for part in parts)
    assert batches.state(0)["documents"] == "packed"


def test_nothing_to_predict_is_no_division_by_zero() -> None:
    batches = Batches(PackedSamples(corpus_of([1] * 9), 2, seed=0), 2)
    assert batches.counted(0) == 1


def test_documents_of_token_files_end_with_a_token(tmp_path: Path) -> None:
    np.array([5, 6, 0, 7, 0, 8, 9, 4], dtype=np.uint16).tofile(tmp_path / "a.bin")
    config = DataConfig(files=(str(tmp_path / "a.bin"),), documents="packed", end_of_text="0", seq_len=7)
    samples = PackedSamples(open_corpus(config, 10), 7, seed=0)
    assert samples.rows(np.array([0])).targets.tolist() == [[6, 0, -1, 0, -1, 9, 4]]
    without = DataConfig(files=(str(tmp_path / "a.bin"),), documents="packed", seq_len=7)
    with pytest.raises(DataError, match=r"needs to know where documents end.*data.end_of_text"):
        PackedSamples(open_corpus(without, 10), 7, seed=0)


def configure(files: str, **changes: Any) -> TrainConfig:
    return with_values(TrainConfig(), {**SMALL, "data.files": (files,), **changes})


def packed_and_apart(mesh: Mesh, config: TrainConfig) -> tuple[float, float, float]:
    """(largest difference of a gradient, loss packed, loss of documents one by one)."""
    learner = Learner(config, mesh)
    model, batch = learner.model, learner.batches.microbatch(0, 0)
    assert batch.documents is not None
    where = Tokens(mesh=mesh, first=0, total=batch.num_tokens)
    weights = list(model.parameters())
    for weight in weights:
        weight.main_grad = None  # type: ignore[attr-defined]  # gradients come back to autograd

    def loss_of(ids: torch.Tensor, targets: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        return model(ids, targets, where, documents).loss_sum

    whole = loss_of(batch.inputs, batch.targets, batch.documents)
    packed = torch.autograd.grad(whole, weights)
    apart, total = [torch.zeros_like(weight) for weight in weights], 0.0
    for ids, targets, documents in zip(batch.inputs, batch.targets, batch.documents, strict=True):
        for number in documents.unique():
            mine = documents == number
            loss = loss_of(ids[mine][None], targets[mine][None], None)
            total += float(loss.detach())
            for sum_, part in zip(apart, torch.autograd.grad(loss, weights), strict=True):
                sum_ += part
    worst = max(difference(a, b) for a, b in zip(packed, apart, strict=True))
    return worst, float(whole.detach()), total


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_gradients_are_those_of_separate_documents(tmp_path: Path, attention: str) -> None:
    mla = {"model.q_lora_rank": 6, "model.kv_lora_rank": 8, "model.qk_nope_head_dim": 4}
    mla |= {"model.qk_rope_head_dim": 4, "model.v_head_dim": 6, "model.attention": "mla"}
    config = configure(records(tmp_path), **(mla if attention == "mla" else {}))
    worst, packed, apart = run_alone(packed_and_apart, config)
    assert worst <= BOUND
    assert math.isclose(packed, apart, rel_tol=BOUND)


def gradients(mesh: Mesh, config: TrainConfig) -> tuple[Pieces, float]:
    learner = Learner(config, mesh)
    sums = learner.backward(1)
    return reduced(learner), float(sums["loss"])


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"parallel.tp": 2}),
    "pp": (2, {"parallel.pp": 2}),
    "ep": (2, {"parallel.ep": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_with_one_process(tmp_path: Path, layout: str) -> None:
    files = records(tmp_path)
    (alone, loss) = run_alone(gradients, configure(files))
    ranks, keys = LAYOUTS[layout]
    axes = {"tp": keys.get("parallel.tp", 1), "pp": keys.get("parallel.pp", 1)}
    results = run_ranks(ranks, gradients, configure(files, **keys), **axes)
    expected, found = join([alone]), join([result[0] for result in results])
    assert found.keys() == expected.keys()
    bad = {name: difference(found[name], expected[name]) for name in expected}
    assert not {name: value for name, value in bad.items() if not value <= BOUND}
    assert math.isclose(sum(result[1] for result in results), loss, rel_tol=BOUND)
