"""What a pipeline holds in memory, and how it ends when a rank does not arrive."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner import configure

from moeclipse.comm.mesh import Mesh
from moeclipse.schedule.op import Op
from moeclipse.testing.run_ranks import run_alone, run_ranks_raw
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

WIDE: dict[str, Any] = {
    "model.num_layers": 4,
    "model.d_model": 64,
    "model.head_dim": 16,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.dtype": "float32",
    "moe.d_ff": 96,
    "data.seq_len": 64,
}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(Path(__file__).read_text()[:4000])
    return str(path)


def peak_bytes(mesh: Mesh, config: TrainConfig, folder: str) -> tuple[float, float]:
    """(most bytes that torch's allocator held beyond those before the step, what the program says)."""
    learner = Learner(config, mesh)
    assert learner.pipelined is not None
    learner.backward(0)
    path = Path(folder) / "trace.json"
    with torch.profiler.profile(profile_memory=True) as profile:
        learner.backward(1)
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    held = [e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]"]
    first = next(e["args"] for e in events if e.get("name") == "[memory]")
    before = first["Total Allocated"] - first["Bytes"]
    return float(max(held) - before), learner.pipelined.runtime.verified.peak[0]


def test_peak_memory_is_what_the_program_says(corpus: str, tmp_path: Path) -> None:
    """Two runs tell what a layer's activations weigh; the others must then weigh what their programs say.

    Beside activations there are buffers of exchanges under way: those of one microbatch, of two in pairs.
    """

    def measure(
        schedule: str, microbatches: int, overlap: str = "off", layers: int = 4
    ) -> tuple[float, float]:
        changes = {**WIDE, "optim.accumulate": microbatches, "data.batch_size": 4 * microbatches}
        changes |= {"pipeline.schedule": schedule, "pipeline.overlap": overlap, "model.num_layers": layers}
        found: tuple[float, float] = run_alone(peak_bytes, configure(corpus, **changes), str(tmp_path))
        return found

    (few, few_units), (many, many_units) = measure("gpipe", 2), measure("gpipe", 5)
    unit = (many - few) / (many_units - few_units)
    base = few - unit * few_units
    assert 0 <= base < 0.2 * many, "what is not kept must be small, or the test says nothing"
    held, units = measure("1f1b", 5)
    assert held == pytest.approx(base + unit * units, rel=0.05)
    held, units = measure("auto", 4, "pair", layers=2)
    pair_base = held - unit * units
    assert base <= pair_base < 3 * base + unit
    held, units = measure("auto", 4, "pair", layers=7)
    assert held == pytest.approx(pair_base + unit * units, rel=0.05)


def dies_in(mesh: Mesh, config: TrainConfig, kind: str, how: str) -> float:
    """Rank 1 is killed, or stalls, in the first op of a kind."""
    learner = Learner(config, mesh)
    assert learner.pipelined is not None
    runtime = learner.pipelined.runtime
    run = runtime._run

    def fail(op: Op) -> Any:
        if mesh.rank == 1 and op.kind.name == kind and op.microbatch == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(5)
        return run(op)

    runtime._run = fail  # type: ignore[method-assign]
    learner.backward(0)
    return 0.0


@pytest.mark.parametrize(
    ("kind", "how"),
    [("ATTN_F", "kill"), ("MLP_B", "stall"), pytest.param("COMBINE_F", "kill", marks=pytest.mark.full)],
)
def test_a_rank_that_does_not_arrive_ends_the_run_and_is_named(corpus: str, kind: str, how: str) -> None:
    changes = {**WIDE, "optim.accumulate": 4, "data.batch_size": 8, "pipeline.schedule": "1f1b"}
    config = configure(corpus, **changes)
    outcomes = run_ranks_raw(2, dies_in, config, kind, how, pp=2, collective_deadline_s=2, deadline_s=40)
    ok, text = outcomes[0]
    assert not ok
    for words in ("rank 1", "stage", "microbatch", "on lane p2p"):
        assert words in text, text
