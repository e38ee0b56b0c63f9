"""Sorted graphs: an order where there is one, a short cycle in words where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.core.errors import ScheduleError
from moeclipse.schedule.graph import DATA, HOST, LANE, WIRE, Edges, Graph, Successors, sort_graph


def letters(node: int) -> str:
    return chr(ord("a") + node)


def edges(*arcs: tuple[int, int, int]) -> Edges:
    """(source, target, reason) each."""
    source, target, reason = np.array(arcs, dtype=np.int64).reshape(-1, 3).T
    return Edges(source=source, target=target, reason=reason, lag=np.zeros_like(source))


def sort(num_nodes: int, *arcs: tuple[int, int, int]) -> Graph:
    return sort_graph(num_nodes, num_nodes, edges(*arcs), letters)


def test_successors_in_compressed_rows() -> None:
    found = Successors.build(4, np.array([2, 0, 2]), np.array([1, 3, 0]), np.array([5, 6, 7]))
    rows = [found.after[found.first[n] : found.first[n + 1]] for n in range(4)]
    assert rows == [[3], [], [1, 0], []]
    assert found.lag == [6, 5, 7]


@given(st.permutations(range(10)), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_whatever_has_an_order_is_put_into_one(label: list[int], pairs: list[tuple[int, int]]) -> None:
    """Edges from low to high numbers, the numbers shuffled: each node comes after all that it waits for."""
    low = [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]
    arcs = [(label[a], label[b], (DATA, HOST)[(a + b) % 2]) for a, b in low]
    order = sort(10, *arcs).order
    assert sorted(order) == list(range(10))
    for source, target, _ in arcs:
        assert order.index(source) < order.index(target)


def test_a_cycle_is_told_edge_by_edge_with_its_reasons() -> None:
    with pytest.raises(ScheduleError) as caught:
        sort(4, (0, 1, DATA), (1, 2, LANE), (2, 1, WIRE), (2, 3, HOST))
    head, *lines = str(caught.value).splitlines()
    assert head == "deadlock: these ops wait for each other in a circle"
    assert sorted(lines) == ["  b waits on the same wire for c", "  c waits on its lane for b"]


def test_the_cycle_that_is_told_is_a_short_one() -> None:
    """A long way round and a short cut: nobody wants to read the long one."""
    ring = [(n, (n + 1) % 9, DATA) for n in range(9)]
    with pytest.raises(ScheduleError) as caught:
        sort(9, *ring, (2, 0, HOST))
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 3
    assert "  a is launched after the host has finished c" in lines


def test_long_cycles_are_cut_in_the_middle() -> None:
    with pytest.raises(ScheduleError) as caught:
        sort(26, *[(n, (n + 1) % 26, DATA) for n in range(26)])
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 17
    assert lines[8] == "  ... 10 more ..."


def test_nodes_that_meet_wait_for_everything_that_any_of_them_needs() -> None:
    """b and c are one vertex: d, behind c, waits for a, too, and a cycle may lead through the meeting."""
    vertex, members = [0, 1, 1, 2], [[0], [1, 2], [3]]
    arcs = edges((0, 1, DATA), (2, 3, DATA))
    graph = sort_graph(4, 4, arcs, letters, vertex=vertex, members=members)
    assert graph.order == [0, 1, 2]
    back = edges((0, 1, DATA), (2, 3, DATA), (3, 0, DATA))
    with pytest.raises(ScheduleError, match="in a circle"):
        sort_graph(4, 4, back, letters, vertex=vertex, members=members)


def test_pieces_are_joined_with_their_reasons() -> None:
    joined = Edges.join([(np.array([0, 1]), np.array([1, 2]), DATA), (np.array([0]), np.array([2]), HOST)])
    assert (joined.source.tolist(), joined.target.tolist()) == ([0, 1, 0], [1, 2, 2])
    assert joined.reason.tolist() == [DATA, DATA, HOST]
    assert joined.lag.tolist() == [0, 0, 0]
