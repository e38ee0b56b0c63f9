"""Named models have the number of parameters that they are known by."""

from __future__ import annotations

import pytest

from moeclipse.model.count import count_parameters
from moeclipse.train.predict.plan_config import config_for
from moeclipse.train.predict.shapes import SHAPES, shape_values

KNOWN = {
    "deepseek-v3": (671, 37),
    "kimi-k2": (1026, 32),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "gpt-oss-120b": (116.8, 5.7),
    "mixtral-8x22b": (141, 39),
    "glm-4.5": (355, 32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_the_known_ones(name: str) -> None:
    config = config_for(name)
    whole, active = count_parameters(config.model, config.moe, config.gate)
    assert whole / 1e9 == pytest.approx(KNOWN[name][0], rel=0.01)
    assert active / 1e9 == pytest.approx(KNOWN[name][1], rel=0.06)


def test_values_are_keys_of_a_configuration() -> None:
    values = shape_values("deepseek-v3")
    assert values["model.attention"] == "mla"
    assert (values["gate.num_groups"], values["gate.top_groups"]) == (8, 4)
    assert shape_values("gpt-oss-120b")["model.windows"][:2] == (128, 0)
