"""Initial weights follow from numbers: seed, layer, what they are and which expert, never who holds them."""

from __future__ import annotations

import torch

from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.two_projections import Experts
from moeclipse.moe.experts.weight_init import WeightInit
from moeclipse.moe.gate.gates import Gate

D, FF = 64, 96


def experts(ids: tuple[int, ...], **init: float) -> Experts:
    return Experts(ids, d_model=D, d_ff=FF, init=WeightInit(dtype=torch.float64, **init))


def test_an_expert_begins_alike_in_every_slot() -> None:
    whole, part = experts((0, 1, 2, 3)), experts((3, 1))
    for name in ("up", "down"):
        assert torch.equal(getattr(part, name)[0], getattr(whole, name)[3])
        assert torch.equal(getattr(part, name)[1], getattr(whole, name)[1])


def test_seed_layer_expert_and_projection_give_other_numbers() -> None:
    made = [experts((0,)), experts((0,), seed=1), experts((0,), layer=1), experts((1,))]
    numbers = {weight.detach()[0, 0, 0].item() for found in made for weight in found.weights}
    assert len(numbers) == 2 * len(made)


def test_deviations_are_those_that_were_asked_for() -> None:
    found = experts((0, 1), std=0.5, down_std=0.125)
    assert abs(found.up.std() - 0.5) < 0.02
    assert abs(found.down.std() - 0.125) < 0.005
    alike = experts((0, 1), std=0.5)
    assert abs(alike.down.std() - 0.5) < 0.02, "None: as the others"


def test_tensors_have_the_type_and_device_that_were_asked_for() -> None:
    init = WeightInit(dtype=torch.bfloat16, device=torch.device("meta"))
    for tensor in (init.empty(2, 3), init.zeros(2, 3)):
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((2, 3), torch.bfloat16, "meta")
    assert WeightInit().zeros(4).tolist() == [0.0] * 4
    gate = Gate(GateConfig(), d_model=D, num_experts=4, init=WeightInit(dtype=torch.float64))
    assert gate.weight.dtype == torch.float64
