"""State in pinned memory of the host on a GPU: the bits of state on the device, and copies beside compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeclipse.comm.async_ops.host_lane import HostLane
from moeclipse.comm.async_ops.record import Recorder
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.schedule.kinds import TO_DEVICE, TO_HOST
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.checkpoints.host_memory import CudaPins, HostMemory
from moeclipse.train.presets import load
from moeclipse.train.step.learner import Learner

HAS_GPU = torch.cuda.device_count() > 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
NARROW = {"optim.state": "8bit", "optim.master": "low-bits", "optim.main_grad": "bf16"}
BASE = {
    "model.num_layers": 3,
    "data.batch_size": 4,
    "data.seq_len": 128,
    "run.deterministic": True,
    "optim.accumulate": 1,
    "integrity.every": 0,  # its digests of what lies on the host take a core many seconds
    "checkpoint.every": 0,
}


def trained(
    mesh: Mesh, changes: dict[str, Any], steps: int = 5
) -> tuple[list[float], dict[str, torch.Tensor]]:
    learner = Learner(with_values(load(preset="small"), {**BASE, **changes}), mesh)
    losses = [learner.step(step)["loss"] for step in range(steps)]
    pieces = {f"{piece.name}[{piece.start}]": piece.values.cpu() for piece in learner.optim.pieces()}
    if learner.weights is not None:
        assert all(memory._pinned for memory in learner.weights._memories.values())
    if learner.optim.host is not None:
        assert all(one.memory._pinned for one in learner.optim.host.travellers.values())
        learner.optim.host.close()
    return losses, pieces


def same_bits(mesh: Mesh) -> None:
    for form, clip in (({}, "global"), ({"optim.accumulate": 2}, "global"), (NARROW, "layer")):
        wanted = trained(mesh, {**form, "optim.clip": clip})
        for how in ({"memory.buffers": 1}, {"memory.share": 0.5}, {}):
            losses, state = trained(mesh, {**form, "optim.clip": clip, "memory.place": "host", **how})
            assert losses == wanted[0], (form, clip, how)
            assert all(torch.equal(state[name], tensor) for name, tensor in wanted[1].items())


def test_the_same_bits_from_pinned_memory() -> None:
    run_ranks(1, same_bits, device="cuda", deadline_s=300.0)


def beside_products(mesh: Mesh) -> None:
    size = 1 << 30
    memory = HostMemory(size, CudaPins(), slice_bytes=size)
    memory.settle()
    assert memory._pinned
    recorder = Recorder(mesh.device)
    lane = HostLane(mesh.device, recorder)
    buffers = [torch.empty(size, dtype=torch.uint8, device=mesh.device) for _ in range(2)]
    a = torch.randn(8192, 8192, device=mesh.device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    recorder.begin_step()
    with recorder.compute():
        for _ in range(40):
            a @ a
        came = lane.copy(TO_DEVICE, "there", buffers[0], memory.data)
        left = lane.copy(TO_HOST, "back", memory.data, buffers[1], after=came)
        came.get()
    left.get()
    told = recorder.end_step()
    (_, _, begun, done), _ = told.transfers
    assert done - begun < 0.06, "a GiB takes some 20 ms from pinned memory"
    assert begun < told.compute[0][1], "the fetch waited for products that it does not depend on"
    lane.close()
    memory.close()


def test_a_fetch_runs_beside_products() -> None:
    run_ranks(1, beside_products, device="cuda", deadline_s=120.0)


INPUTS = {"memory.activations": "host", "pipeline.recompute": "full", "model.num_layers": 6}


def same_inputs(mesh: Mesh) -> None:
    for form in ({}, {"optim.accumulate": 2}, {"optim.accumulate": 4, "pipeline.schedule": "layers"}):
        wanted = trained(mesh, {**form, **INPUTS, "memory.activations": "device"})
        for how in ({"memory.buffers": 1}, {"memory.place": "host"}, {}):
            losses, state = trained(mesh, {**form, **INPUTS, **how})
            assert losses == wanted[0], (form, how)
            assert all(torch.equal(state[name], tensor) for name, tensor in wanted[1].items())


def test_the_same_bits_with_inputs_of_layers_in_pinned_memory() -> None:
    run_ranks(1, same_inputs, device="cuda", deadline_s=300.0)


def same_gradients(mesh: Mesh) -> None:
    base = {"model.num_layers": 6, "optim.clip_norm": 0.01, "pipeline.recompute": "full"}
    for form in ({}, {"optim.main_grad": "bf16"}):
        wanted = trained(mesh, {**form, **base})
        for how in ({"memory.buffers": 1}, {"memory.place": "host"}, INPUTS):
            losses, state = trained(mesh, {**form, **base, **how, "memory.main_grad": "host"})
            assert losses == wanted[0], (form, how)
            assert all(torch.equal(state[name], tensor) for name, tensor in wanted[1].items())


def test_the_same_bits_with_gradients_in_pinned_memory() -> None:
    run_ranks(1, same_gradients, device="cuda", deadline_s=300.0)


def less_memory(mesh: Mesh) -> None:
    """A device holds the inputs of its buffers and of two layers, not of all."""
    peaks = []
    for place in ("device", "host"):
        large = {"data.seq_len": 1024, "data.batch_size": 16, "model.num_layers": 12, "memory.buffers": 1}
        # replays of a graph allocate nothing: inputs that stay would seem to take nothing
        plain = {"memory.activations": place, "run.graphs": "off"}
        changes = {**BASE, **INPUTS, **large, **plain}
        learner = Learner(with_values(load(preset="small"), changes), mesh)
        learner.step(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        learner.step(1)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        each = 16 * 1024 * learner.config.model.d_model * learner.dtype.itemsize
        del learner
        torch.cuda.empty_cache()
    assert peaks[0] - peaks[1] > 6 * each, "ten travel, of which the ring and what waits keep three at a time"


def test_inputs_that_have_left_give_their_memory_back() -> None:
    run_ranks(1, less_memory, device="cuda", deadline_s=300.0)


WEIGHTS = {"memory.weights": "host", "pipeline.recompute": "full", "model.num_layers": 6}
TRAINED = {"optim.clip": "layer", "optim.clip_norm": 0.05}
ADAPTERS = {"lora.rank": 8}


def same_weights(mesh: Mesh) -> None:
    by_layers = {"optim.accumulate": 4, "pipeline.schedule": "layers"}
    forms: tuple[dict[str, Any], ...] = (
        ADAPTERS,
        {**ADAPTERS, "model.base": "nf4", "optim.accumulate": 2},
        {**ADAPTERS, **by_layers},
        TRAINED,
        {**TRAINED, **NARROW, **by_layers},
        {**TRAINED, **NARROW, "optim.master": "none", "optim.accumulate": 2},
    )
    for form in forms:
        wanted = trained(mesh, {**form, **WEIGHTS, "memory.weights": "device"})
        for how in ({"memory.buffers": 1}, {"memory.place": "host"}, {"memory.activations": "host"}, {}):
            losses, state = trained(mesh, {**form, **WEIGHTS, **how})
            assert losses == wanted[0], (form, how)
            assert state.keys() == wanted[1].keys()
            assert all(torch.equal(state[name], tensor) for name, tensor in wanted[1].items()), (form, how)


def test_the_same_bits_with_weights_of_experts_in_pinned_memory() -> None:
    run_ranks(1, same_weights, device="cuda", deadline_s=500.0)


def evaluated(mesh: Mesh) -> None:
    """Weights visit in the order of layers outside of steps, too."""
    held_out = {"eval.every": 1, "eval.share": 0.2, "eval.samples": 4}
    found = []
    for place in ("device", "host"):
        changes = {**BASE, **WEIGHTS, **TRAINED, **held_out, "memory.weights": place}
        learner = Learner(with_values(load(preset="small"), changes), mesh)
        told: list[object] = []
        for step in range(3):
            told.append(learner.step(step)["loss"])
            told += [learner.evaluate(step + 1)["eval_loss"] for _ in range(2)]
        found.append(told)
    assert found[0] == found[1]


def test_evaluation_with_weights_of_experts_in_pinned_memory() -> None:
    run_ranks(1, evaluated, device="cuda", deadline_s=300.0)


def smaller(mesh: Mesh) -> None:
    """A device holds experts of the ring's layers, also while the model is built."""
    peaks = []
    for place in ("device", "host"):
        large = {"moe.num_experts": 64, "model.num_layers": 16, "memory.buffers": 2, "data.batch_size": 1}
        changes = {**BASE, **WEIGHTS, **ADAPTERS, **large, "memory.weights": place}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        learner = Learner(with_values(load(preset="small"), changes), mesh)
        learner.step(0)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        if learner.weights is not None:
            each, layers = learner.weights._held[0].nbytes, learner.weights.num_layers
        del learner
    assert peaks[0] - peaks[1] > (layers - 2 - 3) * each, "a layer that is being built is there a few times"


def test_weights_that_lie_on_the_host_take_no_memory_of_the_device() -> None:
    run_ranks(1, smaller, device="cuda", deadline_s=300.0)
