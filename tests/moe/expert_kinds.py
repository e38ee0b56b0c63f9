"""Experts of every kind with small weights, and what they compute, written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moeclipse.moe.experts.module_experts import ModuleExperts, joint
from moeclipse.moe.experts.protocols import ExpertSet
from moeclipse.moe.experts.two_projections import Experts, PadToCapacity
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.ops.random import fill_normal, key_of

D, CAPACITY = 6, 5
IDS = (4, 0, 7)


def normal(*shape: int, key: int) -> torch.Tensor:
    return fill_normal(torch.empty(*shape, dtype=torch.float64), key, 1.0)


class Net(nn.Module):
    """A user's expert: takes a tensor, or a dict with a position and a flag beside it."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D, dtype=torch.float64)
        for name, parameter in self.named_parameters():
            fill_normal(parameter.data, key_of("net", expert, name), 0.5)

    def forward(self, x: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return torch.tanh(self.linear(x))
        assert (x["position"].dtype, x["flag"].dtype) == (torch.int64, torch.bool)
        sign = torch.where(x["flag"], 1.0, -1.0) * (1 + x["position"])
        return torch.tanh(self.linear(x["h"])) * sign[:, None]


class Nets(nn.Module):
    """All experts of a rank in one module."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(map(Net, ids))

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return torch.cat([net(part) for net, part in zip(self.nets, x.split(counts), strict=True)])


def built_in(ids: Sequence[int] = IDS, bias: bool = False) -> Experts:
    init = WeightInit(seed=3, std=0.5, dtype=torch.float64)
    experts = Experts(ids, d_model=D, d_ff=7, init=init, bias=bias)
    for weight in experts.weights[2:]:
        for expert, row in zip(ids, weight.data, strict=True):
            fill_normal(row, key_of("bias", expert), 0.5)
    return experts


KINDS: dict[str, Callable[..., Any]] = {
    "built-in": built_in,
    "biased": lambda ids=IDS: built_in(ids, bias=True),
    "modules": lambda ids=IDS: ModuleExperts(ids, Net, D),
    "joint": lambda ids=IDS: ModuleExperts(ids, joint(Nets), D),
    "padded": lambda ids=IDS: PadToCapacity(built_in(ids), CAPACITY),
}
SHADOWING = ("built-in", "biased", "modules")


def by_definition(experts: ExpertSet, x: Any, counts: Sequence[int]) -> torch.Tensor:
    """One expert after the other, by operations that autograd knows."""
    experts = experts.experts if isinstance(experts, PadToCapacity) else experts
    parts = [(slot, x[sum(counts[:slot]) : sum(counts[: slot + 1])]) for slot in range(len(counts))]
    if isinstance(experts, Experts):
        return torch.cat([swiglu(experts, slot, part) for slot, part in parts])
    nets: Any = experts.parts[0].nets if experts.joint else experts.parts
    return torch.cat([nets[slot](part) for slot, part in parts])


def swiglu(experts: Experts, slot: int, x: torch.Tensor) -> torch.Tensor:
    up, down, *biases = (weight[slot] for weight in experts.weights)
    up_bias, down_bias = biases or (torch.zeros(()), torch.zeros(()))
    gate, hidden = (x @ up.T + up_bias).chunk(2, -1)
    return (F.silu(gate) * hidden) @ down.T + down_bias
