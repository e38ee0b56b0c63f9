"""The runtime runs what the verifier proved, over layers with and without parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from user_model import LAYERS, WIDTH, Block, M, UserStage, data, model

from moeclipse.comm.mesh import Mesh
from moeclipse.pipeline.config import PipelineConfig
from moeclipse.pipeline.overlap import lay_out, make_program
from moeclipse.pipeline.runtime import Runtime
from moeclipse.pipeline.stage import describe
from moeclipse.schedule.op import Op
from moeclipse.tensor.weight_grad import WeightGrads
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks


def reference(mesh: Mesh) -> list[torch.Tensor]:
    scale, blocks = model()
    for block in blocks:
        block.eval()
    for part in data():
        h = part.x * scale
        for block in blocks:
            h = block(h, part)
        (h.square().sum() * 0.5).backward()
    return [p.grad for p in [scale, *(p for block in blocks for p in block.parameters())]]  # type: ignore[misc]


def staged(mesh: Mesh, config: PipelineConfig, train: bool) -> dict[str, torch.Tensor]:
    scale, blocks = model()
    for block in blocks:
        block.train(train)
    layout = lay_out(config, LAYERS, mesh.pp, M)
    shapes = [describe(block) for block in blocks]
    verified = make_program(config, layout, shapes, mesh.pp, M)
    stages = {
        number: UserStage(
            layers=[blocks[i] for i in layers],
            embed=(lambda part: part.x * scale) if 0 in layers else None,
            head=(lambda h, part: h.square().sum()) if LAYERS - 1 in layers else None,
        )
        for number, layers in layout.held_by(mesh.pp_index).items()
    }
    parts = data()
    runtime = Runtime(verified, mesh, stages, WeightGrads(), width=WIDTH, dtype=torch.float64)
    runtime.step(lambda m, chunk, chunks: parts[m], torch.tensor(0.5, dtype=torch.float64))
    everything = {"scale": scale}
    everything |= {f"{i}.{name}": p for i, b in enumerate(blocks) for name, p in b.named_parameters()}
    return {name: p.grad for name, p in everything.items() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "vpp+1", "dualpipev"])
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_a_users_own_layers_run_unsplit(schedule: str, recompute: str) -> None:
    config = PipelineConfig(schedule=schedule, overlap="pair+self", recompute=recompute)  # type: ignore[arg-type]
    expected = run_alone(reference)
    found: dict[str, torch.Tensor] = {}
    for part in run_ranks(2, staged, config, False, pp=2):
        assert not set(part) & set(found), "every parameter has its gradient on one rank"
        found |= part
    names = ["scale"] + [f"{i}.{n}" for i in range(LAYERS) for n, _ in Block().named_parameters()]
    for name, wanted in zip(names, expected, strict=True):
        assert difference(found[name], wanted) < 1e-12, name


def test_recompute_draws_the_same_numbers() -> None:
    """Dropout: forward and its second run must agree, or gradients belong to another model."""
    kept = run_alone(staged, PipelineConfig(schedule="1f1b"), True)
    again = run_alone(staged, PipelineConfig(schedule="1f1b", recompute="full"), True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def wires(mesh: Mesh) -> list[tuple[str, int, int]]:
    """Which of the communicators between stages were used."""
    used, real = set(), mesh.pipe

    def pipe(letter: str, source: int, target: int) -> Any:
        used.add((letter, source, target))
        return real(letter, source, target)

    mesh.pipe = pipe  # type: ignore[method-assign, assignment]
    staged(mesh, PipelineConfig(schedule="1f1b"), False)
    return sorted(used)


def test_activations_and_gradients_never_share_a_communicator() -> None:
    """Messages of one communicator meet in order: a receive that was posted early would block a send."""
    assert run_ranks(2, wires, pp=2) == [[("B", 1, 0), ("F", 0, 1)]] * 2


def test_ops_are_told_as_they_run() -> None:
    assert run_alone(observed) > 20


def observed(mesh: Mesh) -> int:
    config = PipelineConfig(schedule="1f1b")
    layout = lay_out(config, LAYERS, 1, M)
    scale, blocks = model()
    verified = make_program(config, layout, [describe(block) for block in blocks], 1, M)
    stage = UserStage(blocks, lambda part: part.x * scale, lambda h, _: h.sum())  # type: ignore[arg-type]
    runtime = Runtime(verified, mesh, {0: stage}, WeightGrads(), width=WIDTH, dtype=torch.float64)
    seen: list[Op] = []
    runtime.observe = lambda op, begun, ended: seen.append(op)
    parts = data()
    runtime.step(lambda m, chunk, chunks: parts[m], torch.tensor(1.0, dtype=torch.float64))
    assert [str(op) for op in seen] == [str(op) for op in verified.program.ranks[0]]
    return len(seen)
