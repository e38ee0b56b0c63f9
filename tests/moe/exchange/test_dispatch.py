"""Which row goes to whom, and back: against tables that are searched, and cut alike on both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from moeclipse.balance.placement import Placement
from moeclipse.comm.async_ops.lane import Joined
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.exchange.dispatch import (
    Dispatcher,
    DispatchPlan,
    concatenated,
)
from moeclipse.moe.exchange.dispatch_combine import return_unit, send_unit
from moeclipse.moe.exchange.plan import plan_dispatch
from moeclipse.schedule.shape import ExchangeShape
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


Plans = Callable[[torch.Tensor, Dispatcher, ExchangeShape, str], DispatchPlan]


def plan_of(
    mesh: Mesh, ids: torch.Tensor, table: Any, plans: Plans = plan_dispatch, **shape: Any
) -> DispatchPlan:
    dispatcher = Dispatcher.of(Placement(table), mesh.experts, mesh.a2a, mesh.device)
    return plans(ids, dispatcher, exchange_shape(mesh.num_ranks, **shape), "test")


def there_and_back(
    mesh: Mesh, name: str, plans: Plans, dtype: torch.dtype
) -> list[list[tuple[int, int, int]]]:
    """Rows that hold their token's number travel; (unit, token, choice) of what arrived for each slot."""
    first = sum(SIZES[: mesh.rank])
    ids = IDS[first : first + SIZES[mesh.rank]]
    plan = plan_of(mesh, ids, TABLE, plans, **SHAPES[name])
    x = torch.arange(first, first + len(ids), dtype=dtype)[:, None]
    scores = torch.arange(ids.numel(), dtype=dtype).view_as(ids) + 3 * first
    rows = plan.take_rows(x)
    arrived, back = rows.new_empty(plan.num_arriving, 1), torch.empty_like(rows)
    pairs = plan.send_pairs_of(scores)
    for unit in plan.units.values():
        Joined([send_unit(plan, unit, rows, arrived, "there")]).get()
    found: list[list[tuple[int, int, int]]] = [[] for _ in TABLE[mesh.rank]]
    for number, unit in enumerate(plan.units.values()):
        row_M, score_M = pairs.of(unit)
        here = arrived[unit.arriving]
        assert ((row_M >= 0) & (row_M < len(here))).all(), "of this unit's rows"
        parts = zip(here[row_M, 0].split(unit.counts), score_M.split(unit.counts), strict=True)
        for slot, (tokens, places) in enumerate(parts):
            for token, place in zip(tokens.tolist(), places.tolist(), strict=True):
                assert place // 3 == token, "a pair's score is that of its token"
                found[slot].append((number, int(token), int(place % 3)))
        Joined([return_unit(plan, unit, arrived[unit.arriving] + 0.5, back, "back")]).get()
    assert torch.equal(back, rows + 0.5), "what returns stands where it left"
    ranks = plan.dispatcher.rank_of_E[ids.clamp(min=0)].where(ids >= 0, -1)
    visited = torch.tensor([[len(set(row) - {-1})] for row in ranks.tolist()], dtype=dtype)
    assert torch.equal(plan.sum_tokens(back), visited.view(-1, 1) * (x + 0.5)), "once for each rank"
    scores_M = torch.cat([pairs.of(unit)[1] for unit in plan.units.values()])
    grads = plan.place_score_grads(plan.return_score_grads(scores_M).get(), scores.shape)
    assert torch.equal(grads, scores.where(ids >= 0, 0)), "score gradients go where the scores came from"
    wanted = [
        [int((mine == expert).sum()) if expert >= 0 else 0 for row in TABLE for expert in row]
        for mine in IDS.split(SIZES)
    ]
    assert plan.sizes.pairs_by_slot().tolist() == wanted, "everyone knows who sends how much"
    return found


def all_shapes(
    mesh: Mesh, plans: Plans = plan_dispatch, dtype: torch.dtype = torch.float64
) -> dict[str, list[list[tuple[int, int, int]]]]:
    return {name: there_and_back(mesh, name, plans, dtype) for name in SHAPES}


def test_every_pair_meets_its_expert_and_comes_back() -> None:
    check_all_shapes(run_ranks(4, all_shapes))


def check_all_shapes(results: list[Any]) -> None:
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


def test_tables_stay_where_they_are_when_experts_move() -> None:
    """A CUDA graph reads them at the addresses that it was captured with."""
    mesh = Mesh.single()
    before = Dispatcher.of(Placement(((1, -1, 0),)), mesh.experts, mesh.a2a, mesh.device)
    kept = [before.slot_of_E, before.rank_of_slot, before.places.rank_of_slot, before.places.first_slot_P1]
    after = before.moved(Placement(((0, 1, -1),)))
    now = [after.slot_of_E, after.rank_of_slot, after.places.rank_of_slot, after.places.first_slot_P1]
    assert all(a is b for a, b in zip(kept, now, strict=True))
    assert after.slot_of_E.tolist() == [0, 1]
    assert after.placement.slots == ((0, 1, -1),)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=6))
def test_concatenated_ranges(parts: list[tuple[int, int]]) -> None:
    expected = [i for start, length in parts for i in range(start, start + length)]
    starts, lengths = [p[0] for p in parts], [p[1] for p in parts]
    assert concatenated(starts, lengths, torch.device("cpu")).tolist() == expected
