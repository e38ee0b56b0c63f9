"""Plans in training: made beside it, taken by all ranks or by none."""

from __future__ import annotations

import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner import configure, corpus, state_after_load  # noqa: F401  (a fixture)
from test_model_placement import RANDOM, WIDE

from moeclipse.balance.objective import PlacementCosts
from moeclipse.balance.placement import Placement
from moeclipse.balance.planner import PlanConfig
from moeclipse.comm.mesh import Mesh
from moeclipse.core.errors import CommError, ConfigError
from moeclipse.moe.own_loop import migrate
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_alone, run_ranks, run_ranks_raw
from moeclipse.train.checkpoints.checkpoint import Checkpoint
from moeclipse.train.config import TrainConfig
from moeclipse.train.placement import background_plan, model_placement
from moeclipse.train.placement.background_plan import PlanRequest
from moeclipse.train.step.learner import Learner

CHEAP = PlacementCosts(
    row_seconds=1e-3,
    row_bytes=1.0,
    weight_bytes=1.0,
    gradient_bytes=1.0,
    state_bytes=1.0,
    near_bandwidth=1e6,
    far_bandwidth=1e6,
)
"""Replicas cost so little that planners make some, whatever this machine measures."""
PLANNED = {**RANDOM, "placement.planner": "incremental", "placement.start_step": 2, "placement.every": 4}


def planned(mesh: Mesh, config: TrainConfig, steps: int) -> tuple[list[float], int, list[str], list[int]]:
    learner = Learner(config, mesh)
    learner.placement.costs = CHEAP
    losses, notes = [], []
    for step in range(steps):
        record = learner.step(step)
        losses.append(record["loss"])
        notes += record.get("notes", [])
    replicas = [placed.placement.num_replicas for placed in learner.placement.layers]
    return losses, learner.placement.plans_taken, notes, replicas


def test_plans_that_win_too_little_of_a_step_stay_undone() -> None:
    skewed = np.array([[90.0, 10.0, 5.0, 5.0], [80.0, 20.0, 5.0, 5.0]])
    requests = [
        PlanRequest(
            config=PlanConfig(planner="greedy"),
            counts_PE=counts_PE,
            current=Placement(((0, 1, -1), (2, 3, -1))),
            costs=CHEAP,
            node_P=(0, 0),
        )
        for counts_PE in (skewed, skewed[:, ::-1].copy())
    ]
    free = background_plan.propose(7, requests)
    now, then = free.seconds
    assert now > then > 0
    assert all(new != request.current for new, request in zip(free.placements, requests, strict=True))
    assert background_plan.propose(7, requests, least_s=0.99 * (now - then)) == free
    rows = sum(request.problem.judge(request.current).fullest for request in requests)

    def doubted(part: float) -> list[PlanRequest]:
        costs = replace(CHEAP, row_doubt=part * (now - then) / rows)
        return [replace(request, costs=costs) for request in requests]

    assert background_plan.propose(7, doubted(0.99), least_s=1e-12).placements == free.placements
    unsure = background_plan.propose(7, doubted(1.01), least_s=1e-12)
    assert unsure.placements == tuple(one.current for one in requests), "no more than prices may be off by"
    assert background_plan.propose(7, doubted(1.01)).placements == free.placements, "what was asked is done"
    kept = background_plan.propose(7, requests, least_s=1.01 * (now - then))
    assert kept.placements == tuple(request.current for request in requests)
    assert kept.seconds == (now, now)
    assert kept.expected == free.expected


def test_a_plan_that_nobody_asked_for_is_not_waited_for() -> None:
    thread = background_plan.PlanThread()
    for _ in range(2):
        with pytest.raises(AssertionError, match="nothing was asked for"):
            thread.take()
        thread.put("one")
        assert thread.take() == "one"


def test_a_plan_does_not_wait_for_what_is_done_behind_it() -> None:
    thread, goes_on, order = background_plan.PlanThread(), threading.Event(), list[str]()

    def behind() -> None:
        goes_on.wait()
        order.append("behind the first")

    def second() -> str:
        order.append("the second")
        return "two"

    thread.start(lambda: "one", behind)
    assert thread.take() == "one"
    assert not order
    goes_on.set()
    thread.start(second)
    assert thread.take() == "two"
    assert order == ["behind the first", "the second"]


def test_a_thread_that_plans_gives_way() -> None:
    """A torch operation in the main thread waits for the interpreter no longer than a moment."""
    thread, seen, before = background_plan.PlanThread(), list[float](), sys.getswitchinterval()

    def work() -> str:
        seen.append(sys.getswitchinterval())
        return ""

    def fail() -> None:
        seen.append(sys.getswitchinterval())
        raise ValueError

    thread.start(work, fail)
    thread.join()
    assert seen == [pytest.approx(background_plan.SOON_S)] * 2
    assert sys.getswitchinterval() == before > 10 * background_plan.SOON_S


def times(mesh: Mesh, config: TrainConfig, slow_s: float) -> list[dict[str, float] | None]:
    """What is known about searches after each step; timing one takes long."""
    main = threading.current_thread()

    def timed(_: PlanRequest) -> float:
        assert threading.current_thread() is not main, "nobody waits for it"
        return slow_s

    learner = Learner(config, mesh)
    learner.placement.costs = CHEAP
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_placement, "search_seconds", timed)
        found = []
        for step in range(config.run.steps):
            learner.step(step)
            found.append(learner.placement.choices.search)
    return found


def test_a_search_is_timed_behind_the_first_plan_and_known_at_the_second(corpus: str) -> None:  # noqa: F811
    values = {**PLANNED, "placement.planner": "auto", "placement.start_step": 2, "placement.every": 2}
    config = configure(corpus, **values, **{"run.steps": 5, "run.deterministic": False})
    one, other = run_ranks(2, times, config, 7.0)
    assert one == other
    assert one[0] is None
    assert one[1] is not None
    assert set(one[1]) == {"step_s"}
    assert one[-1] == {**one[1], "search_s": 7.0}


def least(mesh: Mesh, config: TrainConfig) -> list[float]:
    placement = Learner(config, mesh).placement
    before = placement._least_s
    placement.choices.search = {"search_s": 0.1, "step_s": 2.0}
    return [before, placement._least_s]


@pytest.mark.parametrize(("planner", "asked"), [("auto", 0.02), ("greedy", 0.0)])
def test_auto_alone_asks_for_a_share_of_the_step(planner: str, asked: float, corpus: str) -> None:  # noqa: F811
    config = configure(corpus, **{**PLANNED, "placement.planner": planner})
    for found in run_ranks(2, least, config):
        assert found == [0.0, asked], "as long as nobody knows how long a step takes nothing is asked"


@pytest.mark.parametrize("planner", ["wrap_fill", pytest.param("incremental", marks=pytest.mark.full)])
def test_planned_training_has_the_same_losses(planner: str, corpus: str) -> None:  # noqa: F811
    expected, *_ = run_alone(planned, configure(corpus, **WIDE), 8)
    config = configure(corpus, **{**PLANNED, "placement.planner": planner, "integrity.every": 1})
    for losses, plans, notes, replicas in run_ranks(4, planned, config, 8):
        assert difference(losses, expected) <= 1e-12
        assert plans >= 1, notes
        if planner == "wrap_fill":
            assert min(replicas) > 5, "spare slots hold replicas"
            assert any(" transfers" in note and "predicted to take" in note for note in notes)


def with_planner(
    mesh: Mesh, config: TrainConfig, slow: bool, fails: bool
) -> tuple[list[Any], dict[str, int]]:
    """A planner that answers when training has begun to wait for it, or at once, or never rightly."""
    waited_for, plain = threading.Event(), background_plan.answer
    wait = background_plan.PlanThread.found

    def planned(*args: Any) -> Placement:
        if slow:
            waited_for.wait()
        if fails:
            raise RuntimeError("no licence")
        return plain(*args)

    def found(thread: background_plan.PlanThread) -> str | Exception:
        waited_for.set()
        return wait(thread)

    background_plan.answer, background_plan.PlanThread.found = planned, found  # type: ignore[method-assign]
    learner = Learner(config, mesh)
    learner.placement.costs = CHEAP
    told = []
    for step in range(8):
        notes, taken = learner.step(step).get("notes", []), learner.placement.plans_taken
        told.append((step, taken, notes))
    return told, learner.placement.summary()


@pytest.mark.parametrize("slow", [False, True])
def test_a_plan_is_taken_at_a_fixed_step(slow: bool, corpus: str) -> None:  # noqa: F811
    """Asked for after step 2, taken after step 5, however long it takes; and never before."""
    plans = {"placement.start_step": 3, "placement.commit_after": 3, "placement.every": 100}
    config = configure(corpus, **{**PLANNED, **plans, "placement.planner": "wrap_fill"})
    for told, summary in run_ranks(2, with_planner, config, slow, False):
        assert [taken for _, taken, _ in told] == [0, 0, 0, 0, 0, 1, 1, 1]
        assert told[5][2][0].startswith("plan of step 3:")
        assert summary["plans"] == 1
        assert summary["waited_ms"] >= 0


def test_training_survives_a_planner_that_fails(corpus: str) -> None:  # noqa: F811
    config = configure(corpus, **{**PLANNED, "placement.start_step": 2, "placement.every": 100})
    for told, summary in run_ranks(2, with_planner, config, False, True):
        assert told[3][2] == ["the planner asked at step 2 failed: no licence; experts stay"]
        assert (summary["plans"], summary["left_out"]) == (0, 0)


def polled(mesh: Mesh) -> tuple[str, bool, list[int]]:
    """What is said of a plan under way that a run of one stage saved, and what ranks tell each other next."""
    held = Placement(((0, 1), (2, 3)))
    planner = background_plan.BackgroundPlanner(mesh)
    plan = background_plan.Proposal(step=1, placements=(held,), expected=((1.0,) * 4,)).to_json()
    planner.load_state({"asked": 1, "plans": {"0": {"plan": plan}}})
    proposal, note = planner.poll(3, 2, [held])
    return note, proposal is None, mesh.gather_objects(mesh.rank)


def test_stages_take_their_plans_together_or_not_at_all() -> None:
    """One that has none would go on while the others vote, who would take numbers of its next step."""
    why = "the planner asked at step 2 failed: it was made for other ranks; experts stay"
    assert run_ranks(2, polled, pp=2) == [(why, True, [0, 1])] * 2


def with_bad_plan(mesh: Mesh, config: TrainConfig, how: str) -> tuple[list[str], int, bool]:
    plain = background_plan.answer

    def bad(*args: Any) -> Any:
        good = plain(*args)
        rows = [list(row) for row in good.slots]
        rows[0].append(-1)
        return type("Bad", (), {"slots": rows, "primary": good.primary})()

    if how == "slots":
        background_plan.answer = bad
    learner = Learner(config, mesh)
    before = [placed.placement for placed in learner.placement.layers]
    if how == "disagree" and mesh.rank == 1:
        placement = before[0]
        primary = tuple(placement.holders[e][-1] for e in range(placement.num_experts))
        other = Placement((placement.slots[0], placement.slots[1][::-1]), primary)
        object.__setattr__(learner.placement.layers[0].ownership, "placement", other)
    proposal, note = None, ""
    loads = run_a_step(learner)
    learner.placement.planner.request(0, learner.placement._requests(0, loads, CHEAP))
    current = [placed.placement for placed in learner.placement.layers]
    assert learner.placement.planner.poll(1, 2, current) == (None, ""), "it is not due yet"
    proposal, note = learner.placement.planner.poll(2, 2, current)
    return [note], learner.placement.plans_taken, proposal is None


def run_a_step(learner: Learner) -> Any:
    learner.backward(0)
    from moeclipse.balance.load import LoadTrace

    counts = torch.stack([layer.load_E for layer in learner.layers])[:, None].repeat(1, 2, 1)
    for bucket in learner.buckets:
        bucket.reduced()
    trace = LoadTrace()
    trace.add(0, counts.numpy())
    return trace


@pytest.mark.parametrize(
    ("how", "reason"), [("slots", "slots on its ranks, but there are"), ("disagree", "ranks disagree")]
)
def test_a_plan_that_does_not_fit_moves_nobody(how: str, reason: str, corpus: str) -> None:  # noqa: F811
    for notes, taken, refused in run_ranks(2, with_bad_plan, configure(corpus, **PLANNED), how):
        assert refused
        assert taken == 0
        assert reason in notes[0], notes
        assert notes[0].startswith("a plan was refused, experts stay")


def dies_while_moving(mesh: Mesh, config: TrainConfig, folder: str) -> str:
    learner = Learner(config, mesh)
    learner.step(0)
    learner.save(Path(folder), 1)
    if mesh.rank == 1:

        def killed(*_: Any) -> list[int]:
            os._exit(9)

        migrate.header = killed
    try:
        for step in range(1, 12):
            learner.step(step)
    except CommError as error:
        return str(error)
    return ""


def test_a_rank_that_dies_while_experts_move(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    config = configure(corpus, **RANDOM)
    outcomes = run_ranks_raw(4, dies_while_moving, config, str(tmp_path), collective_deadline_s=15.0)
    assert outcomes[1] == (False, "rank 1 ended with exit code 9 and no result")
    for rank in (0, 2, 3):
        ok, told = outcomes[rank]
        assert ok, told
        assert re.match(f"rank {rank} lost rank 1 in migration of experts, layer [01]:", told), told
    found = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert len(found) == 1
    run_alone(state_after_load, configure(corpus, **WIDE), str(tmp_path / found[0]))


def refused(mesh: Mesh, config: TrainConfig) -> str:
    try:
        Learner(config, mesh)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_stage_without_experts_cannot_be_planned(corpus: str) -> None:  # noqa: F811
    stages = {"model.num_layers": 4, "model.num_dense_layers": 2, "optim.accumulate": 4}
    stages |= {"pipeline.schedule": "1f1b", "placement.slots_per_rank": 5}
    config = configure(corpus, **{**PLANNED, **stages})
    for told in run_ranks(2, refused, config, pp=2):
        assert "needs a layer with experts in every stage, but rank 0 of the pipeline holds none" in told


def curve_from(mesh: Mesh, config: TrainConfig, path: str, steps: int) -> list[float]:
    learner = Learner(config, mesh)
    learner.placement.costs = CHEAP
    start = learner.load(Checkpoint.open(path, mesh))
    return [learner.step(step)["loss"] for step in range(start, start + steps)]


def planned_once(mesh: Mesh, config: TrainConfig, folder: str) -> tuple[str, list[float]]:
    """Train until a plan has been taken, save, go on for three steps."""
    learner = Learner(config, mesh)
    learner.placement.costs = CHEAP
    step = 0
    while not learner.placement.plans_taken:
        learner.step(step)
        step += 1
    path = str(learner.save(Path(folder), step))
    return path, [learner.step(step)["loss"] for step in range(step, step + 3)]


def saved_while_planning(mesh: Mesh, config: TrainConfig, folder: str) -> tuple[str, list[Any]]:
    """Ask for a plan after step 1, save after step 2, take the plan after step 3."""
    learner = Learner(config, mesh)
    learner.placement.costs = CHEAP
    for step in range(3):
        learner.step(step)
    assert learner.placement.planner.pending == 1
    before = [placed.placement.slots for placed in learner.placement.layers]
    path = str(learner.save(Path(folder), 3))
    rest = rest_of(learner, 3)
    assert rest[0][1] != before, "the plan is taken after step 3"
    return path, rest


def rest_of(learner: Learner, start: int) -> list[Any]:
    return [
        (learner.step(step)["loss"], [placed.placement.slots for placed in learner.placement.layers])
        for step in range(start, 7)
    ]


def resumed_while_planning(mesh: Mesh, config: TrainConfig, path: str) -> list[Any]:
    learner = Learner(config, mesh)
    learner.placement.costs = CHEAP
    return rest_of(learner, learner.load(Checkpoint.open(path, mesh)))


def test_a_plan_under_way_is_saved_and_taken_at_its_step(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    plans = {"placement.start_step": 2, "placement.commit_after": 9, "placement.every": 1000}
    plans |= {"placement.planner": "wrap_fill", "model.dtype": "float32"}
    config = configure(corpus, **{**PLANNED, **plans})
    path, rest = run_ranks(2, saved_while_planning, config, str(tmp_path))[0]
    assert run_ranks(2, resumed_while_planning, config, path)[0] == rest


def test_a_resumed_run_repeats_the_bits_of_the_first(corpus: str, tmp_path: Path) -> None:  # noqa: F811
    plans = {"placement.planner": "wrap_fill", "placement.start_step": 2, "placement.every": 1000}
    config = configure(corpus, **{**PLANNED, **plans, "model.dtype": "float32"})
    path, losses = run_ranks(3, planned_once, config, str(tmp_path))[0]
    assert run_ranks(3, curve_from, config, path, 3)[0] == losses


UNTOLD = {"row_forward": None, "row_backward": 1.0, "kernel": 0.0, "latency": 0.0, "bandwidth": None}
UNTOLD |= {"link": 1.0, "shared_wire": False, "row_bytes": 1.0, "parameter_bytes": 1.0, "gradient_bytes": 1.0}


def without_prices(mesh: Mesh, config: TrainConfig, blind: int = 0) -> list[Any]:
    """Trials of stage `blind` could not tell what it costs."""
    learner = Learner(config, mesh)
    told = {**UNTOLD, "row_forward": 1.0, "bandwidth": 1.0}
    learner.placement.choices.placement = dict(UNTOLD) if mesh.pp_index == blind else told
    notes = [note for step in range(6) for note in learner.step(step).get("notes", [])]
    return [notes, learner.placement.planner.pending, learner.placement.plans_taken]


@pytest.mark.parametrize("planner", ["auto", "random"])
def test_what_trials_could_not_tell_is_no_ground_to_move(planner: str, corpus: str) -> None:  # noqa: F811
    changes = {"placement.planner": planner, "placement.start_step": 2, "placement.every": 2}
    config = configure(corpus, **{**PLANNED, **changes, "run.deterministic": False})
    one, other = run_ranks(2, without_prices, config)
    assert one == other
    notes, pending, plans = one
    if planner == "auto":
        why = "trials could not tell what they cost (row forward, bandwidth)"
        assert (notes, pending, plans) == ([f"experts stay where they are: {why}"], None, 0), "told once"
    else:
        assert plans > 0, "who names a planner gets plans"
        assert all(note.endswith("(by fixed prices)") for note in notes)


def test_what_one_stage_could_not_tell_keeps_experts_of_all(corpus: str) -> None:  # noqa: F811
    changes = {"placement.planner": "auto", "placement.start_step": 2, "placement.every": 2}
    stages = {"optim.accumulate": 2, "pipeline.schedule": "1f1b", "run.deterministic": False}
    config = configure(corpus, **{**PLANNED, **changes, **stages})
    why = "experts stay where they are: trials could not tell what they cost (row forward, bandwidth)"
    assert run_ranks(4, without_prices, config, 1, pp=2) == [[[why], None, 0]] * 4
