"""Several sources: their shares, their order, their losses, and a run that goes on in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import to_toml, with_values
from moeclipse.core.errors import CheckpointError, DataError
from moeclipse.core.toml import parse_toml
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import DataConfig, TrainConfig
from moeclipse.train.data import sources as module
from moeclipse.train.data.corpus import Corpus, CorpusPart
from moeclipse.train.data.data_config import SourceConfig
from moeclipse.train.data.samples import Batches, Samples
from moeclipse.train.data.sources import Mixture, corpus_of, open_samples, places_of
from moeclipse.train.step.learner import Learner


def samples_of(first: int, num_tokens: int, shuffle: bool = True, held_out: float = 0.0) -> Samples:
    tokens = np.arange(first, first + num_tokens)
    part = CorpusPart(source="a", num_tokens=num_tokens, array=tokens)
    return Samples(Corpus([part], vocab_size=1 << 20, what="a"), 4, 3, shuffle, held_out)


def mixture_of(weights: list[float], shuffle: bool = True, held_out: float = 0.0) -> Mixture:
    parts = [samples_of(10_000 * n, 41 + 8 * n, shuffle, held_out) for n in range(len(weights))]
    return Mixture(parts, [f"s{n}" for n in range(len(weights))], weights, what="test")


@settings(deadline=None)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5))
def test_places_fill_a_cycle(weights: list[float]) -> None:
    counts = places_of(weights)
    assert sum(counts) == module.CYCLE
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - weight / sum(weights) * module.CYCLE) < 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_exact_over_a_cycle_and_sources_keep_their_epochs(
    monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    monkeypatch.setattr(module, "CYCLE", 40)
    mixture = mixture_of([3, 1], shuffle)
    windows = mixture.windows(np.arange(80))
    source = mixture.source_of(windows)
    assert [int((source[first : first + 40] == 1).sum()) for first in (0, 40)] == [10, 10]
    for number, samples in enumerate(mixture.sources):
        own = windows[source == number] - mixture._offsets[number]
        expected = samples.windows(np.arange(len(own)))
        assert sorted(own) == sorted(expected), "the n-th place of a source is its n-th sample"
        whole = len(samples)
        assert len(set(own[:whole].tolist())) == whole or shuffle
    if not shuffle:
        assert source[:8].tolist().count(1) == 2, "evenly spread"
    rows = mixture.rows(windows)
    assert rows.documents is None
    np.testing.assert_array_equal(rows.inputs // 10_000, np.repeat(source[:, None], 4, axis=1))
    np.testing.assert_array_equal(rows.targets, rows.inputs + 1)
    assert mixture.counted(windows).tolist() == [4] * 80


def test_a_weight_that_is_next_to_nothing() -> None:
    with pytest.raises(DataError, match=r"data.source 's1' has a weight below 1 / 10000"):
        mixture_of([1, 1e-9])


def test_what_is_held_out_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CYCLE", 40)
    mixture = mixture_of([1, 1], held_out=0.3)
    held = set(mixture.held_windows().tolist())
    assert len(held) == 3 + 4
    assert not held & set(mixture.windows(np.arange(400)).tolist())
    assert set(mixture.windows(np.arange(400)).tolist()) | held == set(range(10 + 12))
    one = samples_of(0, 401, held_out=0.2)
    assert sorted(one.held_windows().tolist()) != list(range(80, 100)), "from everywhere, not the end alone"
    with pytest.raises(DataError, match=r"eval.share = 0.5 leaves none"):
        samples_of(0, 5, held_out=0.5)


def test_entropy_is_that_of_the_mixed_text() -> None:
    def of(tokens: list[int]) -> Samples:
        part = CorpusPart(source="a", num_tokens=len(tokens), array=np.array(tokens))
        return Samples(Corpus([part], vocab_size=4, what="a"), 1, 0)

    mixture = Mixture([of([0, 0]), of([1, 1, 1])], ["a", "b"], [1, 3], what="both")
    assert mixture.unigram_entropy() == pytest.approx(-0.25 * np.log(0.25) - 0.75 * np.log(0.75))
    assert corpus_of(mixture) is mixture
    assert corpus_of(mixture.sources[0]).what == "a"


def test_other_shares_are_other_data() -> None:
    saved = Batches(mixture_of([1, 1]), 4).state(3)
    Batches(mixture_of([2, 2]), 4).check_state(json.loads(json.dumps(saved)), 3)
    with pytest.raises(CheckpointError, match=r"data.source.s0.share is 5000 in the checkpoint, 7500"):
        Batches(mixture_of([3, 1]), 4).check_state(saved, 3)


SMALL: dict[str, Any] = {
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.head_dim": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.dtype": "float64",
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


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Packed documents of two sources, with weights, shuffled."""
    rng = np.random.default_rng(0)
    for name, low in (("upper", 65), ("lower", 97)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for _ in range(50):
                text = "".join(chr(c) for c in rng.integers(low, low + 26, rng.integers(1, 30)))
                file.write(json.dumps({"text": text}) + "\n")
    sources = (
        SourceConfig(name="upper", files=(str(tmp_path / "upper.jsonl"),), weight=3.0),
        SourceConfig(files=(str(tmp_path / "lower.jsonl"),)),
    )
    return with_values(TrainConfig(), {**SMALL, "data.source": sources})


def steps_of(mesh: Mesh, config: TrainConfig, first: int, last: int, folder: str, path: str = "") -> Any:
    """(losses, losses of sources, master weights' digest on this rank); saves after the last step."""
    learner = Learner(config, mesh)
    if path:
        assert learner.load(Checkpoint.open(path, mesh)) == first
    records = [learner.step(step) for step in range(first, last)]
    told = [[record["loss"], record["sources"]] for record in records]
    return told, str(learner.save(Path(folder), last))


def test_going_on_in_the_middle_is_the_same_run_on_any_number_of_ranks(
    tmp_path: Path, config: TrainConfig
) -> None:
    whole, _ = run_alone(steps_of, config, 0, 6, str(tmp_path / "whole"))
    begun, path = run_alone(steps_of, config, 0, 3, str(tmp_path / "cut"))
    rest, _ = run_alone(steps_of, config, 3, 6, str(tmp_path / "rest"), path)
    assert begun + rest == whole, "to the last bit"
    for ranks in (2, 3):
        for told, _ in run_ranks(ranks, steps_of, config, 3, 6, str(tmp_path / f"{ranks}"), path):
            for (loss, parts), (expected, apart) in zip(told, whole[3:], strict=True):
                assert loss == pytest.approx(expected, rel=1e-12)
                assert parts.keys() == apart.keys()
                for name, part in parts.items():
                    assert part["targets"] == apart[name]["targets"]
                    assert part["loss"] == pytest.approx(apart[name]["loss"], rel=1e-12)
    for _, parts in whole:
        total = sum(part["loss"] * part["targets"] for part in parts.values())
        count = sum(part["targets"] for part in parts.values())
        assert total / count == pytest.approx(whole[[w[1] for w in whole].index(parts)][0], rel=1e-12)
    assert any(len(parts) == 2 for _, parts in whole)


def test_losses_of_sources_in_a_pipeline(tmp_path: Path, config: TrainConfig) -> None:
    config = with_values(config, {"model.num_layers": 2})
    whole, _ = run_alone(steps_of, config, 0, 1, str(tmp_path / "whole"))
    staged = with_values(config, {"parallel.pp": 2})
    for told, _ in run_ranks(2, steps_of, staged, 0, 1, str(tmp_path / "staged"), pp=2):
        for name, part in whole[0][1].items():
            assert told[0][1][name]["loss"] == pytest.approx(part["loss"], rel=1e-12)


def test_tables_in_a_file(config: TrainConfig) -> None:
    text = to_toml(config, comments=True)
    assert text.count("[[data.source]]") == 2
    from moeclipse.core.config import from_table

    assert from_table(TrainConfig, parse_toml(text, "test"), "test") == config


def test_opened_from_a_configuration(config: TrainConfig) -> None:
    samples = open_samples(config.data, 257, 0)
    assert isinstance(samples, Mixture)
    assert samples.names == ("upper", "source-1")
    assert samples.counts == [7500, 2500]
    batch = Batches(samples, 6, 2).microbatch(0, 0)
    assert batch.sources is not None
    assert batch.documents is not None
    upper = ((batch.inputs < 97) | (batch.inputs == 0)).all(1)
    assert torch.equal(upper, batch.sources == 0)
    assert isinstance(open_samples(DataConfig(), 256, 0), Samples)
