"""The search: what it tries, what it drops, and that it gives one answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moeclipse.cost.cluster import ExpertChoice, cluster
from moeclipse.cost.sizes import ModelSizes
from moeclipse.cost.step_bytes import Sharing, StateBytes, beside
from moeclipse.plan import layouts
from moeclipse.plan.layout import Layout
from moeclipse.plan.layouts import (
    ALIKE,
    Candidate,
    axes_of,
    candidates_of,
    divisors,
    plan_of,
    samples_of,
    schedules_of,
    search,
    shortlist,
)
from moeclipse.plan.published import QWEN3_30B
from moeclipse.plan.question import Plan, Request
from moeclipse.plan.rank_bytes import in_flight, most_kept, peak_bytes, roughly, runs_program
from moeclipse.plan.state_place import StatePlace
from moeclipse.plan.step import Step, Terms
from moeclipse.schedule.catalogue import build

SMALL = ModelSizes(
    vocab=32000,
    d_model=1024,
    num_heads=16,
    kv_heads=4,
    d_qk=64,
    d_v=64,
    moe_layers=(True,) * 8,
    expert_width=512,
    experts=ExpertChoice(num_experts=16, top_k=2),
)


def request_of(
    model: ModelSizes = SMALL,
    gpus: int = 8,
    batch: int = 64,
    *,
    state: StateBytes = StateBytes(),  # noqa: B008 (frozen)
    place: StatePlace = StatePlace(),  # noqa: B008
    **more: Any,
) -> Request:
    terms = Terms(model=model, cluster=cluster("h100"), sequence=1024, state=state, place=place)
    return Request(terms=terms, num_gpus=gpus, batch=batch, **more)


def test_axes_use_all_gpus_and_the_whole_batch() -> None:
    request = request_of(batch=24)
    found = list(axes_of(request))
    assert len(found) == len(set(found)) > 20
    for layout in found:
        assert layout.num_ranks == 8
        assert layout.microbatches * layout.samples * layout.dp * layout.ep == 24
        assert 16 % (layout.ep * layout.tp) == 0
        assert layout.tp <= 4  # heads of keys and values
    assert {layout.pp for layout in found} == {1, 2, 4, 8}
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_a_batch_that_nothing_divides_has_no_layout() -> None:
    assert (
        list(axes_of(request_of(replace(SMALL, num_heads=15, kv_heads=1, moe_layers=(True,) * 3), batch=7)))
        == []
    )
    assert search(request_of(replace(SMALL, kv_heads=1, moe_layers=(True,) * 3), batch=7)).considered == 0


def test_dense_models_have_no_expert_ranks() -> None:
    dense = replace(SMALL, moe_layers=(False,) * 8, dense_width=2048)
    assert {layout.ep for layout in axes_of(request_of(dense))} == {1}


def test_schedules_that_go_with_the_microbatches() -> None:
    names = {each.schedule for each in schedules_of(Layout(pp=4, ep=2, microbatches=8), 8)}
    assert names == {"1f1b", "zb-h1", "zb-h2", "zb-m", "zb-v", "vpp", "vpp+1", "1f1b-pairs", "dualpipev"}
    assert "dualpipe" not in names, "half of its stages and twice dp in dualpipev are the same step"
    few = {each.schedule for each in schedules_of(Layout(pp=4, ep=2, microbatches=4), 8)}
    assert "dualpipev" not in few
    assert all(each.num_stages <= 8 for each in schedules_of(Layout(pp=4, microbatches=8), 8))
    assert [each.schedule for each in schedules_of(Layout(ep=2, microbatches=2), 8)] == ["1f1b", "pp1"]
    assert [each.schedule for each in schedules_of(Layout(dp=2, microbatches=2), 8)] == ["1f1b"]


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 8), (4, 8), (4, 16), (8, 24)])
def test_activations_in_flight_as_the_programs_hold_them(pp: int, microbatches: int) -> None:
    for layout in schedules_of(Layout(pp=pp, ep=2, microbatches=microbatches), 64):
        if layout.schedule == "zb-m":
            layout = replace(layout, budget=pp)
        program = build(layout.schedule, pp, microbatches, layout.stages_per_rank, budget=layout.budget)
        held = max(most_kept(program, [1.0] * layout.num_stages))
        assert held <= in_flight(layout) <= held + 1, layout.title


def test_what_a_rank_keeps_is_walked_action_by_action() -> None:
    assert list(most_kept(build("1f1b", 2, 4), [3.0, 5.0])) == [6.0, 5.0]
    assert list(most_kept(build("gpipe", 2, 4), [3.0, 5.0])) == [12.0, 20.0]


def test_bytes_of_one_rank_are_state_layers_and_the_rest() -> None:
    request = request_of(gpus=1)
    step = Step(request.terms, Layout(microbatches=16, samples=4))
    held = Sharing().held(SMALL, range(8), (True, True))
    layers = 8 * Sharing(imbalance=1.1, fused=True).layer(SMALL, True, 4096, 2.0, "off")
    rest = beside(SMALL, Sharing(fused=True), 4096, 2.0, program=False, head=True)
    assert peak_bytes(request, step) == (pytest.approx(6 * held.trained + 12 * held.owned + layers + rest),)
    assert roughly(request, step.layout).peak == pytest.approx(peak_bytes(request, step)[0])
    tied = replace(request, terms=replace(request.terms, model=replace(SMALL, tied=True)))
    less = peak_bytes(request, step)[0] - peak_bytes(tied, Step(tied.terms, step.layout))[0]
    assert less == pytest.approx(18 * SMALL.table_parameters)


def test_the_rough_count_is_near_the_exact_one() -> None:
    request = request_of(QWEN3_30B, gpus=32, batch=128)
    for candidate in shortlist(list(candidates_of(request)))[::5]:
        exact = plan_of(request, candidate.layout).peak
        assert candidate.peak == pytest.approx(exact, rel=0.15), candidate.layout.title


def test_programs_run_where_stages_pairs_or_recompute_ask_for_them() -> None:
    assert not runs_program(Layout(ep=8))
    assert not runs_program(Layout(recompute="full"))
    assert runs_program(Layout(ep=8, recompute="full"))
    assert runs_program(Layout(pp=2))
    assert runs_program(Layout(ep=2, schedule="pp1", overlap="pair"))


def test_plans_fit_are_sorted_and_the_same_each_time() -> None:
    told: list[tuple[int, int]] = []
    request = request_of(replace(QWEN3_30B, moe_layers=(True,) * 12), gpus=4, batch=16)
    found = search(request, lambda done, total: told.append((done, total)))
    assert found.plans
    assert found == search(request)
    assert [plan.time.seconds for plan in found.plans] == sorted(plan.time.seconds for plan in found.plans)
    assert all(plan.peak <= plan.room <= 0.95 * 80e9 for plan in found.plans)
    assert found.dropped["memory"] > 0
    assert told[-1][0] == told[-1][1] == len(told) - 1
    assert found.nearest is None


def test_what_the_exact_count_refuses_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rough count lets some through that do not fit."""
    request = request_of(gpus=4, batch=16)
    dropped = search(request).dropped.get("memory", 0)
    best = search(request).plans[0].layout

    def too_large(request: Request, layout: Layout) -> Plan:
        plan = plan_of(request, layout)
        return replace(plan, bytes_of=(1.01 * plan.room,)) if layout == best else plan

    monkeypatch.setattr(layouts, "plan_of", too_large)
    found = search(request)
    assert best not in [plan.layout for plan in found.plans]
    assert found.dropped["memory"] == dropped + 1


def test_the_best_is_as_fast_as_the_best_of_all() -> None:
    """The bound leaves nothing out that would have won."""
    request = request_of(gpus=4, batch=16)
    everything = [plan_of(request, each.layout) for each in candidates_of(request)]
    best = min(plan.time.seconds for plan in everything)
    assert search(request).plans[0].time.seconds <= 1.02 * best


def test_rules_of_the_caller_drop_plans() -> None:
    def refuse(plan: Plan) -> str:
        return "no stages here" if plan.layout.pp > 1 else ""

    found = search(request_of(refuse=refuse))
    assert {plan.layout.pp for plan in found.plans} == {1}
    assert found.dropped["no stages here"] > 0


def test_where_nothing_fits_the_nearest_is_told() -> None:
    found = search(request_of(replace(QWEN3_30B, moe_layers=(True,) * 480), gpus=4, batch=8))
    assert found.plans == ()
    assert found.nearest is not None
    assert found.nearest.peak > found.nearest.room
    assert found.dropped == {"memory": found.considered}


def test_states_in_fewer_bytes_leave_room() -> None:
    wide = search(request_of(QWEN3_30B, gpus=8, batch=16))
    narrow = search(request_of(QWEN3_30B, gpus=8, batch=16, state=StateBytes(shard=4.0)))
    assert len(wide.plans) < len(narrow.plans)


def test_few_of_one_kind_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = [Candidate(layout=Layout(schedule=f"s{i}"), bound=float(i), peak=0.0) for i in range(20)]
    other = Candidate(layout=Layout(dp=2), bound=100.0, peak=0.0)
    assert shortlist([other, *reversed(alike)]) == [*alike[:ALIKE], other]
    monkeypatch.setattr(layouts, "SIMULATED", 2)
    assert shortlist([other, *alike]) == alike[:2]


def test_a_microbatch_has_more_samples_where_they_are_short() -> None:
    assert samples_of(8192) == (1, 2, 4, 8)
    assert samples_of(4096) == (1, 2, 4, 8, 16)
    assert samples_of(128) == (1, 2, 4, 8, 16, 32, 64)


def test_state_leaves_for_the_host_where_the_device_is_too_small() -> None:
    alone = request_of(QWEN3_30B, gpus=8, batch=16)
    place = StatePlace(host_room=240e9)
    there = replace(alone, terms=replace(alone.terms, place=place))
    layout = Layout(ep=8, microbatches=2, recompute="off")
    kept, left = plan_of(alone, layout), plan_of(there, layout)
    assert kept.peak > kept.room >= left.peak
    assert (kept.layout.host, kept.host_bytes, kept.time.copies) == (0, 0, 0)
    away = left.layout.host * 12 * QWEN3_30B.parameters / 8
    assert left.host_bytes == pytest.approx(away, rel=0.01)
    assert left.peak == pytest.approx(kept.peak - away + place.ring(QWEN3_30B, 8), rel=0.01)
    assert plan_of(there, replace(layout, host=left.layout.host - 0.01)).layout == left.layout
    assert left.time.seconds == pytest.approx(kept.time.seconds + left.time.copies)
    assert left.time.copies > 0.1 * kept.time.seconds, "updates wait for the norm of all gradients"
    roomy = replace(there, terms=replace(there.terms, cluster=cluster("b200")))
    assert plan_of(roomy, layout).layout.host == 0
    assert replace(there, most_bytes=50e9).room(layout) == 50e9


def test_what_state_on_the_host_makes_possible_is_found() -> None:
    alone = request_of(QWEN3_30B, gpus=4, batch=16)
    assert not search(alone).plans
    place = StatePlace(host_room=240e9)
    found = search(replace(alone, terms=replace(alone.terms, place=place, state=StateBytes(gradient=2.0))))
    assert found.plans
    assert all(plan.layout.host and plan.peak <= plan.room for plan in found.plans)
    rough = roughly(replace(alone, terms=replace(alone.terms, place=place)), found.plans[0].layout)
    assert rough.layout.host == pytest.approx(found.plans[0].layout.host, abs=0.4)


def test_one_rank_takes_layers_one_by_one() -> None:
    """Then gradients of two layers are there at a time, and state has all of backward to travel in."""
    narrow = StateBytes(gradient=2.0, shard=4.0, update=14.0)
    given = {"gpus": 1, "batch": 32, "state": narrow}
    by_layer = request_of(QWEN3_30B, place=StatePlace(host_room=240e9, each=4.0, by_layer=True), **given)
    names = [each.schedule for each in schedules_of(Layout(microbatches=4, samples=8), 48, by_layer=True)]
    assert names == ["1f1b", "layers"]
    layout = Layout(microbatches=4, samples=8, recompute="full", schedule="layers", stages_per_rank=48)
    plain = replace(layout, schedule="1f1b", stages_per_rank=1)
    whole = sum(peak_bytes(by_layer, Step(by_layer.terms, plain)))
    layers = sum(peak_bytes(by_layer, Step(by_layer.terms, layout)))
    gradients = 2 * (QWEN3_30B.parameters - 2 * QWEN3_30B.table_parameters) * 46 / 48
    kept = 3 * 48 * 8 * 1024 * 2 * 2048  # of the other microbatches, the inputs of all layers
    more = 3.5 * Sharing(fused=True).layer(QWEN3_30B, True, 8192, 2.0, "off")  # of a program
    assert whole - layers == pytest.approx(gradients - kept - more, rel=0.01)
    assert layout.title == "pp1 dp1 ep1 tp1, layers, 4 x 8, recompute full"
    assert plan_of(by_layer, layout).time.copies == 0


def test_a_budget_is_what_there_is_room_for() -> None:
    deep = replace(QWEN3_30B, moe_layers=(True,) * 16)
    request = request_of(deep, gpus=16, batch=128)
    axes = Layout(pp=4, dp=2, ep=2, samples=8, microbatches=4, schedule="zb-m")
    found = {}
    for room in (31e9, 36e9, 60e9):
        rough = roughly(replace(request, most_bytes=room), axes)
        found[room] = rough.layout.budget
        assert rough.peak <= room or rough.layout.budget == 1
    assert found[31e9] < found[36e9] < found[60e9] == 4, "as many as there are microbatches"
    exact = plan_of(replace(request, most_bytes=36e9), replace(axes, budget=4))
    assert 1 <= exact.layout.budget < 4
    assert exact.layout.title.startswith(f"pp4 dp2 ep2 tp1, zb-m of {exact.layout.budget}, 4 x 8")
    folded = roughly(request, replace(axes, stages_per_rank=2)).layout
    assert ", zb-m x 2 of 4, " in folded.title
    tight = replace(request, most_bytes=36e9)
    assert any(each.layout.schedule == "zb-m" for each in candidates_of(tight))
