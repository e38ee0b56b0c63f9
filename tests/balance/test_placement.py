"""Every expert has a place, nothing is accepted that is none, and moves say exactly what must travel."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from moeclipse.balance.placement import EMPTY, Placement, primary_bounds
from moeclipse.core.errors import ConfigError
from moeclipse.core.shares import even_bounds

SEED = [[0, 3], [1, 2], [1, 2], [0, 3]]


@given(st.integers(0, 40), st.integers(1, 12))
def test_even_bounds(total: int, parts: int) -> None:
    bounds = even_bounds(total, parts)
    sizes = [b - a for a, b in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, total, parts)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_expert_has_one_place(num_experts: int, num_ranks: int) -> None:
    placement = Placement.contiguous(num_experts, num_ranks)
    assert sorted(e for experts in placement.slots for e in experts) == list(range(num_experts))
    flat = [e for experts in placement.slots for e in experts]
    for expert in range(num_experts):
        assert expert in placement.slots[placement.primary[expert]]
        assert flat[placement.slot_of[expert]] == expert
    assert (placement.num_experts, placement.num_ranks) == (num_experts, num_ranks)


@given(st.integers(0, 9), st.integers(1, 5))
def test_primaries_even_out_over_layers(num_experts: int, num_replicas: int) -> None:
    owned = [0] * num_replicas
    for layer in range(num_replicas):
        bounds = primary_bounds(num_experts, num_replicas, layer)
        assert (bounds[0], bounds[-1]) == (0, num_experts)
        for replica in range(num_replicas):
            owned[replica] += bounds[replica + 1] - bounds[replica]
    assert set(owned) == {num_experts}


def test_nested_lists_with_replicas() -> None:
    placement = Placement.parse(SEED, num_experts=4, num_ranks=4, max_slots=2)
    assert placement.holders == ((0, 3), (1, 2), (1, 2), (0, 3))
    assert placement.primary == (0, 1, 1, 0)
    assert placement.slots_PS.tolist() == SEED
    assert placement.num_replicas == 8


def test_ragged_rows_and_empty_slots() -> None:
    placement = Placement.parse([[2, -1, 0], [], [1]])
    assert placement.held == ((2, 0), (), (1,))
    assert placement.slots_PS.tolist() == [[2, -1, 0], [-1, -1, -1], [1, -1, -1]]
    assert placement.slot_of == (2, 3, 0)  # the empty slot is counted
    with pytest.raises(ValueError, match="read-only"):
        placement.slots_PS[0, 0] = 1


@pytest.mark.parametrize(
    ("value", "expected", "message"),
    [
        ([[0, 5], [1]], {"num_experts": 2}, r"rank 0 is given expert 5, but experts are 0 to 1 \(-1: empty"),
        ([[0, -2], [1]], {}, "rank 0 is given expert -2"),
        ([[0, 0], [1]], {}, "rank 0 is given expert 0 2 times; a second copy on one rank helps nobody"),
        ([[0], [2]], {}, "no rank holds expert 1; give each expert at least one slot"),
        ([[0], [1]], {"num_experts": 20}, "no rank holds experts 2, 3, 4, 5, 6, 7, 8, 9 and 10 more"),
        ([[-1], []], {}, "at least one expert; all slots are empty"),
        ([[0, 1, 2]], {"max_slots": 2}, "rank 0 is given 3 slots, but has 2; take experts away"),
        ([[0], [1]], {"num_ranks": 3}, "speaks of 2 ranks, but there are 3"),
        ({"slots": [[0], [1]], "primary": [1, 1]}, {}, r"primary of expert 0 is rank 1, .* its ranks \[0\]"),
        ({"slots": [[0], [1]], "primary": [0]}, {"num_experts": 2}, "primary lists 1 ranks, .* 2 experts"),
        ({"slots": [[0]], "primary": "x"}, {}, "primary must list one rank for each expert; given: 'x'"),
        ({"slots": [[0]], "owner": [0]}, {}, "has the keys slots and primary, not 'owner'"),
        ([], {}, r"a list of experts for each rank, like \[\[0, 3\], .* given: \[\]"),
        ([[0.5]], {}, "a list of experts for each rank"),
        ([[True]], {}, "a list of experts for each rank"),
        ("contiguous" * 9, {}, r"given: 'contiguous.*\.\.\."),
    ],
)
def test_what_is_no_placement_is_refused(value: object, expected: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Placement.parse(value, **expected)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Placement.parse([[0, 0], [9], [1]], num_experts=4, num_ranks=2, max_slots=1)
    assert len(caught.value.problems) == 5


@given(placements())
def test_json_round_trip(placement: Placement) -> None:
    assert Placement.from_json(placement.to_json()) == placement
    assert Placement.parse([list(row) for row in placement.slots]).slots == placement.slots


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    with pytest.raises(ConfigError, match="there is no placement file"):
        Placement.load(path)
    path.write_text("[[0, 1")
    with pytest.raises(ConfigError, match=r"placement\.json: a placement must be JSON"):
        Placement.load(path)
    path.write_text(Placement.parse(SEED).to_json())
    assert Placement.load(path, num_ranks=4) == Placement.parse(SEED)


@given(st.data())
def test_moves_bring_everything_and_nothing_else(data: st.DataObject) -> None:
    old = data.draw(placements())
    new = data.draw(placements(num_experts=old.num_experts, num_ranks=old.num_ranks))
    held = {(e, p) for e, ranks in enumerate(old.holders) for p in ranks}
    wanted = {(e, p) for e, ranks in enumerate(new.holders) for p in ranks}
    moves = old.moves(new)
    assert {(m.expert, m.target) for m in moves if m.weights} == wanted - held
    for move in moves:
        assert move.source in old.holders[move.expert]
        assert new.slots[move.target][move.slot] == move.expert
        assert move.weights or move.state
        if move.state:
            assert (move.source, move.target) == (old.primary[move.expert], new.primary[move.expert])
    changed = {e for e in range(old.num_experts) if old.primary[e] != new.primary[e]}
    assert {m.expert for m in moves if m.state} == changed
    assert list(moves) == sorted(moves, key=lambda m: (m.expert, m.target))
    assert old.moves(old) == ()


@given(st.data())
def test_arranging_keeps_who_holds_what_and_frees_no_slot_in_vain(data: st.DataObject) -> None:
    old = data.draw(placements())
    new = data.draw(placements(num_experts=old.num_experts, num_ranks=old.num_ranks))
    arranged = new.arranged_like(old)
    assert arranged.holders == new.holders
    for before, after, row in zip(old.slots, new.slots, arranged.slots, strict=True):
        assert len(row) == max(len(before), len(after))
        for place, expert in enumerate(before):
            assert expert not in row or row[place] == expert or expert == EMPTY
    for expert, rank in enumerate(old.primary):
        assert rank not in new.holders[expert] or arranged.primary[expert] == rank
    assert len(old.moves(arranged)) <= len(old.moves(new))


def test_parameters_come_from_different_holders() -> None:
    old = Placement.parse([[0], [0], [1], [2]])
    moves = old.moves(Placement.parse([[0], [0], [1, 0], [2, 0]]))
    assert [m.source for m in moves] == [0, 1]


def test_moves_between_different_shapes_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="of 4 experts on 2 ranks cannot become one of 4 experts on 4 ranks"
    ):
        Placement.contiguous(4, 2).moves(Placement.contiguous(4, 4))


@given(placements())
def test_shadows_are_replicas_for_one_step(placement: Placement) -> None:
    more = [(0, [p for p in range(placement.num_ranks) if p not in placement.holders[0]])]
    wider = placement.with_replicas(more)
    assert wider.holders[0] == tuple(range(placement.num_ranks))
    assert wider.primary == placement.primary
    assert [row[: len(old)] for row, old in zip(wider.slots, placement.slots, strict=True)] == list(
        placement.slots
    )
    assert np.array_equal(wider.holds_EP[1:], placement.holds_EP[1:])
