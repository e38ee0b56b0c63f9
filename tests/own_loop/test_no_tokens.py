"""Zero tokens through `forward`, on one rank and on all, under any leading dimensions."""

from __future__ import annotations

import pytest
import torch
from own_models import KINDS, D, layer, often, tokens

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_alone, run_ranks


def empty(mesh: Mesh, kind: str, counts: list[int]) -> list[list[int]]:
    moe = layer(kind, mesh=mesh if mesh.num_ranks > 1 else None, num_shared_experts=1)
    found = []
    for shape in ((counts[mesh.rank],), (2, counts[mesh.rank]), (counts[mesh.rank], 3)):
        x = tokens(count=max(counts) * 6)[: torch.Size(shape).numel()].view(*shape, D).requires_grad_()
        y = moe(x)
        assert y.shape == x.shape
        (y.sum() + moe.last.aux_loss).backward()
        assert x.grad.shape == x.shape
        found.append(list(y.shape))
    assert all(p.grad is not None and not p.grad.isnan().any() for p in moe.parameters())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_at_all(kind: str) -> None:
    assert run_alone(empty, kind, [0]) == [[0, D], [2, 0, D], [0, 3, D]]


@pytest.mark.parametrize("counts", often([[0, 0], [0, 5], [5, 0]], [0, 0], [0, 5]))
def test_no_token_on_some_ranks(counts: list[int]) -> None:
    run_ranks(2, empty, "built-in", counts)
    run_ranks(2, empty, "modules", counts)
