"""Each layer clipped by its own norm and updated behind its gradients: what torch makes of it, to 1e-12."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import ScheduleError
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.bucket_contents import layer_of
from moeclipse.train.step import learner as learner_module
from moeclipse.train.step.learner import Learner

SMALL: dict[str, Any] = {
    "model.num_layers": 5,
    "model.num_dense_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 24,
    "model.head_dim": 8,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.dtype": "float64",
    "moe.num_experts": 4,
    "moe.d_ff": 12,
    "data.seq_len": 8,
    "data.batch_size": 4,
    "optim.lr": 1e-2,
    "optim.warmup_steps": 0,
    "optim.clip": "layer",
    "optim.clip_norm": 0.01,
    "run.steps": 20,
    "integrity.every": 1,
}
IN_BF16 = {"model.dtype": "bfloat16", "optim.state": "8bit", "optim.master": "low-bits"}
LAYERS = {"pipeline.schedule": "layers", "optim.accumulate": 4}
HOST = {"memory.place": "host", "memory.buffers": 2}


def config_of(changes: dict[str, Any]) -> TrainConfig:
    corpus = str(Path(__file__).parents[1] / "text.txt")
    return with_values(TrainConfig(), {**SMALL, "data.files": (corpus,), **changes})


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    """By logical name, whoever holds them."""
    found: dict[str, torch.Tensor] = {}
    for piece in learner.optim.pieces():
        if piece.name.startswith("weight/"):
            found[f"{piece.name}[{piece.start}]"] = piece.values.clone()
    return found


def against_torch(mesh: Mesh, changes: dict[str, Any]) -> None:
    plain = Learner(config_of({**changes, "optim.clip": "global"}), mesh)
    named = dict(plain.model.named_parameters())
    copies = {name: parameter.detach().clone().requires_grad_() for name, parameter in named.items()}
    optim = plain.config.optim
    groups = [
        {"params": [p for n, p in copies.items() if vectors == (named[n].dim() < 2)], "weight_decay": decay}
        for vectors, decay in ((True, 0.0), (False, optim.weight_decay))
    ]
    adam = torch.optim.AdamW(groups, lr=plain.lr(0), betas=(optim.beta1, optim.beta2), eps=optim.eps)
    plain.backward(0)
    clipped = 0
    for layer in dict.fromkeys(map(layer_of, copies)):
        mine = [name for name in copies if layer_of(name) == layer]
        for name in mine:
            copies[name].grad = named[name].main_grad.clone()  # type: ignore[attr-defined]
        grads = [copies[name].grad for name in mine]
        norm = torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None])
        for grad in grads:
            assert grad is not None
            grad.mul_(min(1.0, optim.clip_norm / float(norm)))  # torch's own clipping adds 1e-6 to the norm
        clipped += bool(norm > optim.clip_norm)
    assert clipped >= 4
    adam.step()
    learner = Learner(config_of(changes), mesh)
    assert learner.by_layer is not None
    assert learner.by_layer.in_backward
    learner.step(0)
    for name, parameter in learner.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=0, atol=1e-12, msg=name)
    plain.optim.update([bucket.reduced() for bucket in plain.buckets], plain.lr(0), 0.02)
    for name, parameter in plain.model.named_parameters():
        assert not torch.allclose(parameter, copies[name], rtol=0, atol=1e-9), "one norm gives other weights"


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"optim.accumulate": 2}, marks=pytest.mark.full), HOST, {**HOST, **LAYERS}],
    ids=["accumulate", "host", "layers"],
)
def test_a_layer_is_clipped_by_its_own_norm(changes: dict[str, Any]) -> None:
    run_alone(against_torch, {"optim.eps": 1e-3, **changes})


def the_same_behind_backward(mesh: Mesh, changes: dict[str, Any], steps: int = 3) -> None:
    """In backward, with memory for gradients shared or not, and behind it: the same bits."""
    found: list[tuple[list[float], list[float], dict[str, torch.Tensor]]] = []
    here, shares = learner_module.updates_in_backward, learner_module.grads_take_turns
    for in_backward in (True, False):
        learner_module.updates_in_backward = lambda *_, answer=in_backward: answer  # type: ignore[assignment]
        if not in_backward:
            learner_module.grads_take_turns = lambda *_: 0
        learner = Learner(config_of(changes), mesh)
        records = [learner.step(step) for step in range(steps)]
        state = {f"{piece.name}[{piece.start}]": piece.values.clone() for piece in learner._pieces()}
        found.append(([r["loss"] for r in records], [r["grad_norm"] for r in records], state))
        assert learner.by_layer is not None
        assert learner.by_layer.in_backward is in_backward
    learner_module.updates_in_backward, learner_module.grads_take_turns = here, shares
    (losses, norms, state), (others, other_norms, other) = found
    assert (losses, norms) == (others, other_norms)
    assert losses[-1] != losses[0]
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline.recompute": "full"},
        {**IN_BF16, **HOST},
        {**LAYERS, **HOST, "pipeline.recompute": "full"},
        pytest.param({**IN_BF16, "optim.accumulate": 2}, marks=pytest.mark.full),
        pytest.param({"model.tie_embeddings": True, "pipeline.recompute": "attn"}, marks=pytest.mark.full),
    ],
    ids=["recompute", "bf16", "layers", "accumulate", "tied"],
)
def test_in_backward_or_behind_it_the_bits_are_the_same(changes: dict[str, Any]) -> None:
    run_alone(the_same_behind_backward, changes)


def with_and_without_host(mesh: Mesh, changes: dict[str, Any]) -> None:
    found = []
    for place in ({}, HOST, {**HOST, "memory.share": 0.5, "memory.copy_gb_s": 0.01}):
        learner = Learner(config_of({**IN_BF16, **changes, **place}), mesh)
        losses = [learner.step(step)["loss"] for step in range(3)]
        found.append((losses, weights(learner)))
        assert (learner.optim.host is not None) is bool(place)
    for losses, held in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(held[name], tensor) for name, tensor in found[0][1].items())


def test_state_that_travels_under_backward_has_the_same_bits() -> None:
    run_alone(with_and_without_host, {})


def gradients_share_memory(mesh: Mesh) -> None:
    learner = Learner(config_of({}), mesh)
    experts = [bucket for bucket in learner.buckets if "experts" in bucket.name]
    places = {bucket.grads.data_ptr() for bucket in experts}
    by_layers = Learner(config_of(LAYERS), mesh)
    assert len({bucket.grads.data_ptr() for bucket in by_layers.buckets if "experts" in bucket.name}) == len(
        places
    )
    kept = Learner(config_of({"optim.accumulate": 2}), mesh)
    assert len({bucket.grads.data_ptr() for bucket in kept.buckets}) == len(kept.buckets.buckets)
    assert len(experts) == 2 * len(places)  # four layers with experts take two turns
    for bucket in learner.buckets:
        same = [
            other.layer_name for other in learner.buckets if other.grads.data_ptr() == bucket.grads.data_ptr()
        ]
        assert len(set(same)) == len(same), "two buckets of one layer share memory"
    late = next(bucket for bucket in learner.buckets if bucket.waits_for is not None)
    learner.buckets.zero()
    learner.buckets.arm()
    learner.buckets.on_reduce = None
    late.sums[0].backward_done()
    with pytest.raises(ScheduleError, match=r"came before layers\.4 was updated"):
        learner.buckets.finish()


def test_layers_share_memory_for_gradients_and_none_comes_too_early() -> None:
    run_alone(gradients_share_memory)


def step_on_ranks(mesh: Mesh, changes: dict[str, Any]) -> dict[str, torch.Tensor]:
    learner = Learner(config_of({"parallel.check_launches": True, **changes}), mesh)
    for step in range(2):
        learner.step(step)
    return weights(learner)


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"dp": 2}, {}),
        pytest.param({}, HOST, marks=pytest.mark.full),
        pytest.param({"tp": 2}, {"parallel.tp": 2}, marks=pytest.mark.full),
        ({"pp": 2}, {"parallel.pp": 2, "pipeline.schedule": "1f1b", "optim.accumulate": 4, **HOST}),
    ],
    ids=["dp", "ep", "tp", "pp"],
)
def test_on_several_ranks_each_parameter_is_that_of_one(
    axes: dict[str, int], changes: dict[str, Any]
) -> None:
    alone = {"optim.accumulate": changes.get("optim.accumulate", 1)}
    wanted = run_alone(step_on_ranks, alone)
    compared = 0
    for rank in run_ranks(2, step_on_ranks, changes, **axes):
        for name, tensor in rank.items():
            base, _, start = name.rpartition("[")
            if "[:, " in name:  # some columns of a matrix: other tensors tell whether norms are right
                continue
            whole = next(value for key, value in wanted.items() if key.startswith(f"{base}["))
            part = whole[int(start[:-1]) :][: len(tensor)]
            torch.testing.assert_close(tensor, part, rtol=0, atol=1e-12, msg=name)
            compared += len(tensor)
    assert compared >= 0.6 * sum(map(len, wanted.values()))


def one_layer_stands_still(mesh: Mesh) -> None:
    learner = Learner(config_of({}), mesh)
    learner.step(0)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    spoilt = learner.model.layers["2"]
    hook = spoilt.register_full_backward_hook(lambda *_: None)
    parameter = next(p for n, p in spoilt.named_parameters() if "experts" in n)
    parameter.register_hook(lambda grad: grad)
    bucket = next(b for b in learner.buckets if any(p is parameter for p in b.parameters))
    fill, done = bucket.sums[0].fill, []

    def poisoned() -> None:
        fill()
        if not done:
            bucket.sums[0].main_grad.flatten()[0] = math.inf
            done.append(True)

    bucket.sums[0].fill = poisoned  # type: ignore[method-assign]
    record = learner.step(1)
    hook.remove()
    assert record["notes"] == ["not updated, gradients were not finite: layer 2"]
    assert record["skipped"] is False
    assert math.isfinite(record["grad_norm"])
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, before[name]) is (layer_of(name) == "layers.2"), name
    assert learner.optim.updates == 2


def test_a_layer_whose_gradient_is_not_finite_stands_still_alone() -> None:
    run_alone(one_layer_stands_still)


def nothing_changes(mesh: Mesh, changes: dict[str, Any]) -> None:
    learner = Learner(config_of(changes), mesh)
    learner.step(0)
    with torch.no_grad():
        learner.model.norm.weight[0] = math.nan
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner.integrity.remember(1)
    record = learner.step(1)
    assert record["skipped"] is True
    assert learner.optim.updates == 1
    for name, p in learner.model.named_parameters():
        assert torch.equal(p.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


def nothing_changes_by_inf(mesh: Mesh) -> None:
    learner = Learner(config_of({}), mesh)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    assert learner.by_layer is not None
    judge = learner.by_layer.judge
    learner.sequential.judge = lambda loss: judge(torch.full_like(loss, math.inf))
    learner.step(0)
    for name, p in learner.model.named_parameters():
        assert torch.equal(p, before[name]), name


def test_an_infinite_loss_changes_nothing() -> None:
    """Gradients may be finite all the same."""
    run_alone(nothing_changes_by_inf)


@pytest.mark.parametrize("changes", [{}, HOST], ids=["device", "host"])
def test_a_step_whose_loss_is_not_finite_changes_nothing(changes: dict[str, Any]) -> None:
    run_alone(nothing_changes, changes)
