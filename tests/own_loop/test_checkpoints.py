"""`torch.distributed.checkpoint`: weights and optimizer state of experts, saved and loaded at any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from own_models import EXPERTS, FF, D, Expert, often, tokens
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import moeclipse
from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.layer import MoE
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    def __init__(self, mesh: Mesh | None, kind: str, placement: Placement | None) -> None:
        super().__init__()
        options: dict[str, Any] = {"init_std": 0.5, "dtype": torch.float64, "num_shared_experts": 1}
        if kind == "sharded":
            options["expert_tp"] = "sharded"
        if kind == "biased":
            options["expert_bias"] = True
        if kind == "modules":
            options["experts"] = Expert
        self.first = nn.Linear(D, D, dtype=torch.float64)
        self.moe = MoE(D, FF, EXPERTS, top_k=2, mesh=mesh, placement=placement, **options)
        for key, parameter in self.first.named_parameters():
            fill_normal(parameter.data, key_of("first", key), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(torch.tanh(self.first(x)))


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1},
    "two": {"ranks": 2},
    "four": {"ranks": 4},  # 6 experts: 2, 2, 1, 1
    "copies": {"ranks": 4, "dp": 2},
    "moved": {"ranks": 2, "placement": Placement(((5, 1, 3), (0, 4, 2)), (1, 0, 1, 0, 1, 0))},
    "replicas": {"ranks": 2, "placement": Placement(((0, 1, 2, 5), (3, 5, 4, 0)), (1, 0, 0, 1, 1, 0))},
    "empty": {"ranks": 2, "placement": Placement(((0, 1, 2, -1), (3, 4, 5)), (0, 0, 0, 1, 1, 1))},
    "tp": {"ranks": 4, "tp": 2},
}


def made(mesh: Mesh, layout: str, kind: str, dense: str | None) -> tuple[Any, torch.optim.Optimizer]:
    model = Net(mesh, kind, LAYOUTS[layout].get("placement"))
    wrapped = moeclipse.parallelize(model, mesh, dense=dense if mesh.num_ranks > 1 else None)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.05, foreach=False)


def train(mesh: Mesh, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same tokens in all layouts, shared out over the ranks that have different ones."""
    for step in steps:
        x = tokens(step, count=8).chunk(mesh.num_data)[mesh.data_index]
        (model(x).square().mean() + moeclipse.aux_loss(model)).backward()
        moeclipse.sync_gradients(model)
        moeclipse.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole weights, and the whole first moments by the same names."""
    found = {f"weight {key}": value.clone() for key, value in moeclipse.full_state_dict(model).items()}
    inner = model.module if hasattr(model, "module") else model
    state = {name: optimizer.state[p]["exp_avg"] for name, p in inner.named_parameters()}
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            local(parameter).copy_(local(state[name]))
    return found | {f"moment {key}": value for key, value in moeclipse.full_state_dict(model).items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def one_run(mesh: Mesh, kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = made(mesh, "one", kind, None)
    train(mesh, model, optimizer, range(4))
    return values(model, optimizer)


def save(mesh: Mesh, layout: str, kind: str, dense: str | None, folder: Path) -> None:
    model, optimizer = made(mesh, layout, kind, dense)
    train(mesh, model, optimizer, range(2))
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def go_on(mesh: Mesh, layout: str, kind: str, dense: str | None, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = made(mesh, layout, kind, dense)
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).fill_(7.0)
    weights, state = get_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=FLAT)
    train(mesh, model, optimizer, range(2, 4))
    return values(model, optimizer)


def on(layout: str, function: Any, *args: Any) -> list[Any]:
    options = {key: value for key, value in LAYOUTS[layout].items() if key in ("dp", "tp")}
    return run_ranks(LAYOUTS[layout]["ranks"], function, layout, *args, **options)


CASES = [
    ("two", "one", "built-in", "ddp"),
    ("one", "two", "built-in", "ddp"),
    ("two", "four", "biased", "fsdp2"),
    ("four", "two", "modules", "ddp"),
    ("four", "moved", "built-in", "fsdp2"),
    ("moved", "replicas", "built-in", "fsdp2"),
    ("replicas", "copies", "biased", "ddp"),
    ("copies", "empty", "built-in", "fsdp2"),
    ("empty", "one", "built-in", "ddp"),
    ("one", "four", "modules", "fsdp2"),
]


@pytest.mark.parametrize(
    ("before", "after", "kind", "dense"),
    often(CASES, CASES[0], CASES[3], CASES[5]),
)
def test_a_run_goes_on_at_another_layout(
    before: str, after: str, kind: str, dense: str | None, tmp_path: Path
) -> None:
    expected = run_alone(one_run, kind)
    on(before, save, kind, dense, tmp_path)
    for result in on(after, go_on, kind, dense, tmp_path):
        assert result.keys() == expected.keys()
        bad = {name: difference(result[name], expected[name]) for name in expected}
        assert all(value <= 1e-12 for value in bad.values()), bad


def write(mesh: Mesh, layout: str, kind: str, folder: Path) -> None:
    model, _ = made(mesh, layout, kind, None)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def read(mesh: Mesh, layout: str, kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """What a model that had other weights is full of, after loading twice."""
    model, _ = made(mesh, layout, kind, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    for _ in range(2):
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=folder)
        model.load_state_dict(state)
    return moeclipse.full_state_dict(model)


@pytest.mark.parametrize(("before", "after"), [("tp", "one"), ("two", "tp"), ("replicas", "tp")])
def test_parts_of_the_width_of_experts_are_put_together(before: str, after: str, tmp_path: Path) -> None:
    expected = run_alone(lambda mesh: made(mesh, "one", "sharded", None)[0].state_dict())
    on(before, write, "sharded", tmp_path)
    for result in on(after, read, "sharded", tmp_path):
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], expected[name]) for name in expected)


def async_save(mesh: Mesh, layout: str, folder: Path) -> None:
    model, optimizer = made(mesh, layout, "built-in", "ddp")
    train(mesh, model, optimizer, range(1))
    before = moeclipse.full_state_dict(model)
    before = {name: value.clone() for name, value in before.items()}
    apart = torch.distributed.new_group()  # DDP uses the default group meanwhile
    state = {"model": model.module.state_dict()}
    saving: Any = dcp.async_save(state, checkpoint_id=folder, process_group=apart)
    train(mesh, model, optimizer, range(1, 2))
    saving.result()
    state = model.module.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    found = moeclipse.full_state_dict(model)
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_training_goes_on_while_a_copy_is_saved(tmp_path: Path) -> None:
    on("two", async_save, tmp_path)
