"""Parts that run again: the same bits, and in between nothing is kept."""

from __future__ import annotations

import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.recompute import forget, run_again
from moeclipse.testing.run_ranks import run_alone


def gradients(way: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, weight = (torch.randn(6, 6, requires_grad=True) for _ in range(2))

    def part(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.exp() @ weight, x.sin())

    if way == "forget":
        middle = x.exp()
        out, beside = middle @ weight, x.sin()
        forget(middle, lambda: x.detach().exp(), until=out)
        assert middle.untyped_storage().nbytes() == 0
    else:
        out, beside = run_again(part, x) if way == "again" else part(x)
    (out.square().sum() + beside.sum()).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


def all_ways(_: Mesh) -> list[list[torch.Tensor]]:
    return [gradients(way) for way in ("plain", "again", "forget")]


def test_the_same_bits() -> None:
    plain, *others = run_alone(all_ways)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_without_gradients_nothing_is_kept_or_forgotten() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        (y,) = run_again(lambda x: (2 * x,), x)
        forget(y, lambda: y, until=y)
    assert y.tolist() == [2, 2]
