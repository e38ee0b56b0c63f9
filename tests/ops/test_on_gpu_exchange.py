"""The tables of an exchange on a GPU: those of the references, at sizes that an interpreter cannot do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from moeclipse.ops import arrival, sending
from moeclipse.ops.arrival import Segments
from moeclipse.ops.sending import Places

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
CUDA = torch.device("cuda")


def assert_same(got: Any, expected: Any) -> None:
    for field in dataclasses.fields(expected):
        assert torch.equal(getattr(got, field.name).cpu(), getattr(expected, field.name)), field.name


@pytest.mark.parametrize(("T", "K", "per_rank", "P"), [(1, 1, 1, 1), (5000, 8, 8, 8), (777, 16, 2, 64)])
@pytest.mark.parametrize("chunks", [1, 4])
def test_what_leaves(T: int, K: int, per_rank: int, P: int, chunks: int) -> None:
    torch.manual_seed(T)
    slots_TK = torch.rand(T, per_rank * P).topk(K, 1).indices
    slots_TK = torch.where(torch.rand(T, K) < 0.1, -1, slots_TK)
    ranks, first = torch.arange(P).repeat_interleave(per_rank), torch.arange(P + 1) * per_rank
    places = Places(rank_of_slot=ranks, first_slot_P1=first, num_slots=per_rank * P)
    there = Places(rank_of_slot=ranks.cuda(), first_slot_P1=first.cuda(), num_slots=per_rank * P)
    expected = sending.rows_to_send_reference(slots_TK, places)
    found = sending.rows_to_send(slots_TK.cuda(), there)
    assert_same(found, expected)
    cuts_P = torch.arange(P) % chunks + 1 if chunks > 1 else None
    pairs = sending.pairs_to_send_reference(slots_TK, expected, places, cuts_P, chunks)
    given = (slots_TK.cuda(), found, there, None if cuts_P is None else cuts_P.cuda(), chunks)
    assert_same(sending.pairs_to_send(*given), pairs)


def test_what_arrives() -> None:
    source = np.random.default_rng(0)
    length = source.integers(0, 900, 64 * 4)
    order, total = source.permutation(len(length)), int(length.sum())
    goes_to, zeros = np.empty_like(length), np.zeros_like(length)
    goes_to[order] = np.cumsum(length[order]) - length[order]
    segments = Segments(
        length=length, goes_to=goes_to, row_shift=zeros, first_row=zeros, first_pair=zeros
    ).table()
    address = torch.from_numpy(source.permutation(total)).to(torch.int32)
    packed = torch.stack([address.view(torch.float32), torch.rand(total)], dim=1)
    longest = int(length.max())
    sizes = {"num_pairs": total, "num_rows": total // 8 + 1, "top_k": 8, "most": 8, "longest": longest}
    expected = arrival.unpack_reference(packed, segments, **sizes)
    assert_same(arrival.unpack_kernel(packed.cuda(), segments.cuda(), **sizes), expected)
    back = arrival.send_order_kernel(expected.score_M.cuda(), segments.cuda(), longest)
    assert torch.equal(back.cpu(), packed[:, 1])
    place = torch.from_numpy(source.permutation(total)).to(torch.int32)
    given = (address.view(-1, 1), packed[:, 1:].contiguous(), place)
    bits = arrival.pack_kernel(*(tensor.cuda() for tensor in given)).view(torch.int32)
    assert torch.equal(bits.cpu(), arrival.pack_reference(*given).view(torch.int32))
