"""What layers keep, counted off the graph, beside what the allocator of one GPU says."""

from __future__ import annotations

import pytest
import torch
from test_host_words_on_gpu import SMALL

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.moe.tokens import Tokens
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.memory_table import watched
from moeclipse.train.step.learner import Learner

HAS_GPU = torch.cuda.device_count() > 0  # through NVML: asking CUDA itself would spoil forked ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def test_the_allocator_says_the_same() -> None:
    """Within a tenth: sizes are rounded up, and autograd functions hold a few index tensors of their own."""
    mesh = Mesh.single("cuda")
    changes = {**SMALL, "data.seq_len": 512, "run.graphs": "off", "optim.accumulate": 1}
    learner = Learner(with_values(TrainConfig(), changes), mesh)
    for step in range(2):
        learner.step(step)  # kernels are tuned, tables made
    table = watched(learner)
    batch = learner.batches.microbatch(2, 0, 0, 1)
    tokens = Tokens(mesh=mesh, first=0, total=batch.total_tokens, step=2, microbatch=0)
    inputs, targets = batch.inputs.to("cuda"), batch.targets.to("cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with table.counting(learner.model):
        out = learner.model(inputs, targets, tokens)
    torch.cuda.synchronize()
    assert out.loss_sum.requires_grad
    assert sum(table.kept.values()) == pytest.approx(torch.cuda.memory_allocated() - before, rel=0.1)
