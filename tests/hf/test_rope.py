"""Rotary position in configurations of both generations."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import LLAMA3, YARN
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeclipse.core.config import with_values
from moeclipse.hf.rope import read_rope
from moeclipse.model.config import ModelConfig
from moeclipse.model.rotary import Rotary
from moeclipse.testing.compare import difference

HEADS = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    "given",
    [
        LLAMA3,
        YARN,
        {**YARN, "truncate": False, "mscale": None, "beta_fast": 16},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
        {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
    ],
    ids=["llama3", "yarn", "yarn-untruncated", "linear", "dynamic"],
)
@pytest.mark.parametrize("length", [40, 100])
def test_angles_are_those_of_transformers(given: dict, length: int) -> None:
    config = LlamaConfig(**HEADS, rope_parameters=dict(given))
    seq_len = length if given["rope_type"] == "dynamic" else None
    expected, magnitude = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, torch.device("cpu"), seq_len)
    values, needs = read_rope({**HEADS, "rope_parameters": given}, 1e4)
    assert not needs
    keys = {key.removeprefix("model."): value for key, value in values.items()}
    rotary = Rotary.of(with_values(ModelConfig(head_dim=16), keys))
    assert difference(rotary.frequencies(length, torch.device("cpu")), expected) < 1e-6
    assert rotary.factor_on_table == pytest.approx(magnitude)


def test_the_older_form() -> None:
    old = {**HEADS, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {**HEADS, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert read_rope(old, 1e4) == read_rope(new, 1e4)
    assert read_rope({**HEADS, "rope_theta": 5e5, "rope_scaling": None}, 1e4)[0] == {
        "model.rope_base": 5e5,
        "model.rope_scaling": "none",
    }
    assert read_rope(HEADS, 7.0)[0]["model.rope_base"] == 7.0


def test_part_of_a_head_and_latent_attention() -> None:
    assert read_rope({**HEADS, "partial_rotary_factor": 0.5}, 1e4)[0]["model.rope_dim"] == 8
    latent = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 5, "rope_parameters": YARN}
    values, _ = read_rope({**HEADS, **latent}, 1e4)
    assert "model.rope_dim" not in values
    mscale = 0.1 * 0.5 * math.log(4) + 1
    assert values["model.attention_scale"] == pytest.approx(9**-0.5 * mscale**2)
    assert values["model.rope_magnitude"] == pytest.approx((0.1 * 0.7 * math.log(4) + 1) / mscale)


def test_what_we_do_not_have() -> None:
    assert read_rope({**HEADS, "rope_scaling": {"type": "longrope"}}, 1e4)[1] == [
        "rotary scaling of type 'longrope'"
    ]
    nested = {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}
    assert read_rope({**HEADS, "rope_parameters": nested}, 1e4)[1] == [
        "rotary position that differs from layer to layer"
    ]


def test_layers_with_a_window_have_angles_of_their_own() -> None:
    full = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}
    near = {"rope_type": "default", "rope_theta": 70.0, "partial_rotary_factor": 0.5}
    both = {**HEADS, "layer_types": ["sliding_attention", "full_attention"]}
    both["rope_parameters"] = {"full_attention": full, "sliding_attention": near}
    values, needs = read_rope(both, 1e4, of_windows=True)
    assert not needs
    assert values["model.rope_base"] == 5e5
    assert values["model.rope_scaling"] == "yarn"
    assert (values["model.window_rope_base"], values["model.window_rope_dim"]) == (70.0, 8)
    assert read_rope(both, 1e4)[1] == ["rotary position that differs from layer to layer"]
    both["rope_parameters"] = {"full_attention": near, "sliding_attention": full}
    assert read_rope(both, 1e4, of_windows=True)[1] == ["rotary scaling in layers with a window (yarn)"]
    both["rope_parameters"] = {"full_attention": near, "sliding_attention": near}
    assert "model.window_rope_base" not in read_rope(both, 1e4, of_windows=True)[0], "all turn alike"
