"""Homes of experts: every replica has one owner, both ends of an exchange agree, a move loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from moeclipse.balance.homes import Homes
from moeclipse.balance.placement import Placement

REDUCE = st.sampled_from(["sum", "fedavg"])


@given(placement=placements(), copies=st.integers(1, 3), layer=st.integers(0, 4), reduce=REDUCE)
def test_every_replica_is_tied_to_one_owner(placement: Placement, copies: int, layer: int, reduce) -> None:
    homes = Homes.of(placement, copies, reduce=reduce, layer=layer)
    count = placement.num_experts if reduce == "sum" else placement.num_replicas
    assert len(homes.homes) == count
    ties = [homes.ties(place) for place in range(homes.num_places)]
    owned = [homes.owned(place) for place in range(homes.num_places)]
    assert sum(map(len, owned)) == count
    tied = set()
    for a, mine in enumerate(ties):
        rank = a % placement.num_ranks
        assert mine.own_homes == tuple(range(len(owned[a])))
        for slot, home in zip(mine.own_slots, mine.own_homes, strict=True):
            assert placement.slots[rank][slot] == owned[a][home].expert
            tied.add((a, slot))
        for b, theirs in enumerate(ties):
            experts = [placement.slots[rank][slot] for slot in mine.slots[b]]
            assert experts == [owned[b][home].expert for home in theirs.homes[a]], "both ends name the same"
            tied |= {(a, slot) for slot in mine.slots[b]}
    held = {
        (copy * placement.num_ranks + rank, slot)
        for copy in range(copies)
        for rank, row in enumerate(placement.slots)
        for slot, expert in enumerate(row)
        if expert >= 0
    }
    assert tied == held, "every slot with an expert, in every copy, has an owner; no empty one has"


@given(data=st.data(), copies=st.integers(1, 3), reduce=REDUCE)
def test_after_the_parcels_everybody_has_what_it_needs(data: st.DataObject, copies: int, reduce) -> None:
    old = data.draw(placements())
    new = data.draw(placements(num_experts=old.num_experts, num_ranks=old.num_ranks))
    before = Homes.of(old, copies, reduce=reduce, layer=1)
    after = Homes.of(new, copies, reduce=reduce, layer=1, old=before)
    weights = {
        (c * old.num_ranks + p, e) for c in range(copies) for p, row in enumerate(old.held) for e in row
    }
    states = {(before.owner(home), home.expert) for home in before.homes}
    for parcel in before.parcels(after):
        have = states if parcel.state else weights
        assert (parcel.source, parcel.expert) in have, "nobody sends what it does not have"
        assert parcel.source != parcel.target
    weights |= {(p.target, p.expert) for p in before.parcels(after) if not p.state}
    states |= {(p.target, p.expert) for p in before.parcels(after) if p.state}
    for copy in range(copies):
        for rank, row in enumerate(new.held):
            assert {(copy * new.num_ranks + rank, expert) for expert in row} <= weights
    assert {(after.owner(home), home.expert) for home in after.homes} <= states
    assert not before.parcels(Homes.of(old, copies, reduce=reduce, layer=1, old=before))


@given(placement=placements(), copies=st.integers(1, 4), layer=st.integers(0, 9))
def test_copies_share_the_work_of_a_rank(placement: Placement, copies: int, layer: int) -> None:
    homes = Homes.of(placement, copies, layer=layer)
    again = Homes.of(placement, copies, layer=layer, old=homes)
    for table in (homes, again):
        for rank in range(placement.num_ranks):
            counts = [sum((h.rank, h.copy) == (rank, c) for h in table.homes) for c in range(copies)]
            assert max(counts) - min(counts) <= 1
    assert again == homes, "what need not move stays"


@pytest.mark.parametrize("copies", [2, 3])
def test_one_more_expert_moves_no_other_state(copies: int) -> None:
    old = Homes.of(Placement(((0, 1, 2, 3, -1), (4, 5))), copies)
    new = Homes.of(Placement(((0, 1, 2, 3, 4), (5, -1))), copies, old=old)
    moved = [parcel.expert for parcel in old.parcels(new) if parcel.state]
    assert moved == [4], moved
