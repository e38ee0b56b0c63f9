"""What a pipeline keeps of a microbatch: all of it while it is needed, nothing of it afterwards."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from user_model import LAYERS, WIDTH, Block, Rows, UserStage, data, model

from moeclipse.comm.mesh import Mesh
from moeclipse.pipeline.config import PipelineConfig
from moeclipse.pipeline.overlap import lay_out, make_program
from moeclipse.pipeline.runtime import Runtime
from moeclipse.pipeline.stage import describe
from moeclipse.schedule.op import Op
from moeclipse.tensor.weight_grad import WeightGrads
from moeclipse.testing.run_ranks import run_ranks

M = 4


class Memory:
    """The storages that belong to each microbatch."""

    def __init__(self) -> None:
        self.refs: list[tuple[int, str, StorageWeakRef]] = []

    def note(self, microbatch: int, what: str, tensor: torch.Tensor) -> torch.Tensor:
        self.refs.append((microbatch, what, StorageWeakRef(tensor.untyped_storage())))
        return tensor

    def left(self, microbatch: int) -> list[str]:
        return [what for number, what, ref in self.refs if number == microbatch and not ref.expired()]


class Noted(torch.nn.Module):
    """A layer whose outputs, and the gradients that come back to it, are noted."""

    def __init__(self, block: Block, number: int, memory: Memory) -> None:
        super().__init__()
        self.block, self.number, self.memory = block, number, memory

    def forward(self, h: torch.Tensor, microbatch: Rows) -> torch.Tensor:
        out = self.memory.note(microbatch.number, f"layer {self.number}", self.block(h, microbatch))
        if out.requires_grad:
            out.register_hook(lambda d: self.gradient(microbatch.number, d))
        return out

    def gradient(self, microbatch: int, d_out: torch.Tensor) -> None:
        self.memory.note(microbatch, f"gradient of layer {self.number}", d_out)


def leftovers(mesh: Mesh, config: PipelineConfig) -> dict[str, list[str]]:
    """What is still there of each microbatch, and of each layer, when its last op on this rank has run.

    Nothing is collected in between: what only a garbage collector would find counts as kept.
    """
    gc.disable()
    memory = Memory()
    scale, blocks = model()
    layers: list[Any] = [Noted(block.eval(), number, memory) for number, block in enumerate(blocks)]
    layout = lay_out(config, LAYERS, mesh.pp, M)
    verified = make_program(config, layout, [describe(layer) for layer in layers], mesh.pp, M)
    stages = {
        number: UserStage(
            layers=[layers[i] for i in held],
            embed=(lambda part: part.x * scale) if 0 in held else None,
            head=(lambda h, part: h.square().sum()) if LAYERS - 1 in held else None,
        )
        for number, held in layout.held_by(mesh.pp_index).items()
    }
    runtime = Runtime(verified, mesh, stages, WeightGrads(), width=WIDTH, dtype=torch.float64)
    ends: dict[tuple[int, str], int] = {}
    for position, op in enumerate(runtime.ops):
        ends[op.microbatch or 0, ""] = position
        if op.layer is not None:
            layer = layout.stages[op.stage or 0][op.layer]
            ends[op.microbatch or 0, f"gradient of layer {layer}"] = position
    ran, found = 0, {}

    def feed(m: int, chunk: int, chunks: int) -> Rows:
        return Rows(m, memory.note(m, "input", data()[m].x))

    def observe(op: Op, begun: Any, ended: Any) -> None:
        nonlocal ran
        for (number, what), end in ends.items():
            kept = [name for name in memory.left(number) if what in name]
            if ran == end + 1 and kept:
                found[f"microbatch {number}, seen after {op}"] = kept
        ran += 1

    runtime.observe = observe
    runtime.step(feed, torch.tensor(0.5, dtype=torch.float64))
    noted = {what for _, what, _ in memory.refs}
    assert noted >= {"input", *(f"gradient of layer {n}" for n in layout.layers_of(mesh.pp_index))}
    return found


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_nothing_of_a_microbatch_outlives_its_last_op(recompute: str) -> None:
    for schedule in ("1f1b", "zb-h1", "dualpipev"):
        config = PipelineConfig(schedule=schedule, recompute=recompute)  # type: ignore[arg-type]
        assert run_ranks(2, leftovers, config, pp=2) == [{}, {}], schedule
