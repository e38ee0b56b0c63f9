"""Pairs that arrived, brought in the order in which experts take them; and numbers of theirs back.

Pairs arrive in *segments*, one after the other: those of one source, one chunk and one slot. Experts take
them by (unit, slot): a segment goes somewhere else as a whole. What arrives of a pair is its address,
row * K + j (`ops/sending`), and its score.

    lengths 1, 2 · go to 2, 0 · addresses 0, 2, 5 with K = 2 and rows from 0 on
    rows 1, 2, 0 · scores in that order · places [[2, -1], [0, -1], [-1, 1]]

Contract. `Segments` are made on the host, where all sizes are known, and go to the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moeclipse.ops.pick import pick_reference

BLOCK = 256
BITS_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
"""Whole numbers as wide as scores; kernels take fp32 alone, references float64, too, to compare with."""
FIELDS = ("length", "arrival", "goes_to", "row_shift", "first_row", "first_pair")


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Each field is an array with a number for each segment, in the order of arrival."""

    length: np.ndarray
    goes_to: np.ndarray
    """Where its first pair stands among all that experts take."""
    row_shift: np.ndarray
    """From row numbers of the source to those of all rows that arrive."""
    first_row: np.ndarray
    """Of its unit, among all that arrive: experts count from there."""
    first_pair: np.ndarray
    """Of its unit, among all that experts take."""

    @property
    def arrival(self) -> np.ndarray:
        return np.cumsum(self.length) - self.length

    def table(self) -> torch.Tensor:
        """[6, segments], on the host."""
        return torch.from_numpy(np.stack([getattr(self, name) for name in FIELDS]).astype(np.int32))


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Of each pair, in the order of experts."""

    row_M: torch.Tensor
    """Counted from the first of its unit."""
    score_M: torch.Tensor
    places_RK: torch.Tensor
    """Of each row that arrived its pairs, counted from the first of their unit, by slot; -1: no more."""


def unpack_reference(
    packed_m2: torch.Tensor,
    table_6S: torch.Tensor,
    *,
    num_pairs: int,
    num_rows: int,
    top_k: int,
    most: int,
    longest: int,  # noqa: ARG001  (for the kernel)
    first: int = 0,
) -> Arrived:
    """`packed_m2`: addresses as bits of a float, and scores. `most`: pairs that a row can have here.

    `table_6S`: the segments that `packed_m2` holds, all `num_pairs` or those from number `first` on; what
    others have to say stays open. `longest`: no segment is longer.
    """
    table = dict(zip(FIELDS, table_6S.long(), strict=True))
    number = torch.arange(table_6S.shape[1]).repeat_interleave(table["length"])
    inside = torch.arange(len(number)) - (table["length"].cumsum(0) - table["length"])[number]
    arrival, at = table["arrival"][number] + inside - first, table["goes_to"][number] + inside
    address = packed_m2[:, 0].contiguous().view(BITS_OF[packed_m2.dtype])[arrival].long()
    row = address // top_k + table["row_shift"][number]
    row_M, score_M = torch.zeros(num_pairs, dtype=torch.int32), packed_m2.new_zeros(num_pairs)
    row_M[at] = (row - table["first_row"][number]).to(torch.int32)
    score_M[at] = packed_m2[arrival, 1]
    places_RK = torch.full((num_rows, most), -1, dtype=torch.int32)
    places_RK[row, address % top_k] = (at - table["first_pair"][number]).to(torch.int32)
    return Arrived(row_M=row_M, score_M=score_M, places_RK=places_RK)


def unpack_kernel(
    packed_m2: torch.Tensor,
    table_6S: torch.Tensor,
    *,
    num_pairs: int,
    num_rows: int,
    top_k: int,
    most: int,
    longest: int,
    first: int = 0,
) -> Arrived:
    from moeclipse.ops.triton import arrival

    device, num_segments = packed_m2.device, table_6S.shape[1]
    row_M = torch.empty(num_pairs, dtype=torch.int32, device=device)
    score_M = packed_m2.new_empty(num_pairs)
    places_RK = torch.full((num_rows, most), -1, dtype=torch.int32, device=device)
    if longest and num_segments:
        arrival.unpack[(num_segments, -(-longest // BLOCK))](
            packed_m2.view(torch.int32), packed_m2, table_6S, row_M, score_M, places_RK, table_6S.stride(0),
            first, K=top_k, MOST=most, BLOCK=BLOCK,
        )  # fmt: skip
    return Arrived(row_M=row_M, score_M=score_M, places_RK=places_RK)


def send_order_reference(
    values_M: torch.Tensor,
    table_6S: torch.Tensor,
    longest: int,  # noqa: ARG001
) -> torch.Tensor:
    """A number of each pair, from the order of experts to that of arrival."""
    length, _, goes_to, *_ = table_6S.long()
    number = torch.arange(len(length)).repeat_interleave(length)
    inside = torch.arange(len(number)) - (length.cumsum(0) - length)[number]
    return pick_reference(values_M, goes_to[number] + inside)


def send_order_kernel(values_M: torch.Tensor, table_6S: torch.Tensor, longest: int) -> torch.Tensor:
    from moeclipse.ops.triton import arrival

    out = torch.empty_like(values_M)
    if longest:
        arrival.send_order[(table_6S.shape[1], -(-longest // BLOCK))](
            values_M, table_6S, out, table_6S.stride(0), BLOCK=BLOCK
        )
    return out


def pack_reference(
    address_TK: torch.Tensor, scores_TK: torch.Tensor, pair_place_n: torch.Tensor
) -> torch.Tensor:
    """[n, 2]: what travels of each pair, its address as bits of a float beside its score."""
    place = pair_place_n.long()
    address = address_TK.flatten()[place].to(BITS_OF[scores_TK.dtype]).view(scores_TK.dtype)
    return torch.stack([address, scores_TK.flatten()[place]], dim=1)


def pack_kernel(
    address_TK: torch.Tensor, scores_TK: torch.Tensor, pair_place_n: torch.Tensor
) -> torch.Tensor:
    from moeclipse.ops.triton import arrival

    scores_TK, number = scores_TK.contiguous(), len(pair_place_n)
    packed = scores_TK.new_empty(number, 2)
    if number:
        arrival.pack[(-(-number // BLOCK),)](
            address_TK, scores_TK, pair_place_n, packed.view(torch.int32), packed, number, BLOCK=BLOCK
        )
    return packed
