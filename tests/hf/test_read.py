"""What is refused, before a weight is read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import COMMON, TINY

from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.hf.folder import Shapes
from moeclipse.hf.read import read_config


def theirs(model_type: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model, as it is saved."""
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **TINY[model_type], **changes})
    config.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def read(model_type: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return read_config(theirs(model_type, tmp_path, **changes), "here").values


@pytest.mark.parametrize(
    ("model_type", "changes", "text"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "another activation than silu .hidden_act = 'gelu'."),
        ("mixtral", {"router_jitter_noise": 0.1}, "noise on the router's input"),
        ("deepseek_v3", {"attention_bias": True}, "biases in latent attention"),
        ("ernie4_5_moe", {"use_bias": True}, "biases in all projections"),
        ("granitemoe", {"attention_dropout": 0.1}, "dropout in attention"),
    ],
)
def test_what_we_do_not_have_is_named(
    model_type: str, changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"here: .* with {text}.* is not supported"):
        read(model_type, tmp_path, **changes)


def test_several_needs_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"activation than silu.*; dropout in attention"):
        read("olmoe", tmp_path, hidden_act="relu", attention_dropout=0.2)


def test_unknown_families_are_refused_with_those_we_know() -> None:
    with pytest.raises(
        CheckpointError, match=r"model_type 'llama7' is no family that we read .mixtral, qwen2"
    ):
        read_config({"model_type": "llama7"}, "here")
    with pytest.raises(CheckpointError, match="did you mean qwen3_moe"):
        read_config({"model_type": "qwen3moe"}, "here")
    with pytest.raises(CheckpointError, match=r"lacks hidden_size, .*; take the whole file"):
        read_config({"model_type": "mixtral"}, "here")


HOSTILE: list[tuple[str, Any, str]] = [
    ("num_hidden_layers", "3", r"num_hidden_layers must be a whole number from 1 to 16384, not '3'"),
    ("num_hidden_layers", 10**12, r"whole number from 1 to 16384, not 1000000000000"),
    ("num_hidden_layers", True, r"not True"),
    ("num_attention_heads", 0, r"num_attention_heads must be a whole number from 1"),
    ("hidden_size", -5, r"hidden_size .* not -5"),
    ("hidden_size", [64], r"hidden_size .* not \[64\]"),
    ("hidden_size", "x" * 10_000, r"not 'xxx"),
    ("vocab_size", 1.5, r"vocab_size .* not 1.5"),
    ("rms_norm_eps", float("nan"), r"rms_norm_eps must be a finite number, not nan"),
    ("rms_norm_eps", 10**400, r"rms_norm_eps must be a finite number"),
    ("rms_norm_eps", "1e-5", r"rms_norm_eps must be a finite number"),
    ("initializer_range", {}, r"initializer_range must be a finite number"),
    ("hidden_act", 7, r"hidden_act must be a name, not 7"),
    ("rope_parameters", "yarn", r"rope_parameters must be a table"),
    ("rope_parameters", {"rope_type": "yarn", "factor": "4"}, r"rope_parameters.factor must be a finite"),
    ("rope_parameters", {"rope_type": ["yarn"]}, r"rotary|no Qwen3-MoE"),
    ("rope_parameters", {"rope_type": "llama3", "factor": 2.0}, r"lacks low_freq_factor"),
    ("mlp_only_layers", 3, r"mlp_only_layers must be a list of int"),
    ("layer_types", "full_attention", r"layer_types must be a list of str"),
    ("decoder_sparse_step", 0, r"decoder_sparse_step must be a whole number from 1"),
    ("num_experts", 10**9, r"asks for \d+ experts in all layers; there are at most 262144"),
    ("num_experts", None, r"lacks num_experts; take the whole file of the model"),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    kinds = ("qwen3_moe", "deepseek_v3", "ernie4_5_moe", "granitemoe", "gpt_oss")
    return {kind: theirs(kind, tmp_path_factory.mktemp(kind)) for kind in kinds}


@pytest.mark.parametrize(("key", "value", "text"), HOSTILE)
def test_what_no_model_can_be_is_named(
    sound: dict[str, dict[str, Any]], key: str, value: Any, text: str
) -> None:
    told = sound["qwen3_moe"] | {key: value}
    told = {name: one for name, one in told.items() if name != "num_local_experts"}
    with pytest.raises(CheckpointError, match=text) as caught:
        read_config(told, "here")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_no_value_of_any_key_is_a_traceback(sound: dict[str, dict[str, Any]]) -> None:
    values = [
        None,
        0,
        -1,
        10**12,
        1e308,
        "x",
        "",
        [],
        {},
        [1],
        {"a": 1},
        True,
        float("inf"),
        float("nan"),
        [[]],
    ]
    for kind, told in sound.items():
        for key in told:
            for value in values:
                with contextlib.suppress(CheckpointError, ConfigError):
                    Shapes.of(read_config(told | {key: value}, kind).values)
            with contextlib.suppress(CheckpointError, ConfigError):
                Shapes.of(read_config({k: v for k, v in told.items() if k != key}, kind).values)


def test_keys_that_are_not_ours_may_be_anything(sound: dict[str, dict[str, Any]]) -> None:
    strange = {"time_step_limit": [0.0, float("inf")], "auto_map": {"a": None}, "finetuned": 10**40}
    assert read_config(sound["qwen3_moe"] | strange, "here").values
