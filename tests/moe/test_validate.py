"""What a layer is given: devices and meshes by name, and numbers that nobody gave."""

from __future__ import annotations

import pytest
import torch

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.validate import TOP_K, alike, alone, check_place, given_device, given_gate


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
