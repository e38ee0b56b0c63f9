"""What a layer is given: devices and meshes by name, and numbers that nobody gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.moe.validate import (
    TOP_K,
    alike,
    alone,
    check_place,
    given_device,
    given_exchange,
    given_gate,
)
from moeclipse.testing.run_ranks import run_ranks


def test_weights_are_made_where_one_says() -> None:
    mesh, meta = Mesh.single("cpu"), torch.device("meta")
    assert given_device(None, None) == given_device(None, mesh) == torch.device("cpu")
    assert given_device("meta", mesh) == meta
    with meta:
        assert given_device(None, mesh) == meta
        assert given_device("cpu", mesh) == torch.device("cpu")
    assert alone(meta).device == torch.device("cpu")


def test_devices_that_are_one() -> None:
    cpu, cuda, first, second = map(torch.device, ("cpu", "cuda", "cuda:0", "cuda:1"))
    assert alike(cuda, first)
    assert alike(torch.device("meta"), second)
    assert not alike(first, second)
    assert not alike(cpu, cuda)


def test_a_number_that_nobody_gave_says_nothing() -> None:
    gate = GateConfig(top_k=3)
    assert given_gate(gate, TOP_K) is gate
    assert given_gate(None, TOP_K).top_k == 2
    assert type(given_gate(None, TOP_K).top_k) is int
    with pytest.raises(ConfigError, match="say different things"):
        given_gate(gate, 2)


def test_experts_of_another_place_are_refused() -> None:
    group, placement = Mesh.single().experts, Placement.contiguous(4, 1)
    check_place(placement, group, (0, 1, 2, 3))
    with pytest.raises(ConfigError, match=r"holds experts \[1, 0, 2, 3\]"):
        check_place(placement, group, (1, 0, 2, 3))
    with pytest.raises(ConfigError, match="shared by 2 ranks"):
        check_place(Placement.contiguous(4, 2), group, (0, 1))


def test_a_gate_and_an_exchange_may_be_a_name_or_a_dict() -> None:
    assert given_gate("sigmoid", TOP_K) == GateConfig(kind="sigmoid", top_k=2)
    assert given_gate("switch", TOP_K).top_k == 1, "Switch has one expert for each token"
    assert given_gate({"kind": "softmax", "z_loss": 0.1}, 3) == GateConfig(top_k=3, z_loss=0.1)
    assert given_gate({"top_k": 4}, TOP_K).top_k == 4
    with pytest.raises(ConfigError, match="say different things"):
        given_gate({"top_k": 4}, 2)
    with pytest.raises(ConfigError, match="did you mean 'sigmoid'"):
        MoE(16, 8, 4, gate="sigmoidd")
    assert given_exchange("smart").schedule == "smart"
    assert given_exchange({"chunks": 3}).chunks == 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"d_model": 0}, r"d_model \(0\) must be a whole number of at least 1"),
        ({"d_model": "16"}, r"d_model \('16'\) must be a whole number"),
        ({"d_ff": 8.0}, r"d_ff \(8.0\) must be a whole number"),
        ({"num_experts": True}, r"num_experts \(True\) must be a whole number"),
        ({"gate": 3}, r"gate \(3\) must be a name, a dict, a GateConfig or a module"),
        ({"exchange": 3}, r"exchange \(3\) must be a name, a dict or an ExchangeConfig"),
        ({"mesh": 3}, r"mesh \(3\) must be a moeclipse.Mesh or a torch DeviceMesh"),
        ({"placement": [[0]]}, r"placement \(\[\[0\]\]\) must be a moeclipse.Placement"),
        ({"dtype": "bf16"}, r"dtype \('bf16'\) must be a torch.dtype"),
        ({"init_std": "small"}, r"init_std \('small'\) must be a number"),
    ],
    ids=str,
)
def test_what_an_argument_must_be_is_said_in_a_sentence(given: dict[str, Any], text: str) -> None:
    usual: dict[str, Any] = {"d_model": 16, "d_ff": 8, "num_experts": 4}
    with pytest.raises(ConfigError, match=text):
        MoE(**usual | given)


def test_a_layer_says_its_sizes() -> None:
    text = repr(MoE(16, 8, 4, gate="switch", num_shared_experts=1))
    assert "d_model=16, d_ff=8, num_experts=4, gate='switch', top_k=1, activation='swiglu'" in text
    assert "num_shared_experts=1" in text


def test_tokens_of_another_width_and_things_that_are_no_tensors() -> None:
    moe = MoE(16, 8, 4)
    with pytest.raises(ConfigError, match=r"tokens of shape \[3, 15\], but its d_model is 16"):
        moe(torch.zeros(3, 15))
    with pytest.raises(ConfigError, match="the layer got None; give it a tensor"):
        moe(None)
    with pytest.raises(ConfigError, match="the layer got a list of int"):
        moe([1, 2])


def meshes(mesh: Mesh) -> list[Any]:
    """Over a DeviceMesh: axes as they are named, made once; and what is refused."""
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    first, second = MoE(16, 8, 4, mesh=made), MoE(16, 8, 4, mesh=made)
    first(torch.randn(3, 16)).sum().backward()
    refused = [(("ep", "dp"), [[0, 1], [2, 3]]), (("dp", "ep"), [[0, 2], [1, 3]]), (None, [[0, 1], [2, 3]])]
    for names, ranks in refused:
        wrong = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)
        with pytest.raises(ConfigError, match="name them pp, dp, ep, tp, in this order"):
            Mesh.of_device_mesh(wrong)
    line = Mesh.of_device_mesh(init_device_mesh("cpu", (4,)))
    said = repr(first).count("here experts")
    return [first.mesh.dp, first.mesh.ep, first.experts.ids, first.mesh is second.mesh, line.ep, said]


def test_a_mesh_of_torch() -> None:
    found = run_ranks(4, meshes, dp=2)
    assert [one[:2] for one in found] == [[2, 2]] * 4
    assert [one[2] for one in found] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert all(one[3:] == [True, 4, 1] for one in found)
