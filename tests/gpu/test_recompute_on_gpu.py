"""What runs again on a GPU: the same bits, in graphs too, and the memory that was counted."""

from __future__ import annotations

import gc

import pytest
import torch
from test_host_words_on_gpu import SMALL

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from moeclipse.train.step.recompute import LADDER, kept_by, peaks
from moeclipse.train.step.recompute_ranks import peaks as peaks_before_building

HAS_GPU = torch.cuda.device_count() > 0  # through NVML: asking CUDA itself would spoil forked ranks
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def losses(level: str, graphs: str) -> tuple[list[float], int]:
    changes = {**SMALL, "run.graphs": graphs, "run.steps": 6, "pipeline.recompute": level}
    changes["run.deterministic"] = True
    try:
        learner = Learner(with_values(TrainConfig(), changes), Mesh.single("cuda"))
        found = [learner.step(step) for step in range(6)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert (learner.graphs is not None) == (graphs == "auto")
    assert learner.graphs is None or not learner.graphs.refused
    return [number for record in found for number in (record["loss"], record["grad_norm"])], len(found)


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_no_bit_changes(graphs: str) -> None:
    expected = losses("off", graphs)
    for level in (*LADDER[1:], "moe"):
        assert losses(level, graphs) == expected, level


def test_each_rung_keeps_less_and_the_peak_is_foreseen() -> None:
    changes = {**SMALL, "data.seq_len": 512, "optim.accumulate": 1, "run.graphs": "off"}
    config = with_values(TrainConfig(), changes)
    gc.collect()
    before = torch.cuda.memory_allocated()  # of other tests
    learner = Learner(config, Mesh.single("cuda"))
    kept = [kept_by(learner.model, learner.mesh, 512, level) for level in LADDER]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    learner.step(0)
    expected = peaks(config, learner.mesh, learner.model, len(learner.model.layers))  # all that is allocated
    torch.cuda.reset_peak_memory_stats()
    learner.step(1)
    peak = torch.cuda.max_memory_allocated() - before
    assert 0.4 * (expected["off"] - before) < peak <= 1.05 * (expected["off"] - before)


def test_the_peak_is_foreseen_before_anything_is_built() -> None:
    """As several ranks do it, which have to know before they build; on one rank the same is there to see."""
    changes = {**SMALL, "data.seq_len": 512, "optim.accumulate": 1, "run.graphs": "off"}
    mesh = Mesh.single("cuda")
    expected = peaks_before_building(with_values(TrainConfig(), changes), mesh)
    gc.collect()
    before = torch.cuda.memory_allocated()  # of other tests
    for level in ("off", "attn", "full"):
        config = with_values(TrainConfig(), {**changes, "pipeline.recompute": level})
        learner = Learner(config, mesh)
        learner.step(0)
        torch.cuda.reset_peak_memory_stats()
        learner.step(1)
        peak = torch.cuda.max_memory_allocated() - before
        del learner
        gc.collect()
        assert torch.cuda.memory_allocated() <= before + 2**20, "nothing of a learner stays"
        assert 0.4 * expected[level] < peak <= 1.05 * expected[level], level
