"""Whether a call asks for shadows: no gain is above the bound, and slow wires count like slow experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import shadow_costs as costs
from strategies import counts_for, placements

from moeclipse.balance.asking import LONGEST_REST, LOOK, Asking, CallLoads, most_gain
from moeclipse.balance.placement import Placement
from moeclipse.balance.serving import choose_serving, time_of, with_guests
from moeclipse.balance.shadow import choose_shadows, predict
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.balance.split import ReplicaTable, split_rows
from moeclipse.balance.workloads import SharedLayer, counts

SLOW_CABLE = ShadowCosts(
    row_forward=1.5e-5,
    row_backward=3e-5,
    row_send=7e-5,
    parameter_bytes=98304,
    gradient_bytes=98304,
    parameter_byte=1.4e-7,
    gradient_byte=1.4e-7,
    copy=2e-3,
    overlap=0.0,
)
"""Of small experts on cables of 60 mbit: a row travels for eight times as long as it is computed."""


def loads(rows: list[int], sent: list[list[int]] | None = None, most: float = 0) -> CallLoads:
    return CallLoads(
        rows_P=np.array(rows),
        sent_PP=np.zeros((len(rows), len(rows))) if sent is None else np.array(sent, dtype=float),
        most_sent=most,
    )


def loads_of(counts_PE: np.ndarray, placement: Placement, nodes: list[int], far: float) -> CallLoads:
    pairs_PR = split_rows(counts_PE, ReplicaTable.of(placement), nodes).rows_PR
    return CallLoads.of(pairs_PR, placement, nodes, far)


def test_what_leaves_a_rank_is_seen_by_expert() -> None:
    """Experts 0 and 1 on rank 0, replicas of 1 and 2 on rank 1, 2 and an empty slot on rank 2."""
    placement = Placement(((0, 1), (1, 2), (2, -1)))
    pairs_PR = np.array([[9, 9, 1, 2, 4, 0], [1, 2, 9, 9, 3, 0], [3, 4, 5, 0, 9, 0]])
    found = CallLoads.of(pairs_PR, placement, (0, 0, 0), 1.0)
    assert found.rows_P.tolist() == [28, 26, 16]
    assert found.most_sent == 4 + 5, "of rank 2 for expert 1, whoever computes them"
    assert found.sent_PP.tolist() == [[0, 3, 4], [3, 0, 3], [7, 5, 0]]
    far = CallLoads.of(pairs_PR, placement, (0, 0, 1), 2.0)
    assert far.sent_PP.tolist() == [[0, 3, 8], [3, 0, 6], [14, 10, 0]]
    assert far.most_sent == 2 * (4 + 5)
    assert CallLoads.of(pairs_PR, placement, (5, 4, 4), 2.0).most_sent == 2 * 2 + 2 * 4 + 5, "of a host"


@settings(deadline=None)
@given(st.data())
def test_no_shadows_gain_more_than_the_bound(data: st.DataObject) -> None:
    """Whatever is lent to whom, on near and far links, hidden or not, for own rows or for all."""
    serving = data.draw(st.booleans())
    placement = data.draw(placements())
    if serving:  # with replicas other experts' rows find other places, too
        placement = Placement.contiguous(placement.num_experts, placement.num_ranks)
    counts_PE = data.draw(counts_for(placement))
    names = {"shared_wire": st.booleans(), "overlap": st.sampled_from([0.0, 0.3, 1.0])}
    names |= {"num_parameters": st.sampled_from([1, 300, 10**5]), "far": st.sampled_from([1.0, 2.5])}
    names |= {"row_forward": st.sampled_from([0.0, 1e-7, 4e-5])}
    prices = costs(**{name: data.draw(values) for name, values in names.items()})
    nodes = [rank % 2 for rank in range(placement.num_ranks)]
    free_EP = ~placement.holds_EP
    drawn = data.draw(st.lists(st.booleans(), min_size=free_EP.size, max_size=free_EP.size))
    copies_EP = free_EP & np.array(drawn).reshape(free_EP.shape)
    shadows = tuple((e, tuple(np.flatnonzero(row).tolist())) for e, row in enumerate(copies_EP) if row.any())
    if not shadows:
        return
    before = predict(counts_PE, placement, prices, (), node_P=nodes)
    if serving:
        guests = split_rows(counts_PE, ReplicaTable.of(with_guests(placement, shadows)), nodes)
        after = time_of(guests, placement, shadows, prices, nodes)
    else:
        after = predict(counts_PE, placement, prices, shadows, node_P=nodes)
    bound = most_gain(loads_of(counts_PE, placement, nodes, prices.far), prices, serving)
    assert before.total - after.total <= bound + 1e-9 * before.total


def test_the_bound_is_what_evening_out_leaves_behind_one_copy() -> None:
    prices = costs(overlap=0.0)
    copy = prices.parameter_seconds + prices.gradient_seconds
    row = prices.row_forward + prices.row_backward
    assert most_gain(loads([300, 100]), prices, False) == pytest.approx(100 * row - copy)
    saved = 4 * prices.row_send
    some = loads([300, 100], most=50)
    assert most_gain(some, prices, False) == pytest.approx(100 * row - copy + 50 * saved)
    rows_pay = loads([200, 200], most=copy / saved + 1)
    assert most_gain(rows_pay, prices, False) == np.inf, "rows alone pay for a copy"
    assert most_gain(loads([300, 100]), costs(overlap=1.0), False) == pytest.approx(100 * row)
    wires = loads([200, 200, 200], [[0, 0, 30], [0, 0, 60], [0, 0, 0]])
    assert most_gain(wires, prices, False) == pytest.approx(-copy), "a shadow for own rows evens no wire"
    assert most_gain(wires, prices, True) == pytest.approx((90 - 30) * saved - copy)
    assert most_gain(wires, replace(prices, shared_wire=True), True) == pytest.approx(-copy)
    nothing = loads([0, 0])
    assert most_gain(nothing, prices, True) == pytest.approx(-copy)


@pytest.mark.parametrize("workload", ["hot experts", "hot rank", "rotating"])
def test_slow_cables_are_a_reason_to_lend(workload: str) -> None:
    """Seconds lie in the cable of the rank that has the hot experts; computing them takes a tenth of that."""
    shape = SharedLayer(num_experts=16, top_k=2, num_ranks=4, tokens=256)
    counts_PE = counts(workload, 1, 0, shape)
    placement = Placement.contiguous(16, 4)
    seen = loads_of(counts_PE, placement, [0] * 4, 1.0)
    plan = choose_serving(counts_PE, placement, SLOW_CABLE)
    assert plan.gain > 0.05 * plan.before.total
    assert plan.gain > choose_shadows(counts_PE, placement, SLOW_CABLE).gain
    assert most_gain(seen, SLOW_CABLE, True) >= plan.gain
    asking = Asking()
    asking.asks = False
    asking.after_call(seen, SLOW_CABLE, 1e-3, serves=True)
    assert asking.asks
    even = loads_of(counts("even", 1, 0, shape), placement, [0] * 4, 1.0)
    asking.after_call(even, SLOW_CABLE, 1e-3, serves=True)
    assert not asking.asks


def test_rests_grow_and_a_jump_ends_them() -> None:
    asking, looks = Asking(), []
    for call in range(2 * LOOK):
        if asking.asks:
            asking.after_answer(0.0, 1e-3)
            continue
        looks += [call] if asking.looks else []
        asking.after_call(loads([50, 50]) if asking.looks else None, SLOW_CABLE, 1e-3, serves=True)
    assert looks == [1, 1 + LOOK], "even loads are looked at now and then"
    assert not asking.asks
    asking.look_again()
    assert (asking.asks, asking.rest, asking.left) == (True, 0, 0)
    for _ in range(10):
        asking.after_answer(0.0, 1e-3)
    assert asking.rest == LONGEST_REST
    assert not asking.surprised(np.array([10, 10])), "nothing is usual yet"
    assert not asking.surprised(np.array([10, 11]))
    assert asking.surprised(np.array([10, 30]))
    assert not asking.surprised(np.array([10, 30])), "once"
    assert not asking.surprised(np.array([0, 0]))
    other = Asking()
    other.load_state(asking.state())
    assert other.state() == asking.state(), "a resumed run goes on here"
    asking.after_answer(2e-3, 1e-3)
    assert (asking.asks, asking.rest) == (True, 0)
