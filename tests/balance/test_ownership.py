"""Owners of experts: every replica has one, both ends of an exchange agree, a move loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from moeclipse.balance.ownership import GRAIN, Owner, Ownership
from moeclipse.balance.placement import Placement

REDUCE = st.sampled_from(["sum", "fedavg"])


SIZES = (7, 12)
"""Elements of the parameters of an expert."""


@given(
    placement=placements(),
    copies=st.integers(1, 3),
    layer=st.integers(0, 4),
    reduce=REDUCE,
    grain=st.integers(1, 9),
)
def test_every_element_of_every_replica_has_one_owner(
    placement: Placement, copies: int, layer: int, reduce, grain: int
) -> None:
    ownership = Ownership.of(placement, copies, reduce=reduce, layer=layer, grain=grain)
    assert len(ownership.owners) == placement.num_replicas
    exchanges = [ownership.exchange_of(index) for index in range(ownership.group_size)]
    owned = [ownership.owned_by(index) for index in range(ownership.group_size)]
    assert sum(map(len, owned)) == placement.num_replicas
    found = []
    for a, mine in enumerate(exchanges):
        rank = a % placement.num_ranks
        for slot, owner in zip(mine.own_slots, owned[a], strict=True):
            assert placement.slots[rank][slot] == owner.expert
            found += [(a, slot, element) for element in range(*owner.stretch(12))]
        for b, theirs in enumerate(exchanges):
            assert [owner for _, owner in mine.slots[b]] == [owned[b][which] for which in theirs.owned[a]], (
                "both ends name the same"
            )
            for slot, owner in mine.slots[b]:
                assert placement.slots[rank][slot] == owner.expert
                found += [(a, slot, element) for element in range(*owner.stretch(12))]
    held = [
        (copy * placement.num_ranks + rank, slot, element)
        for copy in range(copies)
        for rank, row in enumerate(placement.slots)
        for slot, expert in enumerate(row)
        if expert >= 0
        for element in range(12)
    ]
    assert sorted(found) == held, "every element of a slot with an expert, in every copy, has one owner"


@given(placement=placements(), size=st.integers(1, 99), grain=st.integers(1, 20))
def test_parts_are_even_and_begin_at_grains(placement: Placement, size: int, grain: int) -> None:
    ownership = Ownership.of(placement, grain=grain)
    for owners in ownership.owners_of.values():
        stretches = [owner.stretch(size) for owner in owners]
        assert [first for first, _ in stretches] == [0, *(last for _, last in stretches[:-1])]
        assert stretches[-1][1] == size
        assert all(first % grain == 0 or first == size for first, _ in stretches)
        lengths = [last - first for first, last in stretches]
        assert max(lengths) - min(lengths) < 2 * grain


@given(data=st.data(), copies=st.integers(1, 3), reduce=REDUCE, grain=st.integers(1, 9))
def test_after_the_transfers_everybody_has_what_it_needs(
    data: st.DataObject, copies: int, reduce, grain: int
) -> None:
    old = data.draw(placements())
    new = data.draw(placements(num_experts=old.num_experts, num_ranks=old.num_ranks))
    before = Ownership.of(old, copies, reduce=reduce, layer=1, grain=grain)
    after = Ownership.of(new, copies, reduce=reduce, layer=1, old=before, grain=grain)
    weights = {
        (c * old.num_ranks + p, e) for c in range(copies) for p, row in enumerate(old.held) for e in row
    }
    states = {place for owner in before.owners for place in elements(before, owner)}
    transfers = before.transfers(after, SIZES)
    for transfer in transfers:
        assert transfer.source != transfer.target
        if transfer.owners is None:
            assert (transfer.source, transfer.expert) in weights, "nobody sends what it does not have"
            weights.add((transfer.target, transfer.expert))
            continue
        sent, taken = transfer.owners
        assert (before.index_of(sent), after.index_of(taken)) == (transfer.source, transfer.target)
        travels = {(*place[1:],) for place in elements(before, sent)} & {
            (*place[1:],) for place in elements(after, taken)
        }
        assert travels, "nothing is sent for nothing"
        states |= {(transfer.target, *place) for place in travels}
    for copy in range(copies):
        for rank, row in enumerate(new.held):
            assert {(copy * new.num_ranks + rank, expert) for expert in row} <= weights
    assert {place for owner in after.owners for place in elements(after, owner)} <= states
    same = Ownership.of(old, copies, reduce=reduce, layer=1, old=before, grain=grain)
    assert not before.transfers(same, SIZES)


def elements(ownership: Ownership, owner: Owner) -> set[tuple[int, int, int, int]]:
    """(index, expert, parameter, element) of all that an owner has state of."""
    return {
        (ownership.index_of(owner), owner.expert, number, element)
        for number, size in enumerate(SIZES)
        for element in range(*owner.stretch(size))
    }


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
    moved = [transfer.expert for transfer in old.transfers(new, SIZES) if transfer.state]
    assert moved == [4], moved


def test_a_replica_more_takes_half_of_the_state_and_moves_nothing_else() -> None:
    old = Ownership.of(Placement(((0, 1), (2, -1))))
    new = Ownership.of(Placement(((0, 1), (2, 0))), old=old)
    found = old.transfers(new, (4 * GRAIN,))
    assert [(t.expert, t.state, t.source, t.target) for t in found] == [(0, False, 0, 1), (0, True, 0, 1)]
    assert found[1].owners is not None
    assert found[1].owners[0].overlap(found[1].owners[1], 4 * GRAIN) == (2 * GRAIN, 4 * GRAIN)
    assert [(t.source, t.target) for t in new.transfers(old, (4 * GRAIN,))] == [(1, 0)], "and back"
