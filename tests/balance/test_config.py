"""The [placement] section: what is legal, what is refused, and when plans are due."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeclipse.balance.config import PlacementConfig
from moeclipse.balance.placement import Placement
from moeclipse.core.config import from_table, problems_of, to_toml, with_values
from moeclipse.core.errors import ConfigError
from moeclipse.core.toml import parse_toml
from moeclipse.train.config import TrainConfig

SEED = "[[0,3],[1,2],[1,2],[0,3]]"
SEED_PLACEMENT = Placement(((0, 3), (1, 2), (1, 2), (0, 3)))


def configure(**values: object) -> TrainConfig:
    return with_values(TrainConfig(), {"moe.num_experts": 4, **values})


def test_the_table_of_the_seed_is_legal(tmp_path: Path) -> None:
    text = f"[moe]\nnum_experts = 4\n[placement]\nslots = {SEED}\n"
    config = from_table(TrainConfig, parse_toml(text, "test"), "test")
    assert config.placement.start(4, 4, 7) == SEED_PLACEMENT
    assert config.expert_ranks == 4
    assert from_table(TrainConfig, parse_toml(to_toml(config), "again"), "again") == config
    file = tmp_path / "table.json"
    file.write_text(SEED)
    for given in (SEED, str(file)):
        assert configure(**{"placement.slots": given}).placement.start(4, 4, 0) == SEED_PLACEMENT
    file.write_text('{"layers": [[[0, 1], [2, 3]], {"slots": [[0, 1, 2], [3, 0]], "primary": [1, 0, 0, 1]}]}')
    config = configure(**{"placement.slots": str(file)})
    assert config.placement.start(4, 2, 1).primary == (1, 0, 0, 1)
    with pytest.raises(ConfigError, match=r"placement\.slots holds 2 layers, but the model has at least 3"):
        config.placement.start(4, 2, 2)


BAD = {
    "unknown": ([[0, 4], [1, 2, 3]], "placement.slots: rank 0 is given expert 4, but experts are 0 to 3"),
    "twice": ([[0, 0], [1, 2, 3]], "placement.slots: rank 0 is given expert 0 2 times"),
    "nowhere": ([[0], [1, 2]], "placement.slots: no rank holds expert 3"),
    "ranks": ([[0, 1, 2, 3]], "placement.slots: the placement speaks of 1 ranks, but there are 2"),
    "slots": ([[0, 1, 2, 3], [1]], "placement.slots: rank 0 is given 4 slots, but has 3"),
    "no table": ("none.json", "placement.slots: there is no placement file none.json"),
    "no json": ("[[0, 1", "placement.slots: a placement must be JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_with_the_reason(name: str) -> None:
    slots, reason = BAD[name]
    given = slots if isinstance(slots, str) else tuple(map(tuple, slots))
    config = configure(**{"placement.slots": given, "placement.slots_per_rank": 3, "parallel.ep": 2})
    problems = list(problems_of(config))
    assert any(problem.startswith(reason) for problem in problems), problems


def test_all_problems_come_together() -> None:
    values = {
        "placement.slots": ((0, 9), (1, 1), (2,)),
        "placement.every": 0,
        "placement.max_moved": 1.5,
        "integrity.every": -1,
        "placement.planner": "random",
        "gate.max_leaving": 0.5,
        "parallel.ep": 2,
    }
    problems = "\n".join(problems_of(configure(**values)))
    for part in ("expert 9", "expert 1 2 times", "no rank holds expert 3", "speaks of 3 ranks", "every (0)"):
        assert part in problems, problems
    for part in ("max_moved (1.5)", "integrity.every (-1)", "gate.max_leaving (0.5) needs placement.planner"):
        assert part in problems, problems
    both = {"placement.slots": ((0, 1, 2, 3), (0,)), "gate.max_leaving": 0.5}
    assert "experts without replicas" in " ".join(problems_of(configure(**both)))
    few = configure(**{"placement.slots_per_rank": 1, "parallel.ep": 2})
    assert list(problems_of(few)) == [
        "placement.slots_per_rank (1) is too small: "
        "4 experts (moe.num_experts) on 2 ranks (parallel.ep) need 2",
    ]


def test_plans_come_soon_at_first_and_then_regularly() -> None:
    config = PlacementConfig(planner="incremental", start_step=10, every=50)
    assert [step + 1 for step in range(230) if config.due(step)] == [10, 30, 70, 120, 170, 220]
    config = PlacementConfig(planner="incremental")
    assert [step + 1 for step in range(45) if config.due(step)] == [10, 20, 30, 40], "as it comes"
    config = PlacementConfig(planner="random", start_step=20, every=5)
    assert [step + 1 for step in range(36) if config.due(step)] == [20, 25, 30, 35]


def test_planners_begin_with_slots_to_spare() -> None:
    config = PlacementConfig(planner="incremental")
    assert config.start(16, 4, 0).slots[0] == (0, 1, 2, 3, -1)
    assert config.start(2, 4, 0).slots == ((0, -1), (1, -1), (-1, -1), (-1, -1))
    assert PlacementConfig().start(5, 2, 0) == Placement.contiguous(5, 2)
    assert not PlacementConfig().in_use
    assert PlacementConfig(slots_per_rank=3).start(5, 2, 0).slots == ((0, 1, 2), (3, 4, -1))


def test_more_ranks_than_experts_need_replicas() -> None:
    assert configure().expert_ranks == 4
    config = configure(**{"placement.planner": "greedy", "parallel.ep": 8})
    assert config.expert_ranks == 8
    assert config.parallel.sizes(8, config.expert_ranks) == (1, 8)
    with pytest.raises(ValueError, match="must not exceed"):
        configure(**{"parallel.ep": 8}).parallel.sizes(8, configure().expert_ranks)
