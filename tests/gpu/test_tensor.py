"""Weight gradients inside the GEMM and tensor-parallel training, on a CUDA device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.ops.random import fill_normal
from moeclipse.tensor.linear import ColumnParallelLinear
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.tensor.weight_grad import attach
from moeclipse.testing.compare import difference

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def layer(dtype: torch.dtype, into: torch.dtype, d_in: int, d_out: int, fuse: bool = True) -> tuple:
    tp = TensorParallel.of(Mesh.single("cuda"), fuse=fuse)
    linear = ColumnParallelLinear(d_in, d_out, tp=tp, bias=True, device=torch.device("cuda"), dtype=dtype)
    sums = [torch.zeros(p.shape, dtype=into, device="cuda") for p in linear.parameters()]
    for parameter, main_grad in zip(linear.parameters(), sums, strict=True):
        attach(parameter, main_grad, lambda: None)
    return linear, sums


@pytest.mark.parametrize(
    ("dtype", "into", "bound"),
    [
        (torch.bfloat16, torch.float32, 1e-4),
        (torch.float16, torch.float32, 1e-4),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float32, torch.float32, 1e-3),
        (torch.float64, torch.float64, 1e-12),
    ],
)
@pytest.mark.parametrize("contiguous", [True, False])
def test_three_microbatches_accumulate(dtype, into, bound: float, contiguous: bool) -> None:
    linear, (weight, bias) = layer(dtype, into, 96, 136)
    expected = [torch.zeros(s.shape, dtype=torch.float64, device="cuda") for s in (weight, bias)]
    for m in range(3):
        x = fill_normal(torch.empty(200, 96, dtype=torch.float64), m, 1.0).to("cuda", dtype)
        dy = fill_normal(torch.empty(136, 200, dtype=torch.float64), 9 + m, 1.0).to("cuda", dtype).t()
        linear(x).backward(dy.contiguous() if contiguous else dy)
        expected[0] += dy.double().t() @ x.double()
        expected[1] += dy.double().sum(0)
    assert difference(weight, expected[0]) < bound
    assert difference(bias, expected[1]) < max(bound, 2e-5)


def test_a_fused_backward_allocates_nothing_of_the_weights_size() -> None:
    tokens, width = 64, 4096
    grown = {}
    for fuse in (True, False):
        linear, _ = layer(torch.bfloat16, torch.float32, width, width, fuse)
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):  # the first call makes cuBLAS take its workspace
            y = linear(x)
            dy = torch.ones_like(y)
            x.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y.backward(dy)
            grown[fuse] = torch.cuda.max_memory_allocated() - before
    weight_bytes = width * width * 2
    assert grown[False] >= weight_bytes, "the probe must see what it looks for"
    activations = 4 * tokens * width * 4
    assert grown[True] <= activations < weight_bytes / 4


TWO_RANKS = """
import sys
sys.path[:0] = sys.argv[2:]
import test_tensor_parallel as t
from pathlib import Path
from moeclipse.testing.run_ranks import run_ranks
text = Path(sys.argv[1]); text.write_text(Path(t.__file__).read_text()[:4000])
for model in ("softmax", "latent"):
    configs = [t.configure(str(text), t.MODELS[model], way, {"parallel.tp": 2}) for way in t.WAYS]
    ((alone, loss),) = t.run_alone(t.gradients, configs[:1])
    expected = t.join([alone])
    results = run_ranks(2, t.gradients, configs, tp=2, device="cuda:0", deadline_s=100)
    for number, way in enumerate(t.WAYS):
        found = t.join([result[number][0] for result in results])
        bad = {n: t.difference(found[n].cpu(), expected[n]) for n in expected}
        assert max(bad.values()) <= 1e-11, (model, way, bad)
print("equal")
"""


def test_two_tp_ranks_on_one_gpu_equal_one_process_on_the_cpu(tmp_path: Path) -> None:
    """Forked ranks need a parent that has not touched the device: a process of its own."""
    tests = Path(__file__).parent.parent
    given = map(str, (tmp_path / "text.txt", tests, tests / "train"))
    command = [sys.executable, "-c", TWO_RANKS, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
