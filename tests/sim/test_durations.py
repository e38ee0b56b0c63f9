"""Seconds of every op: what a table says, what follows from it, what chunks, ranks and stages change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.core.errors import ConfigError, ScheduleError
from moeclipse.cost.model import DEEPSEEK_V3, UNIT, Costs
from moeclipse.schedule import kinds, one_f_one_b
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import ActionColumns, backward, forward, pair, pipeline_program, self_overlap
from moeclipse.schedule.shape import StagePlacement
from moeclipse.sim.durations import (
    checked_durations,
    column_durations,
    seconds_of,
    table_durations,
    tells_self_overlap,
)


def test_what_a_table_leaves_out_is_derived() -> None:
    costs = Costs(seconds={"F": 1.0, "I": 2.0, "W": 3.0}, wire=0.5)
    assert seconds_of(costs, kinds.B) == 5.0
    assert seconds_of(costs, kinds.PAIR) == 6.0
    assert seconds_of(costs, kinds.SELF, kinds.F) == 1.0
    assert seconds_of(costs, kinds.SELF, kinds.B) == 5.0
    assert seconds_of(costs, kinds.RECV_B) == seconds_of(costs, kinds.SEND_F) == 0.5
    assert seconds_of(costs, kinds.REDUCE) == seconds_of(costs, kinds.SHADOW_ADD) == 0.0
    assert seconds_of(Costs(seconds={"F": 1.0, "B": 3.0, "W": 1.0}), kinds.I) == 2.0
    assert seconds_of(Costs(seconds={"F": 1.0, "SELF_F": 0.8}), kinds.SELF, kinds.F) == 0.8
    assert seconds_of(DEEPSEEK_V3, kinds.MLP_R) == seconds_of(DEEPSEEK_V3, kinds.MLP_F) > 0
    assert seconds_of(Costs(seconds={"MLP_F": 1.0, "MLP_R": 2.0}), kinds.MLP_R) == 2.0
    assert seconds_of(Costs(seconds={"SEND_F": 2.0}, wire=0.5), kinds.SEND_F) == 2.0
    with pytest.raises(ConfigError, match="costs 'unit' say nothing about MLP_F; known: B, F, I, PAIR, W"):
        seconds_of(UNIT, kinds.MLP_F)


def test_a_table_says_whether_it_knows_self_overlap() -> None:
    assert not tells_self_overlap(UNIT)
    for name in ("SELF", "SELF_F", "SELF_B", "SELF_I"):
        assert tells_self_overlap(Costs(seconds={"F": 1.0, name: 0.5}))


def test_ops_in_rank_order() -> None:
    ranks = [
        [forward(0, 0), backward(0, 0)],
        [pair(forward(1, 1), backward(1, 0)), self_overlap(forward(1, 0))],
    ]
    program = pipeline_program("by hand", ranks, StagePlacement.loop(2), 2)
    assert table_durations(program, UNIT) == [1.0, 2.0, 3.0, 1.0]
    slow = replace(UNIT, rank_speed=(1.0, 0.5))
    assert table_durations(program, slow) == [1.0, 2.0, 6.0, 2.0]
    uneven = replace(UNIT, stage_scale=(1.0, 3.0), fixed={"F": 0.25})
    assert table_durations(program, uneven) == [1.25, 2.0, 9.0, 3.0]
    with pytest.raises(ScheduleError, match=r"\(1F1;1B0\) has no entry among the 1 scales"):
        table_durations(program, replace(UNIT, stage_scale=(1.0,)))


def test_a_chunk_takes_its_share_and_the_whole_of_what_is_fixed() -> None:
    half = forward(0, 0)._replace(chunk=0, chunks=2)
    program = pipeline_program("half", [[half]], StagePlacement.loop(1), 1)
    assert table_durations(program, replace(UNIT, fixed={"F": 0.25})) == [0.75]


def test_ranks_are_slow_in_compute_alone() -> None:
    program = lower(build("1f1b", 2, 2))
    costs = replace(UNIT, wire=0.5)
    fast, slow = (table_durations(program, replace(costs, rank_speed=(s, s))) for s in (1.0, 0.5))
    ops = [op for ops in program.ranks for op in ops]
    for op, before, after in zip(ops, fast, slow, strict=True):
        assert after == (before if op.comm is not None else 2 * before)


def test_given_durations_must_fit() -> None:
    program = build("1f1b", 2, 1)
    assert checked_durations(program, [[1.0, 2.0], [3.0, 4.0]]) == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(ScheduleError, match=r"\[2, 1\] entries per rank, but the program has \[2, 2\] ops"):
        checked_durations(program, [[1.0, 2.0], [3.0]])


def test_a_pair_has_the_mean_of_its_stages() -> None:
    both = pair(forward(0, 1), backward(1, 0))
    program = pipeline_program("both", [[both]], StagePlacement.loop(1, 2), 2)
    assert table_durations(program, replace(UNIT, stage_scale=(1.0, 3.0))) == [3.0 * 2.0]


def test_columns_have_the_durations_of_their_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of millions of actions are kept as columns: slow ranks and stages count there, too."""
    monkeypatch.setattr(one_f_one_b, "MANY", 0)
    program = build("1f1b", 3, 2)
    assert isinstance(program.ranks, ActionColumns)
    costs = replace(UNIT, rank_speed=(1.0, 0.5, 2.0), stage_scale=(1.0, 3.0, 0.5), fixed={"F": 0.25})
    columns = column_durations(program.ranks, costs).tolist()
    assert columns == table_durations(program, costs)
    assert columns[4:6] == [(3.0 + 0.25) / 0.5] * 2, "the second rank's forwards"
