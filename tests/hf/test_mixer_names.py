"""Names of tensors of mixers: every element of a file has one place in ours, and shapes are the modules'."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from small_model import MODEL, SETTINGS

from moeclipse.hf.mixer_names import MixerStyle, mixer_tensors
from moeclipse.model.config import Mixer
from moeclipse.model.layer import mixer_of
from moeclipse.model.lora_config import NO_LORA


@pytest.mark.parametrize(
    ("kind", "style", "tensors"),
    [
        ("gated_delta", "fused", 7),
        ("gated_delta", "split", 9),
        ("kimi_delta", "kimi", 15),
        ("short_conv", "split", 3),
    ],
)
def test_all_parameters_have_names_and_all_rows_a_place(kind: Mixer, style: MixerStyle, tensors: int) -> None:
    config = replace(MODEL, mixers=(kind,), delta_key_dim=3, delta_value_dim=5, conv_width=3)
    table = dict(mixer_tensors(kind, style, "", "layer.", config))
    shapes = {name: tuple(p.shape) for name, p in mixer_of(config, SETTINGS, NO_LORA).named_parameters()}
    assert {name: tensor.shape for name, tensor in table.items()} == shapes
    parts = [part for tensor in table.values() for part in tensor.parts]
    theirs = {part.key: part.shape for part in parts}
    assert len(theirs) == tensors
    for key, shape in theirs.items():
        rows = [row for part in parts if part.key == key for row in range(part.first, part.first + part.rows)]
        assert sorted(rows) == list(range(max(shape[0], prod(shape) // shape[-1] if shape[0] == 1 else 0)))
