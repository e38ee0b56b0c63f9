"""AdamW over shards: torch's own update, on as many ranks as there are, and back from a checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank, save
from moeclipse.train.config import OptimConfig
from moeclipse.train.optim.adamw import STATES, AdamW, learning_rate
from moeclipse.train.optim.buckets import Buckets

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.3, clip_norm=0.0)


class Model(nn.Module):
    """A matrix, which decays, and a vector, which does not."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype))
        self.scale = nn.Parameter(torch.ones(4, dtype=dtype))


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def make(mesh: Mesh, config: OptimConfig = CONFIG, dtype: torch.dtype = torch.float64) -> tuple[Model, AdamW]:
    model = Model(dtype)
    return model, AdamW(Buckets(model, mesh, 1.0), config)


def step(
    model: Model, optim: AdamW, number: int, mesh: Mesh, *, lr: float = 1e-2, scale: float = 1.0
) -> None:
    """Each rank has an equal part of every gradient, times `scale`."""
    for name, parameter in model.named_parameters():
        full = gradient(name, parameter.shape, number)
        parameter.main_grad.copy_(full * scale / mesh.num_ranks)  # type: ignore[attr-defined]
    optim.buckets.arm()
    optim.buckets.finish()
    shards = [bucket.reduced() for bucket in optim.buckets]
    norm = math.sqrt(sum(float(s) for s in mesh.gather_objects(float(optim.sum_of_squares(shards))))) / scale
    optim.step(shards, lr, norm, scale)


def reference(steps: int, clip: float = 0.0) -> dict[str, torch.Tensor]:
    """What torch makes of the same gradients."""
    model = Model()
    groups = [
        {"params": [model.weight], "weight_decay": CONFIG.weight_decay},
        {"params": [model.scale], "weight_decay": 0.0},
    ]
    optim = torch.optim.AdamW(groups, lr=1e-2, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.eps)
    for number in range(steps):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient(name, parameter.shape, number)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(mesh: Mesh, changes: dict[str, Any], scale: float) -> list[torch.Tensor]:
    config = OptimConfig(**{"lr": 1e-2, "weight_decay": 0.3, "clip_norm": 0.0, **changes})
    model, optim = make(mesh, config)
    for number in range(4):
        # Adam does not see a factor on all gradients, so every second step has none.
        step(model, optim, number, mesh, scale=scale if number % 2 else 1.0)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("clip", "scale"), [(0.0, 1.0), (0.5, 1.0), (0.5, 1024.0)])
def test_the_update_is_that_of_torch(num_ranks: int, clip: float, scale: float) -> None:
    expected = list(reference(4, clip).values())
    for found in run_ranks(num_ranks, trained, {"clip_norm": clip}, scale):
        for mine, theirs in zip(found, expected, strict=True):
            # torch's clip divides by the norm plus 1e-6, ours by the norm.
            assert difference(mine, theirs) <= (1e-7 if clip else 1e-13)


def test_weights_are_kept_wider_than_the_parameters() -> None:
    """Many small updates that bfloat16 would round away one by one."""
    mesh = Mesh.single()
    model, optim = make(mesh, OptimConfig(weight_decay=0.0, clip_norm=0.0), torch.bfloat16)
    before = model.weight.detach().clone()
    for number in range(50):
        for parameter in model.parameters():
            parameter.main_grad.fill_(1.0)  # type: ignore[attr-defined]
        optim.buckets.arm()
        optim.buckets.finish()
        optim.step([bucket.reduced() for bucket in optim.buckets], 1e-4, 1.0)
        assert optim.updates == number + 1
    assert {state.weight.dtype for state in optim.states} == {torch.float32}
    moved = (before - model.weight).float()
    assert torch.allclose(moved, torch.full_like(moved, 50 * 1e-4), atol=2e-2 * float(before.abs().max()))
    assert moved.abs().sum() > 0


def test_what_another_stage_owns_does_not_count_twice() -> None:
    _, optim = make(Mesh.single())
    shards = [torch.full_like(bucket.params, 2.0) for bucket in optim.buckets]
    everything = float(optim.sum_of_squares(shards))
    assert everything == 4.0 * (15 + 4)
    optim.buckets.buckets[0].owned = False
    assert float(optim.sum_of_squares(shards)) == everything - 4.0 * len(shards[0])


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_norm_that_is_not_finite_skips_the_update(norm: float, dtype: torch.dtype) -> None:
    """Also where it is known on the device alone; `take_back` gives the count back."""
    mesh = Mesh.single()
    model, optim = make(mesh, OptimConfig(clip_norm=0.5), dtype)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    shards = [torch.ones_like(bucket.grads) for bucket in optim.buckets]
    for given in (norm, torch.tensor(norm, dtype=torch.float64)):
        optim.step(shards, 1e-2, given)
        optim.take_back()
    assert optim.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(not state.adam_m.any() and not state.adam_v.any() for state in optim.states)


def test_a_norm_on_the_device_clips_as_one_on_the_host() -> None:
    found = []
    for kind in (float, lambda norm: torch.tensor(norm, dtype=torch.float64)):
        model, optim = make(Mesh.single(), OptimConfig(clip_norm=0.5))
        for norm in (3.0, 0.2):
            optim.step([torch.ones_like(bucket.grads) for bucket in optim.buckets], 1e-2, kind(norm), 4.0)
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    config = OptimConfig(lr=2.0, min_lr_ratio=0.25, warmup_steps=4)
    rates = [learning_rate(config, number, 20) for number in range(25)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[4:20] == sorted(rates[4:20], reverse=True)
    assert rates[19] == pytest.approx(0.5)
    assert rates[19:] == pytest.approx([0.5] * 6), "beyond the last step it stays there"
    assert learning_rate(config, 11, 19) == pytest.approx(2.0 * (0.25 + 0.75 / 2)), "halfway down"


def test_a_checkpoint_holds_weights_and_moments(tmp_path: Path) -> None:
    mesh = Mesh.single()
    model, optim = make(mesh, dtype=torch.float32)
    for number in range(3):
        step(model, optim, number, mesh)
    path = save(tmp_path, 3, list(optim.pieces()), {}, OneRank(), keep=1)
    other, loaded = make(mesh, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    loaded.load(Checkpoint.open(path, OneRank()), optim.updates)
    assert loaded.updates == 3
    for mine, theirs in zip(optim.states, loaded.states, strict=True):
        assert all(torch.equal(getattr(mine, kind), getattr(theirs, kind)) for kind in STATES)
    for one in ((model, optim), (other, loaded)):
        step(*one, 3, mesh)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_state_of_another_type_is_converted_with_a_note(tmp_path: Path) -> None:
    mesh = Mesh.single()
    model, optim = make(mesh, dtype=torch.float32)
    step(model, optim, 0, mesh)
    checkpoint = Checkpoint.open(save(tmp_path, 1, list(optim.pieces()), {}, OneRank(), keep=1), OneRank())
    for config, text in (
        (CONFIG, []),
        (replace(CONFIG, state="bf16"), ["adam_m from float32 to bfloat16, adam_v from float32 to bfloat16"]),
    ):
        _, loaded = make(mesh, config, torch.float32)
        loaded.load(checkpoint, 1)
        assert loaded.notes == [f"the checkpoint's state is converted: {what}" for what in text]


RATES = {
    "constant": [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "linear": [0.5, 1, 1, 1 - 0.8 / 7, 1 - 1.6 / 7, 1 - 2.4 / 7, 1 - 3.2 / 7, 1 - 4 / 7, 1 - 4.8 / 7, 0.2],
    "wsd": [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2],
}


@pytest.mark.parametrize("schedule", RATES)
def test_learning_rates_by_name(schedule: str) -> None:
    config = OptimConfig(lr=3.0, warmup_steps=2, min_lr_ratio=0.2, schedule=schedule)
    if schedule == "wsd":
        config = replace(config, decay_share=0.4)
    assert [learning_rate(config, number, 10) / 3 for number in range(10)] == pytest.approx(RATES[schedule])
    assert learning_rate(config, 50, 10) == learning_rate(config, 9, 10), "beyond the end"
    assert learning_rate(config, 0, 1) > 0


def test_the_cosine_is_what_it_was() -> None:
    config = OptimConfig(lr=1e-3, min_lr_ratio=0.1, warmup_steps=20)
    assert learning_rate(config, 5, 200) == 1e-3 * 6 / 20
    for number in (20, 77, 199):
        progress = (number - 20) / 179
        assert learning_rate(config, number, 200) == 1e-3 * (
            0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * progress))
        ), "bit for bit"


def test_what_is_level_does_not_ask_when_the_run_ends() -> None:
    config = OptimConfig(schedule="wsd", decay_share=0.25)
    assert [learning_rate(config, n, 100) for n in range(75)] == [
        learning_rate(config, n, 400) for n in range(75)
    ]
