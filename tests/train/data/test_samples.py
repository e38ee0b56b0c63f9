"""Samples and batches: every layout, restart and split reads the same samples."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.core.errors import CheckpointError, ConfigError, DataError
from moeclipse.train.data.corpus import Corpus, CorpusPart
from moeclipse.train.data.samples import Batches, Samples, even_part


def corpus_of(num_tokens: int, vocab_size: int = 1 << 20, first: int = 0) -> Corpus:
    """Tokens that tell their own position."""
    array = np.arange(first, first + num_tokens, dtype=np.uint32)
    return Corpus(
        [CorpusPart(source="a", num_tokens=num_tokens, array=array)],
        vocab_size=vocab_size,
        what="test tokens",
    )


def batches_of(num_tokens: int, seq_len: int, batch_size: int, accumulate: int = 1, **kwargs: int) -> Batches:
    return Batches(Samples(corpus_of(num_tokens), seq_len, kwargs.get("seed", 0)), batch_size, accumulate)


def step_of(batches: Batches, step: int, num_data_ranks: int) -> torch.Tensor:
    """All inputs of a step as the ranks read them, put together again."""
    parts = [
        batches.microbatch(step, m, rank, num_data_ranks).inputs
        for m in range(batches.accumulate)
        for rank in range(num_data_ranks)
    ]
    return torch.cat(parts)


# ---- samples


@settings(deadline=None)
@given(
    num_tokens=st.integers(2, 400), seq_len=st.integers(1, 20), epoch=st.integers(0, 5), shuffle=st.booleans()
)
def test_every_target_is_predicted_once_per_epoch(
    num_tokens: int, seq_len: int, epoch: int, shuffle: bool
) -> None:
    if num_tokens <= seq_len:
        return
    samples = Samples(corpus_of(num_tokens), seq_len, seed=1, shuffle=shuffle)
    samples.set_epoch(epoch)
    rows = [samples[i] for i in range(len(samples))]
    assert all(row.dtype == np.int64 and row.shape == (seq_len + 1,) for row in rows)
    targets = np.sort(np.concatenate([row[1:] for row in rows]))
    np.testing.assert_array_equal(targets, np.arange(1, len(samples) * seq_len + 1))
    assert num_tokens - 1 - targets.size < seq_len


def test_set_epoch_reshuffles_reproducibly() -> None:
    samples = Samples(corpus_of(1001), 10, seed=5)

    def order(epoch: int) -> list[int]:
        samples.set_epoch(epoch)
        return [int(samples[i][0]) for i in range(len(samples))]

    first, second = order(0), order(1)
    assert first != second
    assert first != sorted(first)
    assert order(0) == first
    other = Samples(corpus_of(1001), 10, seed=6)
    assert [int(other[i][0]) for i in range(100)] != first


def test_shuffling_can_be_switched_off() -> None:
    samples = Samples(corpus_of(101), 10, seed=5, shuffle=False)
    samples.set_epoch(3)
    assert [int(samples[i][0]) for i in range(10)] == list(range(0, 100, 10))


def test_samples_end() -> None:
    samples = Samples(corpus_of(101), 10, seed=0)
    assert len(list(samples)) == 10
    with pytest.raises(IndexError, match="sample 10 is not inside an epoch of 10"):
        samples[10]


def test_a_corpus_shorter_than_a_sample() -> None:
    with pytest.raises(
        DataError, match=r"\(test tokens\) has 8 tokens, but one sample needs data.seq_len \+ 1 = 9"
    ):
        Samples(corpus_of(8), 8, seed=0)
    assert len(Samples(corpus_of(9), 8, seed=0)) == 1


def test_seq_len_of_zero() -> None:
    with pytest.raises(ConfigError, match=r"data.seq_len \(0\) must be at least 1"):
        Samples(corpus_of(8), 0, seed=0)


# ---- batches


@settings(deadline=None)
@given(
    num_tokens=st.integers(30, 300),
    seq_len=st.integers(1, 9),
    batch_size=st.integers(1, 13),
    data=st.data(),
)
def test_who_reads_changes_but_not_what(
    num_tokens: int, seq_len: int, batch_size: int, data: st.DataObject
) -> None:
    accumulate = data.draw(st.integers(1, batch_size))
    num_ranks = data.draw(st.integers(1, 6))
    step = data.draw(st.integers(0, 200))
    one = step_of(batches_of(num_tokens, seq_len, batch_size), step, 1)
    assert one.shape == (batch_size, seq_len)
    many = step_of(batches_of(num_tokens, seq_len, batch_size, accumulate), step, num_ranks)
    assert torch.equal(one, many)


@settings(deadline=None)
@given(batch_size=st.integers(1, 9), steps=st.integers(1, 30))
def test_steps_walk_through_epochs_without_a_seam(batch_size: int, steps: int) -> None:
    batches = batches_of(71, 7, batch_size)
    read = torch.cat([step_of(batches, step, 2) for step in range(steps)])[:, 0]
    samples, length = Samples(corpus_of(71), 7, seed=0), 10
    for g, first in enumerate(read.tolist()):
        samples.set_epoch(g // length)
        assert samples[g % length][0] == first


@settings(deadline=None)
@given(
    cut=st.integers(0, 12),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
)
def test_a_resumed_run_on_other_ranks_sees_what_it_would_have_seen(cut: int, before: int, after: int) -> None:
    def build() -> Batches:
        return batches_of(200, 7, 6, 2)

    undisturbed = [step_of(build(), step, 1) for step in range(12)]
    first = build()
    seen = [step_of(first, step, before) for step in range(cut)]
    saved = json.loads(json.dumps(first.state(cut)))
    second = build()
    second.check_state(saved, cut)
    seen += [step_of(second, step, after) for step in range(cut, 12)]
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, seen, strict=True))


@settings(deadline=None)
@given(batch_size=st.integers(1, 11), num_ranks=st.integers(1, 15), data=st.data())
def test_spans_cover_the_microbatch_in_rank_order(
    batch_size: int, num_ranks: int, data: st.DataObject
) -> None:
    accumulate = data.draw(st.integers(1, batch_size))
    batches = batches_of(100, 4, batch_size, accumulate)
    sizes = []
    for m in range(accumulate):
        parts = [batches.microbatch(3, m, rank, num_ranks) for rank in range(num_ranks)]
        token = 0
        for part in parts:
            assert part.first_token == token
            assert part.inputs.shape == part.targets.shape == (part.num_tokens // 4, 4)
            assert part.inputs.dtype == part.targets.dtype == torch.int64
            assert part.inputs.is_contiguous()
            assert part.targets.is_contiguous()
            token += part.num_tokens
        assert {part.total_tokens for part in parts} == {token}
        counts = [part.inputs.shape[0] for part in parts]
        assert max(counts) - min(counts) <= 1
        sizes.append(sum(counts))
    assert sum(sizes) == batch_size
    assert max(sizes) - min(sizes) <= 1


def test_targets_follow_inputs() -> None:
    part = batches_of(100, 4, 3).microbatch(0, 0)
    assert torch.equal(part.targets, part.inputs + 1)


@settings(deadline=None)
@given(total=st.integers(0, 100), parts=st.integers(1, 20))
def test_even_parts(total: int, parts: int) -> None:
    cuts = [even_part(total, parts, i) for i in range(parts)]
    assert [i for first, stop in cuts for i in range(first, stop)] == list(range(total))
    assert max(b - a for a, b in cuts) - min(b - a for a, b in cuts) <= 1


@pytest.mark.parametrize("where", [(-1, 0, 0, 1), (0, 2, 0, 1), (0, 0, 1, 1), (0, 0, -1, 1)])
def test_a_microbatch_that_is_none(where: tuple[int, int, int, int]) -> None:
    with pytest.raises(IndexError, match="no microbatch"):
        batches_of(100, 4, 3, 2).microbatch(*where)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(0, 1), (3, 4), (3, 0)])
def test_sizes_that_do_not_fit(batch_size: int, accumulate: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"data.batch_size \({batch_size}\).*optim.accumulate \({accumulate}\)"
    ):
        batches_of(100, 4, batch_size, accumulate)


# ---- the data position


def test_other_data_is_named() -> None:
    saved = batches_of(100, 4, 6).state(5)
    assert saved["next_sample"] == 30
    other = Batches(Samples(corpus_of(100, first=1), 5, seed=9, shuffle=False), 6)
    with pytest.raises(CheckpointError) as caught:
        other.check_state(saved, 5)
    text = str(caught.value)
    assert text.startswith(
        "the data changed since the checkpoint: data.seq_len is 4 in the checkpoint, 5 in this run"
    )
    for name in ("data.seed is 0", "data.shuffle is True", "data.corpus.sha256 is"):
        assert name in text
    assert "data.corpus.num_tokens" not in text
    assert "start a new run" in text


def test_another_position_is_named() -> None:
    batches = batches_of(100, 4, 6)
    with pytest.raises(CheckpointError, match=r"data.next_sample is 30 in the checkpoint, 36 in this run"):
        batches.check_state(batches.state(5), 6)


def test_another_accumulation_is_the_same_data() -> None:
    batches_of(100, 4, 6, 3).check_state(batches_of(100, 4, 6, 1).state(5), 5)


# ---- streams


@settings(deadline=None)
@given(
    num_tokens=st.integers(41, 400),  # a sample of 8 for each of 5 streams, and the last target
    seq_len=st.integers(1, 8),
    batch_size=st.integers(1, 5),
    shuffle=st.booleans(),
    ranks=st.integers(1, 3),
)
def test_rows_of_a_stream_go_on(
    num_tokens: int, seq_len: int, batch_size: int, shuffle: bool, ranks: int
) -> None:
    samples = Samples(corpus_of(num_tokens), seq_len, seed=3, shuffle=shuffle)
    batches = Batches(samples, batch_size, min(2, batch_size), order="stream")
    assert batches.streams is not None
    length = batches.streams.length
    before = None
    for step in range(2 * length):
        now = step_of(batches, step, ranks)
        assert batches.continues(step) == (step % length > 0)
        if before is not None and batches.continues(step):
            assert torch.equal(now, before + seq_len), "row b begins where row b ended"
        before = now
    epoch = torch.cat([step_of(batches, step, 1) for step in range(length, 2 * length)])
    assert sorted(epoch.flatten().tolist()) == list(range(batch_size * length * seq_len)), "each token once"


def test_streams_change_rows_from_epoch_to_epoch_and_are_part_of_the_state() -> None:
    samples = Samples(corpus_of(1000), 4, seed=0)
    batches = Batches(samples, 8, order="stream")
    assert batches.streams is not None
    firsts = [step_of(batches, epoch * batches.streams.length, 1)[:, 0].tolist() for epoch in range(3)]
    assert len({tuple(first) for first in firsts}) == 3
    assert len({tuple(sorted(first)) for first in firsts}) == 1
    plain = Batches(samples, 8)
    with pytest.raises(CheckpointError, match=r"data\.order"):
        plain.check_state(batches.state(3), 3)
    with pytest.raises(CheckpointError, match=r"data\.order"):
        batches.check_state(plain.state(3), 3)
    assert not plain.continues(1)
