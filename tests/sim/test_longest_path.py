"""Times in one pass over the proved order: by hand, and equal to those of lists and events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.cost.model import UNIT, Costs
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.graph import DATA, HOST, Edges, sort_graph
from moeclipse.schedule.legal import SCHEDULES, broken_rules, default_stages_per_rank
from moeclipse.schedule.lower import lower
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.sim.engine import simulate
from moeclipse.sim.longest_path import longest_path

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


def test_inline_compute_holds_back_what_is_launched_behind_it() -> None:
    """R0 is launched behind C0 and before C1; on a stream C1's exchange partner would not wait."""
    program = smart(exchange_shape(2, group_size=1))
    durations = [[0.0, 1.0, 5.0, 1.0, 5.0, 1.0]] * 2
    inline = simulate(program, Costs(seconds={}, inline_compute=True, launch=0.5), durations)
    streams = simulate(program, Costs(seconds={}, launch=0.5), durations)
    assert inline.start[3] == pytest.approx(inline.finish[2] + 0.5)
    assert streams.start[3] == pytest.approx(streams.finish[2])
    assert inline.makespan > streams.makespan


def test_makespan_is_monotone_in_costs() -> None:
    """A longest path can only grow; an event queue without contention must not do otherwise."""
    program = verify(lower(build("zb-v", 4, 8)))
    times = [simulate(program, replace(UNIT, wire=w)).makespan for w in (0.0, 0.1, 0.2, 0.4)]
    assert times == sorted(times)


def arcs(*pairs: tuple[int, int, int, int]) -> Edges:
    """(source, target, reason, lag) each."""
    source, target, reason, lag = np.array(pairs, dtype=np.int64).T
    return Edges(source=source, target=target, reason=reason, lag=lag)


def test_an_op_starts_when_its_last_input_is_there() -> None:
    """a (2 s) and b (5 s) before c; the host finishes a before d, which only inline hosts wait for."""
    graph = sort_graph(4, 4, arcs((0, 2, DATA, 0), (1, 2, DATA, 0), (0, 3, HOST, 0)), str)
    for inline, start_of_d in ((False, 0.0), (True, 2.0)):
        times = longest_path(
            graph, [2.0, 5.0, 1.0, 1.0], [0.0] * 4, peers={}, launch=0.0, inline_compute=inline
        )
        assert times.start == [0.0, 0.0, 5.0, start_of_d]
        assert times.finish == [2.0, 5.0, 6.0, start_of_d + 1.0]


def test_a_meeting_starts_with_its_last_peer_and_lags_count_launches() -> None:
    """b and c meet: b is ready at once, c behind a. Launches behind a come one by one, half a second each."""
    graph = sort_graph(
        4, 4, arcs((0, 2, DATA, 0), (0, 3, HOST, 3)), str, vertex=[0, 1, 1, 2], members=[[0], [1, 2], [3]]
    )
    times = longest_path(
        graph, [2.0, 1.0, 4.0, 1.0], [0.0] * 4, peers={1: [1, 2], 2: [1, 2]}, launch=0.5, inline_compute=True
    )
    assert times.ready == [0.0, 0.0, 2.0, 3.5]
    assert times.start == [0.0, 2.0, 2.0, 3.5]
    assert times.finish == [2.0, 3.0, 6.0, 4.5], "each takes its own time"
