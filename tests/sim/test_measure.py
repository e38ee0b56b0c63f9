"""Every instant is compute, exposed, straggle or idle; hidden and exposed add up; memory follows the ops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeclipse.cost.model import DEEPSEEK_V3, UNIT, Costs
from moeclipse.schedule.catalogue import build
from moeclipse.schedule.check import verify
from moeclipse.schedule.kinds import Part
from moeclipse.schedule.lower import lower
from moeclipse.schedule.shape import LayerShape
from moeclipse.schedule.smart import exchange_shape, smart
from moeclipse.schedule.templates import Expansion, expand
from moeclipse.sim.engine import Simulation, simulate
from moeclipse.sim.measure import communication_time, compute_intervals, memory_curve, summarise


def slow_classes(result: Simulation, rank: int, samples: int = 2000) -> dict[str, float]:
    """The same four classes by looking at many instants: slow and obvious."""
    start, finish = compute_intervals(result, rank)
    lane = communication_time(result, rank)
    step = result.makespan / samples
    spent = {"compute": 0.0, "exposed": 0.0, "straggle": 0.0, "idle": 0.0}
    for k in range(samples):
        t = (k + 0.5) * step
        if ((start <= t) & (t < finish)).any():
            what = "compute"
        elif ((lane.start <= t) & (t < lane.finish)).any():
            what = "exposed"
        elif ((lane.ready <= t) & (t < lane.start) & ~lane.posted_ahead).any():
            what = "straggle"
        else:
            what = "idle"
        spent[what] += step
    return spent


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 3))
def test_classes_add_up_and_equal_the_slow_count(seed: int, P: int, size: int) -> None:
    program = smart(exchange_shape(P, group_size=size, chunks=2, backward=True))
    rng = np.random.default_rng(seed)
    durations = [rng.uniform(0.0, 1.0, len(ops)).tolist() for ops in program.ranks]
    result = simulate(program, Costs(seconds={}), durations)
    summary = summarise(result)
    for rank, time in enumerate(summary.ranks):
        assert time.compute + time.exposed + time.straggle + time.idle == pytest.approx(result.makespan)
        slow = slow_classes(result, rank)
        for name in slow:
            assert getattr(time, name) == pytest.approx(slow[name], abs=0.02 * result.makespan)


def test_pipelines_add_up_too() -> None:
    for program in (build("dualpipev", 4, 9), lower(build("zb-v", 4, 9)), build("pp1", 1, 4)):
        result = simulate(program, replace(UNIT, wire=0.3))
        for time in summarise(result).ranks:
            assert time.compute + time.exposed + time.straggle + time.idle == pytest.approx(result.makespan)


def test_a_receive_posted_ahead_is_idle_and_a_late_peer_is_straggle() -> None:
    pipeline = summarise(simulate(lower(build("1f1b", 4, 6)), replace(UNIT, wire=0.3)))
    assert all(rank.straggle == 0.0 and rank.idle > 0 for rank in pipeline.ranks)
    program = smart(exchange_shape(2, backward=True))
    # Per rank: S0 S1 C0 R0 C1 R1 W. Rank 1 computes for 5 s before its R0; rank 0 has nothing to do.
    durations = [[0.0] * 7, [0.0, 0.0, 5.0, 0.0, 1.0, 1.0, 0.0]]
    late = summarise(simulate(program, Costs(seconds={}), durations)).ranks[0]
    assert late.straggle > 0
    assert late.compute == 0.0


def test_implied_and_written_transfers_are_measured_alike() -> None:
    costs = replace(UNIT, wire=0.3)
    one = summarise(simulate(build("dualpipev", 4, 9), costs))
    other = summarise(simulate(lower(build("dualpipev", 4, 9)), costs))
    assert set(one.kinds) == set(other.kinds)
    for kind in one.kinds:
        assert one.kinds[kind].total == pytest.approx(other.kinds[kind].total)
        assert one.kinds[kind].hidden == pytest.approx(other.kinds[kind].hidden)
    assert one.peak == other.peak


def test_hidden_never_exceeds_total() -> None:
    program = expand(build("vpp+1", 4, 8), [LayerShape(shared=False)] * 2, Expansion(chunks=2))
    summary = summarise(simulate(program, DEEPSEEK_V3))
    assert summary.kinds
    for time in summary.kinds.values():
        assert -1e-12 <= time.hidden <= time.total + 1e-12
    exchange = summary.communication(Part.DISPATCH, Part.COMBINE)
    everything = summary.communication()
    assert exchange.total == pytest.approx(everything.total)  # wires are free here


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "vpp+1", "zb-h1", "zb-v", "dualpipev"])
def test_memory_in_time_never_exceeds_memory_in_launch_order(name: str) -> None:
    verified = verify(build(name, 4, 12))
    summary = summarise(simulate(verified, UNIT))
    for rank, (in_time, in_order) in enumerate(zip(summary.peak, verified.peak, strict=True)):
        assert in_time <= in_order + 1e-9
        moments, held = memory_curve(simulate(verified, UNIT), rank)
        assert (np.diff(moments) >= 0).all()
        assert held[-1] == pytest.approx(0.0)
        assert held.min() >= 0


def test_memory_by_hand() -> None:
    result = simulate(build("1f1b", 2, 2), UNIT)
    moments, held = memory_curve(result, 0)
    # F0 at 0, F1 at 1; B0 runs 4..6 and B1 7..9.
    assert list(zip(moments.tolist(), held.tolist(), strict=True)) == [(0, 1), (1, 2), (6, 1), (9, 0)]
