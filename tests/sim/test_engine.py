"""The simulator against itself: fast pass and event queue, action graph and op graph, and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import DEEPSEEK_V3, UNIT, Costs
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.legal import SCHEDULES, broken_rules, default_stages_per_rank
from moeclipse.schedule.lower import lower
from moeclipse.schedule.op import backward, forward, pipeline_program
from moeclipse.schedule.shape import LayerShape, StagePlacement
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand, replicate
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise

NO_CONTENTION = {("compute", "dp"): 0.5}
"""Sends simulations through the event queue without changing anything: nothing runs on dp here."""


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.floats(0.1, 5.0), min_size=5, max_size=5),
    st.booleans(),
)
def test_three_ways_to_the_same_times(name: str, P: int, M: int, seconds: list[float], inline: bool) -> None:
    """Whole actions by arrays, the lowered lists op by op, and the event queue."""
    V = default_stages_per_rank(name)
    if broken_rules(name, P, M, V):
        return
    F, I, W, FB, wire = seconds
    costs = Costs(seconds={"F": F, "I": I, "W": W, "B": I + W, "PAIR": FB}, wire=wire, inline_compute=inline)
    program = build(name, P, M, V)
    lowered = verify(lower(program))
    expected = simulate(program, costs)
    by_op = simulate(lowered, costs)
    by_event = simulate(lowered, replace(costs, contention=NO_CONTENTION))
    computes = [op.comm is None for ops in lowered.program.ranks for op in ops]
    np.testing.assert_allclose(by_op.start[computes], expected.start[: program.num_ops])
    np.testing.assert_allclose(by_op.finish[computes], expected.finish[: program.num_ops])
    assert by_op.makespan == pytest.approx(expected.makespan)
    np.testing.assert_allclose(by_event.start, by_op.start)
    np.testing.assert_allclose(by_event.finish, by_op.finish)


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("launch", [0.0, 1e-4])
def test_queue_and_pass_agree_on_layer_ops(inline: bool, launch: float) -> None:
    program = verify(
        replicate(expand(build("dualpipev", 2, 5), [LayerShape(shared=False)] * 2, Expansion(chunks=2)), 2)
    )
    costs = replace(
        DEEPSEEK_V3, inline_compute=inline, launch=launch, wire=1e-3, rank_speed=(1.0, 0.7, 1.0, 1.2)
    )
    one = simulate(program, costs)
    other = simulate(program, replace(costs, contention=NO_CONTENTION))
    np.testing.assert_allclose(one.start, other.start)
    np.testing.assert_allclose(one.finish, other.finish)
    np.testing.assert_allclose(one.ready, other.ready)


@pytest.mark.parametrize("inline", [False, True])
def test_queue_and_pass_agree_on_an_exchange(inline: bool) -> None:
    program = verify(smart(exchange_shape(6, group_size=4, chunks=2, backward=True)))
    rng = np.random.default_rng(0)
    durations = [rng.uniform(0.1, 1.0, len(ops)).tolist() for ops in program.program.ranks]
    costs = Costs(seconds={}, inline_compute=inline, launch=0.01)
    one = simulate(program, costs, durations)
    other = simulate(program, replace(costs, contention=NO_CONTENTION), durations)
    np.testing.assert_allclose(one.finish, other.finish)


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


def test_contention_slows_compute_by_hand() -> None:
    """Compute at half rate while the exchange (4 s) runs: 3 s of work take 2 + 4 - ... = 5 s."""
    program = smart(exchange_shape(2, group_size=1))
    # Per rank: S0 S1 C0 R0 C1 R1. S0 is instant; S1 runs from 0 to 4 beside C0.
    durations = [[0.0, 4.0, 3.0, 0.0, 0.0, 0.0]] * 2
    costs = Costs(seconds={}, contention={("compute", "a2a"): 0.5})
    result = simulate(program, costs, durations)
    # Until 4 s half of 4 = 2 s of the work are done, the last second runs alone: C0 ends at 5.
    assert result.finish[2] == pytest.approx(5.0)
    assert simulate(program, Costs(seconds={}), durations).finish[2] == pytest.approx(3.0)


def test_contention_slows_communication_too() -> None:
    program = smart(exchange_shape(2, group_size=1))
    durations = [[0.0, 4.0, 3.0, 0.0, 0.0, 0.0]] * 2
    result = simulate(program, Costs(seconds={}, contention={("a2a", "compute"): 0.25}), durations)
    # S1 gets a quarter of its rate for 3 s (0.75 done), then 3.25 s alone.
    assert result.finish[1] == pytest.approx(6.25)


def test_two_wires_of_one_rank_can_share_its_link() -> None:
    """The middle rank of three receives F1 and sends F0 at once; sharing halves both rates."""
    costs = replace(UNIT, wire=1.0)
    program = lower(build("1f1b", 3, 4))
    alone = simulate(program, replace(costs, contention=NO_CONTENTION)).makespan
    shared = simulate(program, replace(costs, contention={("p2p", "p2p"): 0.5})).makespan
    assert alone == pytest.approx(simulate(program, costs).makespan)
    assert shared > alone


def test_host_launch_cost_delays_an_op_by_its_place() -> None:
    program = smart(exchange_shape(2, group_size=1))
    result = simulate(program, Costs(seconds={}, launch=1.0), [[0.0] * 6] * 2)
    assert result.start[:6].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_inline_compute_holds_back_what_is_launched_behind_it() -> None:
    """R0 is launched behind C0 and before C1; on a stream C1's exchange partner would not wait."""
    program = smart(exchange_shape(2, group_size=1))
    durations = [[0.0, 1.0, 5.0, 1.0, 5.0, 1.0]] * 2
    inline = simulate(program, Costs(seconds={}, inline_compute=True, launch=0.5), durations)
    streams = simulate(program, Costs(seconds={}, launch=0.5), durations)
    assert inline.start[3] == pytest.approx(inline.finish[2] + 0.5)
    assert streams.start[3] == pytest.approx(streams.finish[2])
    assert inline.makespan > streams.makespan


def test_peers_wait_for_each_other_alone() -> None:
    """Groups {0,1}, {2,3}: at step 0 a slow rank 3 holds up rank 2, not ranks 0 and 1."""
    program = smart(exchange_shape(4, group_size=2, backward=True))
    kinds = [op.kind for op in program.ranks[0]]
    durations = [[0.0] * len(kinds) for _ in range(4)]
    late = Costs(seconds={}, launch=0.0)
    durations[3][0] = 7.0
    result = simulate(program, late, durations)
    step1 = [result.start[result.begin[r] + 1] for r in range(4)]
    assert step1[3] == 7.0
    assert result.finish[result.begin[0]] == 0.0


def test_slow_ranks_and_uneven_stages() -> None:
    base = simulate(build("1f1b", 4, 8), UNIT).makespan
    slow = simulate(build("1f1b", 4, 8), replace(UNIT, rank_speed=(1.0, 1.0, 0.5, 1.0))).makespan
    heavy = simulate(build("1f1b", 4, 8), replace(UNIT, stage_scale=(1.0, 1.0, 2.0, 1.0))).makespan
    assert slow == heavy > 1.5 * base
    with pytest.raises(ScheduleError, match="3 rank speeds were given for 4 ranks"):
        simulate(build("1f1b", 4, 8), replace(UNIT, rank_speed=(1.0, 1.0, 0.5)))
    with pytest.raises(ScheduleError, match="among the 2 scales"):
        simulate(build("1f1b", 4, 8), replace(UNIT, stage_scale=(1.0, 2.0)))


def test_durations_must_fit() -> None:
    with pytest.raises(ScheduleError, match="entries per rank"):
        simulate(smart(exchange_shape(2)), Costs(seconds={}), [[1.0], [1.0]])


def test_makespan_is_monotone_in_costs() -> None:
    """A longest path can only grow; an event queue without contention must not do otherwise."""
    program = verify(lower(build("zb-v", 4, 8)))
    times = [simulate(program, replace(UNIT, wire=w)).makespan for w in (0.0, 0.1, 0.2, 0.4)]
    assert times == sorted(times)
