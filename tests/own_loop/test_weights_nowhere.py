"""Layers that are made without memory, and get it, and their first weights, later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_models import EXPERTS, FF, D, Expert, layer, tokens

from apart import apart
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.testing.run_ranks import run_ranks

GATE = GateConfig(top_k=2, choose="top_p", mean_experts=1.5, bias_rate=0.1)
OPTIONS: dict[str, Any] = {"gate": GATE, "num_shared_experts": 1, "expert_bias": True, "init_std": 0.5}


def made(way: str, **more: Any) -> MoE:
    if way == "argument":
        return MoE(D, FF, EXPERTS, device=torch.device("meta"), **OPTIONS, **more)
    with torch.device("meta"):
        return MoE(D, FF, EXPERTS, **OPTIONS, **more)


@pytest.mark.parametrize("way", ["argument", "context"])
@apart
def test_weights_that_are_made_later_are_those_that_are_made_at_once(way: str) -> None:
    moe, other = made(way), MoE(D, FF, EXPERTS, **OPTIONS)
    assert all(tensor.is_meta for tensor in [*moe.parameters(), *moe.buffers()])
    moe.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*moe.parameters(), *moe.buffers()]:
            tensor.fill_(77)
    for module in moe.modules():  # as FSDP's recipes do it
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    expected = [*other.named_parameters(), *other.named_buffers()]
    found = dict([*moe.named_parameters(), *moe.named_buffers()])
    assert found.keys() == dict(expected).keys()
    for name, tensor in expected:
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    x = tokens().float()
    assert torch.equal(moe(x), other(x))


@apart
def test_modules_of_the_user_are_asked_for_their_weights() -> None:
    with torch.device("meta"):
        moe = MoE(D, FF, EXPERTS, experts=Expert)
    moe.to_empty(device="cpu").reset_parameters()
    assert all(p.abs().max() < 1 for p in moe.experts.parameters())
    moe(tokens().float() if next(moe.experts.parameters()).dtype == torch.float32 else tokens())


def on_ranks(mesh: Any) -> None:
    expected = MoE(D, FF, EXPERTS, mesh=mesh, **OPTIONS)
    with torch.device("meta"):
        moe = MoE(D, FF, EXPERTS, mesh=mesh, **OPTIONS)
    assert moe.experts.up.is_meta
    moe.to_empty(device=mesh.device).reset_parameters()
    x = tokens(rank=mesh.rank).float()
    assert torch.equal(moe(x), expected(x))
    moe(x).sum().backward()


def test_on_two_ranks() -> None:
    run_ranks(2, on_ranks)


@apart
def test_tables_follow_the_weights() -> None:
    moe = layer()
    moe.to("meta")
    assert moe.dispatcher.rank_of_E.device.type == "cpu"
    moe.to_empty(device="cpu").reset_parameters()
    assert torch.equal(moe(tokens()), layer()(tokens()))
