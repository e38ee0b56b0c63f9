"""Blocks of keys by arithmetic, against torch's, which looks at every pair of a query and a key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from moeclipse.ops.attention import seen_keys
from moeclipse.ops.attention_blocks import BLOCK, document_blocks, window_blocks

CPU = torch.device("cpu")
PARTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
PARTS += ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
LENGTHS = st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]) | st.integers(1, 5 * BLOCK)
WINDOWS = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1]) | st.integers(0, 5 * BLOCK)


def check(found: BlockMask, samples: int | None, queries: int, keys: int) -> None:
    right = create_block_mask(found.mask_mod, samples, None, queries, keys, device="cpu")
    assert found.seq_lengths == right.seq_lengths == (queries, keys)
    assert found.BLOCK_SIZE == right.BLOCK_SIZE
    for part in PARTS:
        assert torch.equal(getattr(found, part), getattr(right, part)), part
        assert getattr(found, part).dtype == getattr(right, part).dtype


def pairs(found: BlockMask, samples: int, queries: int, keys: int) -> torch.Tensor:
    """[B, S, L]: what the mask says of every pair."""
    places = (torch.arange(samples)[:, None, None], 0, torch.arange(queries)[:, None], torch.arange(keys))
    return found.mask_mod(*places).expand(samples, queries, keys)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(0, 3 * BLOCK), WINDOWS)
def test_windows(queries: int, before: int, window: int) -> None:
    keys = queries + before
    found = window_blocks(queries, keys, window, CPU)
    check(found, None, queries, keys)
    assert torch.equal(
        pairs(found, 1, queries, keys)[0], seen_keys(queries, keys, window, documents_BS=None, device=CPU)
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), LENGTHS, WINDOWS, st.data())
def test_documents(samples: int, length: int, window: int, data: st.DataObject) -> None:
    ends = st.lists(st.integers(0, length), max_size=6)
    starts = torch.zeros(samples, length + 1, dtype=torch.int64)
    for row in starts:
        row[data.draw(ends)] = 1
    # Numbers that come back: the second of two neighbours that have the same one is no new document.
    documents_BS = (starts.cumsum(1) % 3)[:, :length].contiguous()
    found = document_blocks(documents_BS, window)
    check(found, samples, length, length)
    right = seen_keys(length, length, window, documents_BS, CPU)
    assert torch.equal(pairs(found, samples, length, length), right[:, 0])


def test_long_ones_take_no_matrix_of_pairs() -> None:
    """Pairs would be 17 billion, blocks are a million."""
    length = 1 << 17
    found = window_blocks(length, length, 4 * BLOCK, CPU)
    assert found.kv_num_blocks.shape == (1, 1, length // BLOCK)
    assert int(found.kv_num_blocks.max() + found.full_kv_num_blocks.max()) == 5
    documents_BS = torch.arange(length).div(1000, rounding_mode="floor")[None]
    assert int(document_blocks(documents_BS, 0).kv_num_blocks.max()) <= 10


@pytest.mark.parametrize("window", [0, 40])
def test_a_mask_is_made_once(window: int) -> None:
    documents_BS = torch.zeros(2, 256, dtype=torch.int64)
    assert document_blocks(documents_BS, window) is document_blocks(documents_BS, window)
    assert document_blocks(documents_BS.clone(), window) is not document_blocks(documents_BS, window)
    assert window_blocks(256, 256, window, CPU) is window_blocks(256, 256, window, CPU)
