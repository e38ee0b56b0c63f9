"""Presets: they are whole, as large as they say, and merge with files and flags in the right order."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeclipse.core.config import flag_layer
from moeclipse.core.errors import ConfigError
from moeclipse.train.config import TrainConfig
from moeclipse.train.presets import load, merge, preset_names, preset_table


def parameters(config: TrainConfig, experts: int) -> int:
    """Parameters by formula, with so many routed experts per MoE layer (gqa attention)."""
    model, moe = config.model, config.moe
    attention = model.d_model * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    norms = 2 * model.d_model
    gate = model.d_model * moe.num_experts
    expert = 3 * model.d_model * moe.d_ff
    layer = attention + norms + gate + expert * (experts + moe.num_shared_experts)
    dense = attention + norms + 3 * model.d_model * model.d_ff
    vocabulary = model.vocab_size * model.d_model * (1 if model.tie_embeddings else 2)
    num_moe = model.num_layers - model.num_dense_layers
    return num_moe * layer + model.num_dense_layers * dense + vocabulary + model.d_model


def test_names() -> None:
    small = ["5b", "deepseek-v2-lite-9l", "deepseek-v3-tiny"]
    assert preset_names() == [*small, "olmoe-12l", "qwen3-moe-8l", "small", "tiny"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_valid(name: str) -> None:
    config = load(preset=name)
    assert config.parallel.sizes(1, config.moe.num_experts) == (1, 1)
    assert config.parallel.sizes(2, config.moe.num_experts) == (1, 2)


def test_5b_has_about_five_billion_parameters_half_a_billion_active() -> None:
    config = load(preset="5b")
    assert (config.model.num_layers, config.model.d_model) == (12, 2048)
    assert (config.moe.num_experts, config.moe.d_ff, config.gate.top_k) == (128, 512, 8)
    assert 4.9e9 < parameters(config, 128) < 5.1e9
    assert 0.49e9 < parameters(config, 8) < 0.52e9
    # bf16 weights, fp32 main_grad, fp32 master weights and two moments must fit beside activations.
    assert parameters(config, 128) * (2 + 4 + 12) < 110 * 2**30


@pytest.mark.parametrize("name", ["tiny", "small", "5b"])
def test_the_formula_counts_what_the_model_has(name: str) -> None:
    from moeclipse.model.count import count_parameters

    config = load(preset=name)
    counted = count_parameters(config.model, config.moe, config.gate)
    assert counted == (parameters(config, config.moe.num_experts), parameters(config, config.gate.top_k))


@pytest.mark.parametrize("name", ["olmoe-12l", "qwen3-moe-8l", "deepseek-v2-lite-9l"])
def test_shapes_of_known_models_train_on_140_gb(name: str) -> None:
    from moeclipse.model.count import count_parameters

    config = load(preset=name)
    everything, active = count_parameters(config.model, config.moe, config.gate)
    assert 5.0e9 < everything < 5.7e9
    assert 1.0e9 < active < 1.2e9
    assert everything * (2 + 4 + 12) < 96 * 2**30
    assert config.data.batch_size * config.data.seq_len == 16384


def test_tiny_and_small_are_as_large_as_their_headers_say() -> None:
    assert parameters(load(preset="tiny"), 8) == pytest.approx(3.4e6, rel=0.02)
    assert parameters(load(preset="small"), 32) == pytest.approx(208e6, rel=0.02)


def test_deepseek_has_every_part() -> None:
    config = load(preset="deepseek-v3-tiny")
    assert config.model.attention == "mla"
    assert (config.model.num_dense_layers, config.moe.num_shared_experts) == (1, 1)
    assert (config.gate.kind, config.gate.num_groups, config.gate.top_groups) == ("sigmoid", 4, 2)
    assert (config.gate.bias_rate, config.gate.balance_loss) == (0.001, 0.0)


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "small"\n[moe]\nnum_experts = 64\n[data]\nseq_len = 64\n')
    flags, _ = flag_layer(TrainConfig, ["--data.seq-len", "32"])
    merged = merge(file, None, flags)
    config = merged.built.checked()
    assert merged.preset == "small"
    assert (config.model.d_model, config.moe.num_experts, config.data.seq_len) == (512, 64, 32)


def test_a_preset_on_the_command_line_replaces_the_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('preset = "small"\n')
    assert merge(file, "tiny").built.config == load(preset="tiny")


def test_a_file_without_preset_stands_on_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[run]\nsteps = 7\n")
    merged = merge(file)
    assert merged.preset == ""
    assert merged.built.config.run.steps == 7
    assert merged.built.config.model == TrainConfig().model


def test_without_anything_it_is_tiny() -> None:
    assert merge().preset == "tiny"


@pytest.mark.parametrize("given", ["tinny", 3])
def test_an_unknown_preset_is_one_problem_among_others(tmp_path: Path, given: object) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"preset = {given!r}\n[run]\nstep = 3\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert len(caught.value.problems) == 2
    head = f"preset = {given!r}: expected one of {', '.join(preset_names())}"
    assert caught.value.problems[0].startswith(head)


def test_preset_table_of_nothing() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        preset_table("tinyy")
