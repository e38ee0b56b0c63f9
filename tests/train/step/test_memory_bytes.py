"""What a graph keeps is counted once, and what is somebody else's is not."""

from __future__ import annotations

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_alone
from moeclipse.train.step.memory_bytes import kept_behind, readable


def counted(_: Mesh) -> tuple[int, int, int]:
    weight = torch.ones(8, 4, requires_grad=True)
    x = torch.ones(16, 8, requires_grad=True)
    y = (x @ weight).exp()
    known = {weight.untyped_storage().data_ptr()}
    return kept_behind(y, known), kept_behind((y, [y]), known), kept_behind(y.detach(), set())


def test_saved_tensors_count_once() -> None:
    """The product keeps x, the exponential its result."""
    size = 4 * (16 * 8 + 16 * 4)
    assert run_alone(counted) == (size, size, 0)


def test_sizes_are_readable() -> None:
    assert [readable(n) for n in (0, 1023, 1536, 5 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
