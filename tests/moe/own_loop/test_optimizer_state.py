"""Optimizers that step for experts: their state says of which, whatever the optimizer keeps."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from own_models import D, layer, loss_of, tokens
from torch import nn

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.own_loop.optimizer_state import places_of
from moeclipse.moe.own_loop.shards import ExpertShards
from moeclipse.testing.run_ranks import run_ranks

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


def stepped(mesh: Mesh, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layer(mesh=mesh)
    optimizer = OPTIMIZERS[name](model.parameters())
    step(mesh, model, optimizer)
    return model, optimizer


def step(mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    loss_of(model, tokens(number, mesh.rank)).backward()
    moeclipse.sync_gradients(model)
    optimizer.step()
    optimizer.zero_grad()


def saved_and_loaded(mesh: Mesh, name: str) -> None:
    model, optimizer = stepped(mesh, name)
    state = optimizer.state_dict()
    index = [p is model.experts.up for p in model.parameters()].index(True)
    wrapped = [value for value in state["state"][index].values() if isinstance(value, ExpertShards)]
    assert wrapped, "no state of experts"
    assert all(value.place.experts == model.experts.ids and len(value) == 6 for value in wrapped)
    assert not any(isinstance(v, ExpertShards) for v in optimizer.state[model.experts.up].values())
    gate = [p is model.gate.weight for p in model.parameters()].index(True)
    assert not any(isinstance(value, ExpertShards) for value in state["state"][gate].values())
    file = io.BytesIO()
    torch.save([state, model.state_dict()], file)
    file.seek(0)
    loaded, weights = torch.load(file, weights_only=True)
    for fresh in (True, False):  # into an optimizer that has made no step, and into one that has
        again, other = (layer(mesh=mesh), None) if fresh else stepped(mesh, name)
        other = other or OPTIMIZERS[name](again.parameters())
        again.load_state_dict(weights)
        other.load_state_dict(copy.deepcopy(loaded))  # torch keeps what it is given
        step(mesh, again, other, 1)
        copied, best = stepped(mesh, name)
        step(mesh, copied, best, 1)
        for mine, wanted in zip(again.parameters(), copied.parameters(), strict=True):
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_saved_and_loaded_by_expert(name: str) -> None:
    run_ranks(2, saved_and_loaded, name)


def refused(mesh: Mesh) -> str:
    _, optimizer = stepped(mesh, "adamw")
    box = [optimizer.state_dict() if mesh.rank == 0 else None]
    torch.distributed.broadcast_object_list(box)
    try:
        optimizer.load_state_dict(box[0])
    except moeclipse.ConfigError as error:
        return str(error)
    return ""


def test_state_of_another_rank_is_refused() -> None:
    texts = run_ranks(2, refused)
    assert texts[0] == ""
    assert "the optimizer's exp_avg was saved by a rank with experts [0, 1, 2] of 6" in texts[1]


def others(mesh: Mesh) -> None:
    """Optimizers without experts, and layers whose experts are all here, are left as they are."""
    made = layer(mesh=mesh)
    assert len(places_of([made.experts], made.parameters())) == 2
    alone, net = layer(), nn.Linear(D, D, dtype=torch.float64)
    for model in (alone, net):
        optimizer = torch.optim.AdamW(model.parameters())
        model(tokens()).sum().backward()
        optimizer.step()
        found = [v for state in optimizer.state_dict()["state"].values() for v in state.values()]
        assert not any(isinstance(value, ExpertShards) for value in found)


def test_others_are_left_alone() -> None:
    run_ranks(2, others)
