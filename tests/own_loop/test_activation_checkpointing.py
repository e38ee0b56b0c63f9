"""A layer that `torch.utils.checkpoint` runs twice: the same gradients, counted once, memory freed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from own_models import GATES, KINDS, Net, assert_alike, gradients, layer, loss_of, often, tokens
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.testing.run_ranks import run_alone, run_ranks

WAYS: dict[str, Callable[..., Any] | None] = {
    "plain": None,
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


def steps(mesh: Mesh, way: str, kind: str, gate: str, more: dict[str, Any], order: str = "in turn") -> dict:
    """Gradients after several forwards and backwards, and what was counted meanwhile."""
    model = Net(layer(kind, gate, mesh if mesh.num_ranks > 1 else None, **more), WAYS[way])
    given = [tokens(number, mesh.rank).requires_grad_() for number in range(3)]
    torch.manual_seed(5)
    if order == "in turn":
        for x in given:
            loss_of(model, x).backward()
    else:
        losses = [loss_of(model, x) for x in given]
        for loss in losses if order == "first first" else reversed(losses):
            loss.backward()
    found = gradients(model) | {f"x{number}": x.grad for number, x in enumerate(given)}
    found["load"] = model.moe.load_E.double()
    if model.moe.gate.dynamic is not None:
        found["seen"] = model.moe.gate.dynamic.seen_3.double()
    return found


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("gate", often(GATES, "gap", "noisy"))
def test_the_same_gradients_and_counts_on_one_rank(way: str, gate: str) -> None:
    expected = run_alone(steps, "plain", "built-in", gate, {"num_shared_experts": 1})
    assert_alike(run_alone(steps, way, "built-in", gate, {"num_shared_experts": 1}), expected)


@pytest.mark.parametrize(
    ("way", "kind"),
    often(
        product(["non-reentrant", "reentrant"], KINDS),
        ("non-reentrant", "modules"),
        ("reentrant", "built-in"),
    ),
)
def test_every_kind_of_expert_on_two_ranks(way: str, kind: str) -> None:
    more = {"exchange": {"schedule": "smart", "group_size": 1, "chunks": 2}}
    expected = run_ranks(2, steps, "plain", kind, "noisy", more)
    for found, wanted in zip(run_ranks(2, steps, way, kind, "noisy", more), expected, strict=True):
        assert_alike(found, wanted)


@pytest.mark.parametrize("way", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("order", often(["first first", "last first"], "first first"))
def test_several_forwards_in_flight(way: str, order: str) -> None:
    expected = run_alone(steps, "plain", "built-in", "noisy", {}, order)
    assert_alike(run_alone(steps, way, "built-in", "noisy", {}, order), expected)


def tuned(mesh: Mesh, way: str) -> dict[str, torch.Tensor]:
    """Through the calls in which granularities are tried: a repetition must be cut as its forward was.

    Two forwards are in flight, of which the second is cut in another way.
    """
    exchange = {"schedule": "smart", "shadow": "auto"}
    model = Net(layer("built-in", "softmax", mesh, exchange=exchange), WAYS[way])
    for number in range(0, 30, 2):
        for loss in [loss_of(model, tokens(number + k, mesh.rank)) for k in range(2)]:
            loss.backward()
    return gradients(model)


def test_repetitions_while_granularities_are_tried() -> None:
    expected = run_ranks(2, tuned, "plain")
    for found, wanted in zip(run_ranks(2, tuned, "non-reentrant"), expected, strict=True):
        assert_alike(found, wanted)


def live_bytes(mesh: Mesh, way: str, kind: str, shared: int) -> int:
    """Bytes that torch's allocator holds for one forward, also those of tensors that nobody can list."""
    model = Net(layer(kind, GateConfig(top_k=2), num_shared_experts=shared), WAYS[way])
    x = tokens(count=512)
    model(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        y = model(x)
        gc.collect()
    held = sum(event.self_cpu_memory_usage for event in seen.key_averages())
    y.sum().backward()
    return int(held)


@pytest.mark.parametrize("kind", often(KINDS, "built-in", "modules"))
def test_checkpointing_frees_rows(kind: str) -> None:
    """What stays is the input of the region, the output and tables of the plan; not rows, h or results."""
    plain = run_alone(live_bytes, "plain", kind, 1)
    freed = run_alone(live_bytes, "non-reentrant", kind, 1)
    rows = 512 * 2 * 8 * 8  # tokens x choices x width x bytes
    assert plain > 4 * rows
    assert freed < 2 * rows, (freed, plain)
