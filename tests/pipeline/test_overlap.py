"""From a configuration to a verified program: schedule, stages, overlap, recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from user_model import LAYERS, Block, M

from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.pipeline.config import PipelineConfig
from moeclipse.pipeline.overlap import choose_schedule, lay_out, make_program
from moeclipse.pipeline.stage import describe
from moeclipse.schedule import kinds
from moeclipse.schedule.check import Verified, verify
from moeclipse.schedule.kinds import Form
from moeclipse.schedule.shape import LayerShape


def test_what_the_verifier_refuses_cannot_be_run() -> None:
    config = PipelineConfig(schedule="1f1b-pairs", overlap="pair")
    layout = lay_out(config, 2, 2, 4)
    verified = make_program(config, layout, [describe(Block())] * 2, 2, 4)
    assert isinstance(verified, Verified)
    ops = list(verified.program.ranks[0])
    place = next(i for i, op in enumerate(ops) if op.kind is kinds.MLP_F)
    broken = replace(
        verified.program, ranks=(tuple(ops[:place] + ops[place + 1 :]), verified.program.ranks[1])
    )
    with pytest.raises(ScheduleError, match="MLP_F"):
        verify(broken)


def test_two_copies_of_the_model_are_laid_out_in_opposite_directions() -> None:
    both = lay_out(PipelineConfig(schedule="dualpipe"), 3, 2, 4)
    assert both.stages == (range(2), range(2, 3)) * 2
    assert [both.held_by(rank) for rank in range(2)] == [
        {0: range(2), 3: range(2, 3)},
        {1: range(2, 3), 2: range(2)},
    ]
    first = both.first_copy
    assert (first.stages, first.rank_of, first.num_chains) == ((range(2), range(2, 3)), (0, 1), 1)


@pytest.mark.parametrize(
    ("config", "layers", "ranks", "microbatches", "message"),
    [
        (PipelineConfig(), 1, 2, 4, "makes 2 stages, but model.num_layers is 1"),
        (PipelineConfig(schedule="dualpipev"), 8, 2, 3, "nearest legal: ranks=2, microbatches=4"),
        (
            PipelineConfig(layers=(1, 2)),
            4,
            2,
            4,
            r"must list the layers of 2 stages, 4 \(model.num_layers\) in all",
        ),
        (PipelineConfig(schedule="vpp+1", group_size=2), 8, 4, 5, r"pipeline.group_size: .* ranks \(4\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    config: PipelineConfig, layers: int, ranks: int, microbatches: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        lay_out(config, layers, ranks, microbatches)


def test_auto_takes_pairs_where_there_is_overlap() -> None:
    pair = PipelineConfig(overlap="pair+self")
    assert choose_schedule(PipelineConfig(), 8, 4, 8) == "1f1b"
    assert choose_schedule(pair, 8, 1, 8) == "pp1"
    assert choose_schedule(pair, 8, 4, 8) == "vpp+1"
    assert choose_schedule(pair, 4, 4, 8) == "1f1b-pairs"
    assert choose_schedule(pair, 4, 1, 1) == "1f1b"


@pytest.mark.parametrize(("wanted", "again"), [(0, []), (1, [0]), (3, [0, 1, 2]), ("all", [0, 1, 2, 3])])
def test_only_the_first_layers_run_again(wanted: Any, again: list[int]) -> None:
    config = PipelineConfig(schedule="1f1b", recompute="full", recompute_layers=wanted)
    layout = lay_out(config, LAYERS, 1, M)
    (ops,) = make_program(config, layout, [describe(Block())] * LAYERS, 1, M).program.ranks
    assert sorted({op.layer for op in ops if op.kind.form is Form.R}) == again  # type: ignore[type-var]


def test_layers_are_shared_out() -> None:
    """Evenly over stages, by layers of a virtual stage, or as listed."""
    even = lay_out(PipelineConfig(schedule="dualpipev"), 7, 2, 4)
    assert [len(layers) for layers in even.stages] == [2, 2, 2, 1]
    assert even.rank_of == (0, 1, 1, 0)
    assert sorted(i for layers in even.stages for i in layers) == list(range(7))
    fine = lay_out(PipelineConfig(schedule="vpp", layers_per_virtual_stage=1), 6, 2, 4)
    assert fine.stages == tuple(range(i, i + 1) for i in range(6))
    assert fine.held_by(1) == {1: range(1, 2), 3: range(3, 4), 5: range(5, 6)}
    assert fine.layers_of(1) == [1, 3, 5]
    listed = lay_out(PipelineConfig(schedule="1f1b", layers=(1, 4)), 5, 2, 4)
    assert listed.stages == (range(1), range(1, 5))


def test_a_program_has_the_head_behind_its_last_layer_and_chunks_outside_pairs() -> None:
    config = PipelineConfig(overlap="pair+self")
    layout = lay_out(config, 4, 2, 4)
    assert layout.schedule == "vpp+1"
    verified = make_program(config, layout, [LayerShape()] * 4, 2, 4, chunks=2)
    layers = verified.program.pipeline().layers
    assert [layer.head for stage in layers for layer in stage] == [False, False, False, True]
    cut = {op.microbatch for ops in verified.program.ranks for op in ops if op.chunks > 1}
    assert cut
    assert all(op.chunks in (1, 2) for ops in verified.program.ranks for op in ops)
    off = make_program(PipelineConfig(), layout, [LayerShape()] * 4, 2, 4, chunks=2)
    assert all(op.chunks == 1 for ops in off.program.ranks for op in ops), "nothing overlaps itself"
