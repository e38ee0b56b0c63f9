"""Keys that follow from several of theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import COMMON, TINY

from moeclipse.hf.derive import Missing, bases_of_layers, dense_of_qwen, grouped, laguna
from moeclipse.hf.read import read_config


def theirs(model_type: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model, as it is saved."""
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **TINY[model_type], **changes})
    config.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


def read(model_type: str, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return read_config(theirs(model_type, tmp_path, **changes), "here").values


def test_windows_and_dense_layers(tmp_path: Path) -> None:
    values = read("qwen2_moe", tmp_path, num_hidden_layers=5, mlp_only_layers=[1, 3])
    assert values["model.windows"] == (3, 0, 0, 0, 0), "even layers below max_window_layers"
    assert values["model.dense_layers"] == (1, 3)
    values = read("qwen3_moe", tmp_path, num_hidden_layers=5, decoder_sparse_step=2)
    assert values["model.dense_layers"] == (0, 2, 4)
    assert values["model.windows"] == ()
    assert read("gpt_oss", tmp_path, num_hidden_layers=4)["model.windows"] == (3, 0, 3, 0)
    assert read("ernie4_5_moe", tmp_path, num_hidden_layers=4)["model.dense_layers"] == (0,)
    assert read("mixtral", tmp_path)["model.windows"] == (3,)
    assert read("mixtral", tmp_path, sliding_window=None)["model.windows"] == ()


def test_what_families_share() -> None:
    told = {"num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": None}
    assert grouped(told) == {"model.attention": "gqa", "model.num_kv_heads": 4, "model.head_dim": 8}
    assert dense_of_qwen({"decoder_sparse_step": 1, "num_hidden_layers": 2}) == {"model.dense_layers": ()}


def test_a_base_for_each_layer() -> None:
    told = {"num_hidden_layers": 4, "layer_rope_theta": [0, 70, 70, 500.0]}
    values = bases_of_layers(told, (0, 3, 3, 0))
    assert values == {
        "model.rope_layers": (False, True, True, True),
        "model.rope_base": 500.0,
        "model.window_rope_base": 70.0,
    }
    assert bases_of_layers({**told, "layer_rope_theta": [70] * 4}, (0, 3, 3, 0)) == {
        "model.rope_layers": (),
        "model.rope_base": 70.0,
    }
    for bases in ([500, 70, 71, 500], [500, 70, 70, 501]):
        with pytest.raises(Missing, match="differs from layer to layer"):
            bases_of_layers({**told, "layer_rope_theta": bases}, (0, 3, 3, 0))
    with pytest.raises(Missing, match="rotary scaling"):
        bases_of_layers({**told, "rope_parameters": {"rope_type": "yarn"}}, (0, 3, 3, 0))
    with pytest.raises(ValueError, match="zip"):
        bases_of_layers({**told, "layer_rope_theta": [70]}, (0, 3, 3, 0))


def test_heads_of_laguna_are_alike() -> None:
    told = {"num_attention_heads": 4, "hidden_size": 16, "gating": True, "num_hidden_layers": 2}
    assert laguna(told)["model.attention_gate"] == "head_softplus"
    assert laguna({**told, "gating": "per-element"})["model.attention_gate"] == "component_softplus"
    with pytest.raises(Missing, match="heads that differ"):
        laguna({**told, "num_attention_heads_per_layer": [4, 8]})
    with pytest.raises(Missing, match="another gate"):
        laguna({**told, "gating": False})
