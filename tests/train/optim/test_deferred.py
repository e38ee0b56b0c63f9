"""Updates under the next step's forward: bits of updates at the end of a step, whoever looks in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_host_states import DEVICE, FORMS, HOST, assert_same, config_of, state_of, trained

from moeclipse.comm.mesh import Mesh
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.optim.deferred import DeferredUpdates
from moeclipse.train.step.learner import Learner

UNSEEN = {"integrity.every": 0}
"""Otherwise a check looks at all state behind every step."""
EVALUATED = {"eval.every": 2, "eval.share": 0.2, "eval.samples": 4}


def all_ways(mesh: Mesh, forms: tuple[str, ...]) -> None:
    ways: dict[str, dict[str, Any]] = {
        "one buffer": {"memory.buffers": 1},
        "half": {"memory.share": 0.5, "memory.buffers": 2},
        "slow": {"memory.copy_gb_s": 0.002},
        "two microbatches, recomputed": {"optim.accumulate": 2, "pipeline.recompute": "full"},
        "tied": {"model.tie_embeddings": True},
        "adapters": {"lora.rank": 4},
        "small buckets": {"optim.bucket_mb": 0.001},
        "one bucket": {"optim.bucket_mb": 100.0},
    }
    for form in forms:
        for way, how in ways.items():
            given = (FORMS[form], UNSEEN, how)
            beside = [{key: value for key, value in one.items() if "memory" not in key} for one in given]
            losses, wanted, _ = trained(mesh, config_of(DEVICE, *beside), steps=4)
            some, found, learner = trained(mesh, config_of(HOST, *given), steps=4)
            assert learner.optim.deferred is not None, way
            assert some == losses, (form, way)
            assert_same(found, wanted)


@pytest.mark.parametrize("forms", [("8bit",), pytest.param(("fp32", "bf16", "none"), marks=pytest.mark.full)])
def test_the_same_bits_as_updates_behind_the_norm(forms: tuple[str, ...]) -> None:
    run_alone(all_ways, forms)


def in_order(mesh: Mesh) -> None:
    learner = Learner(config_of(HOST, UNSEEN, {"model.num_layers": 3, "optim.bucket_mb": 0.003}), mesh)
    seen: list[str] = []
    update, names = learner.optim.update_bucket, [bucket.name for bucket in learner.buckets]
    named = {id(parameter): name for name, parameter in learner.model.named_parameters()}

    def noted(number: int, *rest: Any) -> None:
        seen.append(names[number])
        update(number, *rest)

    learner.optim.update_bucket = noted  # type: ignore[method-assign]
    for number, layer in enumerate(learner.model.all_layers):
        layer.register_forward_pre_hook(lambda *_, number=number: seen.append(f"forward {number}"))
    learner.step(0)
    assert seen == ["forward 0", "forward 1", "forward 2"], (
        "no update, which had nothing to hide copies under"
    )
    seen.clear()
    learner.step(1)
    assert [one for one in seen if not one.startswith("forward")] == names[::-1]
    assert seen[0] != "forward 0"
    assert seen.index("layers.1.moe.experts.up") > seen.index("forward 0"), "none earlier than it must"
    assert seen.index("layers.2.moe.experts.up") > seen.index("forward 1")
    for bucket in learner.buckets:
        read = [named[id(parameter)].split(".") for parameter in bucket.parameters]
        for kind, *rest in read:
            layer = {"layers": rest[:1], "embedding": ["0"]}.get(kind, ["2"])[0]
            assert seen.index(bucket.name) < seen.index(f"forward {layer}"), (bucket.name, kind, layer)


def test_an_update_runs_in_front_of_the_first_layer_that_reads_its_weights() -> None:
    run_alone(in_order)


def looked_at(mesh: Mesh, folder: Path) -> None:
    """Each look sees what a run with updates at the end sees, and the run goes on alike."""
    resident, learner = (Learner(config_of(place, UNSEEN, EVALUATED), mesh) for place in (DEVICE, HOST))
    looks = [
        lambda one: one.model.state_dict(),
        lambda one: one.evaluate(2),
        state_of,
        lambda one: dict(one.model.named_parameters()) if one.optim.states else {},
    ]
    for step, look in enumerate(looks):
        wanted, found = (one.step(step)["loss"] for one in (resident, learner))
        assert found == wanted, step
        assert learner.optim.deferred is not None
        assert learner.optim.deferred.waiting
        wanted, found = look(resident), look(learner)
        assert not learner.optim.deferred.waiting, step
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            same = (
                torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
            )
            assert same or name.endswith(("_s", "_ms")), name
    path = learner.save(folder, 4)
    losses = [resident.step(4)["loss"], resident.step(5)["loss"]]
    assert [learner.step(4)["loss"], learner.step(5)["loss"]] == losses
    # What was fetched ahead is no longer what the host has.
    assert learner.load(Checkpoint.open(path, OneRank())) == 4
    assert [learner.step(4)["loss"], learner.step(5)["loss"]] == losses
    assert_same(state_of(learner), state_of(resident))


def test_whoever_looks_between_steps_sees_what_is_updated(tmp_path: Path) -> None:
    run_alone(looked_at, tmp_path)


def skipped(mesh: Mesh) -> None:
    resident, learner = (
        Learner(config_of(place, UNSEEN, {"optim.max_bad_steps": 3}), mesh) for place in (DEVICE, HOST)
    )
    for one in (resident, learner):
        real = one.backward

        def sick(step: int, real: Any = real) -> dict[str, torch.Tensor]:
            sums: dict[str, torch.Tensor] = real(step)
            return {**sums, "loss": sums["loss"] * float("nan")} if step == 2 else sums

        one.backward = sick  # type: ignore[method-assign]
    for step in range(5):
        wanted, found = (one.step(step) for one in (resident, learner))
        assert found["skipped"] == wanted["skipped"] == (step == 2)
        assert step == 2 or found["loss"] == wanted["loss"]
        assert learner.optim.deferred is not None
        assert learner.optim.deferred.waiting == (step != 2), "copies would travel for nothing"
    assert learner.optim.updates == resident.optim.updates == 4
    assert_same(state_of(learner), state_of(resident))


def test_a_step_that_is_not_finite_leaves_nothing_waiting() -> None:
    run_alone(skipped)


def on_two(mesh: Mesh) -> None:
    learner = Learner(config_of(HOST, UNSEEN), mesh)
    learner.step(0)
    assert learner.optim.deferred is None, "others wait for these weights"


def test_on_several_ranks_updates_follow_the_norm() -> None:
    run_ranks(2, on_two)


class Noted:
    def __init__(self) -> None:
        self.updated: list[int] = []
        self.fetching = 0

    def update_bucket(self, number: int, grad: torch.Tensor, lr: float, factor: torch.Tensor) -> None:
        self.updated.append(number)

    def begin_fetching(self) -> None:
        self.fetching += 1


def test_layers_ask_in_any_order_and_nothing_runs_twice() -> None:
    """Bucket 3 holds the embedding, 2 layers 0 and 1, 1 layer 2, 0 the head with the last layer."""
    optim = Noted()
    deferred = DeferredUpdates(optim, [3, 2, 0, 0])
    deferred.before(1)  # nothing waits
    deferred.finish()
    deferred.hold([torch.zeros(0)] * 4, 0.1, torch.ones(()))
    with pytest.raises(AssertionError, match="have not run"):
        deferred.hold([], 0.1, torch.ones(()))
    for layer, wanted in ((0, [3, 2]), (0, [3, 2]), (1, [3, 2]), (2, [3, 2, 1]), (1, [3, 2, 1])):
        deferred.before(layer)
        assert optim.updated == wanted
    assert (deferred.waiting, optim.fetching) == (True, 1)
    deferred.finish()
    assert optim.updated == [3, 2, 1, 0]
    assert (deferred.waiting, optim.fetching) == (False, 2), "the next ones travel under backward"
    deferred.hold([torch.zeros(0)] * 4, 0.1, torch.ones(()))
    deferred.drop()
    deferred.finish()
    assert len(optim.updated) == 4
    DeferredUpdates(optim, []).finish()
