"""Whether a call asks for shadows: never where none could pay, always where some did, alike on all ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from layer_parity import gradients, make

from moeclipse.balance import shadow_policy
from moeclipse.balance.asking import LONGEST_REST, LOOK
from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.comm.mesh import Mesh
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.tune.probe import Probe
from moeclipse.moe.tune.shadow_choice import ShadowChoice, gather_counts
from moeclipse.testing.run_ranks import run_ranks
from probed import PROBE, SLOW_EXPERTS, lend

IDS = (torch.tensor([[0, 1, 2], [1, 0, 5], [1, -1, 4]]), torch.tensor([[4, 5, 3]]))
"""Choices of two ranks; experts 0, 1 and 2 live on the first, 3, 4 and 5 on the second."""


def choice(shadow: Any = "auto", num_experts: int = 4, ranks: int = 2) -> ShadowChoice:
    return ShadowChoice(MoEConfig(num_experts=num_experts, shadow=shadow), tuple(range(ranks)))


def test_shadows_are_priced_per_row_that_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that travels is computed by several experts of its rank."""
    told: list[tuple[np.ndarray, ShadowCosts]] = []

    def choose(rows_PE: np.ndarray, placement: Placement, costs: ShadowCosts, **more: Any) -> Any:
        told.append((rows_PE, costs))
        assert more["node_P"] == (0, 1), "far rows cost more"
        return SimpleNamespace(shadows=())

    monkeypatch.setattr(shadow_policy, "choose_shadows", choose)
    pairs_PE, rows_PE = np.full((2, 4), 30), np.full((2, 4), 20)
    route: Any = SimpleNamespace(placement=Placement.contiguous(4, 2), table=None)
    choice().question(pairs_PE, rows_PE, route, PROBE.shadow_costs(overlap=0.0)).best()
    ((counts, costs),) = told
    assert counts is rows_PE, "rows travel, pairs do not"
    assert costs.row_forward == pytest.approx(1.5 * PROBE.row_forward)
    assert costs.row_backward == pytest.approx(1.5 * PROBE.row_backward)


def count(mesh: Mesh) -> tuple[list[list[int]], list[list[int]]]:
    moe = make(GateConfig(top_k=3), 6, 0, mesh)
    pairs, rows = moe.schedule.shadows.counts_and_rows(IDS[mesh.rank], moe.dispatcher, "test")
    assert (gather_counts(IDS[mesh.rank], moe.dispatcher, "test") == pairs).all()
    return pairs.tolist(), rows.tolist()


def test_a_row_counts_for_the_least_wanted_of_its_experts_on_a_rank() -> None:
    pairs = [[2, 3, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1]]
    rows = [[1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1]]
    assert run_ranks(2, count) == [(pairs, rows)] * 2


@pytest.mark.parametrize(
    ("pairs", "look", "asks"),
    [
        ([[50, 50], [50, 50]], 0.0, False),
        ([[90, 10], [90, 10]], 0.0, True),
        ([[90, 10], [90, 10]], 1.0, False),
    ],
    ids=["even", "skewed", "skewed, but asking takes longer"],
)
def test_the_next_call_asks_where_this_one_could_have_gained(
    pairs: list[list[int]], look: float, asks: bool
) -> None:
    one, probe = choice(num_experts=2), replace(SLOW_EXPERTS, look=look)
    route = SimpleNamespace(placement=Placement.contiguous(2, 2))
    plan: Any = SimpleNamespace(
        dispatcher=route, sizes=SimpleNamespace(pairs_by_slot=lambda: np.array(pairs))
    )
    one.learn(plan, probe.shadow_costs(overlap=0.0), probe)
    assert one.asking.asks is asks


def test_answers_that_are_not_worth_it_are_asked_for_ever_less_often() -> None:
    one, probe = choice(num_experts=2), replace(SLOW_EXPERTS, look=1e-3)
    costs = probe.shadow_costs(overlap=0.0)
    route = SimpleNamespace(placement=Placement.contiguous(2, 2))
    skewed = SimpleNamespace(pairs_by_slot=lambda: np.array([[90, 10], [90, 10]]))
    plan: Any = SimpleNamespace(dispatcher=route, sizes=skewed)

    def asked(calls: int, gain: float) -> list[int]:
        """Calls that ask, where each answer gains so much."""
        found = []
        for call in range(calls):
            found += [call] if one.asking.asks else []
            one.plan = SimpleNamespace(gain=gain) if one.asking.asks else None  # type: ignore[assignment]
            one.learn(plan, costs, probe)
        return found

    assert asked(20, 5e-4) == [0, 2, 5, 10, 19]
    assert one.asking.rest == 16
    for _ in range(4):
        asked(LONGEST_REST + 1, 0.0)
    assert one.asking.rest == LONGEST_REST
    asked(LONGEST_REST + 1, 2e-3)
    assert asked(5, 2e-3) == [0, 1, 2, 3, 4], "what pays is asked for in every call"
    assert one.asking.rest == 0


def test_even_loads_are_looked_at_now_and_then() -> None:
    """A look takes the host time in every layer: not in every call."""
    one, probe = choice(num_experts=2), replace(SLOW_EXPERTS, look=1e-3)
    one.asking.asks, looks = False, list[int]()
    route = SimpleNamespace(placement=Placement.contiguous(2, 2))

    def learn(call: int, pairs: list[list[int]]) -> None:
        sizes = SimpleNamespace(pairs_by_slot=lambda: (looks.append(call), np.array(pairs))[1])  # type: ignore[func-returns-value]
        plan: Any = SimpleNamespace(dispatcher=route, sizes=sizes)
        one.learn(plan, probe.shadow_costs(overlap=0.0), probe)

    for call in range(3 * LOOK):
        learn(call, [[50, 50], [50, 50]])
    assert looks == [0, LOOK, 2 * LOOK]
    for call in range(LOOK):
        learn(3 * LOOK + call, [[90, 10], [90, 10]])
        if one.asking.asks:
            break
    assert one.asking.asks, "what changes is seen after LOOK calls at the latest"


def calls(mesh: Mesh, probe: Probe, saved: bool) -> list[tuple[bool, bool, bool]]:
    """Of each call: (does it ask, were counts exchanged, was anything lent). Loads are even, then skewed."""
    moe = make(GateConfig(top_k=1), 8, 0, mesh, **lend("auto", schedule="blocking", chunks=1))
    seen, asked = [], []
    moe.schedule.probe = probe
    real = ShadowChoice.counts_and_rows
    ShadowChoice.counts_and_rows = lambda *given: (asked.append(1), real(*given))[1]  # type: ignore[assignment, func-returns-value, misc]
    with torch.no_grad():
        moe.gate.weight.copy_(8.0 * torch.eye(8, moe.gate.weight.shape[1]))
    for call in range(LOOK + 4):
        if call == 3:
            with torch.no_grad():
                moe.gate.weight[5] = 0.0
                moe.gate.weight[5, 0] = 9.0  # more want expert 5
        asks = moe.schedule.shadows.asking.asks
        asked.clear()
        gradients(moe, mesh, [300, 300])
        plan = moe.schedule.shadow_plan
        seen.append((asks, bool(asked), plan is not None and bool(plan.shadows)))
        if saved:
            state = moe.schedule.state()
            moe.attach(mesh)
            moe.schedule.probe = probe
            moe.schedule.load_state(state)
    return seen


def test_even_loads_are_left_in_peace_and_skew_is_seen_with_the_next_look() -> None:
    probe = replace(SLOW_EXPERTS, num_ranks=2, loan=8e-3, look=2e-3)
    first, second = run_ranks(2, calls, probe, False)
    assert first == second, "all ranks ask alike"
    assert first[0] == (True, True, False), "nothing is known before the first call"
    assert first[1:3] == [(False, False, False)] * 2
    assert first[3] == (False, True, True), "its own sizes are a surprise: it is planned anew"
    assert first[4:] == [(True, True, True)] * LOOK
    assert run_ranks(2, calls, probe, True)[0] == first, "a run that is resumed asks as the first one"


def test_whoever_names_experts_is_not_asked() -> None:
    assert not choice(shadow=(0,)).automatic
    assert choice(ranks=1).wanted == choice(shadow=()).wanted == "off"
