"""From names and files to a question, from a plan to a configuration that a run takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moeclipse.core.config import Sourced, problems_of, to_toml, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.cost.cluster import cluster
from moeclipse.pipeline.overlap import lay_out
from moeclipse.plan.layouts import Request, plan_of, search
from moeclipse.plan.step import Layout, Terms
from moeclipse.train.config import layout_problems
from moeclipse.train.predict.model_sizes import sizes_of
from moeclipse.train.predict.plan_config import (
    batch_for,
    config_for,
    fits,
    flags_of,
    planned_config,
    rules_of,
    state_of,
    what_would_fit,
)
from moeclipse.train.predict.shapes import SHAPES
from moeclipse.train.presets import load


def request_of(source: str, gpus: int, batch: int, device: str = "h100", sequence: int = 1024) -> Request:
    config = config_for(source)
    sizes = sizes_of(config.model, config.moe, config.gate)
    terms = Terms(model=sizes, cluster=cluster(device), sequence=sequence)
    refuse = rules_of(config, batch, sequence)
    return Request(terms=terms, num_gpus=gpus, batch=batch, state=state_of(config), refuse=refuse)


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
    assert (state_of(narrow).gradient, state_of(narrow).shard) == (2, 4)


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
        ("5b", 1, 0.155, 1.10, 95.7, 1.04),
        ("5b", 4, 0.180, 1.10, 87.5, 1.02),
        ("olmoe-12l", 1, 0.238, 1.13, 104.1, 1.06),
        ("olmoe-12l", 4, 0.260, 1.14, 92.7, 1.03),
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
