"""Every family's configuration is written as well as read, and what no family holds is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_models import COMMON, TINY

from moeclipse.core.config import to_flat
from moeclipse.core.errors import CheckpointError, ConfigError
from moeclipse.hf.compose import canonical, compose, named
from moeclipse.hf.families import FAMILIES
from moeclipse.hf.folder import Shapes
from moeclipse.hf.read import read_config
from moeclipse.train.presets import load, preset_names

BY_OTHERS = {
    *("head_dim", "rope_theta", "partial_rotary_factor", "num_nextn_predict_layers"),
    *("layer_types", "swiglu_alpha", "swiglu_limit", "attention_bias", "num_experts", "hidden_act"),
}
"""Keys that a class reads without having them, or that older readers know."""


def values_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """Of a tiny model, in our keys."""
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **TINY[model_type], **changes})
    read = read_config(json.loads(config.to_json_string()), "tiny")
    return to_flat(Shapes.of(read.values))


@pytest.mark.parametrize("model_type", TINY)
def test_a_family_is_written_as_it_is_read(model_type: str) -> None:
    values = values_of(model_type)
    fit = compose(values, context=64, family=model_type)
    assert not fit.obstacles
    back = to_flat(Shapes.of(read_config(fit.config, "written").values))
    wanted, found = canonical(values), canonical(back)
    assert {key for key in wanted if wanted[key] != pytest.approx(found[key])} <= {"model.from_hf"}
    known = transformers.AutoConfig.for_model(model_type).to_dict()
    unknown = fit.config.keys() - known.keys()
    assert unknown <= BY_OTHERS, f"keys that no {model_type} has"


@pytest.mark.parametrize("name", preset_names())
def test_presets_belong_to_families(name: str) -> None:
    config = load(preset=name)
    shapes = Shapes(model=config.model, moe=config.moe, gate=config.gate)
    expected = {"olmoe-12l": "olmoe", "qwen3-moe-8l": "qwen3_moe", "deepseek-v2-lite-9l": "deepseek_v2"}
    expected["deepseek-v3-tiny"] = "deepseek_v3"
    assert compose(to_flat(shapes), context=64).family.model_type == expected.get(name, "mixtral")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"moe.activation": "geglu"}, "moe.activation = 'geglu' (it has 'swiglu')"),
        ({"gate.capacity_factor": 1.25}, "gate.capacity_factor = 1.25 (it has 0.0)"),
        ({"gate.choose": "top_p"}, "gate.choose = 'top_p' (it has 'top_k')"),
        ({"model.memory": 8}, "model.memory = 8 (it has 0)"),
        ({"model.norms": "both"}, "model.norms = 'both' (it has 'before')"),
        ({"gate.bias_rate": 0.1, "model.qk_norm": "head"}, "gate.bias_rate = 0.1 (it has 0.0)"),
        ({"model.windows": (4, 8)}, "model.windows"),
    ],
)
def test_what_stands_in_the_way_is_told(change: dict[str, Any], told: str) -> None:
    values = values_of("mixtral", sliding_window=None) | change
    with pytest.raises(CheckpointError, match="no family holds runs/a; the nearest is ") as caught:
        compose(values, context=64, where="runs/a")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gates_of_training_leave_as_what_they_are_outside_of_it() -> None:
    values = values_of("mixtral", sliding_window=None)
    for kind in ("gshard", "noisy"):
        assert compose(values | {"gate.kind": kind}, context=64).family.model_type == "mixtral"
    switch = values | {"gate.kind": "switch", "gate.top_k": 1, "model.qk_norm": "head"}
    fit = compose(switch, context=64)
    assert (fit.family.model_type, fit.config["norm_topk_prob"]) == ("qwen3_moe", False)
    assert fit.config["num_experts_per_tok"] == 1
    dropless = values | {"gate.capacity_factor": 1.5, "gate.eval_capacity_factor": 0.0}
    assert compose(dropless, context=64).family.model_type == "mixtral"
    with pytest.raises(CheckpointError, match=r"capacity_factor = 2\.0"):
        compose(dropless | {"gate.eval_capacity_factor": 2.0}, context=64)


def test_a_family_may_be_named(tmp_path: Path) -> None:
    assert named("Qwen3-MoE") is named("qwen3_moe") is named("Qwen3MoeForCausalLM")
    with pytest.raises(ConfigError, match="did you mean mixtral"):
        named("mixtrall")
    with pytest.raises(
        CheckpointError, match=r"Qwen3-MoE .qwen3_moe. does not hold the model: model.qk_norm"
    ):
        compose(values_of("mixtral", sliding_window=None), context=64, family="qwen3_moe")
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)
