"""The state of one process, gathered from any ranks, and loaded on any."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from own_models import KINDS, layer, often
from torch import nn

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.own_loop.full_state import full_state_dict
from moeclipse.testing.run_ranks import run_alone, run_ranks

MOVED = Placement(((5, 1, 3, 0), (0, 4, 2, 5)), (1, 0, 1, 0, 1, 0))
EVERY = ["built-in", "biased", "modules"]


def whole(_: Mesh, kind: str) -> dict[str, torch.Tensor]:
    return nn.Sequential(layer(kind)).state_dict()


def gathered(mesh: Mesh, kind: str, placement: Placement | None) -> dict[str, torch.Tensor]:
    return full_state_dict(nn.Sequential(layer(kind, mesh=mesh, placement=placement)))


@pytest.mark.parametrize(
    ("kind", "placement", "dp"),
    often(
        [
            (kind, placement, dp)
            for kind in EVERY
            for placement in (None, MOVED)
            for dp in (1, 2)
            if not (kind == "modules" and placement)
        ],
        ("biased", MOVED, 1),
        ("modules", None, 2),
    ),
)
def test_all_ranks_have_the_state_of_one_process(kind: str, placement: Placement | None, dp: int) -> None:
    expected = run_alone(whole, kind)
    for found in run_ranks(2 * dp, gathered, kind, placement, dp=dp):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def loaded(mesh: Mesh, kind: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = nn.Sequential(layer(kind, mesh=mesh))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.load_state_dict(state)
    return full_state_dict(model)


@pytest.mark.parametrize("kind", EVERY)
def test_any_ranks_load_it(kind: str) -> None:
    expected = run_alone(whole, kind)
    for found in run_ranks(4, loaded, kind, expected):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def names(mesh: Mesh, kind: str) -> tuple[list[str], str]:
    model: Any = layer(kind, mesh=mesh)
    state = model.state_dict()
    old = OrderedDict((by_slot(key, model.experts.parts), value) for key, value in state.items())
    old._metadata = {**state._metadata, "experts": {"version": 1}}
    before = model.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    before = {key: value.clone() for key, value in old.items()}
    model.load_state_dict(type(old)(before) if mesh.num_ranks == 1 else restored(before, old))
    assert all(torch.equal(v, before[by_slot(k, model.experts.parts)]) for k, v in model.state_dict().items())
    box = [dict(model.state_dict()) if mesh.rank == 0 else None]
    torch.distributed.broadcast_object_list(box)
    try:
        model.load_state_dict(box[0])
    except RuntimeError as error:
        return sorted({key.split(".")[2] for key in state if "parts" in key}), str(error)
    return sorted({key.split(".")[2] for key in state if "parts" in key}), ""


def restored(values: dict[str, torch.Tensor], like: Any) -> Any:
    made = OrderedDict(values)
    made._metadata = like._metadata  # type: ignore[attr-defined]
    return made


def by_slot(key: str, parts: Any) -> str:
    """The name that 0.1 gave."""
    for slot, name in enumerate(parts._modules):
        key = key.replace(f"experts.parts.{name}.", f"experts.parts.slot{slot}.")
    return key.replace("parts.slot", "parts.")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("modules", [["0", "1", "2"], ["3", "4", "5"]]), ("joint", [["experts_0_1_2"], ["experts_3_4_5"]])],
)
def test_modules_have_the_names_of_their_experts(kind: str, expected: list[list[str]]) -> None:
    """No two ranks give one name to two experts; what 0.1 saved is read, what another rank saved is not."""
    (first, well), (second, bad) = run_ranks(2, names, kind)
    assert [first, second] == expected
    assert well == ""
    assert "Missing key(s)" in bad


def test_every_kind_of_expert_is_looked_at() -> None:
    assert set(EVERY) | {"joint", "kernels"} == set(KINDS)
