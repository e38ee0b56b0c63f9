"""Pairs that arrived, in the order of experts, and back."""

from __future__ import annotations

import numpy as np
import torch
from interpreted import assert_exchange_ran

from moeclipse.ops.arrival import Segments, pack_reference, send_order_reference, unpack_reference

ZEROS = np.zeros(2, dtype=np.int64)
SEGMENTS = Segments(
    length=np.array([1, 2]), goes_to=np.array([2, 0]), row_shift=ZEROS, first_row=ZEROS, first_pair=ZEROS
)
SIZES = {"num_pairs": 3, "num_rows": 3, "top_k": 2, "most": 2, "longest": 2}


def test_segments_go_where_experts_take_them() -> None:
    address, scores = torch.tensor([[0, 2, 5]], dtype=torch.int32), torch.tensor([[0.5, 0.25, 0.125]])
    packed = pack_reference(address, scores, torch.arange(3))
    found = unpack_reference(packed, SEGMENTS.table(), **SIZES)
    assert found.row_M.tolist() == [1, 2, 0]
    assert found.score_M.tolist() == [0.25, 0.125, 0.5]
    assert found.places_RK.tolist() == [[2, -1], [0, -1], [-1, 1]]
    assert send_order_reference(found.score_M, SEGMENTS.table(), 2).tolist() == scores[0].tolist()


def test_some_segments_are_unpacked_before_others_arrive() -> None:
    address, scores = torch.tensor([[2, 5]], dtype=torch.int32), torch.tensor([[0.25, 0.125]])
    packed = pack_reference(address, scores, torch.arange(2))
    found = unpack_reference(packed, SEGMENTS.table()[:, 1:], first=1, **SIZES)
    assert found.row_M[:2].tolist() == [1, 2]
    assert found.score_M[:2].tolist() == [0.25, 0.125]


def test_kernels_make_the_same_tables() -> None:
    assert_exchange_ran(kind="arrival")
