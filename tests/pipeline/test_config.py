"""What a pipeline can be told, and what of it makes no sense."""

from __future__ import annotations

from typing import get_args

import pytest

from moeclipse.pipeline.config import PAIRED, PipelineConfig, Schedule
from moeclipse.schedule import kinds
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.legal import SCHEDULES, default_stages_per_rank


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (PipelineConfig(schedule="1f1b", overlap="pair"), "1f1b-pairs"),
        (PipelineConfig(chunks=0), "at least 1"),
        (PipelineConfig(layers=(1, 0)), "at least one layer"),
        (PipelineConfig(recompute_layers=-1), "negative"),
        (PipelineConfig(comm_sms=-1), "comm_sms"),
    ],
)
def test_bad_settings_are_named(config: PipelineConfig, problem: str) -> None:
    assert any(problem in line for line in config.problems())


def test_two_ways_to_cut_the_layers_are_one_too_many() -> None:
    both = PipelineConfig(layers=(1, 1), layers_per_virtual_stage=1)
    assert list(both.problems()) == [
        "pipeline.layers and pipeline.layers_per_virtual_stage both cut the layers; give only one"
    ]


def test_good_settings_have_no_problems_and_all_are_told_at_once() -> None:
    assert list(PipelineConfig().problems()) == []
    assert list(PipelineConfig(overlap="pair", schedule="vpp+1", recompute="moe", chunks=2).problems()) == []
    bad = PipelineConfig(recompute="some", chunks=0, layers_per_virtual_stage=0, comm_sms=-1)  # type: ignore[arg-type]
    assert len(list(bad.problems())) == 4


@pytest.mark.parametrize(
    ("change", "used"),
    [
        ({}, False),
        ({"chunks": 2}, False),
        ({"schedule": "1f1b"}, True),
        ({"overlap": "pair"}, True),
        ({"recompute": "mlp"}, False),
    ],
)
def test_one_rank_needs_the_runtime_only_where_something_asks_for_it(change: dict, used: bool) -> None:
    assert PipelineConfig(**change).used is used
    assert PipelineConfig(**change).runs_program(pp=1, num_ranks=1) is used


@pytest.mark.parametrize(("recompute", "program"), [("auto", False), ("norms", False), ("mlp", True)])
def test_ranks_that_exchange_rows_run_them_again_by_a_program(recompute: str, program: bool) -> None:
    config = PipelineConfig(recompute=recompute)  # type: ignore[arg-type]
    assert config.runs_program(pp=1, num_ranks=2) is program
    assert config.runs_program(pp=2, num_ranks=2)
    assert (config.recomputed != "off") is program


def test_every_schedule_that_can_be_asked_for_exists() -> None:
    assert set(get_args(Schedule)) - {"auto"} <= set(SCHEDULES)
    assert set(PAIRED) <= set(SCHEDULES)
    for name in PAIRED:
        P, V = (1 if name == "pp1" else 2), default_stages_per_rank(name)
        program = build(name, P, 4, V)
        assert any(op.kind is kinds.PAIR for ops in program.ranks for op in ops), name
