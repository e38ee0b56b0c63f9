"""Blocks by logical rows, whatever part of them is here; a cut inside one is refused with advice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.model.config import ModelConfig
from moeclipse.moe.config import MoEConfig
from moeclipse.tensor.cut import Cut, mark
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.optim.adamw import AdamW
from moeclipse.train.optim.buckets import Buckets
from moeclipse.train.optim.optim_config import OptimConfig
from moeclipse.train.optim.quant_blocks import block_for, block_of, block_problems


def part(shape: tuple[int, int], dim: int, parts: int, index: int = 0) -> nn.Parameter:
    cut = Cut.of(shape, dim, index=index, parts=parts)
    parameter = nn.Parameter(torch.zeros(cut.local_shape))
    mark(parameter, cut)
    return parameter


def test_blocks_cut_rows_evenly() -> None:
    widths = (1, 15, 16, 24, 48, 96, 256, 512, 768, 1408, 2048)
    assert [block_of(n) for n in widths] == [0, 0, 16, 0, 16, 32, 256, 256, 256, 128, 256]


def test_blocks_are_those_of_logical_rows() -> None:
    assert block_for(nn.Parameter(torch.zeros(3, 96)), 2) == 32
    assert block_for(part((6, 96), 0, 2), 2) == 32
    assert block_for(part((6, 512), 1, 2), 2) == 256, "256 columns are here"
    assert block_for(nn.Parameter(torch.zeros(4, 2, 32)), 2) == 32, "a stack of matrices"
    assert block_for(nn.Parameter(torch.zeros(4, 24)), 2) == 0


def test_vectors_have_none() -> None:
    assert block_for(nn.Parameter(torch.zeros(256)), 1) == 0
    assert block_for(nn.Parameter(torch.zeros(4, 256)), 1) == 0, "a stack of them"


@pytest.mark.parametrize("index", [0, 1])
def test_a_cut_inside_a_block_is_refused_on_every_rank(index: int) -> None:
    with pytest.raises(ConfigError, match="has blocks of 32"):
        block_for(part((6, 96), 1, 2, index), 2)


def test_what_a_configuration_cuts_is_told_before() -> None:
    model = ModelConfig(num_heads=4, num_kv_heads=2, head_dim=16, num_layers=2, d_ff=96, num_dense_layers=1)
    told = list(block_problems(model, MoEConfig(d_ff=512, expert_tp="sharded"), 2))
    assert ["attention" in told[0], "model.d_ff (96)" in told[1], len(told)] == [True, True, 2]
    assert not list(block_problems(model, MoEConfig(d_ff=512), 1))


class Matrices(nn.Module):
    """Blocks of 16 and of 32 elements, rows without blocks, a vector."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((5, 16), (3, 48), (3, 96), (5, 7), (9,))
        self.all = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)


def trained(mesh: Mesh) -> tuple[list[tuple[int, list[int]]], list[torch.Tensor]]:
    """(block, bounds) of each bucket, and the weights after some updates with rank 0's gradients."""
    model = Matrices()
    optim = AdamW(Buckets(model, mesh, 1.0, blocks=True), OptimConfig(state="8bit"))
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.main_grad.copy_(grad * (mesh.rank == 0))  # type: ignore[attr-defined]
        optim.buckets.arm()
        optim.buckets.finish()
        optim.step([bucket.reduced() for bucket in optim.buckets], 1e-2, 0.5)
    found = [(bucket.block, bucket.bounds) for bucket in optim.buckets]
    return found, [parameter.detach().clone() for parameter in model.parameters()]


def test_shards_are_cut_between_blocks_and_give_the_same_bits() -> None:
    _, expected = run_ranks(1, trained)[0]
    for num_ranks in (2, 3):
        for found, weights in run_ranks(num_ranks, trained):
            assert sorted(block for block, _ in found) == [0, 0, 16, 32]
            assert all(not block or bound % block == 0 for block, bounds in found for bound in bounds)
            assert all(torch.equal(mine, whole) for mine, whole in zip(weights, expected, strict=True))
