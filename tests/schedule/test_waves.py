"""Large graphs sorted in waves: the same answers as vertex by vertex."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.core.errors import ScheduleError
from moeclipse.cost.model import UNIT, Costs
from moeclipse.schedule import graph as graphs
from moeclipse.schedule import one_f_one_b
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.graph import Lists
from moeclipse.schedule.op import ActionColumns, Program, backward, forward, pipeline_program
from moeclipse.schedule.shape import StagePlacement
from moeclipse.schedule.waves import Rows, Waves, sort_in_waves
from moeclipse.sim.engine import simulate
from moeclipse.sim.measure import summarise


def test_rows_of_successors() -> None:
    rows = Rows.build(4, np.array([2, 0, 2]), np.array([1, 3, 0]))
    after, count = rows.reached(np.array([2, 1, 0], dtype=np.int32))
    assert after.tolist() == [1, 0, 3]
    assert count.tolist() == [2, 0, 1]


@given(st.permutations(range(10)), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_a_wave_waits_for_earlier_waves_alone(label: list[int], pairs: list[tuple[int, int]]) -> None:
    arcs = [(label[min(pair)], label[max(pair)]) for pair in pairs if pair[0] != pair[1]]
    source, target = np.array(arcs, dtype=np.int64).reshape(-1, 2).T
    waves, waiting = sort_in_waves(10, source, target, (source + target) % 2 == 0)
    assert not waiting.any()
    order = waves.order.tolist()
    wave_of = {node: int(np.searchsorted(waves.begin, at, side="right")) for at, node in enumerate(order)}
    assert sorted(order) == list(range(10))
    assert all(wave_of[a] < wave_of[b] for a, b in arcs)


@pytest.fixture
def always_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MANY", 1)
    monkeypatch.setattr(one_f_one_b, "MANY", 1)


def small(name: str, P: int, M: int) -> Program:
    """The same program as lists of ops, whatever it was kept as."""
    program = build(name, P, M)
    shape = program.pipeline()
    return pipeline_program(
        name, [list(ops) for ops in program.ranks], shape.placement, shape.num_microbatches
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "1f1b-pairs", "vpp+1", "dualpipev"])
@pytest.mark.parametrize("inline", [False, True])
def test_times_and_memory_are_those_of_lists(
    name: str, inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs(
        seconds={"F": 1.0, "B": 2.5, "I": 1.25, "W": 1.0, "PAIR": 3.0}, wire=0.25, inline_compute=inline
    )
    if name in ("gpipe", "1f1b"):
        costs = Costs(
            seconds={"F": 1.0, "B": 2.5}, wire=0.25, inline_compute=inline, fixed={"F": 0.125},
            rank_speed=(1.0, 0.5, 1.0, 2.0), stage_scale=(1.0, 1.5, 1.0, 0.5),
        )  # fmt: skip
    by_list = simulate(verify(small(name, 4, 8)), costs)
    assert isinstance(by_list.verified.graph.found, Lists)
    monkeypatch.setattr(graphs, "MANY", 1)
    monkeypatch.setattr(one_f_one_b, "MANY", 1)
    program = build(name, 4, 8)
    assert isinstance(program.ranks, ActionColumns) == (name in ("gpipe", "1f1b"))
    in_waves = simulate(verify(program), costs)
    assert isinstance(in_waves.verified.graph.found, Waves)
    np.testing.assert_allclose(in_waves.start, by_list.start)
    np.testing.assert_allclose(in_waves.finish, by_list.finish)
    assert in_waves.verified.peak == by_list.verified.peak
    fast, slow = summarise(in_waves), summarise(by_list)
    assert fast.peak == slow.peak
    assert fast.ranks == slow.ranks
    assert {kind: time.hidden for kind, time in fast.kinds.items()} == pytest.approx(
        {kind: time.hidden for kind, time in slow.kinds.items()}
    )


def test_columns_are_the_same_lists(always_large: None) -> None:
    program = build("1f1b", 3, 5)
    assert isinstance(program.ranks, ActionColumns)
    assert program.num_ops == 30
    assert [len(ops) for ops in program.ranks] == program.sizes == [10, 10, 10]
    assert " ".join(map(str, program.ranks[1])) == "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4"
    assert program.ranks[-1] == program.ranks[2:][0]
    with pytest.raises(IndexError, match="rank 3 of 3"):
        program.ranks[3]


def test_a_cycle_is_found_and_told_in_waves_too(always_large: None) -> None:
    ranks = [
        [forward(0, 0), backward(0, 1), forward(0, 1), backward(0, 0)],
        [forward(1, 0), backward(1, 0), forward(1, 1), backward(1, 1)],
    ]
    with pytest.raises(ScheduleError, match=r"0F1 on rank 0 waits on its lane for 0B1 on rank 0"):
        verify(pipeline_program("bad", ranks, StagePlacement.loop(2), 2))


def test_lists_are_made_of_waves_where_somebody_asks(always_large: None) -> None:
    graph = verify(build("1f1b", 2, 3)).graph
    assert isinstance(graph.found, Waves)
    assert sorted(graph.order) == list(range(graph.num_nodes))
    place = {node: at for at, node in enumerate(graph.order)}
    for node in range(graph.num_nodes):
        assert all(
            place[node] < place[after]
            for after in graph.hard.after[graph.hard.first[node] : graph.hard.first[node + 1]]
        )


@pytest.mark.full
def test_a_thousand_ranks_take_less_than_a_minute() -> None:
    result = simulate(verify(build("1f1b", 1024, 4096)), UNIT)
    assert result.makespan == (4096 + 1023) * 3
