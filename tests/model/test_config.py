"""Shapes of a model: each mistake is named, with the value and what would do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_model import MLA, MODEL

from moeclipse.model.config import ModelConfig


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "model.num_kv_heads (3) must divide model.num_heads (4)"),
        ({"head_dim": 5}, "model.head_dim (5) must be even"),
        ({"num_dense_layers": 3}, "model.num_dense_layers (3) must be between 0 and model.num_layers (2)"),
        ({"attention": "mla", "qk_rope_head_dim": 3}, "model.qk_rope_head_dim (3) must be even"),
        ({"d_model": 0}, "model.d_model (0) must be at least 1"),
        ({"attention": "mla", "kv_lora_rank": 0}, "model.kv_lora_rank (0) must be at least 1"),
        ({"attention": "mla", "q_lora_rank": -1}, "model.q_lora_rank (-1) must not be negative; 0 is full"),
        ({"norm_eps": 0.0}, "model.norm_eps (0.0) must be positive"),
        ({"window_rope_base": 70.0}, "model.window_rope_base (70.0) needs model.windows"),
        ({"window_rope_base": -1.0}, "model.window_rope_base (-1.0) must not be negative"),
        ({"window_rope_dim": 4}, "model.window_rope_dim (4) needs a model.window_rope_base"),
        (
            {"windows": (3,), "window_rope_base": 70.0, "window_rope_dim": 5},
            "model.window_rope_dim (5) must be even and at most model.head_dim (6)",
        ),
        ({"memory": -1}, "model.memory (-1) must not be negative; 0 is no memory"),
    ],
)
def test_shapes_that_cannot_be(change: dict, message: str) -> None:
    (problem,) = replace(MODEL, **change).problems()
    assert message in problem


def test_as_it_comes_nothing_is_wrong() -> None:
    for config in (ModelConfig(), MODEL, MLA):
        assert not list(config.problems())


def test_keys_of_the_other_attention_do_not_matter() -> None:
    assert not list(replace(MLA, num_kv_heads=3, head_dim=5).problems())
    assert not list(replace(MODEL, kv_lora_rank=0, qk_rope_head_dim=3).problems())


def test_rotary_position_turns_the_components_it_is_given() -> None:
    assert MODEL.rope_width == MODEL.head_dim
    assert MLA.rope_width == MLA.qk_rope_head_dim


@pytest.mark.parametrize("layers", [1, 2, 3, 10**15])
def test_kinds_of_layers_are_known_without_a_look_at_each(layers: int) -> None:
    """A number of layers that nobody can have is refused, after checks that ask for kinds."""
    mixed = replace(MODEL, num_layers=layers, mixers=("gated_delta", "attention", "gated_delta"))
    assert mixed.held_mixers == {mixed.mixer_of(layer) for layer in range(min(layers, 9))}
    assert replace(mixed, mixers=()).held_mixers == {"attention"}
