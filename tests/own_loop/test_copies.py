"""Layers that are copied, pickled and saved, after a forward and with a mesh."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from own_models import KINDS, Net, assert_alike, gradients, layer, loss_of, often, tokens
from torch.optim.swa_utils import AveragedModel

import moeclipse
from apart import apart
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.testing.run_ranks import run_ranks


def saved(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "save": saved}


def trained(model: Net, rank: int = 0) -> Net:
    loss_of(model, tokens(rank=rank)).backward()
    return model


@pytest.mark.parametrize("kind", often([kind for kind in KINDS if kind != "joint"], "modules"))
@pytest.mark.parametrize("way", WAYS)
@apart
def test_a_copy_computes_what_the_original_does(way: str, kind: str) -> None:
    model = trained(Net(layer(kind, num_shared_experts=1)))
    made = WAYS[way](model)
    assert all(a is not b for a, b in zip(made.parameters(), model.parameters(), strict=True))
    for each in (model, made):
        each.zero_grad()
        trained(each)
    assert_alike(gradients(made), gradients(model), bound=0.0)
    with torch.no_grad():
        model.moe.experts.weights[0].zero_()
    assert made.moe.experts.weights[0].any(), "a copy has weights of its own"


def copied(mesh: Mesh, way: str) -> None:
    model = trained(Net(layer(mesh=mesh)), mesh.rank)
    made = WAYS[way](model)
    if way == "deepcopy":
        assert made.moe.mesh is mesh
    else:
        with pytest.raises(ConfigError, match=r"moeclipse.attach\(model, mesh\).*2 ranks"):
            made(tokens())
        assert moeclipse.attach(made, mesh) is made
    for each in (model, made):
        each.zero_grad()
        trained(each, mesh.rank)
    assert_alike(gradients(made), gradients(model), bound=0.0)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_on_two_ranks(way: str) -> None:
    run_ranks(2, copied, way)


def averaged(mesh: Mesh) -> None:
    model = trained(Net(layer(mesh=mesh)), mesh.rank)
    ema = AveragedModel(model)
    before = model.moe.experts.up.detach().clone()
    with torch.no_grad():
        model.moe.experts.up += 2
    ema.update_parameters(model)  # the first update copies
    with torch.no_grad():
        model.moe.experts.up += 2
    ema.update_parameters(model)
    assert torch.allclose(ema.module.moe.experts.up, before + 3)
    ema(tokens(rank=mesh.rank))


def test_averaged_models_hold_averages_of_experts() -> None:
    run_ranks(2, averaged)


def swapped(mesh: Mesh, path: str) -> str:
    torch.save(layer(mesh=mesh), f"{path}/{mesh.rank}.pt")
    mesh.barrier()
    other = torch.load(f"{path}/{1 - mesh.rank}.pt", weights_only=False)
    try:
        moeclipse.attach(other, mesh)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_a_layer_of_another_rank_is_refused(tmp_path: Any) -> None:
    for text in run_ranks(2, swapped, str(tmp_path)):
        assert "each rank must attach the layer that it saved" in text


@apart
def test_a_mesh_of_another_size_is_refused() -> None:
    moe = layer()
    with pytest.raises(ConfigError, match=r"shared by 3 ranks.*ep x tp = 3"):
        moe.attach(Mesh.single(), moeclipse.Placement.contiguous(6, 3))
