"""Options that are wrong raise, and name what is right."""

from __future__ import annotations

from typing import Any

import pytest

from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.layer import MoE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu"}, "did you mean 'relu2'"),
        ({"gate": GateConfig(kind="softmx")}, "did you mean 'softmax'"),  # type: ignore[arg-type]
        ({"gate": GateConfig(choose="topp")}, "did you mean 'top_p'"),  # type: ignore[arg-type]
        ({"gate": GateConfig(overflow="padd")}, "did you mean 'pad'"),  # type: ignore[arg-type]
        ({"exchange": {"schedule": "smrt"}}, "did you mean 'smart'"),
        ({"exchange": {"transport": "dirct"}}, "did you mean 'direct'"),
        ({"exchange": {"chunks": 2.5}}, "chunks = 2.5: expected a whole number"),
        ({"expert_tp": "shard"}, "did you mean 'sharded'"),
        ({"top_k": 2.0}, "expected a whole number"),
    ],
)
def test_a_wrong_value_is_refused_with_the_nearest_right_one(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoE(8, 8, 4, **options)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_top_k_beside_a_gate_that_says_otherwise_is_refused(top_k: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"top_k \({top_k}\) and gate.top_k \(4\).*GateConfig\(top_k={top_k}\)"
    ):
        MoE(8, 8, 4, top_k, gate=GateConfig(top_k=4))


def test_top_k_beside_a_gate_that_says_the_same_is_fine() -> None:
    assert MoE(8, 8, 4, 4, gate=GateConfig(top_k=4)).gate.config.top_k == 4
    assert MoE(8, 8, 4, gate=GateConfig(top_k=4)).gate.config.top_k == 4
    assert MoE(8, 8, 4, 3).gate.config.top_k == 3
    assert MoE(8, 8, 4).gate.config.top_k == 2
