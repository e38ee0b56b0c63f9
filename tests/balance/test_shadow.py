"""Shadows on skewed counts and not on uniform ones; what is predicted adds up; never more than asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import shadow_costs as costs
from strategies import counts_for, placements, zipf_counts

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow import ShadowPlan, choose_shadows, forced_shadows, predict
from moeclipse.core.errors import ConfigError


@pytest.mark.parametrize("overlap", [0.0, 1.0])
@pytest.mark.parametrize("shared_wire", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_skewed_counts_get_shadows_and_uniform_ones_none(
    seed: int, shared_wire: bool, overlap: float
) -> None:
    prices = costs(overlap=overlap, shared_wire=shared_wire)
    placement = Placement.contiguous(16, 4)
    skewed = choose_shadows(zipf_counts(4, 16, 1.2, seed=seed), placement, prices)
    hottest = int(zipf_counts(4, 16, 1.2, seed=seed).sum(0).argmax())
    assert hottest in [expert for expert, _ in skewed.shadows]
    assert skewed.after.total < 0.8 * skewed.before.total
    uniform = choose_shadows(zipf_counts(4, 16, 0.0, seed=seed), placement, prices)
    assert uniform.shadows == ()
    assert uniform.after == uniform.before
    assert uniform.gain == 0


def test_a_dear_wire_forbids_shadows() -> None:
    counts_PE = zipf_counts(4, 16, 1.2, tokens=64)
    assert choose_shadows(counts_PE, Placement.contiguous(16, 4), costs(bandwidth=1e6)).shadows == ()


def test_only_ranks_with_enough_rows_get_a_copy() -> None:
    counts_PE = np.zeros((4, 4), dtype=np.int64)
    counts_PE[:, 0] = [4000, 6000, 5000, 3]
    plan = choose_shadows(counts_PE, Placement.contiguous(4, 4), costs())
    assert plan.shadows == ((0, (1, 2)),)
    limited = choose_shadows(counts_PE, Placement.contiguous(4, 4), costs(min_rows=5500))
    assert limited.shadows == ((0, (1,)),)


def test_a_small_gain_is_not_worth_it() -> None:
    counts_PE, placement = zipf_counts(4, 16, 0.6), Placement.contiguous(16, 4)
    plan = choose_shadows(counts_PE, placement, costs(min_gain=0.0))
    gain = plan.gain / plan.before.total
    assert 0.02 < gain < 0.5
    assert choose_shadows(counts_PE, placement, costs(min_gain=0.95 * gain)).shadows == plan.shadows
    assert choose_shadows(counts_PE, placement, costs(min_gain=1.05 * gain)).shadows == ()


def test_two_equally_full_ranks() -> None:
    """One shadow alone wins nothing, because the other rank stays as full."""
    counts_PE = np.zeros((4, 8), dtype=np.int64)
    counts_PE[:, 0] = counts_PE[:, 2] = 4000
    plan = choose_shadows(counts_PE, Placement.contiguous(8, 4), costs())
    assert {expert for expert, _ in plan.shadows} == {0, 2}


def brute_work(counts_PE: np.ndarray, placement: Placement, plan: ShadowPlan) -> tuple[np.ndarray, ...]:
    """Rows computed, received and sent by each rank, row by row; experts with one replica only."""
    num_ranks = placement.num_ranks
    copies = plan.table(placement.num_experts, num_ranks)
    computed, received, sent = (np.zeros(num_ranks, dtype=np.int64) for _ in range(3))
    for source in range(num_ranks):
        for expert in range(placement.num_experts):
            rows = counts_PE[source, expert]
            target = source if copies[expert, source] else placement.primary[expert]
            computed[target] += rows
            if target != source:
                sent[source] += rows
                received[target] += rows
    return computed, received, sent


@settings(deadline=None)
@given(st.data())
def test_the_prediction_adds_up(data: st.DataObject) -> None:
    num_ranks, num_experts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 8))
    placement = Placement.contiguous(num_experts, num_ranks)
    counts_PE = data.draw(counts_for(placement))
    prices = costs(overlap=data.draw(st.sampled_from([0.0, 0.5, 1.0])), copy=1e-3)
    plan = choose_shadows(counts_PE, placement, prices)
    for this, seconds in (
        (plan, plan.after),
        (ShadowPlan(shadows=(), before=plan.before, after=plan.before), plan.before),
    ):
        computed, received, sent = brute_work(counts_PE, placement, this)
        copies = this.table(num_experts, num_ranks)
        owned = [
            sum(copies[e].sum() for e in range(num_experts) if placement.primary[e] == p)
            for p in range(num_ranks)
        ]
        taken = max(*owned, *copies.sum(0))
        travel = 2 * prices.row_send * max(*received, *sent)
        forward = travel + taken * (prices.parameter_bytes * prices.parameter_byte + prices.copy)
        backward = travel + taken * (prices.gradient_bytes * prices.gradient_byte + prices.copy)
        assert seconds.forward_compute == pytest.approx(computed.max() * prices.row_forward)
        assert seconds.forward_wire == pytest.approx(forward)
        assert seconds.backward_wire == pytest.approx(backward)
        assert seconds.backward_compute == pytest.approx(computed.max() * prices.row_backward)
        for joined, compute, wire in (
            (seconds.forward, seconds.forward_compute, forward),
            (seconds.backward, seconds.backward_compute, backward),
        ):
            expected = max(compute, wire) + (1 - prices.overlap) * min(compute, wire)
            assert joined == pytest.approx(expected)
        assert seconds.total == pytest.approx(seconds.forward + seconds.backward)


@settings(deadline=None)
@given(st.data())
def test_plans_fit_any_placement(data: st.DataObject) -> None:
    placement = data.draw(placements())
    counts_PE = data.draw(counts_for(placement))
    most = data.draw(st.integers(0, 3))
    prices = costs(shared_wire=data.draw(st.booleans()), min_rows=3)
    plan = choose_shadows(counts_PE, placement, prices, max_shadows=most)
    assert plan == choose_shadows(counts_PE.copy(), placement, prices, max_shadows=most)
    copies = plan.table(placement.num_experts, placement.num_ranks)
    assert not (copies & placement.holds_EP).any()
    assert not (copies & (prices.enough_rows > counts_PE.T)).any()
    assert copies.sum(0).max() <= most
    assert list(plan.shadows) == sorted(plan.shadows)
    assert plan.after.total <= plan.before.total
    assert plan.after == predict(counts_PE, placement, prices, plan.shadows)
    placement.with_replicas(plan.shadows)  # a legal placement for one step


def test_forced_shadows_go_where_rows_are() -> None:
    counts_PE = np.array([[5, 0, 0, 1], [0, 0, 0, 2], [7, 3, 0, 0], [1, 0, 0, 4]])
    plan = forced_shadows(counts_PE, Placement.contiguous(4, 4), costs(), [3, 0, 2, 0])
    assert plan.shadows == ((0, (2, 3)), (3, (0, 1)))
    with pytest.raises(ConfigError, match="expert 9 cannot be shadowed; experts are 0 to 3"):
        forced_shadows(counts_PE, Placement.contiguous(4, 4), costs(), [9])


def test_counts_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"counts are \[2, 2\]"):
        choose_shadows(np.zeros((2, 2), dtype=np.int64), Placement.contiguous(4, 2), costs())
