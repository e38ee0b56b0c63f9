"""The same promises on a CUDA device: parity with the CPU, bf16 training, several ranks sharing one GPU."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.async_ops.lane import Lane
from moeclipse.comm.failure import Watch
from moeclipse.comm.group import Group
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import CommError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.tokens import Tokens
from moeclipse.ops.random import fill_normal, normal
from moeclipse.testing.compare import difference
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

# Counted through NVML: asking CUDA itself here would spoil forked ranks.
HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

GATES = {
    "softmax": GateConfig(kind="softmax", top_k=3, z_loss=0.1),
    "sigmoid-groups": GateConfig(kind="sigmoid", top_k=3, num_groups=4, top_groups=2, bias_rate=0.01),
    "switch-pad": GateConfig(kind="switch", top_k=1, capacity_factor=0.7, overflow="pad"),
    "gshard": GateConfig(kind="gshard", top_k=2, capacity_factor=1.1),
    "noisy": GateConfig(kind="noisy", top_k=2),
}


def run_layer(
    device: str, gate: GateConfig, dtype: torch.dtype, d_model: int = 64
) -> dict[str, torch.Tensor]:
    mesh = Mesh.single(device)
    moe = MoE(
        d_model, 48, 8, gate=gate, num_shared_experts=1, mesh=mesh, seed=3, init_std=0.2, dtype=torch.float64
    )
    moe = moe.to(dtype)
    x = fill_normal(torch.empty(100, d_model, dtype=torch.float64), 1, 1.0).to(device, dtype).requires_grad_()
    y, report = moe.run(x, Tokens(mesh=mesh, first=0, total=100, step=2))
    (y.double().square().sum() + report.aux_loss).backward()
    return {"y": y, "dx": x.grad, **{name: p.grad for name, p in moe.named_parameters()}}


@pytest.mark.parametrize("name", GATES)
def test_the_layer_equals_the_cpu_in_float64(name: str) -> None:
    expected = run_layer("cpu", GATES[name], torch.float64)
    found = run_layer("cuda", GATES[name], torch.float64)
    for key, value in expected.items():
        assert difference(found[key].cpu(), value) <= 1e-12, key


def test_bf16_stays_near_float64() -> None:
    gate = GateConfig(top_k=8)  # all experts: rounding cannot change the choice
    expected = run_layer("cpu", gate, torch.float64)
    found = run_layer("cuda", gate, torch.bfloat16)
    for key, value in expected.items():
        assert difference(found[key].cpu(), value) < 0.05, key


def test_random_numbers_are_those_of_the_cpu() -> None:
    index = torch.arange(1 << 16)
    assert difference(normal(11, index.cuda()).cpu(), normal(11, index)) < 1e-14


def small(**changes: Any) -> TrainConfig:
    values = {
        "model.num_layers": 2,
        "model.d_model": 64,
        "model.head_dim": 16,
        "moe.d_ff": 64,
        "data.seq_len": 64,
        "data.batch_size": 8,
        "optim.lr": 3e-3,
        "optim.warmup_steps": 5,
        "run.steps": 30,
    }
    return with_values(TrainConfig(), {**values, **changes})


def test_float64_curve_equals_the_cpu() -> None:
    config = small(**{"model.dtype": "float64", "optim.accumulate": 2})
    curves = []
    for device in ("cpu", "cuda"):
        learner = Learner(config, Mesh.single(device))
        curves.append(torch.tensor([learner.step(step)["loss"] for step in range(5)]))
    assert difference(curves[1], curves[0]) <= 1e-12


def test_bf16_training_learns() -> None:
    learner = Learner(small(), Mesh.single("cuda"))
    assert learner.dtype == torch.bfloat16
    records = [learner.step(step) for step in range(30)]
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]
    times = learner.times.take()[-1].times
    parts = times["compute_ms"] + times["exposed_ms"] + times["straggle_ms"] + times["idle_ms"]
    assert math.isclose(parts, times["step_ms"], rel_tol=1e-6)


def test_a_stuck_transfer_ends_at_the_deadline() -> None:
    mesh = Mesh.single("cuda")
    watch = Watch(store=None, rank=0, num_ranks=2, deadline_s=0.3)
    lane = Lane("a2a", torch.device("cuda"), mesh.recorder, watch)
    group = Group(name="world", ranks=(0, 1), index=0, backend="nccl")

    class Stuck:
        def wait(self) -> None:
            torch.cuda._sleep(4_000_000_000)

    transfer = lane.launch(group, "dispatch of rows, layer 2, microbatch 0", Stuck, None)
    with pytest.raises(CommError, match=r"rank 0 waited 0\.3 s in dispatch of rows, layer 2, microbatch 0"):
        transfer.settle()


SHARE = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from moeclipse.testing.run_ranks import run_ranks
from test_on_one_gpu import small
from moeclipse.train.step.learner import Learner

def curve(mesh):
    config = small(**{"model.dtype": "float64"})
    learner = Learner(config, mesh)
    return [learner.step(step)["loss"] for step in range(3)]

dp, ranks = int(sys.argv[1]), 2
for losses in run_ranks(ranks, curve, dp=dp, device="cuda:0", deadline_s=120):
    print(*losses)
"""


@pytest.mark.parametrize("dp", [1, 2])
def test_two_ranks_share_the_gpu(dp: int) -> None:
    """NCCL refuses two ranks on one device, so these talk through gloo; the numbers must not care."""
    learner = Learner(small(**{"model.dtype": "float64"}), Mesh.single("cpu"))
    expected = torch.tensor([learner.step(step)["loss"] for step in range(3)], dtype=torch.float64)
    done = subprocess.run(
        [sys.executable, "-c", SHARE, str(dp), str(Path(__file__).parent)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        losses = torch.tensor([float(word) for word in line.split()], dtype=torch.float64)
        assert difference(losses, expected) <= 1e-12
