"""Tensor-parallel layers whose ranks talk through peer memory: gradients are those of one process."""

from __future__ import annotations

import pytest
import test_linear
import test_vocab
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.reduce.collectives import PeerCollectives
from moeclipse.tensor.parallel import TensorParallel
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

pytestmark = pytest.mark.peer_memory


def linears(mesh: Mesh, dtype: torch.dtype) -> list[dict]:
    """Every mode of the linears, over peer memory; a few of them twice, over torch."""
    assert isinstance(TensorParallel.of(mesh, peer="on").comm, PeerCollectives)
    fits = test_linear.T % mesh.tp == 0
    modes = [mode for mode in test_linear.modes() if fits or not mode["sequence_parallel"]]
    found = [test_linear.run(mesh, mode | {"peer": "on"}, True, dtype) for mode in modes]
    return [*found, test_linear.run(mesh, modes[0], True, dtype)]


@pytest.mark.parametrize(("tp", "bits"), [(2, 64), (3, 64), (4, 64), (2, 16)])
def test_gradients_equal_one_process(tp: int, bits: int) -> None:
    dtype = torch.float64 if bits == 64 else torch.bfloat16
    expected = run_alone(test_linear.reference, True, dtype)
    ranks = run_ranks(tp, linears, dtype, tp=tp)
    for results in ranks:
        for found in results:
            test_linear.compare(found, expected, test_linear.BOUND[dtype])
    for results in ranks[1:]:
        for mine, first in zip(results, ranks[0], strict=True):
            assert all(torch.equal(mine[name], first[name]) for name in first), "all ranks hold the same bits"


def vocabulary(mesh: Mesh) -> list[dict]:
    return [test_vocab.run(mesh, sequence, True, peer="on") for sequence in (False, True)]


def test_the_vocabulary_parallel_loss() -> None:
    expected = run_alone(test_vocab.reference)
    for results in run_ranks(4, vocabulary, tp=4):
        for found in results:
            assert all(difference(found[name], expected[name]) <= 1e-12 for name in expected)
