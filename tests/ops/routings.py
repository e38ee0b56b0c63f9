"""What scripts in Triton's interpreter share: routings of every kind, and how a comparison is told."""

from __future__ import annotations

import torch

KINDS = "uniform", "skewed", "empty", "one takes all", "unused", "one choice", "all choices"


def routing(kind: str, num_tokens: int = 77, num_experts: int = 5) -> torch.Tensor:
    top_k = {"one choice": 1, "one takes all": 1, "all choices": num_experts}.get(kind, 3)
    noise = torch.rand(num_tokens, num_experts)
    if kind == "skewed":
        noise += torch.linspace(0, 2, num_experts)
    if kind == "empty":
        noise[:, 1:3] -= 10
    if kind == "one takes all":
        noise[:, 3] += 10
    ids = noise.topk(top_k, 1).indices
    return torch.where(torch.rand(ids.shape) < 0.3, -1, ids) if kind == "unused" else ids


def report(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype, f"{name}: {got.dtype} instead of {expected.dtype}"
    difference = (got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    print(f"{name}\t{difference.item():.3e}", flush=True)
