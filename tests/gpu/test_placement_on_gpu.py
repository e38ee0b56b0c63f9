"""Replicas and moving experts on a CUDA device: two ranks share it, and the numbers are those of the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.compare import difference
from moeclipse.train.step.learner import Learner

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

SHARE = """
import sys
sys.path.insert(0, sys.argv[1])
from moeclipse.testing.run_ranks import run_ranks
from test_on_one_gpu import small
from moeclipse.train.step.learner import Learner

def curve(mesh, dtype):
    config = small(**{
        "model.dtype": dtype,
        "placement.planner": "random",
        "placement.start_step": 1,
        "placement.every": 2,
        "placement.slots_per_rank": 6,
        "integrity.every": 1,
    })
    learner = Learner(config, mesh)
    losses = [learner.step(step)["loss"] for step in range(9)]
    return losses + [float(learner.placement.plans_taken)]

for losses in run_ranks(2, curve, sys.argv[2], device="cuda:0", deadline_s=240):
    print(*losses)
"""


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_experts_move_between_ranks_on_one_gpu(dtype: str) -> None:
    from test_on_one_gpu import small

    learner = Learner(small(**{"model.dtype": dtype}), Mesh.single("cpu" if dtype == "float64" else "cuda"))
    expected = torch.tensor([learner.step(step)["loss"] for step in range(9)], dtype=torch.float64)
    command = [sys.executable, "-c", SHARE, str(Path(__file__).parent), dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        *losses, plans = map(float, line.split())
        assert plans >= 2
        bound = 1e-12 if dtype == "float64" else 0.02
        assert difference(torch.tensor(losses, dtype=torch.float64), expected) <= bound
