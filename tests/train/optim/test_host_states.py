"""State in the host's memory: the same bits as on the device, in every form, layout and order of copies."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.checkpoints.checkpoint import Checkpoint, OneRank
from moeclipse.train.checkpoints.shard import Later
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner

SMALL: dict[str, Any] = {
    "model.num_layers": 2,
    "model.num_dense_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 24,
    "model.head_dim": 12,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.dtype": "bfloat16",
    "moe.num_experts": 4,
    "moe.d_ff": 12,
    "data.seq_len": 8,
    "data.batch_size": 4,
    "optim.lr": 1e-2,
    "run.steps": 20,
}
HOST = {"memory.place": "host", "optim.bucket_mb": 0.01}
DEVICE = {"memory.place": "device", "optim.bucket_mb": 0.01}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"optim.state": "bf16", "optim.main_grad": "bf16"},
    "none": {"optim.state": "8bit", "optim.master": "none"},
    "8bit": {"optim.state": "8bit", "optim.master": "low-bits"},
}
HOW: dict[str, dict[str, Any]] = {
    "all": {},
    "one buffer": {"memory.buffers": 1},
    "moments": {"memory.states": "moments"},
    "master": {"memory.states": "master"},
    "half": {"memory.share": 0.5, "memory.buffers": 2},
    "slow": {"memory.copy_gb_s": 0.002},
}


def config_of(*changes: dict[str, Any]) -> TrainConfig:
    corpus = str(Path(__file__).parents[1] / "text.txt")
    merged: dict[str, Any] = {**SMALL, "data.files": (corpus,), "integrity.every": 1}
    for one in changes:
        merged |= one
    return with_values(TrainConfig(), merged)


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {f"{piece.name}[{piece.start}]": piece.values.clone() for piece in learner._pieces()}


def trained(
    mesh: Mesh, config: TrainConfig, steps: int = 3
) -> tuple[list[float], dict[str, torch.Tensor], Learner]:
    learner = Learner(config, mesh)
    records = [learner.step(step) for step in range(steps)]
    return [record["loss"] for record in records], state_of(learner), learner


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def all_ways(mesh: Mesh, forms: tuple[str, ...]) -> None:
    for form in forms:
        given = FORMS[form]
        losses, wanted, resident = trained(mesh, config_of(DEVICE, given))
        assert resident.optim.host is None
        for way, how in HOW.items():
            if form == "none" and way == "master":
                continue
            some, found, learner = trained(mesh, config_of(HOST, given, how))
            assert some == losses, (form, way)
            assert_same(found, wanted)
            host = learner.optim.host
            assert host is not None, (form, way)
            part = sum(bucket.name in host.travellers for bucket in learner.buckets) / len(
                learner.buckets.buckets
            )
            assert (0.2 < part < 0.8) if way == "half" else part > 0.7, (form, way, part)
            host.close()


@pytest.mark.parametrize("forms", [("8bit",), pytest.param(("fp32", "bf16", "none"), marks=pytest.mark.full)])
def test_the_same_bits_as_on_the_device(forms: tuple[str, ...]) -> None:
    run_alone(all_ways, forms)


def in_layout(mesh: Mesh, changes: dict[str, Any]) -> None:
    changes = {**FORMS["8bit"], "parallel.check_launches": True, **changes}
    losses, wanted, _ = trained(mesh, config_of(DEVICE, changes))
    some, found, learner = trained(mesh, config_of(HOST, changes, HOW["one buffer"]))
    assert some == losses
    assert_same(found, wanted)
    assert learner.optim.host is not None
    assert learner.optim.host.num_bytes > 0


@pytest.mark.parametrize(
    ("axes", "changes"),
    [
        ({"dp": 2}, {}),
        ({}, {}),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.full),
        ({"pp": 2}, {"optim.accumulate": 4, "pipeline.schedule": "1f1b", "parallel.pp": 2}),
    ],
    ids=["dp", "ep", "tp", "pp"],
)
def test_the_same_bits_on_several_ranks(axes: dict[str, int], changes: dict[str, Any]) -> None:
    given = {f"parallel.{name}": size for name, size in axes.items() if name == "tp"}
    run_ranks(2, in_layout, {**changes, **given}, **axes)


def saved_and_resumed(mesh: Mesh, folder: Path) -> None:
    for form in ("8bit",):
        config = {
            place: config_of(place_keys, FORMS[form]) for place, place_keys in (("d", DEVICE), ("h", HOST))
        }
        _, wanted, _ = trained(mesh, config["d"], steps=4)
        for before, after in (("h", "d"), ("d", "h"), ("h", "h")):
            _, _, learner = trained(mesh, config[before], steps=2)
            path = learner.save(folder / f"{form}{before}{after}", 2)
            resumed = Learner(config[after], mesh)
            assert resumed.load(Checkpoint.open(path, OneRank())) == 2
            for step in (2, 3):
                resumed.step(step)
            assert_same(state_of(resumed), wanted)


def test_a_checkpoint_of_either_goes_on_as_the_other(tmp_path: Path) -> None:
    run_alone(saved_and_resumed, tmp_path)


def refused(mesh: Mesh) -> None:
    with pytest.raises(
        ConfigError, match=r"the host has .* GB .*takes .* GB; set memory.share to 0\.\d+ at most"
    ):
        Learner(config_of(HOST, {"memory.host_gb": 2e-5}), mesh)


def test_a_host_without_room_is_refused_with_what_would_fit() -> None:
    run_alone(refused)


def told(mesh: Mesh) -> None:
    changes = {"memory.copy_gb_s": 0.002, "memory.buffers": 2, "integrity.every": 0}
    learner = Learner(config_of(HOST, changes), mesh)
    host = learner.optim.host
    assert host is not None
    learner.step(0)
    learner.step(1)  # under whose forward the state of the first one travels
    _, record = (told.times for told in learner.times.take())
    seconds = host.num_bytes / 2e6
    assert record["comm_ms"] > 900 * seconds  # each way takes so long, and they overlap
    assert record["exposed_ms"] > 0
    assert record["exposed_ms"] + record["compute_ms"] <= record["step_ms"] * 1.001
    labels = [transfer.label for transfer in learner.times.transfers]
    assert sum(label.startswith("fetch of state") for label in labels) == len(host.travellers)
    assert sum(label.startswith("store of state") for label in labels) == len(host.travellers)


def test_copies_are_told_as_hidden_or_exposed_like_other_transfers() -> None:
    run_alone(told)


def goes_on(mesh: Mesh) -> None:
    by_layer = {"memory.buffers": 2, "integrity.every": 0, "optim.clip": "layer"}
    learner = Learner(config_of(HOST, by_layer), mesh)
    host = learner.optim.host
    assert host is not None
    gate, copy = threading.Event(), host.lane.copy
    last = [bucket.name for bucket in learner.buckets if bucket.name in host.travellers][-1]

    def held_back(lane: str, label: str, into: torch.Tensor, source: torch.Tensor, after: Any = None) -> Any:
        if label == f"store of state, bucket {last}":
            host.lane._queues[lane].put(lambda: assert_open(gate))
        return copy(lane, label, into, source, after)

    host.lane.copy = held_back  # type: ignore[method-assign]
    learner.step(0)  # ends, and its last store has not begun
    before = host.travellers[last].held.clone()
    assert not host._left[last].ended.is_set()
    threading.Timer(0.2, gate.set).start()
    assert learner.optim.states is learner.optim._states, "waits until all state lies where it belongs"
    assert not torch.equal(host.travellers[last].held, before)
    gate.clear()
    learner.step(1)
    threading.Timer(0.2, gate.set).start()
    learner.step(2)  # fetches what the store of step 1 has yet to bring
    state = state_of(learner)
    assert_same(state, trained(mesh, config_of(DEVICE, {"optim.clip": "layer"}))[1])


def assert_open(gate: threading.Event) -> None:
    gate.wait(60)


def test_the_last_store_goes_on_while_the_next_step_computes() -> None:
    run_alone(goes_on)


def out_of_order(mesh: Mesh) -> None:
    learner = Learner(config_of(HOST), mesh)
    host = learner.optim.host
    assert host is not None
    placed = [bucket for bucket in learner.buckets if bucket.name in host.travellers][::-1]
    with pytest.raises(ScheduleError, match="is updated, but the program's next is"):
        host.arrived(placed[0])  # nothing was fetched
    host.begin_step()
    host.begin_step()  # asked again, as by a second look at a step
    with pytest.raises(ScheduleError, match=rf"next is 0BUCKET_UPDATE@. of {placed[0].name}"):
        host.arrived(placed[1])
    assert host.arrived(placed[0]) is not None
    host.close()


def test_an_update_that_is_not_the_next_of_the_program_is_refused() -> None:
    run_alone(out_of_order)


def given_back(mesh: Mesh, config: TrainConfig) -> None:
    before = threading.active_count()
    learner = Learner(config, mesh)
    learner.step(0)
    assert threading.active_count() == before + 2
    del learner
    gc.collect()
    assert threading.active_count() == before


def test_memory_and_threads_are_given_back_with_the_optimizer() -> None:
    run_alone(given_back, config_of(HOST))


def written_as_it_lies(mesh: Mesh) -> None:
    learner = Learner(config_of(HOST, FORMS["8bit"]), mesh)
    learner.step(0)
    pieces = [piece for piece in learner.optim.pieces() if not isinstance(piece.data, torch.Tensor)]
    assert len(pieces) > 8
    for piece in pieces:
        assert isinstance(piece.data, Later)
        parts = [piece.data[first : first + 7] for first in range(0, piece.data.numel(), 7)]
        assert torch.equal(torch.cat(parts), piece.values)
        assert piece.values.dtype == piece.data.dtype


def test_narrow_state_of_the_host_is_widened_when_it_is_written() -> None:
    run_alone(written_as_it_lies)
