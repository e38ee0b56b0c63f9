"""Small parts by their formulas, and what their parameters say about gradients under tensor parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_model import SETTINGS

from moeclipse.comm.mesh import Mesh
from moeclipse.model.blocks import DenseMLP, Linear, RMSNorm
from moeclipse.tensor.cut import cut_of, share_of
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks


def test_norm_by_its_formula() -> None:
    norm = RMSNorm(16, SETTINGS, 1e-5)
    x = torch.randn(3, 16, dtype=torch.float64)
    assert torch.allclose(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-5), rtol=1e-13)


def test_a_norm_of_low_precision_is_computed_in_fp32() -> None:
    norm = RMSNorm(16, replace(SETTINGS, dtype=torch.bfloat16), 1e-5)
    x = 300 * torch.randn(3, 16).bfloat16()
    assert torch.equal(norm(x), F.rms_norm(x.float(), (16,), None, 1e-5).bfloat16())


def test_linears_by_their_formulas() -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    linear = Linear(6, 5, SETTINGS, "narrow")
    assert difference(linear(x), x @ linear.weight.T) < 1e-14
    mlp = DenseMLP(6, 8, SETTINGS)
    gate, up = (x @ mlp.up.weight.T).chunk(2, -1)
    assert difference(mlp(x), (F.silu(gate) * up) @ mlp.down.weight.T) < 1e-14


def test_weights_follow_from_seed_layer_and_name() -> None:
    settings = replace(SETTINGS, layer=2)
    same = Linear(6, 5, settings, "a"), Linear(6, 5, settings, "a")
    assert torch.equal(same[0].weight, same[1].weight)
    others = [(settings, "b"), (replace(settings, layer=3), "a"), (replace(settings, seed=1), "a")]
    assert not any(torch.equal(Linear(6, 5, *other).weight, same[0].weight) for other in others)


def test_what_writes_to_the_residual_stream_shrinks_with_depth() -> None:
    deep = replace(SETTINGS, num_layers=8, init_std=0.4)
    assert deep.residual_std == pytest.approx(0.1)
    assert float(deep.column(64, 64, "in").weight.detach().std()) == pytest.approx(0.4, rel=0.05)
    assert float(deep.row(64, 64, "out").weight.detach().std()) == pytest.approx(0.1, rel=0.05)


def shares(mesh: Mesh) -> list[list[str]]:
    found = []
    for sequence_parallel in (False, True):
        tp = TensorParallel.of(mesh, sequence_parallel=sequence_parallel)
        settings = replace(SETTINGS, tp=tp)
        mlp = DenseMLP(6, 8, settings)
        assert cut_of(mlp.up.weight).blocks == 2, "gate and up are each cut"
        whole = (Linear(6, 5, settings, "a").weight, RMSNorm(6, settings, 1e-5).weight)
        found.append([share_of(weight) for weight in (*whole, mlp.up.weight, mlp.down.weight)])
    return found


def test_whole_parameters_have_the_same_gradient_or_a_share_of_it() -> None:
    """With sequence parallelism ranks see other tokens, so their gradients are added."""
    replicated, parts = ["same", "same", "cut", "cut"], ["sum", "sum", "cut", "cut"]
    assert run_ranks(2, shares, tp=2) == [[replicated, parts]] * 2
