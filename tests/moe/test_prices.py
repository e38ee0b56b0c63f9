"""What planners are told: measured costs reach them unchanged, and in the unit that they count in."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moeclipse.balance.placement import Placement
from moeclipse.balance.shadow_model import ShadowCosts
from moeclipse.moe import schedule as of_layer
from moeclipse.moe.config import MoEConfig
from moeclipse.moe.granularity import Granularity, Trials
from moeclipse.moe.probe import Probe
from moeclipse.moe.schedule import ExchangeSchedule

PROBE = Probe(
    row_forward=3e-5,
    row_backward=7e-5,
    kernel=1e-5,
    latency=2e-4,
    bandwidth=1e8,
    link=5e8,
    shared_wire=False,
    row_bytes=1024,
    parameter_bytes=4e6,
    gradient_bytes=8e6,
    num_ranks=2,
)


@pytest.mark.parametrize(("schedule", "overlap"), [("smart", 1.0), ("blocking", 0.0)])
def test_shadows_are_priced_per_row_that_travels(
    schedule: Any, overlap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that travels is computed by several experts of its rank; a blocking exchange hides nothing."""
    told: list[tuple[np.ndarray, ShadowCosts]] = []

    def choose(rows_PE: np.ndarray, placement: Placement, costs: ShadowCosts, **more: Any) -> Any:
        told.append((rows_PE, costs))
        return SimpleNamespace(shadows=())

    monkeypatch.setattr(of_layer, "choose_shadows", choose)
    pairs_PE, rows_PE = np.full((2, 4), 30), np.full((2, 4), 20)
    exchange = ExchangeSchedule(MoEConfig(num_experts=4, schedule=schedule, shadow="auto"), (0, 0))
    exchange.probe = PROBE
    exchange._counts_and_rows = lambda *_: (pairs_PE, rows_PE)  # type: ignore[method-assign, assignment]
    route: Any = SimpleNamespace(placement=Placement.contiguous(4, 2), table=None)
    assert exchange._choose_shadows(torch.zeros(1, 1), route, "here")[0] is None
    ((counts, costs),) = told
    assert counts is rows_PE, "rows travel, pairs do not"
    assert costs.row_forward == pytest.approx(1.5 * PROBE.row_forward)
    assert costs.row_backward == pytest.approx(1.5 * PROBE.row_backward)
    assert costs.overlap == overlap


def test_a_link_is_priced_as_it_is_around_a_busy_expert() -> None:
    alone = PROBE.shadow_costs(overlap=1.0)
    assert alone.row_send == pytest.approx(1024 / 5e8), "others rest"
    assert alone.parameter_seconds == pytest.approx(4e6 / 5e8 + 2e-4)
    assert alone.gradient_seconds == pytest.approx(8e6 / 5e8 + 2e-4)
    shared = replace(PROBE, shared_wire=True).shadow_costs(overlap=1.0)
    assert shared.row_send == pytest.approx(1024 / 2e8), "the wire of all, whose bytes are added up"
    assert shared.shared_wire
    all_send = PROBE.exchange_costs()
    assert all_send.transfer(100, near=False) == pytest.approx(2e-4 + 100 * 1024 / 1e8)
    assert all_send.compute(100) == pytest.approx(1e-5 + 100 * 3e-5)


def test_a_run_that_is_saved_amid_its_trials_goes_on_with_the_best_prediction() -> None:
    exchange = ExchangeSchedule(MoEConfig(num_experts=4, schedule="smart"), (0, 0))
    ranked = [Granularity(groups=((0,), (1,)), chunks=chunks) for chunks in (2, 4, 1)]
    exchange.trials = Trials(ranked, cuda=False)
    exchange.use = ranked[2]
    assert exchange.state()["chunks"] == 2
    exchange.trials = None
    assert exchange.state()["chunks"] == 1
