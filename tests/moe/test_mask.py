"""Padding: as if it were not there, for outputs, gradients, losses and loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_parity import D, inputs, make

from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATE = GateConfig(kind="softmax", top_k=2, balance_loss=0.5, z_loss=0.1, capacity_factor=1.0)
MASK = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
"""Of two ranks with four tokens each, the second is all padding; of three ranks, too."""


def padded(mesh: Mesh, with_mask: bool) -> dict[str, torch.Tensor]:
    x, d_y = inputs(len(MASK))
    mine = slice(None) if mesh.num_ranks == 1 else slice(4 * mesh.rank, 4 * mesh.rank + 4)
    x, d_y, mask = x[mine].clone(), d_y[mine], MASK[mine]
    x[~mask] = 1e6  # nobody may read it
    x.requires_grad_()
    moe = make(GATE, 8, 1, mesh if mesh.num_ranks > 1 else None)
    if with_mask:
        y = moe(x.view(2, -1, D), mask=mask.view(2, -1)).view(-1, D)
    else:
        y = torch.zeros_like(x).index_put((mask,), moe(x[mask]))
    ((y * d_y).sum() + moe.last.aux_loss).backward()
    named = {name: p.grad for name, p in moe.named_parameters()}
    counted = {"load": moe.load_E.double(), "aux": moe.last.aux_loss.detach()}
    return {"y": y.detach(), "dx": x.grad, **counted, **named}


def alike(found: Any, expected: Any) -> None:
    assert {k: d for k in expected if not (d := difference(found[k], expected[k])) <= 1e-12} == {}


def test_a_mask_leaves_padding_out() -> None:
    expected = run_alone(padded, False)
    alike(run_alone(padded, True), expected)
    results = run_ranks(3, padded, True)
    cut = ("y", "dx", "experts.up", "experts.down")
    joined = {name: torch.cat([r[name] for r in results]) for name in cut}
    summed = {name: sum(r[name] for r in results) for name in ("load", "aux", "gate.weight", "shared.up")}
    alike(joined | summed, {name: expected[name] for name in joined | summed})


@apart
def test_all_or_nothing() -> None:
    moe, x = make(GATE, 8, 0, None), inputs(5)[0]
    assert torch.equal(moe(x, mask=torch.ones(5, dtype=torch.bool)), moe(x))
    assert not moe(x, mask=torch.zeros(5, dtype=torch.bool)).any()


@pytest.mark.parametrize("mask", [torch.ones(4, dtype=torch.bool), torch.ones(5)])
@apart
def test_a_mask_of_another_shape_or_type_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"one boolean for each token, shape \(5,\)"):
        MoE(D, 8, 4)(inputs(5)[0].float(), mask=mask)


@apart
def test_tensors_that_travel_together() -> None:
    moe = MoE(D, 1, 4, experts=Scaled)
    x, factor = inputs(5)[0].float(), torch.arange(5.0)[:, None]
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)
    found = moe({"h": x, "factor": factor}, mask=mask)
    assert torch.allclose(found, torch.where(mask[:, None], x * factor, 0.0), atol=1e-5)


class Scaled(torch.nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return rows["h"] * rows["factor"] * self.one
