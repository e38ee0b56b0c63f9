"""Attention on a CUDA device: flex attention and torch's own against the definition, and what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.ops.attention import attend, attend_reference
from moeclipse.testing.compare import difference

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "documents": {"documents": True},
    "sinks": {"sinks": True, "window": 40},
}


def inputs(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 8, length, 64), (2, 2, length, 64), (2, 2, length, 64), (8,)]
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_against_the_definition(name: str) -> None:
    given = dict(CASES[name])
    *rows, sinks = inputs(300, torch.bfloat16)
    if given.pop("documents", False):
        given["documents_BS"] = torch.arange(300, device="cuda").div(70, rounding_mode="floor").expand(2, -1)
    wanted = [*rows, sinks] if given.pop("sinks", False) else rows
    given["sinks_H"] = sinks if wanted is not rows else None
    exact = [tensor.detach().double().requires_grad_() for tensor in (*rows, sinks)]
    found = attend(*rows, **given)
    right = attend_reference(*exact[:3], **{**given, "sinks_H": exact[3] if wanted is not rows else None})
    assert difference(found, right) < 2e-2
    found.float().square().sum().backward()
    right.square().sum().backward()
    for tensor, reference in zip(wanted, exact, strict=False):
        assert difference(tensor.grad, reference.grad) < 5e-2


@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
def test_no_matrix_of_all_scores_is_held(name: str) -> None:
    given = dict(CASES[name])
    *rows, sinks = inputs(16384, torch.bfloat16)
    given["sinks_H"] = sinks if given.pop("sinks", False) else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(*rows, **given).float().square().sum().backward()
    scores = 2 * 2 * 8 * 16384 * 16384  # two bytes each: 8 GiB
    assert torch.cuda.max_memory_allocated() - before < scores / 8


@pytest.mark.parametrize("documents", [False, True])
def test_many_lengths_hold_no_matrix_either(documents: bool) -> None:
    """More than dynamo compiles anew for: then it would run without, and hold all scores."""
    for length in range(2048, 3000, 77):
        *rows, _ = inputs(length, torch.bfloat16)
        given: dict[str, Any] = {"window": 100}
        if documents:
            place = torch.arange(length, device="cuda")
            given["documents_BS"] = place.div(300, rounding_mode="floor").expand(2, -1)
        attend(*rows, **given).sum().backward()  # compiled, tried
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = attend(*rows, **given)
        found.sum().backward()
        scores = 2 * 2 * 8 * length * length
        assert torch.cuda.max_memory_allocated() - before < scores / 2, length
        right = attend_reference(*(tensor.detach().double() for tensor in rows), **given)
        assert difference(found.detach(), right) < 2e-2, length
