"""Shadows that serve other ranks: whatever is lent to whom, results are those of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_parity import GATES, compare, gradients, make

from moeclipse import sync_gradients
from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow import ShadowPlan
from moeclipse.balance.shadow_policy import ShadowQuestion
from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.core.errors import ConfigError
from moeclipse.moe.config import GateConfig
from moeclipse.moe.experts.module_experts import ModuleExperts
from moeclipse.moe.experts.pairwise import PairwiseExperts
from moeclipse.moe.experts.served import serves
from moeclipse.moe.experts.two_projections import PadToCapacity
from moeclipse.moe.tokens import Structure
from moeclipse.testing.run_ranks import run_alone, run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.step.learner import Learner
from probed import SLOW_EXPERTS, lend

Wanted = dict[int, tuple[int, ...]]
ALL: Wanted = dict.fromkeys(range(8), (0, 1, 2, 3))
SOME: Wanted = {0: (1, 3), 3: (0,), 6: (2,), 7: (0, 2)}


def served(
    mesh: Mesh,
    gate: GateConfig,
    sizes: list[int],
    wanted: Wanted,
    more: dict[str, Any],
    num_experts: int = 8,
    kernels: bool = False,
) -> dict:
    moe = make(gate, num_experts, 1, mesh, **more)
    moe.fused = True if kernels else None
    asked: list[ShadowQuestion] = []

    def policy(call: ShadowQuestion) -> ShadowPlan:
        asked.append(call)
        return call.lend(wanted, serving=True)

    moe.schedule.shadows.policy = policy
    found = gradients(moe, mesh, sizes)
    if mesh.num_ranks > 1:
        plan = moe.schedule.shadow_plan
        assert plan is not None
        assert plan.serving == bool(plan.shadows), "asked to serve, and it did"
        assert asked[0].may_serve
        assert asked[0].counts_PE.shape == (mesh.ep, num_experts)
    return found


def parity(
    wanted: Wanted, dp: int = 1, ep: int = 4, gate: GateConfig | None = None, sizes: Any = None, **more: Any
) -> None:
    gate, sizes = gate or GateConfig(top_k=3, z_loss=0.1), sizes or [5, 0, 9, 4][: dp * ep]
    kernels = more.pop("kernels", False)
    placement = more.pop("placement", None)
    settings_of = lend("off", **more)
    reference = run_alone(served, gate, [sum(sizes)], wanted, settings_of)
    if placement is not None:
        settings_of = {**settings_of, "placement": placement}
    results = run_ranks(dp * ep, served, gate, sizes, wanted, settings_of, 8, kernels, dp=dp)
    compare(results, reference, dp, ep)


def test_rows_of_others_change_nothing() -> None:
    parity(SOME, schedule="smart", chunks=2)


@pytest.mark.parametrize("wanted", [SOME, ALL], ids=["some", "all"])
def test_by_kernels(wanted: Wanted) -> None:
    parity(wanted, schedule="smart", chunks=2, kernels=True)


@pytest.mark.full
@pytest.mark.parametrize("wanted", [{}, ALL], ids=["none", "all"])
@pytest.mark.parametrize("schedule", ["blocking", "smart"])
def test_loans_to_nobody_and_to_everyone(wanted: Wanted, schedule: str) -> None:
    parity(wanted, schedule=schedule, chunks=1 if schedule == "blocking" else 2)


@pytest.mark.full
def test_copies_of_the_model() -> None:
    parity({0: (1,), 5: (0,), 7: (0,)}, dp=2, ep=2)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in GATES if not name.endswith("pad")])
def test_every_gate(name: str) -> None:
    parity(SOME, gate=GATES[name])


def test_beside_replicas() -> None:
    """A guest is one holder more of an expert that has two; `sync_gradients` takes means over ranks."""
    table = Placement(((0, 1, 4), (2, 3), (4, 5), (6, 7)), (0, 0, 1, 1, 2, 2, 3, 3))
    found = run_ranks(4, beside_replicas, table)
    reference = run_alone(beside_replicas, None)
    for rank, one in enumerate(found):
        for slot, expert in enumerate(table.slots[rank]):
            for key in ("experts.up", "experts.down"):
                expected = reference[0][key][expert] / 4
                assert torch.allclose(one[0][key][slot], expected, rtol=1e-12, atol=1e-12), (rank, expert)
        assert one[1], "they served"


def beside_replicas(mesh: Mesh, table: Placement | None) -> tuple[dict, bool]:
    more = lend("off") if table is None else {**lend("off"), "placement": table}
    moe = make(GateConfig(top_k=3), 8, 0, mesh, **more)
    moe.schedule.shadows.policy = lambda call: call.lend({4: (1,), 6: (0, 2), 0: (3,)}, serving=True)
    sizes = [5, 0, 9, 4] if mesh.num_ranks > 1 else [18]
    found = gradients(moe, mesh, sizes)
    if table is not None:
        sync_gradients(moe)
        found |= {f"experts.{name}": p.grad for name, p in moe.experts.named_parameters()}
    plan = moe.schedule.shadow_plan
    return found, plan is not None and plan.serving


@pytest.mark.full
@settings(max_examples=settings.default.max_examples // 10, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    wanted=st.dictionaries(st.integers(0, 7), st.sets(st.integers(0, 3)).map(tuple), max_size=8),
    chunks=st.integers(1, 3),
    kernels=st.booleans(),
)
def test_random_loans(sizes: list[int], wanted: Wanted, chunks: int, kernels: bool) -> None:
    parity(wanted, gate=GateConfig(top_k=2), sizes=sizes, chunks=chunks, kernels=kernels)


def with_main_grad(mesh: Mesh, wanted: Wanted, kernels: bool = False) -> torch.Tensor:
    moe = make(GateConfig(top_k=2), 8, 0, mesh, **lend("off"))
    moe.fused = True if kernels else None
    moe.schedule.shadows.policy = lambda call: call.lend(wanted, serving=True)
    for parameter in (moe.experts.up, moe.experts.down):
        parameter.main_grad = torch.zeros_like(parameter)
    for _ in range(2):
        gradients(moe, mesh, [6, 9])
    return moe.experts.up.main_grad


def test_gradients_reach_main_grad() -> None:
    expected = torch.cat(run_ranks(2, with_main_grad, {}))
    for kernels in (False, True):
        found = torch.cat(run_ranks(2, with_main_grad, {0: (1,), 5: (0,), 6: (0,)}, kernels))
        assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)
    assert expected.abs().max() > 0


def chosen(mesh: Mesh) -> tuple[list[dict], list[tuple], list[list[int]]]:
    """Nearly all want expert 5, and prices say that copies are cheap beside rows."""
    moe = make(GateConfig(top_k=1), 8, 0, mesh, **lend("auto", schedule="blocking", chunks=1))
    with torch.no_grad():
        moe.gate.weight[5] = 0.0
        moe.gate.weight[5, 0] = 9.0
    moe.schedule.probe = SLOW_EXPERTS
    results, plans, rows = [], [], []
    for _ in range(3):
        moe.zero_grad()
        results.append(gradients(moe, mesh, [300, 0, 300, 0]))
        plan = moe.schedule.shadow_plan
        plans.append((plan is not None and plan.serving, () if plan is None else plan.shadows))
        rows.append(moe.schedule.take_rows())
    return results, plans, rows


def test_auto_serves_where_ranks_without_rows_could_help() -> None:
    """Ranks 1 and 3 have no rows of their own, so a shadow there is of use only if it serves others."""
    found = run_ranks(4, chosen)
    reference = run_alone(chosen_alone)
    assert all(plans == found[0][1] for _, plans, _ in found)
    serving, shadows = found[0][1][-1]
    assert serving
    assert {1, 3} & set(dict(shadows)[5])
    for step in range(3):
        compare([results[step] for results, _, _ in found], reference, 1, 4)
    computed = [rows[-1] for _, _, rows in found]
    assert sum(computed) == 600
    assert max(computed) < 300, "even ranks"


def chosen_alone(mesh: Mesh) -> dict:
    moe = make(GateConfig(top_k=1), 8, 0, mesh)
    with torch.no_grad():
        moe.gate.weight[5] = 0.0
        moe.gate.weight[5, 0] = 9.0
    return gradients(moe, mesh, [600])


RUN = {
    "model.num_layers": 2,
    "model.d_model": 32,
    "model.head_dim": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.dtype": "float64",
    "moe.num_experts": 8,
    "moe.d_ff": 16,
    "moe.schedule": "smart",
    "moe.chunks": 2,
    "moe.shadow": "auto",
    "gate.top_k": 2,
    "data.seq_len": 16,
    "data.batch_size": 8,
    "optim.accumulate": 2,
    "parallel.check_launches": True,
}


def trained(mesh: Mesh, wanted: Wanted, more: dict[str, Any]) -> tuple[list[float], int]:
    """Under a ledger, which refuses a launch that the program of the step does not have."""
    learner = Learner(with_values(TrainConfig(), {**RUN, **more}), mesh)
    times_served = 0

    def policy(call: ShadowQuestion) -> ShadowPlan:
        nonlocal times_served
        plan = call.lend(wanted, serving=True)
        times_served += plan.serving
        return plan

    for layer in learner.layers:
        layer.schedule.shadows.policy = policy
    return [learner.step(step)["loss"] for step in range(3)], times_served


@pytest.mark.full
@pytest.mark.parametrize("overlap", ["off", "pair"])
def test_a_run_launches_what_its_program_has(overlap: str) -> None:
    """In a pipeline, which cuts calls into pieces, shadows compute their own rows alone."""
    more = {"pipeline.overlap": overlap}
    plain, _ = run_ranks(2, trained, {}, more)[0]
    lent, times_served = run_ranks(2, trained, {0: (1,), 5: (0,), 7: (0,)}, more)[0]
    assert lent == pytest.approx(plain, rel=1e-12)
    assert times_served == (12 if overlap == "off" else 0)


def disagreeing(mesh: Mesh) -> str:
    moe = make(GateConfig(top_k=1), 8, 0, mesh, **lend("off"))
    moe.schedule.shadows.policy = lambda call: call.lend({mesh.rank: (1 - mesh.rank,)})
    with pytest.raises(ConfigError) as caught:
        gradients(moe, mesh, [3, 3])
    return str(caught.value)


def test_ranks_that_disagree_are_told_so() -> None:
    told = "a shadow policy must say the same on all ranks, from the question alone"
    assert run_ranks(2, disagreeing) == [told, told]


def test_who_serves() -> None:
    experts = make(GateConfig(top_k=1), 4, 0, None).experts
    row = torch.empty(0, 12)
    pairs = PairwiseExperts(experts=experts, structure=Structure(), like=[row])
    assert serves(pairs)
    assert not serves(None), "a pipeline cuts the call into pieces"
    assert not serves(replace(pairs, like=[row, row]))
    assert not serves(replace(pairs, experts=ModuleExperts.__new__(ModuleExperts)))
    assert not serves(replace(pairs, experts=PadToCapacity(experts, 3)))
