"""Which blocks of keys a block of queries sees, for flex attention: by arithmetic, without looking at pairs.

Queries and keys are cut into blocks of BLOCK. What flex attention has to know of two blocks is whether some
of their pairs are seen, and whether all are: it leaves out the rest, and asks `sees` in the blocks between.

    differences between places in two blocks are all whole numbers of a range, so a window is a comparison
    documents are runs in the order of their numbers, so the ends of a block say which ones it touches

Torch's `create_block_mask` says the same (`tests/ops/test_attention_blocks.py`), by looking at every pair of
a query and a key: a matrix of them all, unless it is compiled, which it is again for other lengths, until
dynamo's limit of eight; then it is that matrix.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128


class Seen(NamedTuple):
    """[B or 1, blocks of queries, blocks of keys]"""

    some: torch.Tensor
    every: torch.Tensor


@functools.lru_cache(maxsize=32)
def window_blocks(queries: int, keys: int, window: int, device: torch.device) -> BlockMask:
    """The last `queries` of `keys` places; `window` 0: none."""
    before = keys - queries

    def sees(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        place = i + before
        return (place >= j) & (place - j < window) if window else place >= j

    return block_mask(seen_by_place(queries, keys, window, device), queries, keys, sees)


@functools.lru_cache(maxsize=8)
def document_blocks(documents_BS: torch.Tensor, window: int) -> BlockMask:
    """All layers of a microbatch see the same documents: known by the tensor itself, which nobody changes."""
    document_BS = runs_of(documents_BS)
    length = document_BS.shape[1]

    def sees(b: Any, _h: Any, i: Any, j: Any) -> Any:
        near = (i >= j) & (i - j < window) if window else i >= j
        return near & (document_BS[b, i] == document_BS[b, j])

    near = seen_by_place(length, length, window, document_BS.device)
    return block_mask(seen_by_document(near, document_BS), length, length, sees)


def runs_of(documents_BS: torch.Tensor) -> torch.Tensor:
    """Number of the document each token is in: one that comes back after another is another one."""
    changes_BS = torch.zeros_like(documents_BS)
    changes_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return changes_BS.cumsum(dim=1)


def seen_by_place(queries: int, keys: int, window: int, device: torch.device) -> Seen:
    first_q, last_q = (ends + keys - queries for ends in block_ends(queries, device))
    first_q, last_q = first_q[:, None], last_q[:, None]
    first_k, last_k = block_ends(keys, device)
    some, every = first_k <= last_q, last_k <= first_q
    if window:
        some, every = some & (first_q - last_k < window), every & (last_q - first_k < window)
    whole = (last_q - first_q == BLOCK - 1) & (last_k - first_k == BLOCK - 1)
    return Seen(some[None], (every & whole)[None])


def seen_by_document(near: Seen, document_BS: torch.Tensor) -> Seen:
    """Of the blocks seen by place, those with a document in common, and those all in one."""
    first, last = (document_BS[:, ends] for ends in block_ends(document_BS.shape[1], document_BS.device))
    common = (first[:, None] <= last[:, :, None]) & (first[:, :, None] <= last[:, None])
    one = (first[:, :, None] == last[:, None]) & (last[:, :, None] == first[:, None])
    return Seen(near.some & common, near.every & common & one)


def block_ends(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last place of each block."""
    first = torch.arange(0, length, BLOCK, device=device)
    return first, (first + BLOCK - 1).clamp(max=length - 1)


def block_mask(seen: Seen, queries: int, keys: int, sees: Any) -> BlockMask:
    partly = in_order(seen.some & ~seen.every)
    return BlockMask.from_kv_blocks(
        *partly, *in_order(seen.every), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys)
    )


def in_order(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys each block of queries has, [B, 1, Q], and which, those first, [B, 1, Q, K]."""
    marked = blocks[:, None].to(torch.int32)
    which = marked.argsort(dim=-1, descending=True, stable=True)
    return marked.sum(dim=-1).to(torch.int32), which.to(torch.int32)
