"""Parts that run again: the same bits, and in between nothing is kept."""

from __future__ import annotations

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.model.recompute import forget, run_again
from moeclipse.ops.frozen import Frozen, Scratch
from moeclipse.ops.quantised import Quantised
from moeclipse.testing.compare import difference
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
        out, beside = run_again(part, x, Scratch()) if way == "again" else part(x)
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
        (y,) = run_again(lambda x: (2 * x,), x, Scratch())
        forget(y, lambda: y, until=y)
    assert y.tolist() == [2, 2]


class Product(torch.autograd.Function):
    """x W^T with a frozen W, which is decoded in either direction and never kept."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: Frozen) -> torch.Tensor:
        ctx.weight = weight
        return x @ weight.numbers(x.dtype).T

    @staticmethod
    def backward(ctx, d_y: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d_y @ ctx.weight.numbers(d_y.dtype), None


def frozen_layers(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[torch.Tensor]]:
    """(What was decoded, by layer and role; gradients of x without and with recompute)."""
    torch.manual_seed(0)
    scratch, names = Scratch(), {}
    layers = []
    for layer in range(3):
        pair = [Frozen.of("nf4", torch.randn(64, 64), scratch, role) for role in ("up", "down")]
        names |= {f.codes.data_ptr(): f"{f.role}{layer}" for f in pair}
        layers.append(pair)
    seen, decode = [], Quantised.decode

    def told(self: Quantised, into: torch.Tensor) -> torch.Tensor:
        seen.append(names[self.tensors["codes"].data_ptr()])
        return decode(self, into)

    monkeypatch.setattr(Quantised, "decode", told)
    x, found = torch.randn(5, 64, dtype=torch.float64, requires_grad=True), []
    for again in (False, True):
        seen.clear()
        h = x
        for up, down in layers:

            def part(h: torch.Tensor, up=up, down=down) -> tuple[torch.Tensor, ...]:
                return (h + Product.apply(Product.apply(h, up).sin(), down),)

            (h,) = run_again(part, h, scratch) if again else part(h)
        h.square().sum().backward()
        found.append(x.grad)
        x.grad = None
    return seen, found


def test_recomputed_layers_decode_their_frozen_weights_once_in_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, (plain, again) = frozen_layers(monkeypatch)
    assert seen == [f"{role}{layer}" for layer in (0, 1, 2, 2, 1, 0) for role in ("up", "down")]
    assert difference(again, plain) <= 1e-12
