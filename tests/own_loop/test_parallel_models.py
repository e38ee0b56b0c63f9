"""`parallelize`: DDP or FSDP2 around dense weights, our ranks around experts, numbers of one process."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from own_models import EXPERTS, FF, D, often, tokens
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import moeclipse
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE
from moeclipse.ops.random import fill_normal, key_of
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

GATE = GateConfig(kind="sigmoid", top_k=2, bias_rate=0.05, balance_loss=0.3)
STEPS, PARTS = 3, 2


class Block(nn.Module):
    def __init__(self, number: int, mesh: Mesh | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, dtype=torch.float64)
        options: dict[str, Any] = {"num_shared_experts": 1, "init_std": 0.5, "dtype": torch.float64}
        self.moe = MoE(D, FF, EXPERTS, gate=GATE, mesh=mesh, layer=number, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


class Tower(nn.Module):
    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block(number, mesh) for number in range(2))
        self.frozen = nn.Linear(D, D, dtype=torch.float64).requires_grad_(False)
        self.last = nn.Linear(D, 2, dtype=torch.float64)
        for name in ("first", "frozen", "last"):
            for key, parameter in getattr(self, name).named_parameters():
                fill_normal(parameter.data, key_of(name, key), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers after training, whole; all ranks ask together."""
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor = tensor.detach()
        found[name.removeprefix("module.")] = (
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        )
    return found


def one_process(_: Mesh, ranks: int, clip: float | None) -> dict[str, torch.Tensor]:
    model = Tower(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for step in range(STEPS):
        for part in range(PARTS):
            x = torch.cat([tokens(PARTS * step + part, rank) for rank in range(ranks)])
            ((model(x).square().mean() + moeclipse.aux_loss(model)) / PARTS).backward()
        moeclipse.sync_gradients(model)
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return values(model) | {"norms": torch.stack(norms) if norms else torch.zeros(0)}


def on_ranks(mesh: Mesh, dense: str, clip: float | None) -> dict[str, torch.Tensor]:
    model: Any = moeclipse.parallelize(Tower(mesh), mesh, dense=dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    norms = []
    for step in range(STEPS):
        for part in range(PARTS):
            last = part == PARTS - 1
            if dense == "fsdp2":
                model.set_requires_gradient_sync(last)
            with model.no_sync() if dense == "ddp" and not last else nullcontext():
                loss = model(tokens(PARTS * step + part, mesh.rank)).square().mean()
                ((loss + moeclipse.aux_loss(model)) / PARTS).backward()
        moeclipse.sync_gradients(model)
        if clip is not None:
            norms.append(moeclipse.clip_grad_norm_(model, clip))
        optimizer.step()
        optimizer.zero_grad()
    return values(model) | {"norms": torch.stack(norms) if norms else torch.zeros(0)}


CASES = list(product(["ddp", "fsdp2"], [1, 2], [1, 2], [None, 0.1]))


@pytest.mark.parametrize(
    ("dense", "dp", "ep", "clip"),
    often([case for case in CASES if case[1:3] != (1, 1)], ("ddp", 2, 2, 0.1), ("fsdp2", 1, 2, 0.1)),
)
def test_three_steps_of_two_parts_equal_one_process(dense: str, dp: int, ep: int, clip: float | None) -> None:
    expected = run_alone(one_process, dp * ep, clip)
    results = run_ranks(dp * ep, on_ranks, dense, clip, dp=dp)
    for rank, result in enumerate(results):
        assert result.keys() == expected.keys()
        for name, value in result.items():
            wanted = expected[name]
            if ".experts." in name:
                first = sum(len(results[e][name]) for e in range(rank % ep))
                wanted = wanted[first : first + len(value)]
            assert difference(value, wanted) <= 1e-12, (rank, name)


def wrongly(mesh: Mesh, way: str) -> list[str]:
    """What the first call says, alone and after a call that went well."""
    model: Any = Tower(mesh)
    x = tokens(rank=mesh.rank)
    model(x)
    wraps = {"ddp": DistributedDataParallel, "fsdp2": fully_shard}
    for name, more in (("fsdp", {}), ("fsdp, views", {"use_orig_params": True})):
        wraps[name] = partial(FullyShardedDataParallel, device_id=mesh.device, **more)
    model.frozen.requires_grad_(way == "fsdp")  # flat parameters want gradients for all or for none
    model = wraps[way](model)
    try:
        model(x)
    except ConfigError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp", "fsdp, views"])
def test_a_wrap_that_mixes_experts_is_refused_at_the_first_call(way: str) -> None:
    for texts in run_ranks(2, wrongly, way):
        assert len(texts) == 1
        dense = "fsdp2" if way.startswith("fsdp") else way
        assert f"moeclipse.parallelize(model, mesh, dense='{dense}')" in texts[0]


def replicated(mesh: Mesh) -> None:
    """Layers without a mesh are plain modules: DDP shares them as it shares all others."""
    model = DistributedDataParallel(Tower(None))
    (model(tokens(rank=mesh.rank)).square().mean() + moeclipse.aux_loss(model)).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    moeclipse.sync_gradients(model)
    for grad, parameter in zip(before, (p for p in model.parameters() if p.grad is not None), strict=True):
        assert torch.equal(grad, parameter.grad)


def test_layers_without_a_mesh_go_with_plain_ddp() -> None:
    run_ranks(2, replicated)


def refused(mesh: Mesh) -> list[str]:
    found = []
    for model, options in ((Tower(mesh), {"dense": "fsdp"}), (Tower(None), {"dense": "ddp"})):
        try:
            moeclipse.parallelize(model, mesh, **options)
        except ConfigError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_parallelized_says_why() -> None:
    for wrong, without in run_ranks(2, refused):
        assert "must be 'ddp', 'fsdp2' or None" in wrong
        assert "make it with MoE(..., mesh=mesh)" in without
