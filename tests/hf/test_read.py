"""What is refused, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import COMMON, TINY

from moeclipse.core.errors import CheckpointError
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
        CheckpointError, match=r"model_type 'llama4' is no family that we read .mixtral, qwen2"
    ):
        read_config({"model_type": "llama4"}, "here")
    with pytest.raises(CheckpointError, match="did you mean qwen3_moe"):
        read_config({"model_type": "qwen3moe"}, "here")
    with pytest.raises(CheckpointError, match=r"lacks hidden_size, .*; take the whole file"):
        read_config({"model_type": "mixtral"}, "here")
