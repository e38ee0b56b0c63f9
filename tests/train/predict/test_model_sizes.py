"""A configuration's sizes: the same parameters, the same work as the model itself counts."""

from __future__ import annotations

import pytest

from moeclipse.model.count import count_parameters
from moeclipse.model.flops import LeastWork
from moeclipse.train.predict.model_sizes import sizes_of
from moeclipse.train.presets import load, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_parameters_and_flops_are_those_of_the_model(name: str) -> None:
    config = load(preset=name)
    sizes = sizes_of(config.model, config.moe, config.gate)
    counted, _ = count_parameters(config.model, config.moe, config.gate)
    assert sizes.parameters == pytest.approx(counted, rel=0.001)
    work = LeastWork.of(config.model, config.moe, config.gate, tokens=256, seq_len=256)
    assert 256 * sizes.flops_per_token(256) == pytest.approx(work.flops, rel=0.001)
