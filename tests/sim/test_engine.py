"""What costs and programs make of each other: wires, launches, peers, slow ranks, durations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import DEEPSEEK_V3, UNIT, Costs
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import backward, forward, pipeline_program
from moeclipse.schedule.shape import LayerShape, StagePlacement
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise


def test_two_ranks_by_hand() -> None:
    """Wire 0.5: rank 1 starts at 1.5 and answers at 4.5; rank 0 waits for it from 1 to 5."""
    program = pipeline_program(
        "hand", [[forward(0, 0), backward(0, 0)], [forward(1, 0), backward(1, 0)]], StagePlacement.loop(2), 1
    )
    result = simulate(program, replace(UNIT, wire=0.5))
    assert result.start[:4].tolist() == [0.0, 5.0, 1.5, 2.5]
    assert result.finish[:4].tolist() == [1.0, 7.0, 2.5, 4.5]
    assert result.makespan == 7.0
    summary = summarise(result)
    assert (summary.ranks[0].compute, summary.ranks[0].exposed, summary.ranks[0].idle) == (3.0, 1.0, 3.0)


def test_slow_ranks_and_uneven_stages() -> None:
    base = simulate(build("1f1b", 4, 8), UNIT).makespan
    slow = simulate(build("1f1b", 4, 8), replace(UNIT, rank_speed=(1.0, 1.0, 0.5, 1.0))).makespan
    heavy = simulate(build("1f1b", 4, 8), replace(UNIT, stage_scale=(1.0, 1.0, 2.0, 1.0))).makespan
    assert slow == heavy > 1.5 * base
    for number in (3, 5):
        with pytest.raises(ScheduleError, match=f"{number} rank speeds were given for 4 ranks"):
            simulate(build("1f1b", 4, 8), replace(UNIT, rank_speed=(1.0,) * number))
    with pytest.raises(ScheduleError, match="among the 2 scales"):
        simulate(build("1f1b", 4, 8), replace(UNIT, stage_scale=(1.0, 2.0)))


def test_durations_must_fit() -> None:
    with pytest.raises(ScheduleError, match="entries per rank"):
        simulate(smart(exchange_shape(2)), Costs(seconds={}), [[1.0], [1.0]])


def test_host_launch_cost_delays_an_op_by_its_place() -> None:
    program = smart(exchange_shape(2, group_size=1))
    result = simulate(program, Costs(seconds={}, launch=1.0), [[0.0] * 6] * 2)
    assert result.start[:6].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_peers_wait_for_each_other_alone() -> None:
    """Groups {0,1}, {2,3}: at step 0 a slow rank 3 holds up rank 2, not ranks 0 and 1."""
    program = smart(exchange_shape(4, group_size=2, backward=True))
    durations = [[0.0] * len(ops) for ops in program.ranks]
    late = Costs(seconds={}, launch=0.0)
    durations[3][0] = 7.0
    result = simulate(program, late, durations)
    step1 = [result.start[result.begin[r] + 1] for r in range(4)]
    assert step1[3] == 7.0
    assert result.finish[result.begin[0]] == 0.0


@pytest.mark.parametrize("change", [{"launch": 0.25}, {"contention": {("compute", "p2p"): 0.5}}])
def test_whole_actions_are_lowered_where_launches_or_lanes_matter(change: dict) -> None:
    """Implied transfers have no place in a host's list and no lane that could be busy."""
    program, costs = build("1f1b", 2, 3), replace(UNIT, wire=0.5, **change)
    result = simulate(program, costs)
    assert result.program == lower(program)
    assert result.makespan == simulate(lower(program), costs).makespan > simulate(program, UNIT).makespan
    with pytest.raises(ScheduleError, match="durations of a program of whole actions cannot go with launch"):
        simulate(program, costs, [[1.0] * 6] * 2)


def test_a_result_speaks_of_ops_alone() -> None:
    """Nodes that only make a host wait are left out, implied transfers stand behind the ops."""
    program = build("1f1b", 2, 3)
    result = simulate(program, UNIT)
    assert len(result.start) == program.num_ops + 2 * 3
    assert [result.rank_slice(rank) for rank in range(2)] == [slice(0, 6), slice(6, 12)]
    layered = expand(build("1f1b", 2, 1), [LayerShape(shared=False)], Expansion())
    timed = simulate(layered, DEEPSEEK_V3)
    assert timed.verified.graph.num_nodes > layered.num_ops
    assert len(timed.start) == layered.num_ops
    empty = replace(program, ranks=((), ()), shape=replace(program.shape, num_microbatches=0))
    assert simulate(empty, UNIT).makespan == 0.0
