"""Replicas in the layer: whoever computes which rows, outputs and gradients are those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_parity import BOUND, gradients, make

from moeclipse.balance.placement import Placement
from moeclipse.balance.replicate import plan_random
from moeclipse.balance.split import split_rows
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.exchange.replicas import choose_slots, sum_over_replicas
from moeclipse.moe.layer import MoE
from moeclipse.moe.own_loop.standalone import sync_gradients
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks

SEED_TABLE = ((0, 3), (1, 2), (1, 2), (0, 3))
"""The table of the document that this feature goes back to."""
SHAPES = {
    "seed": (4, SEED_TABLE),
    "everywhere": (5, ((0, 1, 2), (0, 3), (4, 0, -1), (0,))),
    "a rank without experts": (3, ((), (0, 1, 2), (1,), (2, 1))),
    "empty slots": (4, ((-1, 0), (1, -1), (2, 1, -1), (3, -1, 0))),
    "fewer experts than ranks": (2, ((1,), (0, 1), (1,), (0,))),
    "one expert": (1, ((0,), (0,), (), (0,))),
    "no replicas, mixed": (6, ((5, 0), (2,), (4, 1), (3,))),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "blocking": {"schedule": "blocking"},
    "smart": {"schedule": "smart", "group_size": 1, "chunks": 3},
    "pairs": {"schedule": "smart", "group_size": 2, "chunks": 2, "shadow": (0, 1)},
}


def run_placed(
    mesh: Mesh, gate: GateConfig, num_experts: int, sizes: list[int], table: Any, exchange: dict[str, Any]
) -> dict:
    more = {} if table is None else {"placement": Placement(table), "exchange": exchange}
    moe = make_any(gate, num_experts, mesh, **more)
    return gradients(moe, mesh, sizes)


def make_any(gate: GateConfig, num_experts: int, mesh: Mesh, **more: Any) -> MoE:
    if num_experts > 1:
        return make(gate, num_experts, 1, mesh, **more)
    return MoE(12, 20, 1, gate=gate, mesh=mesh, seed=7, init_std=0.5, dtype=torch.float64, **more)


def compare_placed(results: list[dict], reference: dict, ranks_per_copy: int) -> None:
    """Gradients of an expert are summed over all slots that hold it, those of other copies (dp) included."""
    joined = {
        "y": torch.cat([r["y"] for r in results]),
        "dx": torch.cat([r["dx"] for r in results]),
        "aux": torch.stack([r["aux"] for r in results]).sum(),
    }
    assert len(results) % ranks_per_copy == 0
    for key in ("experts.up", "experts.down"):
        total = torch.zeros_like(reference[key])
        for result in results:
            for slot, expert in enumerate(result["ids"]):
                if expert >= 0:
                    total[expert] += result[key][slot]
                else:
                    assert torch.count_nonzero(result[key][slot]) == 0
        joined[key] = total
    for key in reference:
        if key.startswith(("gate.", "shared.")):
            joined[key] = sum(r[key] for r in results)
    bad = {key: difference(value, reference[key]) for key, value in joined.items()}
    bad = {key: value for key, value in bad.items() if not value <= BOUND}
    assert not bad, bad


def parity_placed(
    gate: GateConfig, num_experts: int, table: Any, sizes: list[int], exchange: dict[str, Any], dp: int = 1
) -> None:
    reference = run_alone(run_placed, gate, num_experts, [sum(sizes)], None, {})
    results = run_ranks(len(sizes), run_placed, gate, num_experts, sizes, table, exchange, dp=dp)
    compare_placed(results, reference, len(sizes) // dp)


DEFAULT = {("seed", "smart"), ("everywhere", "pairs"), ("a rank without experts", "smart")}
DEFAULT |= {("empty slots", "blocking"), ("fewer experts than ranks", "pairs"), ("one expert", "smart")}


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [
        pytest.param(shape, schedule, marks=[] if (shape, schedule) in DEFAULT else pytest.mark.full)
        for shape in SHAPES
        for schedule in SCHEDULES
    ],
)
def test_any_placement_computes_the_same(shape: str, schedule: str) -> None:
    num_experts, table = SHAPES[shape]
    exchange = dict(SCHEDULES[schedule])
    if num_experts == 1:
        exchange.pop("shadow", None)
    gate = GateConfig(top_k=min(2, num_experts), z_loss=0.1)
    parity_placed(gate, num_experts, table, [15, 0, 29, 8], exchange)


@pytest.mark.parametrize("top_k", [1, 4])
def test_the_table_of_the_seed_with_few_and_many_choices(top_k: int) -> None:
    parity_placed(GateConfig(top_k=top_k), 4, SEED_TABLE, [9, 14, 3, 0], {"schedule": "smart", "chunks": 2})


def test_copies_of_the_whole_placement() -> None:
    parity_placed(GateConfig(top_k=2), 3, ((0, 1, 2), (1,)), [9, 4, 3, 7], {}, dp=2)


def test_a_gate_that_drops_after_counting() -> None:
    gate = GateConfig(kind="gshard", top_k=2, capacity_factor=0.6)
    parity_placed(gate, 4, SEED_TABLE, [9, 14, 3, 6], {"schedule": "blocking"})


@settings(max_examples=settings.default.max_examples // 10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=3, max_size=3),
    num_experts=st.integers(2, 6),
    slots=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_random_placements(
    sizes: list[int], num_experts: int, slots: list[int], seed: int, data: st.DataObject
) -> None:
    slots[seed % 3] = num_experts + 1
    placement = plan_random(num_experts, slots, seed)
    top_k = data.draw(st.integers(1, num_experts))
    exchange = SCHEDULES[data.draw(st.sampled_from(["blocking", "smart"]))]
    parity_placed(GateConfig(top_k=top_k), num_experts, placement.slots, sizes, exchange)


def chosen_rows(mesh: Mesh, table: tuple, counts: list[list[int]]) -> list[int]:
    """Rows of this rank for each slot, counted from the slot of each of its choices."""
    moe = make(GateConfig(top_k=1), len(counts[0]), 0, mesh, placement=Placement(table))
    mine = counts[mesh.rank]
    ids = torch.tensor([e for e, count in enumerate(mine) for _ in range(count)]).view(-1, 1)
    ids = torch.cat([ids, torch.full((3, 1), -1)])[torch.randperm(len(ids) + 3)]
    slots = choose_slots(ids, moe.dispatcher, np.array(counts))
    used = ids.flatten() >= 0
    held = torch.tensor([e for row in table for e in row])
    assert torch.equal(held[slots[used]], ids.flatten()[used]), "a row must go to a slot with its expert"
    return torch.bincount(slots[used], minlength=len(held)).tolist()


def test_rows_follow_the_split_and_stay_home_first() -> None:
    counts = [[40, 5, 0, 8], [0, 30, 2, 9], [7, 7, 47, 7], [50, 31, 50, 3]]
    found = run_ranks(4, chosen_rows, SEED_TABLE, counts)
    split = split_rows(np.array(counts), make_table())
    assert found == split.rows_PR.tolist()
    assert split.balance > 0.8, split.balance
    assert found[0][0] == 40, "rank 0 holds expert 0: its rows stay"


def make_table() -> Any:
    from moeclipse.balance.split import ReplicaTable

    return ReplicaTable.of(Placement(SEED_TABLE))


def summed(mesh: Mesh, table: tuple) -> torch.Tensor:
    placement = Placement(table)
    grad = torch.arange(1.0, 1 + len(table[mesh.rank]))[:, None] * 10.0**mesh.rank
    return sum_over_replicas(grad, placement, mesh.experts, mesh.grads, "test").flatten()


def test_own_loops_sum_over_replicas() -> None:
    found = run_ranks(4, summed, ((0, 3), (1, -1), (2, 1), (0, 2, 3)))
    assert [part.tolist() for part in found] == [
        [1001.0, 3002.0],
        [210.0, 20.0],
        [2100.0, 210.0],
        [1001.0, 2100.0, 3002.0],
    ]


def own_loop(mesh: Mesh, sizes: list[int], table: Any) -> tuple[Any, torch.Tensor]:
    moe = make(GateConfig(top_k=2), 4, 0, mesh, **({} if table is None else {"placement": Placement(table)}))
    gradients(moe, mesh, sizes)
    sync_gradients(moe)
    return moe.experts.ids, moe.experts.up.grad


def test_after_sync_gradients_all_replicas_have_the_whole_gradient() -> None:
    _, expected = run_alone(own_loop, [26], None)
    for ids, grad in run_ranks(4, own_loop, [9, 14, 3, 0], SEED_TABLE):
        for slot, expert in enumerate(ids):
            assert difference(4 * grad[slot], expected[expert]) <= BOUND


def test_a_placement_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="the placement has 4 experts on 4 ranks, but the layer has 4 expe"):
        MoE(12, 20, 4, placement=Placement(SEED_TABLE))


def test_modules_of_users_have_no_replicas() -> None:
    with pytest.raises(ConfigError, match="modules of your own may stand on one rank each"):
        MoE(12, 20, 2, experts=lambda _: torch.nn.Linear(12, 12), placement=Placement(((0, 1), (0,))))
