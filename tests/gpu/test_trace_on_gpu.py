"""A traced step on a GPU: kernels lie inside the step that launched them, and its numbers are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_graphs_on_gpu import SMALL

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.observe.step_trace import StepTrace
from moeclipse.train.step.learner import Learner

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_kernels_of_a_traced_step(graphs: str, tmp_path: Path) -> None:
    values = {**SMALL, "run.graphs": graphs, "run.steps": 9}
    plain = Learner(with_values(TrainConfig(), values), Mesh.single("cuda"))
    traced = Learner(with_values(TrainConfig(), {**values, "metrics.trace": 7}), Mesh.single("cuda"))
    trace_of = StepTrace(traced.config, traced.mesh, traced.model)
    for step in range(9):
        expected = plain.step(step)["loss"]
        torch.cuda.synchronize()  # its kernels are not to be seen
        trace_of.begin(step)
        assert traced.step(step)["loss"] == expected
        trace_of.end(step, traced.times, tmp_path, traced.program)
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    kernels = [event for event in events if event["cat"] == "kernel"]
    whole = [event for event in events if event["name"].startswith("microbatch")]
    assert len(kernels) > 20
    first, last = min(one["ts"] for one in whole), max(one["ts"] + one["dur"] for one in events)
    inside = [one for one in kernels if first - 1e3 <= one["ts"] <= last + 1e3]
    assert len(inside) > 0.9 * len(kernels), "on one clock with what launched them"
    assert any(event["name"] == "layer 0 B" for event in events) == (graphs == "off")
