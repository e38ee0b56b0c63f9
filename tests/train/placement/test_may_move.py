"""What auto does where it cannot be had: experts stay, the run goes on, and it is told why."""

from __future__ import annotations

from typing import Any

import pytest

from moeclipse.core.config import problems_of, with_values
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement.may_move import as_far_as_it_goes
from moeclipse.train.presets import load

AUTO = {"placement.planner": "auto", "moe.shadow": "auto", "parallel.ep": 2}
TABLE = ((0, 1, 2, 3), (4, 5, 6, 7))


def given(**changes: Any) -> TrainConfig:
    return with_values(TrainConfig(), {**AUTO, **changes})


def test_presets_of_several_ranks_leave_it_to_us() -> None:
    for name in ("tiny", "deepseek-v3-tiny"):
        preset = load(preset=name)
        assert (preset.placement.planner, preset.moe.shadow) == ("auto", "auto")
    tiny = load(preset="tiny")
    told = ["experts: move where that pays, are lent where that pays"]
    assert as_far_as_it_goes(tiny, 2) == (tiny, told)
    plain = TrainConfig()
    assert as_far_as_it_goes(plain, 2) == (plain, []), "a file that names no preset moves nothing"


def test_rows_that_serve_several_experts_stay_together() -> None:
    """DeepSeek's gate chooses groups, and four experts of a token on two ranks share a row."""
    preset = load(preset="deepseek-v3-tiny")
    settled, (line,) = as_far_as_it_goes(preset, 2)
    assert (settled.placement.planner, settled.moe.shadow) == ("static", "off")
    assert "never move (gate.num_groups (4)" in line
    assert "never are lent (gate.top_k (4) on 2 ranks" in line
    assert as_far_as_it_goes(preset, 8)[0].moe.shadow == "auto", "on many ranks a row serves one"
    free = with_values(preset, {"gate.num_groups": 1, "gate.top_groups": 1})
    assert as_far_as_it_goes(free, 2)[0].placement.planner == "auto"
    assert as_far_as_it_goes(with_values(preset, {"gate.top_groups": 4}), 2)[0].placement.planner == "auto"


@pytest.mark.parametrize(
    ("changes", "planner", "shadow", "why"),
    [
        ({"gate.max_leaving": 0.5}, "static", "auto", "never move (gate.max_leaving (0.5) needs"),
        ({"placement.slots": TABLE}, "static", "auto", "never move (placement.slots says who holds what"),
        ({"placement.reduce": "fedavg"}, "static", "auto", "never move (placement.reduce = 'fedavg' would"),
        (
            {"placement.reduce": "fedavg", "placement.planner": "greedy"},
            "greedy",
            "off",
            "never are lent (placement.reduce = 'fedavg' counts",
        ),
        (
            {"model.num_layers": 4, "model.num_dense_layers": 2, "parallel.pp": 2, "optim.accumulate": 2},
            "static",
            "auto",
            "never move (placement.planner = 'auto' needs a layer with experts in every stage",
        ),
        ({"moe.shadow": "off"}, "auto", "off", "experts: move where that pays"),
    ],
    ids=[
        "near experts",
        "a table",
        "fedavg",
        "fedavg with a planner",
        "a stage without experts",
        "no shadows",
    ],
)
def test_what_speaks_against_it_wins_and_is_told(
    changes: dict[str, Any], planner: str, shadow: str, why: str
) -> None:
    config = given(**changes)
    assert not list(problems_of(config)), "nobody is refused what nobody asked for"
    settled, (line,) = as_far_as_it_goes(config, 2)
    assert (settled.placement.planner, settled.moe.shadow) == (planner, shadow)
    assert why in line
    assert not list(problems_of(settled))


def test_who_names_a_planner_is_refused() -> None:
    config = given(**{"gate.max_leaving": 0.5, "placement.planner": "incremental"})
    assert any("gate.max_leaving" in text for text in problems_of(config))
    policy = given(**{"gate.max_leaving": 0.5, "placement.policy": "json:dumps"})
    assert any("gate.max_leaving" in text for text in problems_of(policy)), (
        "a policy is a planner with a name"
    )


def test_one_rank_has_nobody_to_lend_to() -> None:
    settled, lines = as_far_as_it_goes(given(), 1)
    assert (settled.placement.planner, settled.moe.shadow, lines) == ("static", "off", [])
