"""The kernels of an exchange against their references, through Triton's interpreter (`in_interpreter`)."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from in_interpreter import KINDS, routing
from what_ran import print_what_ran

from moeclipse.ops import arrival, sending
from moeclipse.ops.arrival import Segments
from moeclipse.ops.sending import Places

PLACES = Places(
    rank_of_slot=torch.tensor([0, 0, 1, 1, 1, 2]), first_slot_P1=torch.tensor([0, 2, 5, 6]), num_slots=6
)


def tell(name: str, got: object, expected: object) -> None:
    for field in dataclasses.fields(expected):  # type: ignore[arg-type]
        one, other = getattr(got, field.name), getattr(expected, field.name)
        same = one.dtype == other.dtype and torch.equal(one, other)
        print(f"{name} {field.name}\t{0 if same else 1}", flush=True)


def check_sending(kind: str) -> None:
    slots_TK = routing(kind, num_experts=6)
    rows = sending.rows_to_send_reference(slots_TK, PLACES)
    tell(f"sending {kind} rows", sending.rows_to_send_kernel(slots_TK, PLACES), rows)
    for cuts_P, chunks in ((None, 1), (torch.tensor([3, 1, 2]), 3), (torch.tensor([1, 1, 1]), 1)):
        given = (slots_TK, rows, PLACES, cuts_P, chunks)
        expected = sending.pairs_to_send_reference(*given)
        tell(f"sending {kind} pairs {chunks} {cuts_P}", sending.pairs_to_send_kernel(*given), expected)


def check_arrival(lengths: list[int], top_k: int) -> None:
    """Segments that go anywhere; each row has its pairs in some order of segments."""
    source = np.random.default_rng(len(lengths))
    length, order = np.array(lengths), source.permutation(len(lengths))
    goes_to = np.empty_like(length)
    goes_to[order] = np.cumsum(length[order]) - length[order]
    total = int(length.sum())
    zeros = np.zeros_like(length)
    segments = Segments(
        length=length, goes_to=goes_to, row_shift=zeros + 2, first_row=zeros + 1, first_pair=zeros
    )
    address = torch.from_numpy(source.permutation(total)).to(torch.int32)
    packed = torch.stack([address.view(torch.float32), torch.randn(total)], dim=1)
    num_rows, longest = total // top_k + 3, int(length.max())
    sizes = {"num_pairs": total, "num_rows": num_rows, "top_k": top_k, "most": top_k, "longest": longest}
    expected = arrival.unpack_reference(packed, segments.table(), **sizes)
    name = f"arrival {lengths} {top_k}"
    tell(name, arrival.unpack_kernel(packed, segments.table(), **sizes), expected)
    given = (torch.randn(total), segments.table(), longest)
    same = torch.equal(arrival.send_order_kernel(*given), arrival.send_order_reference(*given))
    print(f"{name} back\t{0 if same else 1}")
    place = torch.from_numpy(source.permutation(total))[: total - 1].to(torch.int32)
    packing = (address.view(1, -1), torch.randn(1, total), place)
    bits = [
        function(*packing).view(torch.int32) for function in (arrival.pack_kernel, arrival.pack_reference)
    ]
    print(f"{name} packed\t{0 if torch.equal(*bits) else 1}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for kind in KINDS:
        check_sending(kind)
    for lengths in ([1, 2], [0, 3, 1, 0], [700, 5, 0, 260]):
        for top_k in (1, 3):
            check_arrival(lengths, top_k)
    print_what_ran()
