"""What an exchange runs: how it is cut and tried out, and what is told to those who plan its shadows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from layer_parity import gradients, make

from moeclipse.balance.placement import Placement
from moeclipse.comm.mesh import Mesh
from moeclipse.core.values import convert_table
from moeclipse.moe.config import GateConfig, MoEConfig
from moeclipse.moe.tune import exchange_policy
from moeclipse.moe.tune.cut_choice import CALLS, LEAST_CALLS, TRIED, LayerChoice, Trials
from moeclipse.moe.tune.exchange_policy import Decided, ExchangeSchedule
from moeclipse.moe.tune.granularity import Granularity
from moeclipse.testing.run_ranks import run_ranks
from probed import PROBE


@pytest.mark.parametrize(
    ("schedule", "plain", "overlap"),
    [("smart", False, 1.0), ("blocking", True, 0.0), ("auto", True, 0.0), ("auto", False, 1.0)],
)
def test_an_exchange_in_one_go_hides_no_shadows(schedule: Any, plain: bool, overlap: float) -> None:
    exchange = ExchangeSchedule(MoEConfig(num_experts=4, schedule=schedule, shadow="auto"), (0, 1))
    use = Granularity(groups=((0, 1),) if plain else ((0,), (1,)), chunks=1)
    costs = exchange._shadow_costs(Decided(use=use, probe=PROBE, asks=True))
    assert costs is not None
    assert costs.overlap == overlap
    assert exchange._shadow_costs(Decided(use=use, probe=None, asks=True)) is None, "nothing is known yet"


def test_a_run_that_is_saved_amid_its_trials_goes_on_with_the_best_prediction() -> None:
    exchange = ExchangeSchedule(MoEConfig(num_experts=4, schedule="smart"), (0, 0))
    ranked = [Granularity(groups=((0,), (1,)), chunks=chunks) for chunks in (2, 4, 1)]
    exchange.cuts.trials = Trials(ranked, cuda=False)
    exchange.cuts.use = ranked[2]
    assert exchange.state()["chunks"] == 2
    exchange.cuts.trials = None
    assert exchange.state()["chunks"] == 1


def learn(mesh: Mesh) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Training calls until a granularity is chosen: (what was known in each, the choice, its report)."""
    moe = make(GateConfig(top_k=2), 8, 0, mesh, exchange={"schedule": "smart"})
    schedule, seen = moe.schedule, []
    for _ in range(2 + TRIED * CALLS):
        gradients(moe, mesh, [6, 4, 5])
        seen.append(
            (
                schedule.probe is not None,
                schedule.cuts.trials is not None,
                schedule.state()["chunks"],
            )
        )
    chosen = schedule.cuts.use
    gradients(moe.eval(), mesh, [6, 4, 5])
    assert schedule.cuts.use == chosen
    resumed = ExchangeSchedule(schedule.config, schedule.hosts)
    resumed.load_state(json.loads(json.dumps(schedule.state())))
    assert resumed.cuts.use.rule == "resumed"
    assert resumed.shape() == schedule.shape(), "a resumed run cuts rows as this one did"
    moe.train().schedule = resumed
    for _ in range(2):
        gradients(moe, mesh, [6, 4, 5])
    assert resumed.probe is None, "... and measures nothing"
    elsewhere = ExchangeSchedule(schedule.config, (0, 0))
    elsewhere.load_state(schedule.state())
    assert elsewhere.cuts.use.rule != "resumed", "a choice for three ranks says nothing about two"
    return seen, [chosen.groups, chosen.chunks, chosen.rule], schedule.cuts.report()


@pytest.fixture
def told_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are forked now find costs that are known: a busy machine may not be able to tell its own."""

    def measured(_choice: Any, _pairs: Any, dispatcher: Any, *_: Any) -> Any:
        return replace(PROBE, num_ranks=dispatcher.group.size)

    monkeypatch.setattr(exchange_policy, "measured", measured)


@pytest.mark.usefixtures("told_prices")
def test_costs_are_measured_in_the_second_call_and_the_fastest_of_the_tried_stays() -> None:
    results = run_ranks(3, learn)
    seen, chosen, report = results[0]
    assert all(found[:2] == (seen, chosen) for found in results), "all ranks decide alike"
    assert [call[:2] for call in seen] == [
        (False, False),
        *[(True, True)] * (TRIED * CALLS),  # the best by simulation take turns
        (True, False),
    ]
    assert report["measured_ms"] > 0
    assert report["predicted_ms"] > 0
    assert (report["steps"], report["chunks"], report["rule"]) == (len(chosen[0]), *chosen[1:])


def learn_by_itself(mesh: Mesh) -> tuple[list[tuple[int, bool]], float]:
    """Calls of a layer that chooses: units of each, whether it was exact; and what was left behind.

    On so few rows no cut is predicted to be faster: here all of them are.
    """
    plain, moe = (
        make(GateConfig(top_k=2), 8, 0, mesh, exchange={"schedule": schedule})
        for schedule in ("blocking", "auto")
    )
    rank = moe.schedule.cuts.rank
    moe.schedule.cuts.rank = lambda *given: [  # type: ignore[method-assign]
        replace(one, both_s=2.0 if one.plain else 1.0) for one in rank(*given)
    ]
    truth, seen = gradients(plain, mesh, [6, 4, 5]), []
    for _ in range(3 + TRIED * CALLS):
        moe.zero_grad()
        found = gradients(moe, mesh, [6, 4, 5])
        exact = all(
            torch.allclose(found[name], value, rtol=0, atol=1e-12)
            for name, value in truth.items()
            if isinstance(value, torch.Tensor)
        )
        seen.append((moe.schedule.cuts.use.num_units, exact))
    return seen, moe.schedule.cuts.report()["over_plain"]


@pytest.mark.usefixtures("told_prices")
def test_a_layer_that_chooses_begins_in_one_go_and_tries_that_beside_units() -> None:
    results = run_ranks(3, learn_by_itself)
    (seen, over_plain), units = results[0], [units for units, _ in results[0][0]]
    assert all(found == results[0] for found in results), "all ranks decide alike"
    assert all(exact for _, exact in seen)
    assert units[0] == 1
    assert units[1 : 1 + TRIED * CALLS].count(1) == CALLS, "one go has as many calls as each of the others"
    assert over_plain >= 1 / 1.06, "what stays was not seen to be slower"


def test_where_units_would_be_padded_there_is_no_choice() -> None:
    gate = GateConfig(top_k=2, overflow="pad", capacity_factor=2.0)
    assert make(gate, 8, 0, None, exchange={"schedule": "auto"}).schedule.config.schedule == "blocking"
    assert make(GateConfig(), 8, 0, None, exchange={"schedule": "auto"}).schedule.cuts.careful


@pytest.mark.parametrize(
    ("hosts", "options"),
    [((0, 0, 1, 1), {}), ((0,) * 4, {"group_size": 2, "chunks": 2}), ((0,) * 4, {"chunks": 4})],
)
def test_one_go_is_among_what_may_be_tried(hosts: tuple[int, ...], options: dict[str, Any]) -> None:
    exchange = ExchangeSchedule(MoEConfig(schedule="auto", num_experts=4, **options), hosts)
    dispatcher: Any = SimpleNamespace(
        table=None, placement=Placement.contiguous(4, 4), slot_bounds=(0, 1, 2, 3, 4)
    )
    ranked = exchange.cuts.rank(np.full((4, 4), 100), dispatcher, PROBE)
    assert sum(one.plain for one in ranked) == 1
    chunks = {options.get("chunks", one.chunks) for one in ranked}
    assert {one.chunks for one in ranked if not one.plain} == chunks


def computed(mesh: Mesh, shadow: tuple[int, ...]) -> tuple[list[int], list[int], Any]:
    """(rows that each slot computed in training, rows that wanted each expert, who had shadows)"""
    placement = Placement(((0, 1), (1, 2), (3, 0)))
    more = {"placement": placement, "exchange": {"shadow": shadow}}
    moe = make(GateConfig(top_k=2), 4, 0, mesh, **more)
    load = gradients(moe, mesh, [9, 4, 7])["load"]
    gradients(moe.eval(), mesh, [9, 4, 7])
    plan, found = moe.schedule.shadow_plan, moe.schedule.take_computed()
    assert moe.schedule.take_computed() == []
    return found, load.tolist(), () if plan is None else plan.shadows


@pytest.mark.parametrize("shadow", [(), (0, 2)], ids=str)
def test_slots_count_what_they_computed_in_training_and_shadows_do_not(shadow: tuple[int, ...]) -> None:
    results = run_ranks(3, computed, shadow)
    stayed = dict(results[0][2])
    assert set(stayed) == set(shadow)
    found = [0] * 4
    for (counts, *_), experts in zip(results, ((0, 1), (1, 2), (3, 0)), strict=True):
        for expert, rows in zip(experts, counts, strict=True):
            found[expert] += rows
    wanted = [
        sum(load[expert] for rank, (_, load, _) in enumerate(results) if rank not in stayed.get(expert, ()))
        for expert in range(4)
    ]
    assert found == wanted
    assert sum(found) > 0


def test_trials_need_calls_that_they_may_take() -> None:
    """Whoever runs a layer says how many; a choice that is known is repeated all the same."""
    exchange = ExchangeSchedule(MoEConfig(schedule="auto", num_experts=4), (0, 0))
    assert exchange.cuts.tries(False)
    for calls, tunes in ((0, False), (2 * LEAST_CALLS - 1, False), (2 * LEAST_CALLS, True)):
        exchange.cuts.most_calls = calls
        assert exchange.cuts.tries(False) is tunes
    named = ExchangeSchedule(MoEConfig(schedule="smart", num_experts=4), (0, 0))
    named.cuts.most_calls = 0
    assert named.cuts.tries(False), "who names the smart schedule wants its cuts to be chosen"
    exchange.cuts.most_calls = 0
    one, two = Granularity(groups=((0, 1),), chunks=1), Granularity(groups=((0,), (1,)), chunks=2)
    known = LayerChoice(probe=PROBE, tried=(two, one), calls=3, chosen=two)
    exchange._repeat(convert_table(json.loads(json.dumps(asdict(known))), LayerChoice), cuda=False)
    assert exchange.cuts.trials is not None
    assert (len(exchange.cuts.trials.candidates), exchange.cuts.trials.calls) == (2, 3)


def learn_briefly(mesh: Mesh, calls: int | None) -> tuple[list[int], bool]:
    """Units of each call where trials may take so many; whether anything was measured."""
    moe = make(GateConfig(top_k=2), 8, 0, mesh, exchange={"schedule": "auto"})
    moe.schedule.cuts.most_calls = calls
    rank = moe.schedule.cuts.rank
    moe.schedule.cuts.rank = lambda *given: [  # type: ignore[method-assign]
        replace(one, both_s=2.0 if one.plain else 1.0) for one in rank(*given)
    ]
    units = []
    for _ in range(10):
        gradients(moe, mesh, [6, 4])
        units.append(moe.schedule.cuts.use.num_units)
    return units, moe.schedule.probe is not None


@pytest.mark.usefixtures("told_prices")
def test_a_short_run_tries_little_or_nothing() -> None:
    for units, measured in run_ranks(2, learn_briefly, 0):
        assert units == [1] * 10
        assert not measured
    for units, measured in run_ranks(2, learn_briefly, 2 * LEAST_CALLS):
        assert measured
        assert units[0] == 1
        assert [count == 1 for count in units[1:7]].count(True) == LEAST_CALLS
        assert len(set(units[7:])) == 1, "chosen"


def test_programs_are_built_once_for_each_shape() -> None:
    exchange = ExchangeSchedule(MoEConfig(schedule="smart", chunks=2), (0, 0, 0))
    plain, shadowed = exchange.shape(), exchange.shape(shadows=True)
    assert exchange.programs(plain) is exchange.programs(exchange.shape())
    assert exchange.programs(plain) is not exchange.programs(shadowed)
    assert exchange.cuts.use.chunks == 2
    assert ExchangeSchedule(MoEConfig(schedule="blocking", chunks=2), (0, 0, 0)).cuts.use.chunks == 1
