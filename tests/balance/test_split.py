"""Every row gets exactly one replica of its expert, and the fullest rank is nearly as low as can be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import counts_for, placements, zipf_counts

from moeclipse.balance.placement import EMPTY, Placement
from moeclipse.balance.split import ReplicaTable, Split, balance_of, pour, split_rows
from moeclipse.core.errors import ConfigError


def check_every_row_once(split: Split, placement: Placement, counts_PE: np.ndarray) -> None:
    flat = [expert for row in placement.slots for expert in row]
    assert split.rows_PR.shape == (placement.num_ranks, len(flat))
    assert (split.rows_PR >= 0).all()
    assigned_PE = np.zeros_like(counts_PE)
    for slot, expert in enumerate(flat):
        if expert == EMPTY:
            assert not split.rows_PR[:, slot].any()
        else:
            assigned_PE[:, expert] += split.rows_PR[:, slot]
    assert np.array_equal(assigned_PE, counts_PE)
    assert split.load_P.sum() == counts_PE.sum()


@settings(deadline=None)
@given(st.data())
def test_every_row_is_given_once(data: st.DataObject) -> None:
    placement = data.draw(placements())
    counts_PE = data.draw(counts_for(placement))
    table = ReplicaTable.of(placement)
    split = split_rows(counts_PE, table)
    check_every_row_once(split, placement, counts_PE)
    again = split_rows(counts_PE.copy(), ReplicaTable.of(placement))
    assert np.array_equal(split.rows_PR, again.rows_PR)
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=placement.num_ranks, max_size=placement.num_ranks))
    near = split_rows(counts_PE, table, nodes)
    check_every_row_once(near, placement, counts_PE)
    assert np.array_equal(near.load_P, split.load_P)


@settings(deadline=None)
@given(st.data())
def test_local_rows_come_first_but_only_up_to_the_quota(data: st.DataObject) -> None:
    placement = data.draw(placements())
    counts_PE = data.draw(counts_for(placement))
    split = split_rows(counts_PE, ReplicaTable.of(placement))
    for slot, (rank, expert) in enumerate((r, e) for r, row in enumerate(placement.slots) for e in row):
        if expert == EMPTY:
            continue
        total, kept = split.rows_PR[:, slot].sum(), split.rows_PR[rank, slot]
        assert kept == min(total, counts_PE[rank, expert])


def lowest_possible(load_E: np.ndarray, placement: Placement) -> float:
    """The lowest fullest rank: for every set of ranks, what must stay inside it, shared evenly."""
    best = 0.0
    for size in range(1, placement.num_ranks + 1):
        for ranks in itertools.combinations(range(placement.num_ranks), size):
            inside = [e for e, holders in enumerate(placement.holders) if set(holders) <= set(ranks)]
            best = max(best, load_E[inside].sum() / size)
    return best


@settings(deadline=None)
@given(st.data())
def test_the_fullest_rank_is_nearly_as_low_as_can_be(data: st.DataObject) -> None:
    placement = data.draw(placements())
    counts_PE = data.draw(counts_for(placement))
    load_E = counts_PE.sum(0)
    lowest = lowest_possible(load_E, placement)
    _, level = pour(load_E, ReplicaTable.of(placement), max_sweeps=200)
    assert max(level) >= lowest * (1 - 1e-9)
    fullest = split_rows(counts_PE, ReplicaTable.of(placement)).load_P.max()
    # Whole rows: each of a rank's experts may round up by one.
    assert fullest <= lowest / 0.9 + placement.num_experts


def test_always_local_would_not_balance() -> None:
    """Rank 0 has all tokens and a replica of everything; quotas still send half of them away."""
    placement = Placement.parse([[0, 1], [0, 1]])
    split = split_rows(np.array([[60, 40], [0, 0]]), ReplicaTable.of(placement))
    assert split.load_P.tolist() == [50, 50]
    assert split.sent_PP.tolist() == [[50, 50], [0, 0]]
    assert split.balance == 1.0


def test_rows_prefer_their_own_node() -> None:
    placement = Placement.parse([[0], [1], [0], [1]])
    counts_PE = np.array([[0, 10], [10, 0], [0, 10], [10, 0]])
    split = split_rows(counts_PE, ReplicaTable.of(placement), node_P=[0, 0, 1, 1])
    assert split.sent_PP.tolist() == [[0, 10, 0, 0], [10, 0, 0, 0], [0, 0, 0, 10], [0, 0, 10, 0]]


def test_a_large_skewed_layer_is_balanced() -> None:
    counts_PE = zipf_counts(8, 64, 1.2)
    hot = np.argsort(-counts_PE.sum(0))
    rows = [list(row) for row in Placement.contiguous(64, 8).slots]
    for rank, expert in itertools.product(range(8), hot[:4].tolist()):
        if expert not in rows[rank]:
            rows[rank].append(expert)
    placement = Placement(tuple(map(tuple, rows)))
    split = split_rows(counts_PE, ReplicaTable.of(placement))
    assert split.balance > 0.99
    assert balance_of(np.zeros(3)) == 1.0


def test_counts_of_another_shape_are_refused() -> None:
    table = ReplicaTable.of(Placement.contiguous(4, 2))
    with pytest.raises(
        ConfigError, match=r"counts are \[4, 2\], .* 2 ranks and 4 experts: expected \[2, 4\]"
    ):
        split_rows(np.zeros((4, 2), dtype=np.int64), table)
