"""Shadows: whatever is copied to whom, outputs and gradients are those of one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_parity import GATES, compare, gradients, make, parity

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.shadow import RankShadows, keep_shadowed
from moeclipse.testing.run_ranks import run_alone, run_ranks
from probed import SLOW_EXPERTS, lend


@pytest.mark.parametrize("shadow", [(), (0,), (3, 4), tuple(range(8))], ids=["none", "one", "some", "all"])
@pytest.mark.parametrize("schedule", ["blocking", "smart"])
@pytest.mark.parametrize(("dp", "ep"), [(1, 4), (2, 2)])
def test_forced_shadows_change_nothing(shadow: tuple, schedule: str, dp: int, ep: int) -> None:
    chunks = 1 if schedule == "blocking" else 2
    more = lend(shadow, schedule=schedule, chunks=chunks)
    parity(GateConfig(top_k=3, z_loss=0.1), dp, ep, shared=1, more=more)


@pytest.mark.parametrize("name", [name for name in GATES if not name.endswith("pad")])
def test_every_gate_with_all_experts_shadowed(name: str) -> None:
    parity(GATES[name], 1, 4, more=lend(tuple(range(8))))


@settings(max_examples=settings.default.max_examples // 10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    shadow=st.sets(st.integers(0, 6)),
    group_size=st.integers(1, 4),
)
def test_random_shadows(sizes: list[int], shadow: set[int], group_size: int) -> None:
    more = lend(tuple(sorted(shadow)), group_size=group_size)
    parity(GateConfig(top_k=2), 1, 4, num_experts=7, sizes=sizes, more=more)


def with_main_grad(mesh: Mesh, shadow: tuple[int, ...], sizes: list[int]) -> torch.Tensor:
    """Gradients of shadowed experts reach the owner's main_grad, where they add up over microbatches."""
    moe = make(GateConfig(top_k=2), 8, 0, mesh, **lend(shadow))
    for parameter in (moe.experts.up, moe.experts.down):
        parameter.main_grad = torch.zeros_like(parameter)
    for _ in range(2):
        gradients(moe, mesh, sizes)
    return moe.experts.up.main_grad


def test_gradients_of_shadows_reach_main_grad() -> None:
    sizes = [6, 9]
    expected = torch.cat(run_ranks(2, with_main_grad, (), sizes))
    found = torch.cat(run_ranks(2, with_main_grad, (0, 5, 6), sizes))
    assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)
    assert expected.abs().max() > 0


def with_policy(mesh: Mesh, skewed: bool) -> tuple[list[dict], list[tuple]]:
    """Four training calls; where costs are not given they are measured in the second."""
    moe = make(GateConfig(top_k=1), 8, 0, mesh, **lend("auto", chunks="auto", group_size="auto"))
    if skewed:
        with torch.no_grad():
            moe.gate.weight[5] = 0.0
            moe.gate.weight[5, 0] = 9.0  # nearly all want expert 5
        moe.schedule.probe = SLOW_EXPERTS
    results, shadows = [], []
    for _ in range(4):
        moe.zero_grad()
        results.append(gradients(moe, mesh, [300, 300, 300, 300]))
        plan = moe.schedule.shadow_plan
        shadows.append(plan.shadows if plan is not None else ())
    return results, shadows


@pytest.mark.parametrize("skewed", [True, False])
def test_the_policy_lends_alike_on_all_ranks_and_stays_exact(skewed: bool) -> None:
    (expected, *_), _ = run_alone(with_policy_alone, skewed)
    outcomes = run_ranks(4, with_policy, skewed)
    for call in range(4):
        compare([results[call] for results, _ in outcomes], expected, 1, 4)
    assert len({str(shadows) for _, shadows in outcomes}) == 1, "all ranks must lend alike"
    first = outcomes[0][1]
    if skewed:
        assert all(any(expert == 5 for expert, _ in shadows) for shadows in first), first
    else:
        assert first[0] == (), "nothing is shadowed before costs are known"


def with_policy_alone(mesh: Mesh, skewed: bool) -> tuple[list[dict], list]:
    moe = make(GateConfig(top_k=1), 8, 0, None)
    if skewed:
        with torch.no_grad():
            moe.gate.weight[5] = 0.0
            moe.gate.weight[5, 0] = 9.0
    return [gradients(moe, mesh, [1200])], []


@given(
    ids=st.lists(st.lists(st.integers(-1, 5), min_size=2, max_size=2), max_size=8),
    shadowed=st.lists(st.integers(0, 5), unique=True, max_size=4),
)
def test_rows_of_shadowed_experts_stay(ids: list[list[int]], shadowed: list[int]) -> None:
    table = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    mine = RankShadows(experts=tuple(shadowed), send_slots=(), send_counts=(), receive_counts=())
    travel, place = keep_shadowed(table, mine, 6)
    flat = [i for row in ids for i in row]
    assert travel.flatten().tolist() == [-1 if i in shadowed else i for i in flat]
    expected = [p for e in shadowed for p, i in enumerate(flat) if i == e]
    assert place[: len(expected)].tolist() == expected


def test_shadows_are_seen_alike_from_both_ends() -> None:
    placement = Placement.contiguous(6, 3)
    shadows = ((1, (1, 2)), (4, (0,)), (5, (0, 1)))
    seen = [RankShadows.of(shadows, placement, rank) for rank in range(3)]
    assert [mine.experts for mine in seen] == [(4, 5), (1, 5), (1,)]
    assert [mine.send_slots for mine in seen] == [(1, 1), (), (0, 1, 1)]
    for a in range(3):
        for b in range(3):
            assert seen[a].send_counts[b] == seen[b].receive_counts[a]
