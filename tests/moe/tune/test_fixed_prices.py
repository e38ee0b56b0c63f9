"""Prices by the book: counted from shapes, known to all ranks, and never asked of a clock."""

from __future__ import annotations

from typing import Any

import pytest
from layer_parity import gradients, make

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.tune import probe, stopwatch
from moeclipse.moe.tune.fixed_prices import BOOKS, fixed_prices, rate
from moeclipse.moe.tune.probe import Probe
from moeclipse.testing.run_ranks import run_ranks
from probed import lend


def priced(mesh: Mesh, hosts: list[int], slots: Any) -> dict[str, Any]:
    mesh.hosts = tuple(hosts)
    probe.timed = stopwatch.timed = None  # type: ignore[attr-defined, assignment]
    moe = make(GateConfig(top_k=2), 4, 0, mesh, placement=Placement(slots))
    return vars(moe.measure_costs(fixed_prices))


def test_rows_and_bytes_are_counted() -> None:
    one, other = run_ranks(2, priced, [0, 0], ((0, 1, 2, 3), ()))
    assert one == other, "a rank without experts knows them, too"
    found = Probe(**one)
    assert found.fixed
    assert not found.unknown
    parameters = 2 * 20 * 12 + 20 * 12
    book = BOOKS["cpu"]
    assert found.row_forward == pytest.approx(2 * parameters / (0.8 * 1.2e11 / 2)), "of one thread"
    assert found.row_backward == pytest.approx(2 * one["row_forward"])
    assert found.row_bytes == 96
    assert found.parameter_bytes == found.gradient_bytes == 8 * parameters
    assert (found.look, found.loan, found.sync) == (book.look, book.loan, book.sync)
    assert (found.bandwidth, found.far_bandwidth) == (2e9, 0.0)
    assert found.doubt == 0.0
    assert rate(Mesh.single()) > 0


def test_links_between_hosts_have_a_price_where_there_are_any() -> None:
    one, other = run_ranks(2, priced, [0, 1], ((0, 1), (2, 3)))
    assert one == other
    assert one["far_bandwidth"] == one["far_link"] > 0
    assert one["far_latency"] > one["latency"]


def by_the_book(mesh: Mesh, schedule: str) -> list[Any]:
    """A layer whose runs must be equal: whatever it chooses, it times nothing."""
    probe.timed = stopwatch.timed = None  # type: ignore[attr-defined, assignment]
    moe = make(GateConfig(top_k=2), 4, 0, mesh, **lend("auto", schedule=schedule, chunks="auto"))
    moe.schedule.by_the_book = True
    told: list[Any] = []
    moe.schedule.on_choice = told.append
    for _ in range(4):
        gradients(moe, mesh, [6, 4])
    again = make(GateConfig(top_k=2), 4, 0, mesh, **lend("auto", schedule=schedule, chunks="auto"))
    again.schedule.by_the_book = True
    again.schedule.take_choice(told[0])
    for _ in range(4):
        gradients(again, mesh, [6, 4])
    same = again.schedule.cuts.use == moe.schedule.cuts.use
    return [moe.schedule.cuts.use.plain, moe.schedule.cuts.trials, len(told), told[0].probe.fixed, same]


@pytest.mark.parametrize("schedule", ["auto", "smart"])
def test_a_layer_by_the_book_tries_nothing(schedule: str) -> None:
    one, other = run_ranks(2, by_the_book, schedule)
    assert one == other
    plain, trials, told, fixed, same = one
    assert plain or schedule == "smart", "auto leaves one go for what was seen to be faster alone"
    assert (trials, told, fixed, same) == (None, 1, True, True)
