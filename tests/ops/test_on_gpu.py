"""The kernels on a CUDA device: errors against float64 beside plain torch's, equal bits, no host copy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from moeclipse.ops.combine import gather_sum, gather_sum_reference
from moeclipse.ops.grouped_experts import grouped_experts, grouped_experts_reference
from moeclipse.ops.grouped_gemm import dense_wgrad, grouped_wgrad_kernel, grouped_wgrad_reference
from moeclipse.ops.grouping import group_rows, group_rows_reference
from moeclipse.ops.topk_softmax import topk_softmax, topk_softmax_reference
from moeclipse.ops.tuning import HOPPER, Tile, has_warpgroups

# Counted through NVML: asking CUDA itself here would spoil forked ranks.
HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


@dataclass(frozen=True)
class Case:
    name: str
    num_tokens: int = 1024
    d: int = 512
    n: int = 256
    num_experts: int = 16
    top_k: int = 4
    dtype: torch.dtype = torch.bfloat16

    def ids(self) -> torch.Tensor:
        noise = torch.rand(self.num_tokens, self.num_experts, device="cuda")
        if self.name == "skewed":
            noise += torch.linspace(0, 2, self.num_experts, device="cuda")
        if self.name == "empty":
            noise[:, 1::2] -= 10
        if self.name == "one takes all":
            noise[:, 3] += 10
        ids = noise.topk(self.top_k, 1).indices
        return (
            torch.where(torch.rand_like(ids, dtype=torch.float32) < 0.3, -1, ids)
            if self.name == "unused"
            else ids
        )


CASES = [
    Case("uniform"),
    Case("fp16", dtype=torch.float16),
    Case("skewed"),
    Case("empty"),
    Case("one takes all", top_k=1),
    Case("unused"),
    Case("k=16", num_tokens=300, top_k=16, num_experts=32),
    Case("odd tokens", num_tokens=1021),
    Case("few tokens", num_tokens=3),
    Case("one token", num_tokens=1),
    Case("few tokens, odd widths", num_tokens=16, d=200, n=72),
    Case("odd widths", d=200, n=72),
    Case("wide", num_tokens=513, d=1536, n=768),
]


def make(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    d, n, e = case.d, case.n, case.num_experts
    x = torch.randn(case.num_tokens, d, device="cuda").to(case.dtype)
    scores = torch.rand(case.num_tokens, case.top_k, device="cuda")
    up = (torch.randn(e, 2 * n, d, device="cuda") * d**-0.5).to(case.dtype)
    down = (torch.randn(e, d, n, device="cuda") * n**-0.5).to(case.dtype)
    return [x, scores, up, down], case.ids(), torch.randn_like(x)


def gradients(function, inputs, ids, d_out, **options) -> list[torch.Tensor]:
    x, scores, up, down = (tensor.detach().clone().requires_grad_() for tensor in inputs)
    out = function(x, scores, ids, up, down, **options)
    out.backward(d_out.to(out.dtype))
    return [out.detach(), x.grad, scores.grad, up.grad, down.grad]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_errors_are_those_of_plain_torch(case: Case) -> None:
    inputs, ids, d_out = make(case)
    exact = gradients(grouped_experts_reference, [t.double() for t in inputs], ids, d_out)
    plain = gradients(grouped_experts_reference, inputs, ids, d_out)
    ours = gradients(grouped_experts, inputs, ids, d_out)
    for name, got, beside, truth in zip(
        ("out", "dx", "dscores", "dup", "ddown"), ours, plain, exact, strict=True
    ):
        allowed = 1.1 * error(beside, truth) + 1e-7
        assert error(got, truth) <= allowed, name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_runs_give_the_same_bits(case: Case) -> None:
    inputs, ids, d_out = make(case)
    first, second = (gradients(grouped_experts, inputs, ids, d_out) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_weight_gradients_add_into_fp32() -> None:
    inputs, ids, d_out = make(Case("empty"))
    exact = gradients(grouped_experts_reference, [t.double() for t in inputs], ids, d_out)
    into = tuple(torch.full_like(t, 2.0, dtype=torch.float32) for t in inputs[2:])
    for _ in range(3):
        ours = gradients(grouped_experts, inputs, ids, d_out, into=into)
    assert ours[3] is None
    assert ours[4] is None
    for sums, truth in zip(into, exact[3:], strict=True):
        assert error(sums - 2, 3 * truth) < 6e-3
        assert torch.equal(sums[1], torch.full_like(sums[1], 2.0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_grouping_equals_sorting(case: Case) -> None:
    ids = case.ids()
    got, expected = group_rows(ids, case.num_experts), group_rows_reference(ids, case.num_experts)
    for name in ("counts_E", "offsets_E1", "row_token_M", "row_place_M", "place_row_TK"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


@pytest.mark.parametrize("gather", ["dy", "x", "none"])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("divided", [True, False])
def test_wgrad_of_ragged_groups(gather: str, accumulate: bool, divided: bool) -> None:
    torch.manual_seed(1)
    line = ("wgrad" if gather == "none" else f"wgrad_{gather}") + (", add" if accumulate else "")
    tile = None if divided else HOPPER[line]  # which all warps compute in turn, everywhere
    counts = torch.tensor([130, 0, 1, 64, 0, 517])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to("cuda", torch.int32)
    rows, room = int(counts.sum()), int(counts.sum()) + 40
    dy, x = torch.randn(room, 136, device="cuda").bfloat16(), torch.randn(room, 264, device="cuda").bfloat16()
    index = torch.randperm(room, device="cuda")[:rows].to(torch.int32)
    options = {f"{gather}_index_M": index} if gather != "none" else {}
    into = torch.randn(6, 136, 264, device="cuda")
    expected = into.double()
    grouped_wgrad_reference(dy.double(), x.double(), offsets, expected, accumulate=accumulate, **options)
    # What lies past the last group must not be looked at.
    for tensor, gathered in ((dy, gather == "dy"), (x, gather == "x")):
        if not gathered:
            tensor[rows:] = float("nan")
    grouped_wgrad_kernel(dy, x, offsets, into, accumulate=accumulate, tile=tile, **options)
    assert error(into, expected) < 1e-5


WARPGROUPS = {
    "two buffers": Tile(stages=4, split=8, staging=2),
    "one buffer": Tile(stages=4, split=4, staging=1),
    "short blocks": Tile(stages=8, k=32, split=8, staging=2),
}


@pytest.mark.parametrize("name", WARPGROUPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("into_dtype", [torch.float32, None])
def test_wgrad_by_warpgroups(name: str, dtype: torch.dtype, into_dtype: torch.dtype | None) -> None:
    if not has_warpgroups(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper and Gluon")
    torch.manual_seed(3)
    # In blocks: none, one, a tail, just a ring full and one row more; long groups after short ones.
    counts = torch.tensor([130, 0, 1, 64, 0, 517, 63, 256, 257, 0, 2048, 5, 1024, 0])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to("cuda", torch.int32)
    rows, accumulate = int(counts.sum()), into_dtype is not None
    for n, d in ((136, 264), (640, 1536)):
        dy = torch.randn(rows + 40, n, device="cuda").to(dtype)
        x = torch.randn(rows + 40, d, device="cuda").to(dtype)
        dy[rows:], x[rows:] = float("nan"), float("nan")
        before = torch.randn(len(counts), n, d, device="cuda").to(into_dtype or dtype)
        expected = before.double()
        sums = [before.clone() for _ in range(3)]
        for into in sums:
            for _ in range(2):  # adding twice, or writing over what is there
                grouped_wgrad_kernel(dy, x, offsets, into, accumulate=accumulate, tile=WARPGROUPS[name])
                if into is sums[0]:
                    grouped_wgrad_reference(dy.double(), x.double(), offsets, expected, accumulate=accumulate)
        assert error(sums[0], expected) < (3e-5 if accumulate else 6e-3)
        assert all(torch.equal(sums[0], other) for other in sums[1:])


GATHERED = {
    "wide": Tile(stages=4, split=8, staging=2, stagger=900),
    "tall": Tile(m=256, n=128, k=32, stages=8, split=4, staging=2),
}


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("gather", ["dy", "x"])
@pytest.mark.parametrize(
    ("dtype", "into_dtype", "accumulate"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_gathered_wgrad_by_warpgroups(
    name: str, gather: str, dtype: torch.dtype, into_dtype: torch.dtype, accumulate: bool
) -> None:
    if not has_warpgroups(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("needs Hopper and Gluon")
    torch.manual_seed(4)
    counts = torch.tensor([0, 130, 0, 0, 1, 64, 0, 517, 63, 256, 257, 0, 2048, 5, 1024, 0])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to("cuda", torch.int32)
    rows, wide = int(counts.sum()), into_dtype == torch.float32
    tile = GATHERED[name] if wide else replace(GATHERED[name], split=GATHERED[name].split // 2)
    # Nobody may look at places past the last group, nor at rows that no place names.
    index = torch.randint(rows // 3, (rows + 40,), device="cuda", dtype=torch.int32)
    index[rows:] = 1 << 30
    for n, d in ((136, 264), (640, 1536)):
        dy = torch.randn(rows + 40, n, device="cuda").to(dtype)
        x = torch.randn(rows + 40, d, device="cuda").to(dtype)
        for tensor, named in ((dy, gather == "dy"), (x, gather == "x")):
            tensor[rows // 3 if named else rows :] = float("nan")
        before = torch.randn(len(counts), n, d, device="cuda").to(into_dtype)
        expected, options = before.double(), {f"{gather}_index_M": index, "accumulate": accumulate}
        sums = [before.clone() for _ in range(3)]
        for into in sums:
            for _ in range(2):  # adding twice, or writing over what is there
                grouped_wgrad_kernel(dy, x, offsets, into, tile=tile, **options)
                if into is sums[0]:
                    grouped_wgrad_reference(dy.double(), x.double(), offsets, expected, **options)
        assert error(sums[0], expected) < (3e-5 if wide else 6e-3)
        assert all(torch.equal(sums[0], other) for other in sums[1:])


def test_dense_wgrad_adds_in_place_without_a_temporary() -> None:
    torch.manual_seed(2)
    dy, x = torch.randn(512, 1024, device="cuda").bfloat16(), torch.randn(512, 2048, device="cuda").bfloat16()
    into = torch.randn(1024, 2048, device="cuda")
    expected = into.double() + dy.double().t() @ x.double()
    dense_wgrad(dy, x, into.clone())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dense_wgrad(dy, x, into)
    assert torch.cuda.max_memory_allocated() - before < into.nbytes // 4
    assert error(into, expected) < 1e-5


def test_gate_and_combine() -> None:
    logits = torch.randn(777, 128, device="cuda").bfloat16().requires_grad_()
    twin = logits.detach().clone().requires_grad_()
    (scores, ids), (scores_0, ids_0) = topk_softmax(logits, 8), topk_softmax_reference(twin, 8)
    assert torch.equal(ids, ids_0)
    torch.testing.assert_close(scores, scores_0)
    d_scores = torch.randn_like(scores)
    scores.backward(d_scores)
    scores_0.backward(d_scores)
    torch.testing.assert_close(logits.grad, twin.grad, atol=1e-3, rtol=2e-2)
    rows, place = (
        torch.randn(500, 1000, device="cuda").bfloat16(),
        torch.randint(-1, 500, (77, 5), device="cuda"),
    )
    weight = torch.rand(500, device="cuda")
    torch.testing.assert_close(gather_sum(rows, place, weight), gather_sum_reference(rows, place, weight))


def test_nothing_waits_for_the_host() -> None:
    inputs, ids, d_out = make(Case("uniform"))
    gradients(grouped_experts, inputs, ids, d_out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(grouped_experts, inputs, ids, d_out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_backward_may_be_the_first_thing_that_a_thread_does_on_the_device() -> None:
    """Autograd's threads have no context before; kernels with descriptors ask the driver for one."""
    code = """
import torch
from moeclipse.ops.grouped_experts import grouped_experts
x, up, down = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for shape in ((256, 128), (4, 256, 128), (4, 128, 128)))
scores, ids = torch.rand(256, 4, device="cuda").topk(2)
out = grouped_experts(x, scores, ids, up, down)
out.backward(torch.ones_like(out))
print(float(x.grad.abs().sum()) > 0, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
