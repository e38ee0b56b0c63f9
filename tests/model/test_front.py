"""A layer as one part and what is left of it: the layer's own forward and gradients, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.config import ModelConfig
from moeclipse.model.front import Front
from moeclipse.model.transformer import Transformer
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.tokens import Tokens
from moeclipse.testing.run_ranks import run_ranks

SMALL = ModelConfig(
    num_layers=2, num_dense_layers=1, d_model=16, num_heads=2, num_kv_heads=2, head_dim=8, vocab_size=32
)
GATES = {
    "softmax": GateConfig(top_k=2, z_loss=0.01),
    "draws": GateConfig(kind="gshard", top_k=2),
    "bounded": GateConfig(top_k=2, capacity_factor=1.0),
    "chooses": GateConfig(top_k=2, choose="top_p", top_p=0.6),
}


def numbers(mesh: Mesh, gate: GateConfig, parts: list[int] | None) -> tuple[Any, ...]:
    moe = MoEConfig(num_experts=4, d_ff=16, num_shared_experts=1)
    model = Transformer(SMALL, moe, gate, mesh=mesh, dtype=torch.float64)
    if parts is not None:
        for layer in model.all_layers:

            def run(part: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                found: tuple[torch.Tensor, ...] = part(x)
                parts.append(len(found))
                return found

            layer.front = Front(layer, run)
    ids_BS = torch.arange(24).view(3, 8) % 31 + mesh.rank
    tokens = Tokens(mesh=mesh, first=24 * mesh.rank, total=24 * mesh.num_ranks)
    out = model(ids_BS, ids_BS + 1 - mesh.rank, tokens)
    (out.loss_sum + out.aux_loss).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return out.loss_sum.detach(), out.aux_loss.detach(), out.reports[0].load_E, *grads


def both(mesh: Mesh, gate: str) -> tuple[bool, list[int]]:
    parts: list[int] = []
    plain, cut = numbers(mesh, GATES[gate], None), numbers(mesh, GATES[gate], parts)
    assert len(plain) == len(cut)
    return all(torch.equal(a, b) for a, b in zip(plain, cut, strict=True)), parts


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_and_the_rest_are_the_layer(gate: str, ranks: int) -> None:
    for same, parts in run_ranks(ranks, both, gate):
        assert same
        dense, experts = parts
        assert dense == 1
        # Behind attention, and the gate's choices where it asks nobody.
        assert experts == (2 if gate in ("draws", "bounded") else 7)


def test_evaluation_knows_no_parts() -> None:
    model = Transformer(SMALL, MoEConfig(num_experts=4, d_ff=16), GateConfig(), mesh=Mesh.single("cpu"))
    asked: list[int] = []
    for layer in model.all_layers:
        layer.front = lambda *_: asked.append(1)  # type: ignore[assignment,return-value,misc]
    ids_BS = torch.arange(8).view(1, 8)
    with torch.no_grad():
        model(ids_BS, ids_BS, Tokens(mesh=model.mesh, first=0, total=8))
    assert not asked
