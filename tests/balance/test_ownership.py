"""Owners of experts: every replica has one, both ends of an exchange agree, a move loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from moeclipse.balance.ownership import Ownership
from moeclipse.balance.placement import Placement

REDUCE = st.sampled_from(["sum", "fedavg"])


@given(placement=placements(), copies=st.integers(1, 3), layer=st.integers(0, 4), reduce=REDUCE)
def test_every_replica_has_one_owner(placement: Placement, copies: int, layer: int, reduce) -> None:
    ownership = Ownership.of(placement, copies, reduce=reduce, layer=layer)
    count = placement.num_experts if reduce == "sum" else placement.num_replicas
    assert len(ownership.owners) == count
    exchanges = [ownership.exchange_of(index) for index in range(ownership.group_size)]
    owned = [ownership.owned_by(index) for index in range(ownership.group_size)]
    assert sum(map(len, owned)) == count
    found = set()
    for a, mine in enumerate(exchanges):
        rank = a % placement.num_ranks
        for slot, owner in zip(mine.own_slots, owned[a], strict=True):
            assert placement.slots[rank][slot] == owner.expert
            found.add((a, slot))
        for b, theirs in enumerate(exchanges):
            experts = [placement.slots[rank][slot] for slot in mine.slots[b]]
            assert experts == [owned[b][which].expert for which in theirs.owned[a]], "both ends name the same"
            found |= {(a, slot) for slot in mine.slots[b]}
    held = {
        (copy * placement.num_ranks + rank, slot)
        for copy in range(copies)
        for rank, row in enumerate(placement.slots)
        for slot, expert in enumerate(row)
        if expert >= 0
    }
    assert found == held, "every slot with an expert, in every copy, has an owner; no empty one has"


@given(data=st.data(), copies=st.integers(1, 3), reduce=REDUCE)
def test_after_the_transfers_everybody_has_what_it_needs(data: st.DataObject, copies: int, reduce) -> None:
    old = data.draw(placements())
    new = data.draw(placements(num_experts=old.num_experts, num_ranks=old.num_ranks))
    before = Ownership.of(old, copies, reduce=reduce, layer=1)
    after = Ownership.of(new, copies, reduce=reduce, layer=1, old=before)
    weights = {
        (c * old.num_ranks + p, e) for c in range(copies) for p, row in enumerate(old.held) for e in row
    }
    states = {(before.index_of(owner), owner.expert) for owner in before.owners}
    transfers = before.transfers(after)
    for transfer in transfers:
        have = states if transfer.state else weights
        assert (transfer.source, transfer.expert) in have, "nobody sends what it does not have"
        assert transfer.source != transfer.target
    weights |= {(t.target, t.expert) for t in transfers if not t.state}
    states |= {(t.target, t.expert) for t in transfers if t.state}
    for copy in range(copies):
        for rank, row in enumerate(new.held):
            assert {(copy * new.num_ranks + rank, expert) for expert in row} <= weights
    assert {(after.index_of(owner), owner.expert) for owner in after.owners} <= states
    assert not before.transfers(Ownership.of(old, copies, reduce=reduce, layer=1, old=before))


@given(placement=placements(), copies=st.integers(1, 4), layer=st.integers(0, 9))
def test_copies_share_the_work_of_a_rank(placement: Placement, copies: int, layer: int) -> None:
    ownership = Ownership.of(placement, copies, layer=layer)
    again = Ownership.of(placement, copies, layer=layer, old=ownership)
    for table in (ownership, again):
        for rank in range(placement.num_ranks):
            counts = [sum((o.rank, o.copy) == (rank, c) for o in table.owners) for c in range(copies)]
            assert max(counts) - min(counts) <= 1
    assert again == ownership, "what need not move stays"


@pytest.mark.parametrize("copies", [2, 3])
def test_one_more_expert_moves_no_other_state(copies: int) -> None:
    old = Ownership.of(Placement(((0, 1, 2, 3, -1), (4, 5))), copies)
    new = Ownership.of(Placement(((0, 1, 2, 3, 4), (5, -1))), copies, old=old)
    moved = [transfer.expert for transfer in old.transfers(new) if transfer.state]
    assert moved == [4], moved
