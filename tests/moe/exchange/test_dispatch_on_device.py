"""The plan that kernels make, here by their references: what arrives is what plain torch's plan brings."""

from __future__ import annotations

import torch
from test_dispatch import IDS, SHAPES, SIZES, TABLE, all_shapes, check_all_shapes, plan_of

from moeclipse.comm.mesh import Mesh
from moeclipse.moe.exchange.dispatch import Dispatcher, TorchPairs
from moeclipse.moe.exchange.dispatch_on_device import (
    DevicePlan,
    plan_on_device,
    prepare_sending,
)
from moeclipse.moe.tune.exchange_policy import plans_on_device
from moeclipse.ops.grouping import group_arrived
from moeclipse.schedule.shape import ExchangeShape
from moeclipse.testing.run_ranks import run_ranks


def on_device(ids: torch.Tensor, dispatcher: Dispatcher, shape: ExchangeShape, where: str) -> DevicePlan:
    return plan_on_device(prepare_sending(ids, dispatcher), dispatcher, shape, where)


def test_every_pair_meets_its_expert_and_comes_back() -> None:
    check_all_shapes(run_ranks(4, all_shapes, on_device, torch.float32))


def compare(mesh: Mesh) -> list[str]:
    """Where two plans of the same choices differ."""
    wrong = []
    first = sum(SIZES[: mesh.rank])
    ids = IDS[first : first + SIZES[mesh.rank]]
    scores = torch.rand(ids.shape)
    for name, shape in SHAPES.items():
        plain, ours = plan_of(mesh, ids, TABLE, **shape), plan_of(mesh, ids, TABLE, on_device, **shape)
        assert isinstance(ours, DevicePlan)
        wrong += [f"{name} units"] * (plain.units != ours.units)
        for field in ("row_token_N", "pair_place_n"):
            same = torch.equal(getattr(plain, field), getattr(ours, field).long())
            wrong += [f"{name} {field}"] * (not same)
        pairs, mine = plain.send_pairs_of(scores), ours.send_pairs_of(scores)
        assert isinstance(pairs, TorchPairs)
        for unit in sorted(plain.units.values(), key=lambda unit: not unit.local):  # own rows come first
            (row_M, score_M), (ours_M, our_score_M) = pairs.of(unit), mine.of(unit)
            wrong += [f"{name} rows"] * (not torch.equal(row_M, ours_M.long()))
            wrong += [f"{name} scores"] * (not torch.equal(score_M, our_score_M))
            found, num_rows = mine.grouping(unit), unit.arriving.stop - unit.arriving.start
            expected = group_arrived(row_M, unit.counts, num_rows, found.place_row_TK.shape[1])
            for field in ("counts_E", "offsets_E1", "row_token_M", "place_row_TK"):
                same = torch.equal(getattr(found, field), getattr(expected, field))
                wrong += [f"{name} {field}"] * (not same)
    return wrong


def test_both_plans_have_the_same_tables() -> None:
    assert run_ranks(4, compare) == [[], [], [], []]


def test_only_kernels_on_a_device_plan_like_this() -> None:
    assert not plans_on_device(torch.zeros(3, 2))
