"""`overlap`: how microbatches are given and what layers say afterwards; parity is in tests/own_loop."""

from __future__ import annotations

from typing import Any

import torch
from own_models import layer, tokens
from torch import nn

import moeclipse
from apart import apart
from moeclipse.moe.own_loop.overlap import overlap


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = layer()

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return factor * self.moe(x)


@apart
def test_microbatches_are_given_as_the_model_takes_them() -> None:
    model = Model()
    given: list[Any] = [tokens(0), (tokens(1), 2.0), {"x": tokens(2), "factor": 3.0}]
    expected = [model(tokens(0)), model(tokens(1), 2.0), model(tokens(2), 3.0)]
    for found, wanted in zip(overlap(model, given), expected, strict=True):
        assert torch.equal(found, wanted)


@apart
def test_reports_are_joined() -> None:
    model, alone = Model(), []
    for number in range(3):
        model(tokens(number))
        alone.append((moeclipse.aux_loss(model), model.moe.last.load_E))
    overlap(model, [tokens(number) for number in range(3)])
    losses, loads = zip(*alone, strict=True)
    assert torch.allclose(moeclipse.aux_loss(model), torch.stack(losses).mean(), rtol=1e-14)
    assert torch.equal(model.moe.last.load_E, torch.stack(loads).sum(0))
    overlap(model, [tokens(1)])
    assert torch.equal(moeclipse.aux_loss(model), losses[1])
