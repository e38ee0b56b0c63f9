"""What a run settles at start: only what is left open, only what wins, alike on all ranks, and once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_learner import configure, corpus  # noqa: F401  (a fixture)
from test_trainer import configure as configure_run
from test_trainer import whole

from moeclipse.comm.mesh import Mesh
from moeclipse.core.config import with_values
from moeclipse.cost.hardware import device, link
from moeclipse.moe.tune import stopwatch
from moeclipse.testing.compare import difference
from moeclipse.testing.run_ranks import run_ranks
from moeclipse.train.config import TrainConfig
from moeclipse.train.run import resolve_auto as settling
from moeclipse.train.run.choices import FILE, Choices
from moeclipse.train.run.resolve_auto import (
    ROWS,
    choose_pipeline,
    left_to_choose,
    link_of,
    measured_device,
    programs_of,
    settle,
)
from moeclipse.train.step.learner import Learner

LONG = {"run.steps": 100, "optim.accumulate": 4, "data.batch_size": 8}
SLOW = {"direct": [0.018, 0.258], "peer": [0.017, 0.257]}


def test_only_what_is_left_open_is_settled() -> None:
    config = with_values(TrainConfig(), {"parallel.peer": "on", "pipeline.recompute": "off"})
    assert left_to_choose(config) == {"moe.transport", "pipeline.overlap", "pipeline.schedule"}
    assert left_to_choose(TrainConfig()) == left_to_choose(config) | {"parallel.peer", "pipeline.recompute"}
    for key, value, left in (
        ("moe.transport", "direct", {"pipeline.overlap", "pipeline.schedule"}),
        ("pipeline.overlap", "off", {"moe.transport"}),
        ("pipeline.schedule", "zb-h1", {"moe.transport", "pipeline.overlap"}),
    ):
        assert left_to_choose(with_values(config, {key: value})) == left


def test_programs_that_a_run_could_take() -> None:
    one = with_values(TrainConfig(), {"optim.accumulate": 4})
    assert list(programs_of(TrainConfig(), 2)) == [], "one microbatch has no other to hide under"
    assert list(programs_of(one, 1)) == []
    assert list(programs_of(one, 2)) == [("auto", "pair"), ("auto", "pair+self")]
    two = with_values(one, {"parallel.pp": 2})
    assert ("zb-h1", "off") in list(programs_of(two, 1))
    assert all(overlap == "off" for _, overlap in programs_of(two, 1))
    assert ("vpp+1", "pair") in list(programs_of(two, 2))
    assert ("zb-h1", "pair") not in list(programs_of(two, 2)), "it has no pairs"
    named = with_values(two, {"pipeline.schedule": "zb-h1"})
    assert list(programs_of(named, 2)) == [("zb-h1", "pair+self")]


def test_a_wire_in_two_numbers() -> None:
    small, large = settling.SIZES["cpu"]
    wire = link_of([1e-3 + 3 * small / 1e8, 1e-3 + 3 * large / 1e8], 4, "cpu")
    assert wire.bandwidth == pytest.approx(1e8)
    assert wire.latency == pytest.approx(1e-3)
    for flat in ([1.0, 0.5], [1.0, 1.0], [1.0, 1.1]):
        assert link_of(flat, 2, "cpu") is None, "more bytes were not seen to take longer"


@pytest.mark.parametrize(
    ("pp", "kind", "mbit", "overlaps"),
    [
        (1, "cpu", 800, True),
        (1, "cpu", 10**6, False),  # nothing to hide
        (1, "cpu", 10, False),  # next to nothing to hide it under
        (1, "cuda", 800, False),
        (2, "cpu", 800, True),
    ],
)
def test_a_slow_wire_is_hidden_where_there_is_memory_for_it(
    pp: int, kind: str, mbit: float, overlaps: bool
) -> None:
    values = {"optim.accumulate": 8, "data.batch_size": 32, "parallel.pp": pp}
    config = with_values(TrainConfig(), values)
    mesh: Any = SimpleNamespace(
        dp=1, ep=2, pp=pp, experts=SimpleNamespace(size=2), device=SimpleNamespace(type=kind)
    )
    wire = replace(link("loopback"), bandwidth=mbit * 125e3)
    chosen, lines = choose_pipeline(config, mesh, device("cpu"), wire)
    assert (chosen.get("pipeline.overlap", "off") != "off") is overlaps
    assert len(lines) == (1 if chosen else 0)
    if kind == "cuda":
        assert chosen == {}, "pairs hold a second microbatch"
    if overlaps:
        assert lines[0].startswith("pipeline: ")
        assert "without overlap is predicted to take" in lines[0]


@pytest.mark.parametrize(("microbatches", "reordered"), [(4, True), (16, False)])
def test_a_shorter_bubble_must_win_much(microbatches: int, reordered: bool) -> None:
    """Four microbatches through four stages leave half of a step to bubbles, sixteen some of it."""
    values = {"optim.accumulate": microbatches, "data.batch_size": 32, "parallel.pp": 4}
    config = with_values(TrainConfig(), {**values, "model.num_layers": 16})
    mesh: Any = SimpleNamespace(
        dp=1, ep=1, pp=4, experts=SimpleNamespace(size=1), device=SimpleNamespace(type="cpu")
    )
    chosen, _ = choose_pipeline(config, mesh, device("cpu"), link("loopback"))
    assert bool(chosen) is reordered
    assert chosen.get("pipeline.overlap", "off") == "off"


def settled_gradients(mesh: Mesh, config: TrainConfig) -> list[Any]:
    """(overlap that a slow wire asks for, how far gradients are from the plain ones), and that it is kept."""
    settling.wire_times = lambda *_: SLOW  # type: ignore[attr-defined, assignment]
    settling.shares_cores = lambda _: False  # type: ignore[attr-defined, assignment]
    settling.measured_device = lambda *_: replace(device("cpu"), flops=1e7)  # type: ignore[attr-defined, assignment]
    choices = Choices(mesh)
    settled, lines = settle(config, mesh, choices)
    again, silent = settle(config, mesh, choices)
    assert (again, silent) == (settled, []), "known by now"
    grads = []
    for one in (config, settled):
        learner = Learner(one, mesh)
        learner.backward(0)
        grads.append([bucket.reduced().clone() for bucket in learner.buckets])
    worst = max(difference(a, b) for a, b in zip(*grads, strict=True))
    return [settled.pipeline.overlap, settled.moe.transport, len(lines), float(worst)]


def test_a_settled_run_has_the_gradients_of_the_plain_one(corpus: str) -> None:  # noqa: F811
    config = configure(corpus, **LONG, **{"run.deterministic": False})
    for overlap, transport, lines, worst in run_ranks(2, settled_gradients, config):
        assert overlap in ("pair", "pair+self")
        assert (transport, lines) == ("direct", 1)
        assert worst < 1e-12


def settled_pipeline(mesh: Mesh, config: TrainConfig) -> list[Any]:
    """What a run of two stages settles, by itself and where nothing but its cores is in the way."""
    found = []
    for shared in (True, False):
        settling.os.cpu_count = lambda shared=shared: 1 if shared else 64  # type: ignore[attr-defined, misc]
        choices = Choices(mesh)
        settled, lines = settle(config, mesh, choices)
        Learner(settled, mesh).backward(0)
        found.append([settled.pipeline.schedule, settled.pipeline.overlap, lines, choices.settled])
    return found


def test_stages_without_exchanges_settle_alike(corpus: str) -> None:  # noqa: F811
    """Nothing is known of hosts before: all ranks must ask for them together."""
    config = configure(corpus, **{**LONG, "parallel.pp": 2, "model.num_layers": 4})
    results = run_ranks(2, settled_pipeline, config, pp=2)
    assert results[0] == results[1]
    shared, own = results[0]
    assert shared == ["auto", "auto", [], {}]
    assert own[0] in ("auto", *settling.SCHEDULES)
    assert own[1] in ("auto", "off"), "there are no exchanges to hide"
    assert len(own[2]) == (1 if own[3] else 0)


def test_what_is_named_wins_over_what_was_chosen(corpus: str) -> None:  # noqa: F811
    choices = Choices(Mesh.single())
    choices.settled = {"moe.transport": "peer", "pipeline.schedule": "zb-h1", "pipeline.overlap": "off"}
    named = configure(corpus, **{"moe.transport": "direct", "pipeline.overlap": "pair"})
    assert settle(named, choices.mesh, choices) == (named, [])
    settled, lines = settle(configure(corpus), choices.mesh, choices)
    assert (settled.moe.transport, settled.pipeline.schedule, lines) == ("peer", "zb-h1", [])


def test_what_does_not_fit_this_run_is_left_out_and_told(corpus: str) -> None:  # noqa: F811
    choices = Choices(Mesh.single())
    choices.settled = {"moe.transport": "peer", "pipeline.overlap": "pair+self", "pipeline.schedule": "auto"}
    config = configure(corpus, **{**LONG, "pipeline.recompute": "norms"})
    settled, (line,) = settle(config, choices.mesh, choices)
    assert settled == with_values(config, {"moe.transport": "peer"}), "the rest holds"
    assert line.startswith("pipeline: as without a choice, for pipeline.recompute = 'norms'")
    assert choices.settled == {"moe.transport": "peer"}, "what is written down is what is done"
    assert settle(config, choices.mesh, choices) == (settled, [])


def with_norms(mesh: Mesh, config: TrainConfig) -> list[Any]:
    settling.wire_times = lambda *_: SLOW  # type: ignore[attr-defined, assignment]
    settling.shares_cores = lambda _: False  # type: ignore[attr-defined, assignment]
    settled, lines = settle(config, mesh, Choices(mesh))
    return [settled.pipeline.overlap, settled.pipeline.recompute, lines]


def test_norms_that_run_again_are_not_given_up_for_overlap(corpus: str) -> None:  # noqa: F811
    config = configure(corpus, **{**LONG, "pipeline.recompute": "norms"})
    for found in run_ranks(2, with_norms, config):
        line = "pipeline: without overlap, which pipeline.recompute = 'norms' cannot go with"
        assert found == ["auto", "norms", [line]]


def nothing_to_settle(mesh: Mesh, config: TrainConfig) -> bool:
    choices = Choices(mesh)
    settled, lines = settle(config, mesh, choices)
    return settled == config and not lines and choices.settled is None


def test_short_runs_and_single_ranks_measure_nothing(corpus: str) -> None:  # noqa: F811
    assert all(run_ranks(2, nothing_to_settle, configure(corpus, **{**LONG, "run.steps": 59})))
    assert nothing_to_settle(Mesh.single(), configure(corpus, **LONG))


@pytest.mark.peer_memory
def test_a_run_writes_what_it_settled_and_another_repeats_it(tmp_path: Path) -> None:
    config = configure_run(tmp_path, **{"run.steps": 60, "checkpoint.every": 0, "model.num_layers": 1})
    run_ranks(2, whole, config)
    folder = Path(config.run.dir) / config.run.name
    written = json.loads((folder / FILE).read_text())
    assert written["settled"]["moe.transport"] in ("direct", "peer")
    assert 'transport = "auto"' in (folder / "config.toml").read_text(), (
        "a run's file says what was asked for"
    )
    given = {**written, "settled": {"moe.transport": "two_level"}}
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / FILE).write_text(json.dumps(given))
    again = with_values(
        config, {"run.name": "again", "run.steps": 2, "run.tuned_from": str(tmp_path / "given")}
    )
    run_ranks(2, whole, again)
    repeated = json.loads((folder.with_name("again") / FILE).read_text())
    assert repeated["settled"] == given["settled"]


def of_a_step(mesh: Mesh, config: TrainConfig) -> float:
    """By a clock on which everything takes a second, and twice as long on rank 1."""
    ticks = iter(range(1000))
    stopwatch.time = SimpleNamespace(perf_counter=lambda: (1 + mesh.rank) * next(ticks))  # type: ignore[attr-defined]
    return measured_device(config, mesh).flops


def test_the_speed_of_a_rank_is_that_of_rows_there_and_back(corpus: str) -> None:  # noqa: F811
    """Of the slowest: all three products with each of an expert's weights, and what stands between them."""
    config = configure(corpus, **LONG)
    weights = 3 * config.model.d_model * config.moe.d_ff
    assert run_ranks(2, of_a_step, config) == [pytest.approx(3 * 2 * ROWS * weights / 2)] * 2
