"""The two-level exchange gives what the direct one gives, in any layout, order and dtype; ranks may fail."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.comm.mesh import Mesh
from moeclipse.comm.transports.transport import TorchTransport
from moeclipse.comm.transports.two_level import StageQueue, TwoLevelTransport, two_level
from moeclipse.core.errors import ConfigError
from moeclipse.testing.run_ranks import run_ranks, run_ranks_raw

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
LAYOUTS = {
    "2x2": [0, 0, 1, 1],
    "2x2 interleaved": [0, 1, 1, 0],
    "2x3": [0, 0, 0, 1, 1, 1],
    "3x2": [0, 0, 1, 1, 2, 2],
    "3x2 interleaved": [0, 1, 2, 0, 2, 1],
}
Counts = list[list[int]]


def rows_of(rank: int, counts: Counts, number: int) -> torch.Tensor:
    """Each row says who sent it to whom, and in which exchange."""
    dtype, width = DTYPES[number % len(DTYPES)], number % 3
    values = [
        (17 * rank + 5 * peer + i + number) % 251
        for peer, count in enumerate(counts[rank])
        for i in range(count)
    ]
    rows = torch.tensor(values, dtype=torch.int64)
    rows = rows[:, None].expand(-1, width).contiguous() if width else rows
    return (rows % 2 == 1) if dtype == torch.bool else rows.to(dtype)


def both(mesh: Mesh, hosts: list[int], tables: list[Counts], inline: bool) -> bool:
    """All exchanges under way together, got in another order, against the direct ones."""
    mesh.hosts = tuple(hosts)
    direct, wire = TorchTransport(mesh.a2a, mesh.experts), two_level(mesh, mesh.experts)
    assert isinstance(wire, TwoLevelTransport)
    assert wire is two_level(mesh, mesh.experts), "groups are made once"
    if inline:
        wire.queue.start = wire.run_inline  # type: ignore[method-assign, assignment]
    expected, found = [], []
    for number, counts in enumerate(tables):
        rows = rows_of(mesh.rank, counts, number)
        receive = [row[mesh.rank] for row in counts]
        expected.append(direct.all_to_all(rows, counts[mesh.rank], receive, "direct").get())
        out = torch.empty_like(expected[-1]) if number % 2 else None
        found.append(wire.all_to_all(rows, counts[mesh.rank], receive, "two levels", out))
        if out is not None:
            assert found[-1]._value is out
    order = sorted(
        range(len(tables)), key=lambda i: (i * 7 + 3 * mesh.rank) % 5
    )  # ranks get in their own order
    got = {i: found[i].get() for i in order}
    return all(torch.equal(got[i], expected[i]) and got[i].dtype == expected[i].dtype for i in got)


def tables(num_ranks: int) -> st.SearchStrategy[list[Counts]]:
    count = st.sampled_from([0, 0, 0, 1, 2, 5])
    row = st.lists(count, min_size=num_ranks, max_size=num_ranks)
    return st.lists(st.lists(row, min_size=num_ranks, max_size=num_ranks), min_size=1, max_size=9)


@pytest.mark.parametrize("inline", [False, True], ids=["chained", "inline"])
@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_equals_the_direct_exchange(name: str, inline: bool, data: st.DataObject) -> None:
    hosts = LAYOUTS[name]
    drawn = data.draw(tables(len(hosts)))
    ranks = range(len(hosts))
    zeros = [[0 for _ in ranks] for _ in ranks]
    uneven = [[(3 * source + 5 * peer) % 4 for peer in ranks] for source in ranks]
    assert all(run_ranks(len(hosts), both, hosts, [*drawn, zeros, uneven], inline))


def in_inference_mode(mesh: Mesh) -> list[int]:
    mesh.hosts = (0, 1, 1, 0)
    with torch.inference_mode():
        rows = torch.arange(4) + 10 * mesh.rank
        return two_level(mesh, mesh.experts).all_to_all(rows, [1] * 4, [1] * 4, "test").get().tolist()


def test_in_inference_mode() -> None:
    assert run_ranks(4, in_inference_mode) == [[rank, 10 + rank, 20 + rank, 30 + rank] for rank in range(4)]


def without_get(mesh: Mesh) -> tuple:
    """Nobody asks for the rows until they have arrived everywhere."""
    wire = two_level(mesh, mesh.experts, hosts=["a", "a", "b", "b"])
    mesh.recorder.begin_step()
    rows = torch.arange(4.0) + 10 * mesh.rank
    results = [wire.all_to_all(rows, [1] * 4, [1] * 4, f"exchange {i}") for i in range(3)]
    until = time.monotonic() + 300
    while time.monotonic() < until and not all(r._work.future.done() for r in results):
        time.sleep(0.001)
    arrived = [r._value.tolist() for r in results]
    stamps = mesh.recorder.end_step()
    for result in results:
        result.get()
    sizes = (wire.sizes.size, wire.inside.ranks, wire.across.ranks)
    return (
        arrived,
        sizes,
        [(group, label, done > launched) for group, label, launched, done in stamps.transfers],
    )


def test_rows_travel_all_the_way_while_nobody_waits() -> None:
    for rank, (arrived, sizes, transfers) in enumerate(run_ranks(4, without_get)):
        assert arrived == [[10.0 * source + rank for source in range(4)]] * 3
        assert sizes == (2, (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2))
        assert transfers == [("experts", f"exchange {i}", True) for i in range(3)], "one transfer, not three"


class Held:
    """A transfer that is done when the test says so."""

    def __init__(self) -> None:
        self.future: torch.futures.Future = torch.futures.Future()

    def get_future(self) -> torch.futures.Future:
        return self.future


def test_no_journey_overtakes_another_at_any_stage() -> None:
    queue, launched = StageQueue(), []
    works = {(name, stage): Held() for name in "abc" for stage in range(3)}

    def journey(name: str):
        for stage in range(3):
            launched.append((name, stage))
            yield works[name, stage]

    journeys = {name: queue.start(journey(name)) for name in "abc"}
    assert launched == [("a", 0), ("b", 0), ("c", 0)]
    works["c", 0].future.set_result(None)
    works["b", 0].future.set_result(None)
    assert len(launched) == 3, "b and c wait for a"
    works["a", 0].future.set_result(None)
    assert launched[3:] == [("a", 1), ("b", 1), ("c", 1)]
    works["b", 1].future.set_result(None)
    assert len(launched) == 6
    works["a", 1].future.set_result(None)
    assert launched[6:] == [("a", 2), ("b", 2)], "c is still under way"
    works["b", 2].future.set_result(None)
    assert journeys["b"].future.done()
    assert not journeys["a"].future.done()
    works["c", 1].future.set_result(None)
    assert launched[8:] == [("c", 2)]


def test_what_was_done_at_once_goes_on_at_once() -> None:
    works = [Held() for _ in range(3)]
    for work in works:
        work.future.set_result(None)
    StageQueue().start(iter(works)).wait(timedelta(seconds=1))


def test_a_failure_ends_all_that_is_under_way_and_all_that_comes() -> None:
    queue, bad, fine = StageQueue(), Held(), Held()
    first, second = queue.start(iter([bad, Held()])), queue.start(iter([fine]))
    bad.future.set_exception(RuntimeError("connection closed"))
    for journey in (first, second):
        with pytest.raises(RuntimeError, match="connection closed"):
            journey.wait(timedelta(seconds=1))
    with pytest.raises(RuntimeError, match=r"an earlier exchange has failed: .*connection closed"):
        queue.start(iter([Held()]))
    with pytest.raises(RuntimeError, match="timed out"):
        StageQueue().start(iter([Held()])).wait(timedelta(seconds=0.01))


def failing(mesh: Mesh) -> None:
    mesh.hosts = (0, 0, 1, 1)
    wire = two_level(mesh, mesh.experts)
    for number in range(3):
        if mesh.rank == 3 and number == 2:
            raise ValueError("out of luck")
        wire.all_to_all(torch.zeros(4), [1] * 4, [1] * 4, f"exchange {number}").get()


def test_all_ranks_hear_of_the_one_that_failed() -> None:
    begun = time.monotonic()
    outcomes = run_ranks_raw(4, failing, collective_deadline_s=300.0)
    assert time.monotonic() - begun < 150, "within the deadline of a collective"
    for rank, (fine, text) in enumerate(outcomes):
        assert not fine
        wanted = "out of luck" if rank == 3 else "CommError: rank 3 failed: ValueError: out of luck"
        assert wanted in text


def chosen(mesh: Mesh, hosts: list[Any]) -> str:
    try:
        wire = two_level(mesh, mesh.experts, hosts)
    except ConfigError as error:
        return str(error)
    rows = torch.arange(mesh.experts.size) + 10 * mesh.rank
    ones = [1] * mesh.experts.size
    assert wire.all_to_all(rows, ones, ones, "test").get().tolist() == [
        10 * source + mesh.experts.index for source in mesh.experts.ranks
    ]
    return type(wire).__name__


def test_where_there_is_nothing_to_gain_the_exchange_is_direct() -> None:
    assert run_ranks(3, chosen, ["one"] * 3) == ["TorchTransport"] * 3
    assert run_ranks(3, chosen, ["a", "b", "c"]) == ["TorchTransport"] * 3
    assert chosen(Mesh.single(), ["here"]) == "TorchTransport"
    mixed = run_ranks(8, chosen, [0, 0, 1, 1, 2, 2, 2, 2], dp=2)
    assert mixed == ["TwoLevelTransport"] * 4 + ["TorchTransport"] * 4


def two_layouts(mesh: Mesh) -> list[tuple]:
    wires = [two_level(mesh, mesh.experts, hosts) for hosts in ("aabb", "abab", "xxyy")]
    assert all(isinstance(wire, TwoLevelTransport) for wire in wires)
    assert wires[0] is wires[2], "the same layout under other names"
    return [wire.places for wire in wires[:2]]


def test_another_layout_of_hosts_gets_groups_of_its_own() -> None:
    expected = [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    assert run_ranks(4, two_layouts) == [expected] * 4


def test_ragged_hosts_are_refused_on_all_ranks() -> None:
    expected = (
        'moe.transport = "two_level" needs the same number of ranks on every host, but the 2 hosts of ranks '
        '(0, 1, 2) have 2, 1 of them; use moe.transport = "direct", or start as many ranks on each host'
    )
    assert run_ranks(3, chosen, ["a", "a", "b"]) == [expected] * 3
