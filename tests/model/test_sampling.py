"""Tokens are drawn by their probabilities, and by (seed, row, place) alone."""

from __future__ import annotations

import pytest
import torch

from moeclipse.core.config import problems_of
from moeclipse.model.sampling import SamplingConfig, choose_tokens

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.2, 0.25], dtype=torch.float64))


def shares(config: SamplingConfig, draws: int = 20000) -> torch.Tensor:
    chosen = choose_tokens(LOGITS.expand(draws, -1), config, range(draws), 3)
    return torch.bincount(chosen, minlength=5) / draws


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0.1, 0.4, 0.05, 0.2, 0.25]),
        ({"temperature": 0.5}, [0.01, 0.16, 0.0025, 0.04, 0.0625]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
        ({"top_k": 2}, [0, 0.4, 0, 0, 0.25]),
        ({"top_k": 9}, [0.1, 0.4, 0.05, 0.2, 0.25]),
        ({"top_p": 0.6}, [0, 0.4, 0, 0, 0.25]),  # 0.4 is not enough, and no more than two are needed
        ({"top_p": 0.4}, [0, 1, 0, 0, 0]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.99}, [0, 0.4, 0, 0.2, 0.25]),
    ],
)
def test_tokens_come_as_often_as_they_should(config: dict[str, float], expected: list[float]) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    found = shares(SamplingConfig(**config))
    assert (found - wanted / wanted.sum()).abs().max() < 0.015
    assert (found > 0).tolist() == (wanted > 0).tolist()


def test_a_row_draws_for_itself() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    config = SamplingConfig(seed=4)
    together = choose_tokens(logits, config, range(6), 2)
    apart = torch.cat([choose_tokens(logits[row, None], config, [row], 2) for row in range(6)])
    assert torch.equal(together, apart)
    others = [choose_tokens(logits, SamplingConfig(seed=5), range(6), 2)]
    others += [choose_tokens(logits, config, range(6), 3), choose_tokens(logits, config, range(1, 7), 2)]
    assert not any(torch.equal(together, other) for other in others)
    assert choose_tokens(logits[:0], config, [], 0).shape == (0,)
    assert choose_tokens(logits.bfloat16(), config, range(6), 2).shape == (6,)


def test_what_is_wrong_is_told() -> None:
    config = SamplingConfig(temperature=-1.0, top_k=-2, top_p=0.0)
    assert [text.split()[0] for text in problems_of(config)] == ["temperature", "top_k", "top_p"]
    assert not list(problems_of(SamplingConfig()))
