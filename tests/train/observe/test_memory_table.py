"""What memory is taken for: state by its tensors, layers by what autograd's own graph is found to hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_optim_states import config_of

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.observe.memory_table import BEFORE, BEHIND, by_kind, watched
from moeclipse.train.step.learner import Learner


def counted_and_held(mesh: Mesh, dtype: str) -> tuple[dict[str, int], int]:
    """By the table, and by hooks that see every tensor on its way into the graph."""
    learner = Learner(config_of({"model.dtype": dtype, "parallel.check_launches": False}), mesh)
    table = watched(learner)
    batch = learner.batches.microbatch(0, 0, mesh.data_index, mesh.num_data)
    tokens = Tokens(mesh=mesh, first=batch.first_token, total=batch.total_tokens, step=0, microbatch=0)
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        table.counting(learner.model),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        out = learner.model(batch.inputs, batch.targets, tokens)
    assert out.loss_sum.requires_grad
    own = [bucket.params for bucket in learner.buckets] + [b for m in learner.layers for b in m.buffers()]
    for tensor in own:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    return table.kept, sum(held.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_counted_is_what_the_graph_holds(num_ranks: int, dtype: str) -> None:
    for kept, held in run_ranks(num_ranks, counted_and_held, dtype):
        assert list(kept) == [BEFORE, "layer 0", "layer 1", BEHIND]
        assert all(kept.values())
        assert sum(kept.values()) == pytest.approx(held, rel=0.005)


def told(mesh: Mesh, changes: dict[str, Any]) -> tuple[list[str], dict[str, int], list[float], int]:
    learner = Learner(config_of(changes), mesh)
    table = watched(learner)
    losses = [learner.step(step)["loss"] for step in range(3)]
    lines = table.lines()
    assert not table.lines(), "once"
    plain = Learner(config_of(changes), mesh)
    assert [plain.step(step)["loss"] for step in range(3)] == losses, "no number changes"
    numel = sum(len(bucket.params) for bucket in learner.buckets)
    return lines, table.state(), losses, numel


def test_a_run_tells_it_once_and_trains_as_before() -> None:
    lines, state, _, numel = run_alone(told, {})
    expected = {"weights": 2, "main_grad": 4, "master weights": 4, "moments": 8}
    assert state == {name: size * numel for name, size in expected.items()}
    assert lines[0] == "memory of this rank"
    assert [line.split("  ")[1] for line in lines[1:5]] == list(expected)
    assert sum("kept of a microbatch" in line for line in lines) == 4
    assert lines[-1].startswith("  peak so far")


def test_narrow_state_is_seen() -> None:
    _, state, _, numel = run_alone(told, {"optim.state": "bf16", "optim.master": "none"})
    assert state == {"weights": 2 * numel, "main_grad": 4 * numel, "master weights": 0, "moments": 4 * numel}


def test_where_a_program_runs_layers_are_not_counted() -> None:
    lines, *_ = run_alone(told, {"pipeline.overlap": "pair", "optim.accumulate": 2})
    assert not any("kept" in line for line in lines)
    assert lines[-1].endswith("not counted where microbatches go through a program")


def test_a_run_that_is_asked_prints_it(tmp_path: Path) -> None:
    text = str(Path(__file__).parents[1] / "text.txt")
    sizes = [
        "--model.num-layers",
        "1",
        "--model.d-model",
        "16",
        "--data.seq-len",
        "8",
        "--data.batch-size",
        "4",
    ]
    words = ["train", "--print-memory", "--ranks", "1", "--run.steps", "2", "--run.device", "cpu", *sizes]
    command = [sys.executable, "-m", "moeclipse", *words, "--data.files", text, "--run.dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("memory of this rank") == 1
    assert "layer 0, kept of a microbatch" in done.stdout + done.stderr


def kinds_there(mesh: Mesh) -> dict[str, Any]:
    return by_kind(Learner(config_of({"parallel.check_launches": False}), mesh))


def test_every_rank_tells_what_its_memory_is_taken_for() -> None:
    first, second = run_ranks(2, kinds_there)
    assert first == second
    assert first["kinds"][:2] == ["weights", "main_grad"]
    for sizes in first["ranks"]:
        assert len(sizes) == len(first["kinds"])
        assert all(size > 0 for size in (sizes[0], sizes[1], sizes[-1]))
