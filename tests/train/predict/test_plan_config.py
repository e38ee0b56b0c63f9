"""From names and files to a question, from a plan to a configuration that a run takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moeclipse.core.config import Sourced, problems_of, to_toml, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.cost.cluster import cluster
from moeclipse.cost.hardware import device
from moeclipse.pipeline.overlap import lay_out
from moeclipse.plan.layout import Layout
from moeclipse.plan.layouts import plan_of, search
from moeclipse.plan.question import Plan, Request
from moeclipse.plan.step import Terms
from moeclipse.train.config import TrainConfig, layout_problems
from moeclipse.train.predict.host_share import host_link, placing
from moeclipse.train.predict.model_sizes import sizes_of, sizes_of_run
from moeclipse.train.predict.plan_config import (
    batch_for,
    config_for,
    fits,
    flags_of,
    place_of,
    planned_config,
    rules_of,
    state_of,
    ways_out,
    what_would_fit,
)
from moeclipse.train.predict.shapes import SHAPES
from moeclipse.train.presets import load


def request_of(source: str, gpus: int, batch: int, device: str = "h100", sequence: int = 1024) -> Request:
    config = config_for(source)
    sizes = sizes_of(config.model, config.moe, config.gate)
    terms = Terms(model=sizes, cluster=cluster(device), sequence=sequence, state=state_of(config))
    refuse = rules_of(config, batch, sequence)
    return Request(terms=terms, num_gpus=gpus, batch=batch, refuse=refuse)


def test_a_model_by_name_preset_file_or_folder(tmp_path: Path) -> None:
    assert config_for("qwen3-30b-a3b").model.num_layers == 48
    assert config_for("small").model == replace(load(preset="small").model, dtype="bfloat16")
    file = tmp_path / "mine.toml"
    file.write_text('preset = "tiny"\n[model]\nnum_layers = 3\n')
    assert config_for(str(file)).model.num_layers == 3
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen3-30b-a3b"]))
    for source in (folder, folder / "config.json"):
        assert config_for(str(source)).model.d_model == 2048


def test_what_is_not_counted_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nmemory = 8\n[data]\norder = "stream"\n')
    with pytest.raises(ConfigError, match=r"model\.memory cannot be planned"):
        config_for(str(file))


def test_flags_win_over_what_a_model_says(tmp_path: Path) -> None:
    rank = {"lora.rank": Sourced(4, "--lora.rank")}
    file = tmp_path / "mine.toml"
    file.write_text("[lora]\nrank = 2\n")
    for source in ("qwen3-30b-a3b", "tiny", str(file)):
        assert config_for(source, rank).lora.rank == 4
    with pytest.raises(ConfigError, match=r"lora\.rank \(-1\) must not be negative"):
        config_for("tiny", {"lora.rank": Sourced(-1, "--lora.rank")})


def test_an_unknown_model_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'deepseek-v3'.*kimi-k2"):
        config_for("deepseek-v4")


def test_state_follows_the_optimizer() -> None:
    config = config_for("small")
    assert (state_of(config).weight, state_of(config).gradient, state_of(config).shard) == (2, 4, 12)
    narrow = with_values(
        config, {"optim.state": "8bit", "optim.master": "low-bits", "optim.main_grad": "bf16"}
    )
    assert (state_of(narrow).gradient, state_of(narrow).shard) == (2, pytest.approx(2 + 1 / 8 + 2 + 1 / 128))


def test_a_batch_is_near_and_divisible() -> None:
    assert batch_for(63e6, 4096, 2048) == 15360
    assert batch_for(4096 * 512, 4096, 8) == 512
    assert batch_for(4096 * 7, 4096, 8) == 7
    assert batch_for(1, 4096, 8) == 1
    assert batch_for(1e6, 8192, 8) == 128, "1M is meant roughly: 122 would leave 61 microbatches"


@pytest.mark.parametrize(("source", "gpus", "batch"), [("qwen3-30b-a3b", 32, 64), ("5b", 4, 16)])
def test_a_run_takes_every_plan_as_it_is(tmp_path: Path, source: str, gpus: int, batch: int) -> None:
    request, config = request_of(source, gpus, batch), config_for(source)
    plans = search(request).plans
    assert plans
    for plan in plans[::8]:
        file = tmp_path / "best.toml"
        file.write_text(to_toml(planned_config(config, plan, batch, 1024)))
        taken = config_for(str(file))
        assert not list(problems_of(taken))
        assert not list(layout_problems(taken, gpus))
        assert taken.parallel.sizes(gpus, taken.moe.num_experts) == (plan.layout.dp, plan.layout.ep)
        assert taken.optim.accumulate == plan.layout.microbatches
        assert taken.pipeline.recompute == plan.layout.recompute
        if plan.layout.pp > 1:
            layout = lay_out(taken.pipeline, taken.model.num_layers, plan.layout.pp, plan.layout.microbatches)
            assert layout.schedule == plan.layout.schedule
            assert tuple(map(len, layout.stages)) == plan.stages


def test_rules_of_the_configuration_are_asked(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "tiny"\n[placement]\nplanner = "greedy"\n[model]\nnum_dense_layers = 2\n')
    config = config_for(str(file))
    request = request_of(str(file), 2, 16)
    plan = plan_of(request, Layout(pp=2, microbatches=4, samples=4))
    assert rules_of(config, 16, 1024)(plan)


def test_where_nothing_fits_ways_out_are_told() -> None:
    request, config = request_of("qwen3-30b-a3b", 4, 16), config_for("qwen3-30b-a3b")
    found = search(request)
    assert found.nearest is not None
    lines = what_would_fit(request, config, found.nearest)
    assert "nothing fits: the nearest is" in lines[0]
    assert "GiB of" in lines[0]
    assert any("GPUs" in line for line in lines[1:])
    more = next(line for line in lines if "it would fit on" in line)
    assert fits(replace(request, num_gpus=int(more.split()[-2])))
    assert not fits(request)
    assert flags_of({"optim.main_grad": "bf16"}) == "--optim.main-grad bf16"


@pytest.mark.parametrize(
    ("preset", "microbatches", "measured_s", "of_it", "measured_gib", "of_them"),
    [
        ("5b", 1, 0.155, 1.06, 95.7, 1.03),
        ("5b", 4, 0.180, 1.06, 87.5, 1.01),
        ("olmoe-12l", 1, 0.238, 1.09, 104.1, 1.05),
        ("olmoe-12l", 4, 0.260, 1.10, 92.7, 1.02),
    ],
)
def test_our_own_steps_are_as_the_page_says(
    preset: str, microbatches: int, measured_s: float, of_it: float, measured_gib: float, of_them: float
) -> None:
    data = config_for(preset).data
    request = request_of(preset, 1, data.batch_size, "h200", data.seq_len)
    layout = Layout(microbatches=microbatches, samples=data.batch_size // microbatches)
    plan = plan_of(request, layout)
    assert round(plan.time.seconds / measured_s, 2) == of_it
    assert round(plan.peak / 2**30 / measured_gib, 2) == of_them


ONE_GPU = {
    "optim.state": "8bit",
    "optim.master": "low-bits",
    "optim.main_grad": "bf16",
    "optim.clip": "layer",
}


def asked(config: TrainConfig, gpus: int, batch: int) -> Request:
    machine = cluster("h200")
    sizes = sizes_of(config.model, config.moe, config.gate)
    terms = Terms(model=sizes, cluster=machine, sequence=4096, state=state_of(config))
    terms = replace(terms, place=place_of(config, machine))
    return Request(terms=terms, num_gpus=gpus, batch=batch, refuse=rules_of(config, batch, 4096))


@pytest.mark.parametrize(
    ("master", "batch", "measured_s", "of_it"),
    [("none", 8, 2.258, 0.98), ("none", 16, 4.306, 1.0), ("low-bits", 16, 4.507, 0.96)],
)
def test_thirty_billion_parameters_on_one_gpu_are_planned_as_they_ran(
    tmp_path: Path, master: str, batch: int, measured_s: float, of_it: float
) -> None:
    """docs/host-memory.md: 14,500 to 15,200 tokens/s in 110 to 115 GiB."""
    config = with_values(config_for("qwen3-30b-a3b"), {**ONE_GPU, "optim.master": master})
    request = asked(config, 1, batch)
    best = search(request).plans[0]
    ran = plan_of(request, Layout(samples=batch, recompute="full"))
    assert round(ran.time.seconds / measured_s, 2) == of_it
    assert 0.85 * measured_s < best.time.seconds <= ran.time.seconds
    assert max(best.peak, ran.peak) < 0.95 * 141e9
    file = tmp_path / "best.toml"
    file.write_text(to_toml(planned_config(config, best, batch, 4096)))
    taken = config_for(str(file))
    assert not list(problems_of(taken))
    assert (taken.memory.place, taken.memory.share) == ("host", best.layout.host)
    simulated = placing(
        taken, (1, 1, 1), best.room, device("h200"), torch.bfloat16, best.layout.recompute, best.layout.host
    )
    assert best.time.seconds == pytest.approx(simulated.step_s, rel=0.05)
    assert best.peak == pytest.approx(simulated.peak, rel=0.03)


@pytest.mark.parametrize(
    ("clip", "master", "batch", "microbatches"),
    [("layer", "low-bits", 2, 1), ("global", "none", 16, 16)],
)
def test_copies_that_nothing_hides_are_near_the_simulated_ones(
    clip: str, master: str, batch: int, microbatches: int
) -> None:
    changes = {"optim.clip": clip, "data.batch_size": batch, "optim.accumulate": microbatches}
    types = {**ONE_GPU, "optim.master": master, "data.seq_len": 4096}
    config = with_values(config_for("qwen3-30b-a3b"), {**types, **changes})
    layout = Layout(microbatches=microbatches, samples=batch // microbatches, recompute="full")
    plan = plan_of(asked(config, 1, batch), layout)
    simulated = placing(
        config, (1, 1, 1), plan.room, device("h200"), torch.bfloat16, "full", plan.layout.host
    )
    assert plan.time.copies > 0.2
    assert plan.time.seconds == pytest.approx(simulated.step_s, rel=0.1)


@pytest.mark.parametrize(
    ("clip", "microbatches", "gb_s"),
    [
        ("layer", 4, 5),
        *(pytest.param(*way, marks=pytest.mark.full) for way in (("layer", 1, 50), ("layer", 4, 50))),
        pytest.param("global", 4, 5, marks=pytest.mark.full),
    ],
)
def test_inputs_on_the_host_are_counted_and_priced_as_simulated(
    clip: str, microbatches: int, gb_s: float
) -> None:
    """Layer by layer or not, with more state there than fits beside: the wire is one."""
    layers = clip == "layer" and microbatches > 1
    changes = {
        "data.seq_len": 4096,
        "data.batch_size": 32,
        "optim.clip": clip,
        "optim.accumulate": microbatches,
        "pipeline.schedule": "layers" if layers else "auto",
        "pipeline.recompute": "full",
        "memory.place": "host",
        "memory.share": 0.9,
        "memory.activations": "host",
        "memory.copy_gb_s": gb_s,
    }
    config = with_values(config_for("qwen3-30b-a3b"), {**ONE_GPU, "optim.master": "low-bits", **changes})
    request = asked(config, 1, 32)
    machine = replace(request.terms.cluster, host=host_link(config), host_memory=1e12)
    terms = replace(request.terms, cluster=machine, place=place_of(config, machine))
    way = {"schedule": "layers", "stages_per_rank": 48} if layers else {}
    layout = Layout(
        microbatches=microbatches, samples=32 // microbatches, recompute="full", inputs=True, **way
    )
    plan = plan_of(replace(request, terms=terms), layout)
    given = ((1, 1, 1), plan.room, device("h200"), torch.bfloat16, "full", 0.9)
    simulated = placing(config, *given)
    assert plan.time.seconds == pytest.approx(simulated.step_s, rel=0.1)
    assert plan.peak == pytest.approx(simulated.peak, rel=0.01)
    assert plan.host_bytes == pytest.approx(simulated.host_bytes + simulated.input_bytes, rel=0.01)
    stay = with_values(config, {"memory.activations": "device"})
    assert plan.peak < 0.98 * placing(stay, *given).peak
    if gb_s < 10:
        assert plan.time.seconds > 1.05 * placing(stay, *given).step_s
    assert planned_config(config, plan, 32, 4096).memory.activations == "host"


def test_inputs_leave_where_no_layout_fits_without() -> None:
    config = with_values(config_for("qwen3-30b-a3b"), {**ONE_GPU, "optim.master": "low-bits"})

    def plans(gb: float, **changes: object) -> tuple[Plan, ...]:
        keys = {f"memory.{key}": value for key, value in {"weights": "device", **changes}.items()}
        return search(replace(asked(with_values(config, keys), 1, 32), most_bytes=1e9 * gb)).plans

    found = plans(90)
    assert not plans(90, activations="device")
    assert found
    assert all(plan.layout.inputs and plan.layout.recompute == "full" for plan in found)
    assert found[0].layout.title.endswith(", inputs on the host")
    assert max(plan.peak for plan in found) < 90e9
    better, stay = plans(110), plans(110, activations="device")
    assert better[0].time.seconds < 0.95 * stay[0].time.seconds, "larger microbatches fit"
    assert any(not plan.layout.inputs for plan in better), "none leave where they need not"
    assert all(plan.layout.inputs for plan in plans(133, activations="host"))
    assert not plans(90, host_gb=125), "150 GB are needed"


ADAPTED = {"optim.clip": "global", "lora.rank": 16}


@pytest.mark.parametrize(
    ("how", "batch", "microbatches", "layers"),
    [
        (ADAPTED, 16, 1, False),
        (ADAPTED, 2, 1, False),
        (ADAPTED, 16, 4, True),
        *(
            pytest.param(*way, marks=pytest.mark.full)
            for way in (
                ({**ADAPTED, "model.base": "nf4"}, 2, 1, False),
                (ADAPTED, 16, 4, False),
                ({"optim.master": "none"}, 16, 1, False),
                ({"optim.master": "none"}, 4, 1, False),
                ({"optim.master": "none"}, 32, 4, True),
            )
        ),
    ],
)
def test_weights_on_the_host_are_counted_and_priced_as_simulated(
    how: dict[str, Any], batch: int, microbatches: int, layers: bool
) -> None:
    changes = {
        "data.seq_len": 4096,
        "data.batch_size": batch,
        "optim.accumulate": microbatches,
        "pipeline.schedule": "layers" if layers else "auto",
        "pipeline.recompute": "full",
        "memory.weights": "host",
        "memory.activations": "device",
    }
    changes |= {"memory.place": "host", "memory.share": 0.5} if "optim.master" in how else {}
    config = with_values(config_for("qwen3-30b-a3b"), {**ONE_GPU, **how, **changes})
    request = asked(config, 1, batch)
    machine = replace(request.terms.cluster, host_memory=1e12)
    given = {"cluster": machine, "place": place_of(config, machine), "model": sizes_of_run(config)}
    way = {"schedule": "layers", "stages_per_rank": 48} if layers else {}
    layout = Layout(
        microbatches=microbatches, samples=batch // microbatches, recompute="full", weights=True, **way
    )
    plan = plan_of(replace(request, terms=replace(request.terms, **given)), layout)
    simulated = placing(
        config, (1, 1, 1), plan.room, device("h200"), torch.bfloat16, "full", plan.layout.host
    )
    assert plan.time.seconds == pytest.approx(simulated.step_s, rel=0.1)
    assert plan.peak == pytest.approx(simulated.peak, rel=0.03)
    assert plan.host_bytes == pytest.approx(simulated.host_bytes + simulated.weight_bytes, rel=0.01)
    assert planned_config(config, plan, batch, 4096).memory.weights == "host"


def test_experts_leave_where_no_layout_of_one_gpu_fits_without() -> None:
    config = with_values(config_for("qwen3-30b-a3b"), {**ONE_GPU, **ADAPTED})

    def plans(gb: float, gpus: int = 1, **changes: object) -> tuple[Plan, ...]:
        keys = {f"memory.{key}": value for key, value in changes.items()}
        request = replace(asked(with_values(config, keys), gpus, 16), most_bytes=1e9 * gb)
        return search(replace(request, terms=replace(request.terms, model=sizes_of_run(config)))).plans

    found = plans(30)
    assert found
    assert all(plan.layout.weights and plan.layout.recompute == "full" for plan in found)
    assert "experts on the host" in found[0].layout.title
    assert max(plan.peak for plan in found) < 30e9
    assert found[0].layout.schedule == "layers", "microbatches one by one bring all of it anew"
    taken = planned_config(config, found[0], 16, 4096)
    assert not list(problems_of(taken))
    assert not plans(30, weights="device")
    assert not plans(30, host_gb=50), "58 GB are needed"
    assert not any(plan.layout.weights for plan in plans(120))
    assert all(plan.layout.weights for plan in plans(120, weights="host"))
    assert not any(plan.layout.weights for plan in plans(60, gpus=2))


def test_what_would_let_one_gpu_take_it_is_told_with_what_it_comes_to() -> None:
    config = config_for("qwen3-30b-a3b")
    request = asked(config, 1, 16)
    found = search(request)
    assert found.nearest is not None
    lines = what_would_fit(request, config, found.nearest)
    ways = [line for line in lines if "tokens/s/GPU" in line]
    assert "--optim.clip layer --optim.state 8bit: " in ways[-1]
    rates = [float(line.partition(" s a step, ")[2].split()[0].replace(",", "")) for line in ways]
    assert rates == sorted(rates)
    assert rates[-1] > 13_000
    assert "GiB of the host" in ways[-1]
    assert not any("clip" in flags_of(way) for way in ways_out(config, 8))


def test_rules_of_the_configuration_keep_state_on_the_device() -> None:
    config = config_for("qwen3-30b-a3b")
    machine = cluster("h200")
    assert place_of(config, machine).host_room == machine.host_memory
    assert place_of(with_values(config, {"memory.host_gb": 10.0}), machine).host_room == 10e9
    assert place_of(config, machine).state
    assert not place_of(with_values(config, {"placement.planner": "greedy"}), machine).state
    assert place_of(config, cluster("cpu")).host_room == 0
    half = with_values(config, {"memory.place": "host", "memory.share": 0.5, "memory.states": "moments"})
    assert (place_of(half, machine).fixed, place_of(half, machine).each) == (0.5, 8)


def test_gradients_on_the_host_are_not_planned() -> None:
    away = {"memory.main_grad": Sourced("host", "--memory.main-grad")}
    with pytest.raises(ConfigError, match="cannot be planned: the way of gradients is counted by"):
        config_for("qwen3-30b-a3b", away)


def test_types_are_those_of_the_machine(tmp_path: Path) -> None:
    assert config_for("qwen3-30b-a3b").model.dtype == "bfloat16"
    assert config_for("tiny", on_cpu=True).model.dtype == "float32"
    narrow = {"optim.master": Sourced("low-bits", "--optim.master")}
    assert config_for("qwen3-30b-a3b", narrow).optim.master == "low-bits", "a model by name says no type"
    file = tmp_path / "wide.toml"
    file.write_text('[model]\ndtype = "float32"\n')
    with pytest.raises(ConfigError, match=r"model\.dtype = 'float32' cannot be planned for GPUs"):
        config_for(str(file))
