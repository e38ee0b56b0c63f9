"""What state on the host, and updates by layers, cannot go with: said before a run begins."""

from __future__ import annotations

from typing import Any

import pytest

from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.optim.memory_config import MemoryConfig


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory.share": 0.0}, "memory.share (0.0) must be above 0"),
        ({"memory.share": 0.5, "memory.place": "auto"}, "needs memory.place = 'host'"),
        ({"memory.buffers": 0}, "memory.buffers (0) must be at least 1"),
        ({"memory.host_gb": -1.0}, "memory.host_gb (-1.0) must be a number, 0 or more"),
        ({"placement.planner": "greedy"}, "experts that stay where they are"),
        ({"placement.slots_per_rank": 4}, "experts that stay where they are"),
        ({"optim.master": "none", "memory.states": "master"}, "needs master weights"),
        ({"memory.place": "auto", "parallel.pp": 2}, "needs parallel.pp = 1"),
        ({"optim.clip": "layer", "optim.clip_norm": 0.0}, "needs optim.clip_norm"),
        ({"optim.clip": "layer", "model.dtype": "float16"}, "cannot go with model.dtype"),
        ({"optim.clip": "layer", "memory.place": "device", "placement.planner": "greedy"}, "optim.clip"),
    ],
)
def test_what_cannot_be_right_is_said(changes: dict[str, Any], words: str) -> None:
    base = {"memory.place": "host", "model.dtype": "bfloat16", "model.num_layers": 4}
    config = with_values(TrainConfig(), base)
    assert not list(problems_of(config))
    assert [text for text in problems_of(with_values(config, changes)) if words in text]


def test_auto_placement_of_experts_gives_way() -> None:
    config = with_values(TrainConfig(), {"memory.place": "host", "placement.planner": "auto"})
    assert not list(problems_of(config))
    assert not MemoryConfig().travels
    assert config.memory.travels
