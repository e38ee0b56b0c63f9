"""Which row goes to whom, and back: against tables that are searched, and cut alike on both sides."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.shares import even_bounds
from moeclipse.moe.dispatch import (
    Dispatcher,
    DispatchPlan,
    Pairs,
    chunk_of,
    concatenated,
    plan_dispatch,
    return_score_grads,
)
from moeclipse.schedule.smart import end_units, exchange_shape
from moeclipse.testing.run_ranks import run_ranks

SIZES = [6, 0, 3, 5]
TABLE = ((2, 5), (0,), (-1, 1, 6), (4, 3))
IDS = torch.tensor([[(3 * t + k * (1 + t % 3)) % 8 - 1 for k in range(3)] for t in range(sum(SIZES))])
"""Of all tokens; -1 is an unused place."""
SHAPES: dict[str, dict[str, Any]] = {
    "blocking": {"group_size": 4, "blocking": True},
    "each rank for itself": {"group_size": 1},
    "chunks": {"group_size": 1, "chunks": 3, "units": end_units(4, 3)},
    "groups": {"groups": ((0, 2), (1, 3)), "chunks": 2},
}


def plan_of(mesh: Mesh, ids: torch.Tensor, table: Any, **shape: Any) -> DispatchPlan:
    dispatcher = Dispatcher.of(Placement(table), mesh.experts, mesh.a2a, mesh.device)
    return plan_dispatch(ids, dispatcher, exchange_shape(mesh.num_ranks, **shape), "test")


def there_and_back(mesh: Mesh, name: str) -> list[list[tuple[int, int, int]]]:
    """Rows that hold their token's number travel; (unit, token, choice) of what arrived for each slot."""
    first = sum(SIZES[: mesh.rank])
    ids = IDS[first : first + SIZES[mesh.rank]]
    plan = plan_of(mesh, ids, TABLE, **SHAPES[name])
    x = torch.arange(first, first + len(ids), dtype=torch.float64)[:, None]
    scores = torch.arange(ids.numel(), dtype=torch.float64).view_as(ids) + 3 * first
    rows = x[plan.row_token_N]
    arrived, back = rows.new_empty(plan.num_arriving, 1), torch.empty_like(rows)
    pairs = Pairs(plan, scores)
    for unit in plan.units.values():
        plan.send(unit, rows, arrived, "there").get()
    found: list[list[tuple[int, int, int]]] = [[] for _ in TABLE[mesh.rank]]
    for number, unit in enumerate(plan.units.values()):
        row_M, score_M = pairs.of(unit)
        assert ((unit.arriving.start <= row_M) & (row_M < unit.arriving.stop)).all(), "of this unit's rows"
        parts = zip(arrived[row_M, 0].split(unit.counts), score_M.split(unit.counts), strict=True)
        for slot, (tokens, places) in enumerate(parts):
            for token, place in zip(tokens.tolist(), places.tolist(), strict=True):
                assert place // 3 == token, "a pair's score is that of its token"
                found[slot].append((number, int(token), int(place % 3)))
        plan.send_back(unit, arrived[unit.arriving] + 0.5, back, "back").get()
    assert torch.equal(back, rows + 0.5), "what returns stands where it left"
    ranks = plan.dispatcher.rank_of_E[ids.clamp(min=0)].where(ids >= 0, -1)
    visited = torch.tensor([[len(set(row) - {-1})] for row in ranks.tolist()], dtype=torch.float64)
    assert torch.equal(plan.sum_tokens(back), visited.view(-1, 1) * (x + 0.5)), "once for each rank"
    grads = torch.full_like(scores, -1.0)
    grads.view(-1)[plan.pair_place_n] = return_score_grads(plan, pairs.all()[1]).get()
    assert torch.equal(grads, scores.where(ids >= 0, -1)), "score gradients go where the scores came from"
    wanted = [
        [int((mine == expert).sum()) if expert >= 0 else 0 for row in TABLE for expert in row]
        for mine in IDS.split(SIZES)
    ]
    assert plan.sizes.pairs_by_slot().tolist() == wanted, "everyone knows who sends how much"
    return found


def all_shapes(mesh: Mesh) -> dict[str, list[list[tuple[int, int, int]]]]:
    return {name: there_and_back(mesh, name) for name in SHAPES}


def test_every_pair_meets_its_expert_and_comes_back() -> None:
    results = run_ranks(4, all_shapes)
    for name in SHAPES:
        for rank, slots in enumerate(result[name] for result in results):
            for expert, found in zip(TABLE[rank], slots, strict=True):
                wanted = (expert == IDS).nonzero().tolist() if expert >= 0 else []
                assert sorted([token, choice] for _, token, choice in found) == wanted, (name, expert)
                assert found == sorted(found), "by unit, then in the order of sources and tokens"


def count_rows(mesh: Mesh) -> tuple[list[int], int]:
    plan = plan_of(mesh, torch.arange(8).repeat(6, 1), ((0, 1, 2, 3), (4, 5, 6, 7)), group_size=2)
    return plan.units[0, 0].send_rows, len(plan.pair_place_n)


def test_a_token_travels_once_to_each_rank() -> None:
    for rows, pairs in run_ranks(2, count_rows):
        assert rows == [6, 6], "six tokens, all of whose experts are wanted, are six rows for each rank"
        assert pairs == 48


def test_a_dispatcher_knows_slots_and_follows_a_placement() -> None:
    mesh = Mesh.single()
    before = Dispatcher.of(Placement(((1, -1, 0),)), mesh.experts, mesh.a2a, mesh.device)
    assert before.slot_of_E.tolist() == [2, 0]
    assert before.slot_bounds == [0, 3]
    assert before.table is None, "every expert has one place"
    after = before.moved(Placement(((0, 1),)))
    assert after.slot_of_E.tolist() == [0, 1]
    assert after.transport is before.transport


@given(st.integers(0, 30), st.integers(1, 7))
def test_chunks_are_cut_alike_on_both_sides(total: int, chunks: int) -> None:
    bounds = even_bounds(total, chunks)
    place = torch.arange(total)
    found = chunk_of(place, torch.full_like(place, total), torch.full_like(place, chunks)).tolist()
    expected = [next(c for c in range(chunks) if bounds[c] <= i < bounds[c + 1]) for i in range(total)]
    assert found == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=6))
def test_concatenated_ranges(parts: list[tuple[int, int]]) -> None:
    expected = [i for start, length in parts for i in range(start, start + length)]
    starts, lengths = [p[0] for p in parts], [p[1] for p in parts]
    assert concatenated(starts, lengths, torch.device("cpu")).tolist() == expected
