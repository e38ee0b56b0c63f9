"""Statistics and gradient of logits: together they are torch's cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moeclipse.ops.cross_entropy import gradient, statistics


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_they_are_torchs_cross_entropy(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits = (30 * torch.randn(tokens, 7, dtype=torch.float64, generator=generator)).requires_grad_()
    target = torch.arange(tokens) % 7
    largest, total, logit = statistics(logits.detach(), target)
    log_sum = largest + total.log()
    expected = F.cross_entropy(logits, target, reduction="sum")
    assert abs((log_sum - logit).sum() - expected.detach()) < 1e-13
    (0.3 * expected).backward()
    found = gradient(logits.detach(), log_sum, target, torch.tensor(0.3, dtype=torch.float64))
    assert not tokens or (found - logits.grad).abs().max() < 1e-14


def test_a_target_of_another_rank_is_not_here() -> None:
    logits = torch.randn(2, 4)
    largest, total, logit = statistics(logits, torch.tensor([-1, 3]))
    assert logit.tolist() == [0.0, logits[1, 3].item()]
    d = gradient(logits, largest + total.log(), torch.tensor([-1, 3]), torch.ones(()))
    assert torch.allclose(d.sum(1), torch.tensor([1.0, 0.0]), atol=1e-6)
    taken = gradient(logits, largest + total.log(), torch.tensor([-1, 3]), torch.ones(()), in_place=True)
    assert taken is logits
    assert torch.equal(taken, d)
