"""Costs from what was measured: fixed parts and slopes, the same on all ranks, and what planners are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from layer_parity import gradients, make

from moeclipse.balance.objective import PlacementCosts, score
from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow_model import MIN_GAIN, Latency
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.tokens import Structure
from moeclipse.moe.tune import probe, stopwatch
from moeclipse.moe.tune.probe import BYTES, ROWS, ExpertSizes, Probe, measure
from moeclipse.moe.tune.stopwatch import MORE, REPEATS, Timing, timing_of
from moeclipse.testing.run_ranks import run_ranks
from probed import PROBE


def test_a_link_is_priced_as_it_is_around_a_busy_expert() -> None:
    alone = PROBE.shadow_costs(overlap=1.0)
    assert alone.row_send == pytest.approx(1024 / 5e8), "others rest"
    assert alone.parameter_seconds == pytest.approx(4e6 / 5e8 + 2e-4)
    assert alone.gradient_seconds == pytest.approx(8e6 / 5e8 + 2e-4)
    shared = replace(PROBE, shared_wire=True).shadow_costs(overlap=1.0)
    assert shared.row_send == pytest.approx(1024 / 2e8), "the wire of all, whose bytes are added up"
    assert shared.shared_wire
    all_send = PROBE.exchange_costs()
    assert all_send.transfer(100, near=False) == pytest.approx(2e-4 + 100 * 1024 / 1e8)
    assert all_send.compute(100) == pytest.approx(1e-5 + 100 * 3e-5)


def test_far_links_are_told_to_all_who_decide() -> None:
    """Given links: what exchanges, shadows and planners are told of them."""
    far = replace(PROBE, far_bandwidth=1e7, far_link=1e8, far_latency=1e-3)
    exchange = far.exchange_costs()
    assert exchange.transfer(100, near=True) == pytest.approx(2e-4 + 100 * 1024 / 1e8)
    assert exchange.transfer(100, near=False) == pytest.approx(1e-3 + 100 * 1024 / 1e7)
    assert exchange.parameters(2) == pytest.approx(1e-3 + 2 * 4e6 / 1e7)
    assert far.shadow_costs(overlap=1.0).far == 5.0, "one link of 5e8 against one of 1e8"
    assert replace(far, far_link=3e8).shadow_costs(overlap=1.0).far == 27 / 16, "in whole sixteenths"
    assert replace(far, far_link=9e8).shadow_costs(overlap=1.0).far == 1.0, "far is never nearer than near"
    shared = replace(far, shared_wire=True).shadow_costs(overlap=1.0)
    assert shared.far == 10.0, "where all send"
    assert PROBE.shadow_costs(overlap=1.0).far == 1.0
    costs = PlacementCosts.from_measured(asdict(far), every=5, ranks_per_node=2)
    assert (costs.near_bandwidth, costs.far_bandwidth, costs.card_per_rank) == (1e8, 1e8, False)


Wires = list[tuple[int, float, float]]


def on_a_clock(mesh: Mesh, wires: Wires, hosts: Sequence[int]) -> dict[str, float]:
    """Costs as this clock gives them: experts of rank r take (1 + r) times as long as those of rank 0.

    `wires`: of each kind of links that is measured, the peers of a rank, and bytes per second of all and one.
    """
    mesh.hosts = tuple(hosts)
    moe = make(GateConfig(top_k=2), 4, 0, mesh)
    slots = len(moe.experts.ids)
    seconds = [
        factor * (1 + mesh.rank) * (2e-3 + slots * rows * 1e-5) for rows in ROWS["cpu"] for factor in (1, 3)
    ]
    for peers, wire, link in wires:
        seconds += [peers * (4e-4 + size / wire) for size in BYTES["cpu"]]
        seconds += [4e-4 + size / link for size in BYTES["cpu"]]

    def timed(work: object, device: torch.device) -> Timing:
        assert callable(work)
        work()
        return Timing(seconds.pop(0), 0.0)

    probe.timed = timed
    real, joined = probe._wire_seconds, []

    def wire(dispatcher: Any, mesh: Mesh, size: int, pairs: Sequence[tuple[int, int]]) -> Timing:
        joined.append(
            {mesh.hosts[dispatcher.group.ranks[a]] == mesh.hosts[dispatcher.group.ranks[b]] for a, b in pairs}
        )
        return real(dispatcher, mesh, size, pairs)

    probe._wire_seconds = wire
    found = moe.measure_costs()
    assert not seconds, "all of it is measured, and nothing else"
    if len(set(hosts)) > 1:
        far, near = joined[:4], joined[4:]
        assert all(kind <= {False} for kind in far), "only what crosses hosts"
        assert all(kind <= {True} for kind in near), "only what stays inside"
    return vars(found)


@pytest.mark.parametrize(("wire", "link", "shared"), [(1e8, 1.5e8, False), (1e8, 3e8, True)])
def test_slopes_and_fixed_parts_are_found(wire: float, link: float, shared: bool) -> None:
    results = run_ranks(3, on_a_clock, [(2, wire, link)], [0, 0, 0])
    assert results[0] == results[1] == results[2], "whoever decides from them decides alike"
    found = Probe(**results[0])
    assert found.row_forward == pytest.approx(1e-5 * (1 + 2 + 3) / 3), "the mean of all ranks"
    assert found.row_backward == pytest.approx(3 * found.row_forward)
    assert found.kernel == pytest.approx(2e-3 * 2)
    assert found.bandwidth == pytest.approx(wire)
    assert found.link == pytest.approx(link)
    assert found.latency == pytest.approx(4e-4)
    assert found.shared_wire is shared, "all together are more than twice as slow as one alone"
    assert found.row_bytes == 12 * 8
    assert found.parameter_bytes == found.gradient_bytes == 8 * (2 * 20 * 12 + 20 * 12)
    assert found.num_ranks == 3
    assert (found.far_bandwidth, found.far_link) == (0.0, 0.0), "there is one host"


@pytest.mark.parametrize(
    ("hosts", "dp", "wires", "near"),
    [
        ([0, 0, 1, 1], 1, [(2, 1e7, 2e7), (1, 1e8, 1.5e8)], (1e8, 1.5e8)),
        ([0, 1], 1, [(1, 1e7, 2e7)], (1e7, 2e7)),
        # The first copy is on one host and takes part without a far link of its own.
        ([0, 0, 1, 2], 2, [(1, 1e7, 2e7), (1, 1e8, 1.5e8)], (1e8, 1.5e8)),
    ],
    ids=["two by two", "one each", "copies"],
)
def test_links_inside_hosts_and_between_them_are_measured_apart(
    hosts: list[int], dp: int, wires: Wires, near: tuple[float, float]
) -> None:
    results = run_ranks(len(hosts), on_a_clock, wires, hosts, dp=dp)
    assert all(one == results[0] for one in results)
    found = Probe(**results[0])
    assert (found.bandwidth, found.link) == pytest.approx(near)
    assert (found.far_bandwidth, found.far_link) == pytest.approx((1e7, 2e7))
    assert found.far_latency == pytest.approx(4e-4)
    assert not found.shared_wire


def measured(mesh: Mesh) -> dict[str, float]:
    moe = make(GateConfig(top_k=2), 4, 0, mesh, placement=Placement(((0, 1, 2, 3), ())))
    pairs = moe._pairwise(Structure(), (moe.gate.weight,))
    return vars(measure(pairs, moe.dispatcher, mesh))


def test_a_rank_without_experts_measures_with_the_others() -> None:
    one, other = run_ranks(2, measured)
    assert one == other
    assert min(one["latency"], one["parameter_bytes"]) > 0
    # On a busy machine more rows, or bytes, may take no longer than few.
    for name in ("row_forward", "row_backward", "bandwidth", "link"):
        assert one[name] is None or one[name] > 0, name
    assert not one["shared_wire"], "two ranks have a wire of their own"


WEATHERS: dict[str, tuple[float, ...]] = {
    "flat": (1.0,),
    "noisy": (1.0, 3.0, 0.4, 2.2, 1.1, 5.0, 0.7),
    "falling": tuple(1 / (1 + number) for number in range(500)),
}
"""What works take, one after the other, whatever they do."""


def in_weather(mesh: Mesh, kind: str) -> tuple[dict[str, Any], int, list[Any]]:
    """A layer that may lend and cut, by a clock that tells nothing; what it measured, and what it does."""
    takes, calls = WEATHERS[kind], [0]

    def timed(work: Any, device: torch.device) -> Timing:
        work()
        seconds = [takes[(calls[0] * REPEATS + lap) % len(takes)] for lap in range(REPEATS)]
        calls[0] += 1
        return timing_of(seconds)

    probe.timed = stopwatch.timed = timed
    more = {"exchange": {"schedule": "auto", "shadow": "auto"}}
    moe = make(GateConfig(top_k=2), 4, 0, mesh, **more)
    for _ in range(3):
        gradients(moe, mesh, [6, 4])
    schedule = moe.schedule
    assert schedule.probe is not None
    return (
        vars(schedule.probe),
        calls[0],
        [schedule.cuts.use.plain, schedule.cuts.trials, schedule.shadow_plan],
    )


@pytest.mark.parametrize("kind", list(WEATHERS))
def test_what_trials_cannot_tell_is_unknown_and_nothing_is_chosen_by_it(kind: str) -> None:
    """More bytes that took no longer were a wire of 2.46 TB/s: their number over 1e-7 seconds."""
    (found, calls, does), other = run_ranks(2, in_weather, kind)
    assert other == (found, calls, does), "all ranks know as little"
    for name in ("row_forward", "row_backward", "bandwidth", "link", "sync_bandwidth"):
        assert found[name] is None, name
    attempts = len(MORE["cpu"])
    assert calls == attempts * (2 * 2 + 2 + 2 + 3), "each of them was tried again, and shadows had no price"
    assert does == [True, None, None], "one go, no trials, nothing lent"
    assert Probe(**found).unknown
    with pytest.raises(ConfigError, match="could not tell what this costs: row_forward, row_backward"):
        PlacementCosts.from_measured(found, every=50)


def test_what_is_lent_wins_more_than_figures_may_be_off_by() -> None:
    """Rows and wires apart: what is known well counts where it is most of a layer."""
    doubted = replace(PROBE, row_doubt=0.3, wire_doubt=0.05)
    one_go = {"forward_compute": 1.0, "forward_wire": 20.0, "backward_compute": 2.0, "backward_wire": 20.0}
    before = Latency(**one_go, overlap=0.0)
    assert PROBE.shadow_costs(overlap=0.0).worthwhile(before) == MIN_GAIN * before.total
    assert doubted.shadow_costs(overlap=0.0).worthwhile(before) == pytest.approx(0.3 * 3 + 0.05 * 40)
    hidden = Latency(**{**one_go, "forward_wire": 1.0, "backward_wire": 2.0}, overlap=1.0)
    assert doubted.shadow_costs(overlap=1.0).worthwhile(hidden) == pytest.approx(0.3 * 3), "not twice"
    costs = PlacementCosts.from_measured(asdict(doubted), every=50)
    now = score(Placement.contiguous(2, 2), np.array([[9, 1], [5, 5]]), costs)
    assert costs.unsure_seconds(now) == pytest.approx(0.3 * now.fullest + 0.05 * now.near)


def test_sizes_are_written_as_they_are_read_back() -> None:
    """Who repeats choices that a file holds writes the same file again."""
    sizes = ExpertSizes(row_bytes=64, parameters=9, weight_dtype=torch.bfloat16, held=1).as_bytes()
    assert [repr(value) for value in sizes.values()] == ["64.0", "18.0", "36.0"]
