"""What a placement costs: every part of the sum by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plans import FREE

from moeclipse.balance.objective import PlacementCosts, nodes_of, rows_per_pair, score, sync_copies
from moeclipse.balance.placement import Placement
from moeclipse.core.errors import ConfigError


def test_on_a_shared_wire_a_rank_has_its_part_of_all_rows() -> None:
    counts_PE = np.array([[5, 7], [3, 9]])
    costs = replace(FREE, row_bytes=2.0, near_bandwidth=10.0)
    placement = Placement.contiguous(2, 2)
    assert score(placement, counts_PE, costs).near == pytest.approx(4 * 2 * 7 / 10)
    shared = replace(costs, shared_wire=True)
    assert score(placement, counts_PE, shared).near == pytest.approx(4 * 2 * (7 + 3) / 2 / 10)


def test_the_score_adds_up() -> None:
    current = Placement.contiguous(4, 2)
    new = Placement.parse([[0, 1, 2], [2, 3, 0]]).arranged_like(current)
    counts_PE = np.array([[10, 0, 0, 0], [10, 0, 0, 20]])
    costs = PlacementCosts(
        row_seconds=1.0,
        row_bytes=2.0,
        weight_bytes=10.0,
        gradient_bytes=20.0,
        state_bytes=60.0,
        near_bandwidth=10.0,
        far_bandwidth=4.0,
        every=5,
    )
    found = score(new, counts_PE, costs, current=current, node_P=[0, 1])
    assert found.fullest == 20  # expert 0 is poured so that both ranks have 20 rows
    assert found.cross == 4 * 2.0 * 10 / 4.0  # 10 rows of rank 1 go to rank 0
    assert (found.moves, found.states) == (2, 1.0), "half of the state of each"
    assert found.migration == pytest.approx((10.0 + 60.0 / 2) / 4.0 / 5), "each gets one, side by side"
    assert sync_copies(new) == [1, 1]
    assert found.sync == pytest.approx(30.0 / 4.0)
    assert found.total == found.fullest + found.cross + found.sync + found.migration
    assert (found.balance, found.cross_share) == (1.0, 0.25)


def test_far_rows_are_charged_to_the_card_that_carries_them() -> None:
    """Four ranks on two nodes; rank 0 sends 8 rows across, rank 1 sends 4: of one card 12, of their own 8."""
    counts_PE = np.zeros((4, 4), dtype=np.int64)
    counts_PE[0, 2], counts_PE[1, 3] = 8, 4
    costs = replace(FREE, row_bytes=2.0, far_bandwidth=4.0, near_bandwidth=1e9)
    placement, node_P = Placement.contiguous(4, 4), (0, 0, 1, 1)
    assert score(placement, counts_PE, costs, node_P=node_P).cross == pytest.approx(4 * 2 * 12 / 4)
    own = replace(costs, card_per_rank=True)
    assert score(placement, counts_PE, own, node_P=node_P).cross == pytest.approx(4 * 2 * 8 / 4)
    assert (costs.bandwidth(node_P), own.bandwidth(node_P)) == (2.0, 4.0), "of one rank's parameters"


PROBED = {
    "row_forward": 1.0,
    "row_backward": 2.0,
    "row_bytes": 8.0,
    "parameter_bytes": 3.0,
    "gradient_bytes": 6.0,
    "bandwidth": 100.0,
    "shared_wire": False,
}


@pytest.mark.parametrize(
    ("far", "node", "per_rank"),
    [
        ({}, 200.0, False),
        ({"far_bandwidth": 0.0, "far_link": 0.0}, 200.0, False),
        ({"far_bandwidth": 10.0, "far_link": 19.0}, 20.0, False),
        ({"far_bandwidth": 10.0, "far_link": 22.0}, 22.0, False),
        ({"far_bandwidth": 10.0, "far_link": 11.0}, 10.0, True),
    ],
)
def test_whether_ranks_share_a_card_follows_from_what_was_measured(
    far: dict[str, float], node: float, per_rank: bool
) -> None:
    """One rank alone that is as fast as each of two together has a card of its own."""
    found = PlacementCosts.from_measured({**PROBED, **far}, every=5, ranks_per_node=2)
    assert (found.far_bandwidth, found.card_per_rank, found.near_bandwidth) == (node, per_rank, 100.0)


def test_moved_state_is_paid_for() -> None:
    costs = replace(FREE, weight_bytes=2.0, state_bytes=12.0, near_bandwidth=2.0)
    assert costs.move_seconds(3, 2) == (3 * 2 + 2 * 12) / 2
    assert replace(costs, far_bandwidth=0.5).move_seconds(3, 2, (0, 1)) == (3 * 2 + 2 * 12) / 0.5


def test_a_migration_takes_as_long_as_its_busiest_link() -> None:
    """Expert 0 goes to ranks 1, 2 and 3: they get one copy each, and rank 0 sends all three."""
    costs = replace(FREE, weight_bytes=6.0, near_bandwidth=2.0, every=4)
    old, counts_PE = Placement.parse([[0], [1], [2], [3]]), np.ones((4, 4), dtype=np.int64)
    new = Placement.parse([[0], [1, 0], [2, 0], [3, 0]])
    assert score(new, counts_PE, costs, current=old).migration == pytest.approx(3 * 6 / 2 / 4)
    turned = Placement.parse([[1], [2], [3], [0]])
    assert score(turned, counts_PE, costs, current=old).migration == pytest.approx(6 / 2 / 4)
    together = replace(costs, shared_wire=True)
    assert score(new, counts_PE, together, current=old).migration == pytest.approx(3 / 4 * 6 / 2 / 4)
    assert score(new, counts_PE, costs).migration == 0.0


def test_replicas_share_the_exchange_of_gradients() -> None:
    """An expert on r ranks: each sends and receives (r - 1) / r of it, where its primary received r - 1."""
    for replicas in range(1, 9):
        table = Placement(((0,),) * replicas)
        assert sync_copies(table) == pytest.approx([(replicas - 1) / replicas] * replicas)
        alone = sync_copies(table, shared_owners=False)
        assert max(alone) == replicas - 1
    table = Placement.parse([[0, 1], [0, 2], [0, 1]])
    assert sync_copies(table) == pytest.approx([2 / 3 + 1 / 2, 2 / 3, 2 / 3 + 1 / 2])


def test_across_nodes_a_rank_has_its_share_of_the_links() -> None:
    costs = replace(FREE, near_bandwidth=8.0, far_bandwidth=4.0)
    assert costs.bandwidth((0, 0, 0, 0)) == 8.0
    assert costs.bandwidth((0, 0, 1, 1)) == 2.0, "two ranks share what the node has"
    assert costs.bandwidth((0, 1, 2, 3)) == 4.0
    assert replace(costs, far_bandwidth=99.0).bandwidth((0, 0, 1, 1)) == 8.0, "no faster than inside"


def test_nodes_are_runs_of_ranks() -> None:
    assert nodes_of(6, 3) == (0, 0, 1, 1, 2, 2)
    with pytest.raises(ConfigError, match=r"nodes \(4\) must divide ranks \(6\); choose one of 1, 2, 3, 6"):
        nodes_of(6, 4)


def test_costs_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"every \(0\) must be positive"):
        PlacementCosts.from_shapes(d_model=8, d_ff=8, every=0)
    with pytest.raises(ConfigError, match="2 problems"):
        replace(FREE, row_bytes=-1, near_bandwidth=0)


@pytest.mark.parametrize(("top_k", "ranks"), [(1, 4), (2, 2), (4, 2), (3, 8)])
def test_a_row_stays_where_none_of_its_pairs_leaves(top_k: int, ranks: int) -> None:
    """Tokens that choose among ranks; one pair more stays at home: how many rows less travel for it."""
    rng, tokens = np.random.default_rng(0), 200_000
    choices_TK = rng.integers(0, ranks, (tokens, top_k))

    def rows(ranks_TK: np.ndarray) -> int:
        return sum(int((ranks_TK == rank).any(1).sum()) for rank in range(1, ranks))

    moved = np.where((rng.random(choices_TK.shape) < 0.02) & (choices_TK > 0), 0, choices_TK)
    pairs = int(((choices_TK > 0) & (moved == 0)).sum())
    found = (rows(choices_TK) - rows(moved)) / pairs
    assert rows_per_pair(top_k, ranks) == pytest.approx(found, abs=0.03)


def test_pairs_that_share_a_row_are_priced_by_what_they_save() -> None:
    whole = PlacementCosts.from_measured(PROBED, every=5)
    assert PlacementCosts.from_measured(PROBED, 5, 1, 0.25).row_bytes == 0.25 * whole.row_bytes
    assert rows_per_pair(4, 1) == rows_per_pair(1, 9) == 1.0


def test_replicas_cost_a_fixed_part_however_few_they_are() -> None:
    """And their bytes travel as fast as copies do, which may be slower than rows."""
    costs = PlacementCosts(
        row_seconds=1e-3,
        row_bytes=0.0,
        weight_bytes=100.0,
        gradient_bytes=300.0,
        state_bytes=0.0,
        near_bandwidth=1e6,
        far_bandwidth=1e6,
        replicas_seconds=0.5,
        copy_bandwidth=1e3,
    )
    counts_PE = np.array([[4, 4], [4, 4]])
    apart, one, both = (
        score(Placement(slots), counts_PE, costs).sync
        for slots in (((0,), (1,)), ((0, 1), (1,)), ((0, 1), (0, 1)))
    )
    assert apart == 0.0
    assert one == pytest.approx(0.5 + 0.5 * 0.4), "half a copy each way, over the slow way of copies"
    assert both == pytest.approx(0.5 + 0.4)
    assert costs.move_seconds(2, 0) == pytest.approx(0.2)
    assert replace(costs, copy_bandwidth=0.0).move_seconds(2, 0) == pytest.approx(2e-4), "0: not known"
    assert replace(costs, copy_bandwidth=1e9).move_seconds(2, 0) == pytest.approx(2e-4), "never above rows"
    with pytest.raises(ConfigError, match=r"replicas_seconds \(-1.0\) must not be negative"):
        replace(costs, replicas_seconds=-1.0)
