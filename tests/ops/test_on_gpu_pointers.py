"""The pointer form on a CUDA device, with the tiles of every architecture that has it.

A device that has the copy engine computes here what others compute without it: the same kernels, with the
tiles of an A100, an RTX 4090 or an MI300X. Errors against float64 beside plain torch's, equal bits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_on_gpu import CASES, Case, error, gradients, make

from moeclipse.ops import tuning
from moeclipse.ops.architecture import ARCHITECTURES
from moeclipse.ops.expert_mlp import down, narrow, narrow_reference
from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference
from moeclipse.ops.grouped_gemm import grouped_wgrad_kernel, grouped_wgrad_reference
from moeclipse.ops.grouping import group_rows
from moeclipse.ops.tuning import TABLES, Tile, tile_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device"),
]
HOPPER_THROUGH_POINTERS = replace(ARCHITECTURES["sm_90"], form="pointer")
TAKEN_FOR = {"sm_90": HOPPER_THROUGH_POINTERS} | {
    name: ARCHITECTURES[name] for name in ("sm_80", "sm_89", "gfx942")
}


@pytest.fixture(params=TAKEN_FOR)
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device is taken for one without the copy engine."""
    monkeypatch.setattr(tuning, "architecture_of", lambda _: TAKEN_FOR[request.param])
    assert tile_for("down", torch.device("cuda"), 64, 64).pointers
    return request.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_errors_are_those_of_plain_torch_and_bits_repeat(case: Case, architecture: str) -> None:
    inputs, ids, d_out = make(case)
    exact = gradients(grouped_experts_reference, [t.double() for t in inputs], ids, d_out)
    plain = gradients(grouped_experts_reference, inputs, ids, d_out)
    ours, again = (gradients(grouped_experts, inputs, ids, d_out) for _ in range(2))
    names = ("out", "dx", "dscores", "dup", "ddown")
    for name, got, beside, truth in zip(names, ours, plain, exact, strict=True):
        assert error(got, truth) <= 1.1 * error(beside, truth) + 1e-7, name
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_weight_gradients_add_into_fp32(architecture: str) -> None:
    inputs, ids, d_out = make(Case("empty"))
    exact = gradients(grouped_experts_reference, [t.double() for t in inputs], ids, d_out)
    into = tuple(torch.full_like(t, 2.0, dtype=torch.float32) for t in inputs[2:])
    for _ in range(3):
        gradients(grouped_experts, inputs, ids, d_out, into=into)
    for sums, truth in zip(into, exact[3:], strict=True):
        assert error(sums - 2, 3 * truth) < 6e-3
        assert torch.equal(sums[1], torch.full_like(sums[1], 2.0))


@pytest.mark.parametrize("gather", ["dy", "x", "none"])
@pytest.mark.parametrize("accumulate", [True, False])
def test_wgrad_of_ragged_groups(gather: str, accumulate: bool, architecture: str) -> None:
    torch.manual_seed(1)
    counts = torch.tensor([130, 0, 1, 64, 0, 517])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to("cuda", torch.int32)
    rows, room = int(counts.sum()), int(counts.sum()) + 40
    index = torch.randperm(room, device="cuda")[:rows].to(torch.int32)
    options = {f"{gather}_index_M": index} if gather != "none" else {}
    for n, d in ((136, 264), (384, 512), (16, 264)):
        dy, x = torch.randn(room, n, device="cuda").bfloat16(), torch.randn(room, d, device="cuda").bfloat16()
        into = torch.randn(6, n, d, device="cuda")
        expected = into.double()
        grouped_wgrad_reference(dy.double(), x.double(), offsets, expected, accumulate=accumulate, **options)
        # What lies past the last group must not be looked at.
        for tensor, gathered in ((dy, gather == "dy"), (x, gather == "x")):
            if not gathered:
                tensor[rows:] = float("nan")
        grouped_wgrad_kernel(dy, x, offsets, into, accumulate=accumulate, **options)
        assert error(into, expected) < 1e-5


@pytest.mark.parametrize("rank", [8, 64, 136])
def test_adapters(rank: int, architecture: str) -> None:
    """Beside a product and inside of it; what they add is as near to float64 as in the descriptor form."""
    from moeclipse.ops.expert_kernels import More

    torch.manual_seed(2)
    ids = Case("skewed").ids()
    grouping = group_rows(ids, 16)
    used = int(grouping.offsets_E1[-1])
    rows = torch.randn(grouping.num_rows, 256, device="cuda").bfloat16()
    a = (torch.randn(16, rank, 256, device="cuda") * 256**-0.5).bfloat16()
    b = (torch.randn(16, 512, rank, device="cuda") * rank**-0.5).bfloat16()
    weight = (torch.randn(16, 512, 256, device="cuda") * 256**-0.5).bfloat16()
    u = narrow(rows, a, grouping, scale=2.0, transposed=True)
    exact = narrow_reference(rows.double(), a.double(), grouping, scale=2.0, transposed=True)
    assert error(u[:used], exact[:used]) < 4e-3
    y = down(rows, weight, grouping, more=More(u, b))
    expected = [rows.double(), weight.double(), u.double(), b.double()]
    counts = grouping.counts_E.tolist()
    begin = 0
    for expert, count in enumerate(counts):
        mine = slice(begin, begin + count)
        truth = expected[0][mine] @ expected[1][expert].t() + expected[2][mine] @ expected[3][expert].t()
        assert count == 0 or error(y[mine], truth) < 4e-3
        begin += count


def test_nothing_waits_for_the_host(architecture: str) -> None:
    inputs, ids, d_out = make(Case("uniform"))
    gradients(grouped_experts, inputs, ids, d_out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(grouped_experts, inputs, ids, d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tiles_that_persist_and_tiles_that_do_not_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which program computes a tile changes nothing about it."""
    inputs, ids, d_out = make(Case("skewed"))
    monkeypatch.setattr(tuning, "architecture_of", lambda _: HOPPER_THROUGH_POINTERS)
    found = []
    for per_sm in (0, 1, 2):
        table = {
            line: replace(tile, per_sm=per_sm, stages=2) for line, tile in TABLES["sm_90, pointers"].items()
        }
        monkeypatch.setitem(TABLES, "sm_90, pointers", table)
        assert isinstance(tile_for("down", torch.device("cuda"), 64, 64), Tile)
        found.append(gradients(grouped_experts, inputs, ids, d_out))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
