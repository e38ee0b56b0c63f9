"""A whole step of training on one GPU: torch raises where the host would wait for the device.

`set_sync_debug_mode` sees copies to and from memory that is not pinned, `.item()`, `nonzero` and their kin;
it does not see events and `torch.cuda.synchronize`, with which a step begins and ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

HAS_GPU = torch.cuda.device_count() > 0  # through NVML: asking CUDA itself would spoil forked ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

SMALL: dict[str, Any] = {
    "model.num_layers": 3,
    "model.num_dense_layers": 1,
    "model.d_model": 128,
    "model.head_dim": 64,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "moe.num_experts": 8,
    "moe.d_ff": 64,
    "moe.num_shared_experts": 1,
    "data.seq_len": 64,
    "data.batch_size": 4,
    "optim.accumulate": 2,
    "data.files": (str(Path(__file__).parents[1] / "train/text.txt"),),
}
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "biases that move": {"gate.kind": "sigmoid", "gate.bias_rate": 0.01, "gate.z_loss": 0.1},
    "norms of heads": {"model.qk_norm": "head", "model.tie_embeddings": True},
    "gated shared experts": {"moe.shared_gate": True},
    "narrow": {
        "model.dtype": "bfloat16",
        "optim.state": "bf16",
        "optim.master": "none",
        "optim.main_grad": "bf16",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_nothing_inside_a_step(case: str) -> None:
    torch.use_deterministic_algorithms(False)  # filling fresh memory with NaN is no part of a step
    learner = Learner(with_values(TrainConfig(), {**SMALL, **CASES[case]}), Mesh.single("cuda"))
    assert learner.dtype == torch.bfloat16
    first = [learner.step(step)["loss"] for step in range(2)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        record = learner.step(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(True)
    assert record["loss"] < first[0] + 0.5
    assert not record["skipped"]
    assert learner.optim.updates == 3


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    # A look at the state would say what is wrong with it, and does where one is due.
    learner = Learner(with_values(TrainConfig(), {**SMALL, "integrity.every": 0}), Mesh.single("cuda"))
    learner.step(0)
    kept = [(state.weight.clone(), state.adam_m.clone()) for state in learner.optim.states]
    with torch.no_grad():
        good = learner.model.norm.weight.clone()
        learner.model.norm.weight.fill_(torch.nan)
    assert learner.step(1)["skipped"]
    with torch.no_grad():
        learner.model.norm.weight.copy_(good)
    assert learner.optim.updates == 1
    for (weight, adam_m), state in zip(kept, learner.optim.states, strict=True):
        assert torch.equal(weight, state.weight)
        assert torch.equal(adam_m, state.adam_m)
    assert not learner.step(2)["skipped"]
